"""One level of the verification walk on a CPU: what happens where each request's walk stands.

Sums over the vocabulary are taken tile by tile, several numbers at a time, and a draw looks into one tile only.
"""

from __future__ import annotations

import numpy as np

from optimized.kernels.cpu.jit import FLAG, INTEGER, NUMBER, array, jit
from optimized.kernels.cpu.slots import Flags, Floats, Ints

TILE = 256


@jit()
def next_probe(row: int, after: int, parents: Ints, is_probe: Flags) -> int:
    """The first probe below a row behind another row; 0 where there is none."""
    for child in range(max(after, row) + 1, parents.size):
        if parents[child] == row and is_probe[child]:
            return child
    return 0


@jit()
def child_with(token: int, row: int, end: int, token_ids: Ints, parents: Ints, is_probe: Flags) -> int:
    """The child before ``end`` that holds a token and is no probe; 0 where there is none."""
    for child in range(row + 1, end):
        if parents[child] == row and token_ids[child] == token and not is_probe[child]:
            return child
    return 0


@jit()
def without_leads(law: Floats, row: int, probe: int, token_ids: Ints, parents: Ints, tiles: Floats) -> None:
    """Take the children before the probe out of a law; it stays as it is where nothing would be left."""
    leads = [child for child in range(row + 1, probe) if parents[child] == row]
    if not leads:
        return
    before = law.copy()
    for lead in leads:
        law[token_ids[lead]] = 0.0
    total = total_of(law, tiles)
    if total > 0:
        law /= total
    else:
        law[:] = before


@jit()
def mass_of(token: int, ids: Ints, law: Floats) -> float:
    """What a law over some ids gives to a token."""
    for place in range(ids.size):
        if ids[place] == token and law[place] > 0:
            return law[place]
    return 0.0


@jit()
def law_without(token: int, ids: Ints, law: Floats) -> Floats:
    """What a draw of a token leaves of a law over some ids, summing to one where anything is left."""
    left = np.where(ids == token, 0.0, law)
    total = left.sum()
    return left / total if total > 0 else left


@jit(reassociate=True)
def tile_sum(law: Floats, first: int, end: int) -> float:
    """The sum over some tokens."""
    total = 0.0
    for token in range(first, end):
        total += law[token]
    return total


@jit()
def total_of(law: Floats, tiles: Floats) -> float:
    """The sum over all tokens; ``tiles`` receives that over each tile."""
    total = 0.0
    for tile in range(tiles.size):
        tiles[tile] = tile_sum(law, tile * TILE, min((tile + 1) * TILE, law.size))
        total += tiles[tile]
    return total


@jit()
def draw(law: Floats, uniform: float, total: float, tiles: Floats) -> int:
    """Inverse CDF in ascending token id: the first whose cumulative weight exceeds ``uniform * total``.

    Where rounding leaves none, the last token with weight of the tile that it must be in.
    """
    point, cumulative = uniform * total, 0.0
    last = 0
    for tile in range(tiles.size):
        if cumulative + tiles[tile] > point or tile + 1 == tiles.size:
            for token in range(tile * TILE, min((tile + 1) * TILE, law.size)):
                if law[token] > 0:
                    last = token
                    cumulative += law[token]
                    if cumulative > point:
                        return token
            return last
        if tiles[tile] > 0:
            last = last_with_weight(law, tile * TILE, (tile + 1) * TILE)
        cumulative += tiles[tile]
    return last


@jit()
def last_with_weight(law: Floats, first: int, end: int) -> int:
    """The last of some tokens that has weight."""
    token = end - 1
    while token > first and not law[token] > 0:
        token -= 1
    return token


@jit()
def decide(
    row: int,
    probe: int,
    law: Floats,
    token_ids: Ints,
    parents: Ints,
    is_probe: Flags,
    probe_ids: Ints,
    probe_law: Floats,
    accept_uniforms: Floats,
    residual_uniform: float,
    lead_uniform: float,
    in_tree_order: bool,
) -> tuple[int, int, bool]:
    """The token, the child it leads to or 0, and whether that is a probe; ``reference.verification``.

    ``probe`` is the first one below the row, 0 where there is none.
    """
    tiles = np.empty((law.size + TILE - 1) // TILE)
    if in_tree_order and probe > 0:
        token = draw(law, lead_uniform, total_of(law, tiles), tiles)
        lead = child_with(token, row, probe, token_ids, parents, is_probe)
        if lead > 0:
            return token, lead, False
        without_leads(law, row, probe, token_ids, parents, tiles)
    total = -1.0
    left = probe_law
    attempt = 0
    while probe > 0:
        token = token_ids[probe]
        if accept_uniforms[attempt] * mass_of(token, probe_ids, left) < law[token]:
            return token, probe, True
        before = law[probe_ids]
        for place in range(probe_ids.size):
            # Padding repeats token 0, with q~ = 0.
            law[probe_ids[place]] = max(law[probe_ids[place]] - left[place], 0.0)
        total = total_of(law, tiles)
        if not total > 0:
            law[probe_ids] = before
        attempt += 1
        probe = next_probe(row, probe, parents, is_probe)
        if probe > 0:
            if total > 0:
                law /= total
            left = law_without(token, probe_ids, left)
    if not total > 0:
        total = total_of(law, tiles)
    token = draw(law, residual_uniform, total, tiles)
    return token, child_with(token, row, token_ids.size, token_ids, parents, is_probe), False


@jit(
    INTEGER,
    array(NUMBER, 2),
    *[array(INTEGER, 2)] * 2,
    array(FLAG, 2),
    array(INTEGER, 2),
    array(INTEGER, 3),
    *[array(NUMBER, 3)] * 2,
    *[array(NUMBER, 2)] * 2,
    FLAG,
    *[array(INTEGER, 2)] * 2,
    *[array(FLAG, 2)] * 2,
    array(INTEGER, 1),
)
def step(
    level: int,
    laws: Floats,
    token_ids: Ints,
    parents: Ints,
    is_probe: Flags,
    law_index: Ints,
    probe_law_ids: Ints,
    probe_laws: Floats,
    accept_uniforms: Floats,
    residual_uniforms: Floats,
    lead_uniforms: Floats,
    in_tree_order: bool,
    rows: Ints,
    emitted: Ints,
    offered: Flags,
    accepted: Flags,
    counts: Ints,
) -> bool:
    """Decide at one row of every request.

    Args:
        level: how many rows each walk has behind it.
        laws: [batch, vocab], the target's where the walks stand, summing to one; written into.
        token_ids, parents, is_probe, law_index, probe_law_ids, probe_laws: the trees, as in ``TreeBatch``.
        accept_uniforms: [batch, rows, probes or more].
        residual_uniforms, lead_uniforms: [batch, rows].
        in_tree_order: the rule "rrsw", otherwise "rheo".
        rows: [batch, levels] where the walks stand, -1 for one that has ended; receives where they go on to.
        emitted: [batch, levels] receives the token.
        offered, accepted: [batch, levels] receive whether there was a probe, and whether the walk goes on through one.
        counts: [batch] tokens emitted so far.

    Returns:
        Whether some walk goes on.
    """
    going = False
    for b in range(counts.size):
        row = rows[b, level]
        if row < 0:
            continue
        probe = next_probe(row, 0, parents[b], is_probe[b])
        offered[b, level] = probe > 0
        emitted[b, level], child, accepted[b, level] = decide(
            row,
            probe,
            laws[b],
            token_ids[b],
            parents[b],
            is_probe[b],
            probe_law_ids[b, max(law_index[b, row], 0)],
            probe_laws[b, max(law_index[b, row], 0)],
            accept_uniforms[b, row],
            residual_uniforms[b, row],
            lead_uniforms[b, row],
            in_tree_order,
        )
        counts[b] += 1
        if child > 0:
            rows[b, level + 1] = child
            going = True
    return going

"""Verification rows in Triton: what standing at each row of each tree would come to, for all of them at once.

Two kernels. ``_tile_sums``, one program per (row, tile), is the one read of the logits: each tile's largest logit and
its sum of weights exp((x - largest) / T). ``_row_outcome``, one program per row, takes those sums together, gathers p
where q~ lives, decides about the probe and draws from p or from the residual: first a tile by the tiles' masses, then
64 tokens of it, then the token, so only one tile is read again and no law over the vocabulary is ever written.

What q~ (and, for ``rrsw``, the leads) takes out of p is known per token of the law: min(p, q~). A tile's residual mass
is its mass less what is taken out of it, and so on down to the token, where it is max(0, p - q~) itself.

Rounding. Weights are float32, everything added across them is float64, in an order that the compiler chooses by the
logits' type: 1e-16 of a sum depends on it. A weight's relative error is below (2 y + 6) 2**-24 where
y = (largest - x) / T: a subtraction and a product, half an ulp of y each, and an exp2 good to two ulps of its own (and
to 0 below 2**-126, on a device). 1 / T is off by half an ulp for all weights alike. The mean of y under p is the
entropy plus the logarithm of the largest probability, below 10 for any law over 2**18 tokens, so the law moves by less
than 1.6e-6 in total variation even if every error had its largest size and pushed the same way. They are rounding
errors of both signs: over laws that spread y the most, 3e-8 was measured in the interpreter (whose exp2 is good to half
an ulp), and the limit of 1e-6 is a test that runs wherever the kernels do. Draws add nothing to it: cumulative sums are
float64, so a token's share is its own weight's.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels.launching import check_logits, check_shape, check_tile, device_of, power_of_two
from optimized.kernels.row_draws import base_of, binary_scale, draw_token, lead_block, weights_at

Rule = Literal["rheo", "rrsw"]
TILE = 4096
MAX_TILES = 1024
BLOCK = 64  # tokens of q~, or tree rows, that are looked at together

NOWHERE = tl.constexpr(2**31 - 1)


class RowOutcomes(NamedTuple):
    """What standing at each row comes to; [batch, rows] each.

    Attributes:
        accepts: bool, whether the row's probe is accepted, given that the walk did not leave by a lead.
        token: int64, the token drawn otherwise: from the residual where the row has a probe, from p where it has none.
        lead_token: int64, for "rrsw" the token drawn over the leads; -1 where the row has no leads before a probe.
        failed: bool, logits that are NaN, +inf or all -inf.

    Padding rows and failed rows accept nothing and draw token 0.
    """

    accepts: Tensor
    token: Tensor
    lead_token: Tensor
    failed: Tensor


@triton.jit(do_not_specialize=["rows", "num_tiles"])
def _tile_sums(
    logits,
    stride_batch,
    stride_row,
    temperatures,
    num_nodes,
    tops,  # [batch * rows, num_tiles] float32
    sums,  # likewise, float64; NaN where a logit is NaN or +inf
    bests,  # likewise, int32; greedy requests only
    vocab,
    rows,
    num_tiles,
    TILE: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
):
    program = tl.program_id(0)
    row, tile = program // num_tiles, program % num_tiles
    request = row // rows
    if row % rows >= tl.load(num_nodes + request):
        return
    logits += request.to(tl.int64) * stride_batch + (row % rows).to(tl.int64) * stride_row
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    out = program.to(tl.int64)
    tl.store(tops + out, top)
    temperature = tl.load(temperatures + request)
    if temperature < GREEDY_BELOW:
        bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=0)
        tl.store(sums + out, tl.where(bad > 0, float("nan"), 1.0))
        tl.store(bests + out, tl.min(tl.where(x == top, ids, NOWHERE), axis=0))
    else:
        scale = binary_scale(temperature).to(tl.float32)
        # NaN and +inf make the sum NaN; a tile of nothing but -inf has none.
        tl.store(sums + out, tl.sum(tl.exp2((x - base_of(top)) * scale).to(tl.float64), axis=0))


@triton.jit(
    do_not_specialize=["rows", "laws", "support", "num_tiles", "stride_accept", "stride_residual", "stride_lead"],
    # A step's uniforms are a slice of those of several steps: aligned or not, one compilation.
    do_not_specialize_on_alignment=["accept_uniforms", "residual_uniforms", "lead_uniforms"],
)
def _row_outcome(
    logits,
    stride_batch,
    stride_row,
    temperatures,
    token_ids,  # [batch, rows]
    parents,
    num_nodes,
    probe_rows,
    law_index,
    law_ids,  # [batch, laws, support]
    law,
    accept_uniforms,
    residual_uniforms,
    lead_uniforms,
    stride_accept,
    stride_residual,
    stride_lead,
    tops,  # [batch * rows, num_tiles]
    sums,
    bests,
    law_amounts,  # [batch * rows, support] scratch
    accepts,
    drawn,
    drawn_lead,
    failed,
    vocab,
    rows,
    laws,
    support,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    RRSW: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
):
    row = tl.program_id(0)
    request = (row // rows).to(tl.int64)
    place = row % rows
    out = row.to(tl.int64)
    if place >= tl.load(num_nodes + request):
        tl.store(accepts + out, False)
        tl.store(drawn + out, 0)
        tl.store(drawn_lead + out, -1)
        tl.store(failed + out, False)
        return
    logits += request * stride_batch + place.to(tl.int64) * stride_row
    token_ids += request * rows
    parents += request * rows
    tops += out * num_tiles
    law_amounts += out * support
    temperature = tl.load(temperatures + request)

    # The row's total weight, from the tiles.
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    tile_tops = tl.load(tops + tiles, mask=inside, other=float("-inf"))
    tile_sums = tl.load(sums + out * num_tiles + tiles, mask=inside, other=0.0)
    top = tl.max(tile_tops, axis=0)
    fails = (top == float("-inf")) | (tl.max((tile_sums != tile_sums).to(tl.int32), axis=0) > 0)
    if temperature < GREEDY_BELOW:
        tile_bests = tl.load(bests + out * num_tiles + tiles, mask=inside, other=NOWHERE)
        best = tl.min(tl.where(tile_tops == top, tile_bests, NOWHERE), axis=0)
        mass = (tiles == best // TILE).to(tl.float64)
    else:
        best = place * 0
        mass = tile_sums * tl.exp2((tile_tops - base_of(top)).to(tl.float64) * binary_scale(temperature))
    top = base_of(top).to(tl.float64)
    total = tl.sum(mass, axis=0)

    probe = tl.load(probe_rows + out).to(tl.int32)
    has_probe = probe > 0
    probe = tl.minimum(probe, rows - 1)
    first_lead = probe
    lead_token = place * 0 - 1
    if RRSW:
        lead_mass = total * 0.0
        for start in range(place + 1, probe, BLOCK):
            entry, tokens, is_lead = lead_block(start, probe, place, parents, token_ids, vocab, BLOCK)
            weights = weights_at(tokens, is_lead, logits, tops, top, best, temperature, TILE, GREEDY_BELOW)
            lead_mass += tl.sum(weights, axis=0)
            first_lead = tl.minimum(first_lead, tl.min(tl.where(is_lead, entry, probe), axis=0))
        if first_lead < probe:
            # fmt: off
            lead_token = draw_token(
                tl.load(lead_uniforms + request * stride_lead + place), mass, law_ids, law_amounts, 0, 0, 0, place,
                parents, token_ids, logits, vocab, tops, top, best, temperature, TILE, TILES, RUN, BLOCK,
                RRSW, False, GREEDY_BELOW,
            )
            # fmt: on
        # Where the leads are all there is, the walk cannot have come further, and p stays whole.
        first_lead = tl.where(total > lead_mass, first_lead, probe)
        total = tl.where(total > lead_mass, total - lead_mass, total)

    # The probe, and min(p, q~) of every token of its law, in units of weight.
    num_law = tl.where(has_probe, support, 0)
    index = tl.minimum(tl.maximum(tl.load(law_index + out), 0), laws - 1)
    law_ids += (request * laws + index) * support
    law += (request * laws + index) * support
    probe_token = tl.load(token_ids + probe).to(tl.int32)
    probe_prob = total * 0.0
    for start in range(0, num_law, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        tokens = tl.load(law_ids + entry, mask=entry < num_law, other=-1).to(tl.int32)
        q = tl.load(law + entry, mask=entry < num_law, other=0.0).to(tl.float64)
        known = (tokens >= 0) & (tokens < vocab)
        weights = weights_at(tokens, known, logits, tops, top, best, temperature, TILE, GREEDY_BELOW)
        tl.store(law_amounts + entry, tl.minimum(weights, q * total), mask=entry < num_law)
        probe_prob += tl.sum(tl.where(tokens == probe_token, q, 0.0), axis=0)
    tl.debug_barrier()
    only = probe_token + tl.arange(0, 1)
    known = (only >= 0) & (only < vocab)
    probe_weight = weights_at(only, known, logits, tops, top, best, temperature, TILE, GREEDY_BELOW)
    threshold = tl.load(accept_uniforms + request * stride_accept + place) * probe_prob * total
    accepted = has_probe & (threshold < tl.sum(probe_weight, axis=0))

    # fmt: off
    token = draw_token(
        tl.load(residual_uniforms + request * stride_residual + place), mass, law_ids, law_amounts, num_law,
        first_lead, probe, place, parents, token_ids, logits, vocab, tops, top, best, temperature,
        TILE, TILES, RUN, BLOCK, RRSW, True, GREEDY_BELOW,
    )
    # fmt: on
    tl.store(accepts + out, (fails == 0) & accepted)
    tl.store(drawn + out, tl.where(fails, 0, token).to(tl.int64))
    tl.store(drawn_lead + out, tl.where(fails, -1, lead_token).to(tl.int64))
    tl.store(failed + out, fails)


def tile_warps(tile: int) -> int:
    """Warps of the first kernel."""
    return max(1, min(8, tile // 1024))


def row_warps(tile: int) -> int:
    """Warps of the second kernel."""
    return max(1, min(8, tile // 512))


def run_for(tile: int) -> int:
    """Tokens that the second kernel narrows a tile down to: about the root of the tile."""
    return 1 << (tile.bit_length() // 2)


def row_outcomes(
    logits: Tensor,
    temperatures: Tensor,
    token_ids: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    probe_rows: Tensor,
    law_index: Tensor,
    law_ids: Tensor,
    law: Tensor,
    accept_uniforms: Tensor,
    residual_uniforms: Tensor,
    lead_uniforms: Tensor,
    *,
    rule: Rule = "rheo",
    greedy_below: float = 1e-5,
    tile: int | None = None,
) -> RowOutcomes:
    """Outcomes of every row (docs/algorithm.md, "Verification").

    Args:
        logits: [batch, rows, vocab] of any float type, -inf where a token is not allowed, not yet divided by the
            temperature; float64 is rounded to float32. Only the last dimension need be contiguous.
        temperatures: [batch]; below ``greedy_below`` p is one-hot at the largest logit, the lowest id on ties.
        token_ids, parents: [batch, rows] int64, of the trees.
        num_nodes: [batch] int64, rows in use.
        probe_rows: [batch, rows] int64, the row of each row's probe; 0 where none is in the tree.
        law_index: [batch, rows] int64, which law drew the row's probe; ignored where there is no probe.
        law_ids: [batch, laws, support] int64.
        law: [batch, laws, support], q~ over them.
        accept_uniforms, residual_uniforms, lead_uniforms: [batch, at least rows] float64 in [0, 1).
        rule: "rheo" or "rrsw".
        tile: logits per program; results depend on it by rounding only.

    Raises:
        ValueError: shapes that do not fit together, an unknown rule, more vocabulary than the kernels hold.
    """
    if rule not in get_args(Rule):
        raise ValueError(f"rule must be one of {get_args(Rule)}, got {rule!r}")
    logits = check_logits(logits, "rows")
    batch, rows, vocab = logits.shape
    tile = check_tile(tile, TILE, vocab)
    num_tiles = triton.cdiv(vocab, tile)
    if num_tiles > MAX_TILES:
        raise ValueError(
            f"{vocab} tokens in tiles of {tile} are {num_tiles} tiles, more than {MAX_TILES}; take wider tiles"
        )
    if law.ndim != 3 or law.shape[0] != batch or 0 in law.shape:
        raise ValueError(f"law must be [{batch}, laws, support] with no dimension empty, got {list(law.shape)}")
    laws, support = law.shape[1:]
    temperatures = check_shape("temperatures", temperatures, batch).double()
    tree = [
        check_shape("token_ids", token_ids, batch, rows),
        check_shape("parents", parents, batch, rows),
        check_shape("num_nodes", num_nodes, batch),
        check_shape("probe_rows", probe_rows, batch, rows),
        check_shape("law_index", law_index, batch, rows),
        check_shape("law_ids", law_ids, batch, laws, support),
        law.contiguous(),
    ]
    uniforms = []
    for name, values in (
        ("accept_uniforms", accept_uniforms),
        ("residual_uniforms", residual_uniforms),
        ("lead_uniforms", lead_uniforms),
    ):
        if values.ndim != 2 or values.shape[0] != batch or values.shape[1] < rows:
            raise ValueError(f"{name} must be at least [{batch}, {rows}], got {list(values.shape)}")
        uniforms.append(values.double() if values.stride(1) == 1 else values.double().contiguous())

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(batch, rows, *shape, dtype=dtype, device=logits.device)

    out = RowOutcomes(
        accepts=empty(dtype=torch.bool),
        token=empty(dtype=torch.int64),
        lead_token=empty(dtype=torch.int64),
        failed=empty(dtype=torch.bool),
    )
    tops, sums = empty(num_tiles, dtype=torch.float32), empty(num_tiles, dtype=torch.float64)
    bests = empty(num_tiles, dtype=torch.int32)
    amounts = empty(support, dtype=torch.float64)
    with device_of(logits):
        _tile_sums[(batch * rows * num_tiles,)](
            logits,
            logits.stride(0),
            logits.stride(1),
            temperatures,
            num_nodes,
            tops,
            sums,
            bests,
            vocab,
            rows,
            num_tiles,
            TILE=tile,
            GREEDY_BELOW=greedy_below,
            num_warps=tile_warps(tile),
        )
        _row_outcome[(batch * rows,)](
            logits,
            logits.stride(0),
            logits.stride(1),
            temperatures,
            *tree,
            *uniforms,
            *(values.stride(0) for values in uniforms),
            tops,
            sums,
            bests,
            amounts,
            *out,
            vocab,
            rows,
            laws,
            support,
            num_tiles,
            TILE=tile,
            GREEDY_BELOW=greedy_below,
            TILES=max(power_of_two(num_tiles), 2),
            RUN=run_for(tile),
            BLOCK=BLOCK,
            RRSW=rule == "rrsw",
            num_warps=row_warps(tile),
        )
    return out

"""What the row kernels are made of: weights of tokens, the mass that a residual leaves, and a draw by its tiles.

A row's law p is never written. It is known as each tile's largest logit and sum of weights, and a draw goes down from
there: first a tile by the tiles' masses, then 64 tokens of it, then the token. What the residual takes out is known per
token of q~, and taken out of the masses on every one of these levels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def binary_scale(temperature):
    """What turns a logit into an exponent of 2, float64."""
    return 1.4426950408889634 / temperature


@triton.jit
def base_of(top):
    """What is subtracted from a tile's logits: its largest, unless that is -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def weights_of(ids, x, tile_top, top, best, temperature, GREEDY_BELOW: tl.constexpr):
    """float64 weights of tokens with logits ``x`` in tiles with largest logit ``tile_top``; p is weight over sum."""
    if temperature < GREEDY_BELOW:
        weights = (ids == best).to(tl.float64)
    else:
        scale = binary_scale(temperature)
        within = tl.exp2((x - base_of(tile_top)) * scale.to(tl.float32))
        weights = within.to(tl.float64) * tl.exp2((tile_top.to(tl.float64) - top) * scale)
    return weights


@triton.jit
def weights_at(ids, mask, logits, tops, top, best, temperature, TILE: tl.constexpr, GREEDY_BELOW: tl.constexpr):
    """Weights of tokens anywhere in the row; 0 where masked."""
    x = tl.load(logits + ids, mask=mask, other=float("-inf")).to(tl.float32)
    tile_top = tl.load(tops + ids // TILE, mask=mask, other=float("-inf"))
    return tl.where(mask, weights_of(ids, x, tile_top, top, best, temperature, GREEDY_BELOW), 0.0)


@triton.jit
def weights_from(
    first, logits, vocab, tile_top, top, best, temperature, COUNT: tl.constexpr, GREEDY_BELOW: tl.constexpr
):
    """Weights of COUNT tokens of one tile, from ``first`` on."""
    ids = first + tl.arange(0, COUNT)
    x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(ids < vocab, weights_of(ids, x, tile_top, top, best, temperature, GREEDY_BELOW), 0.0)


@triton.jit
def bins_of(tokens, first, WIDTH: tl.constexpr):
    """Which bin of WIDTH tokens, bin 0 starting at token ``first``, each token is in; -1 before the first."""
    # On a device // rounds towards zero: without the condition the tokens just before the first would be in bin 0.
    return tl.where(tokens >= first, (tokens - first) // WIDTH, -1)


@triton.jit
def lead_block(start, end, place, parents, token_ids, vocab, BLOCK: tl.constexpr):
    """Tree rows from ``start`` on: which are leads of the row at ``place``, and their tokens."""
    rows = start + tl.arange(0, BLOCK)
    inside = rows < end
    tokens = tl.load(token_ids + rows, mask=inside, other=-1).to(tl.int32)
    is_lead = inside & (tl.load(parents + rows, mask=inside, other=-1) == place)
    return rows, tokens, is_lead & (tokens >= 0) & (tokens < vocab)


@triton.jit
def pick(mass, index, point):
    """The first index whose cumulative mass exceeds ``point``, else the last with mass; and how far into it."""
    cumulative = tl.cumsum(mass, axis=0)
    last = tl.max(tl.where(mass > 0.0, index, 0), axis=0)
    chosen = tl.min(tl.where((mass > 0.0) & (cumulative > point), index, last), axis=0)
    return chosen, point - tl.sum(tl.where(index == chosen, cumulative - mass, 0.0), axis=0)


@triton.jit
def mass_left(
    mass,
    first,
    bins,
    law_ids,
    law_amounts,
    num_law,
    first_lead,
    last_lead,
    place,
    parents,
    token_ids,
    logits,
    vocab,
    tops,
    top,
    best,
    temperature,
    WIDTH: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    RRSW: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
):
    """The residual's mass in each bin; where rounding left none in any, the mass without the leads, or the mass."""
    without = mass
    if RRSW:
        taken = tl.zeros([BINS], tl.float64)
        for start in range(first_lead, last_lead, BLOCK):
            _, tokens, is_lead = lead_block(start, last_lead, place, parents, token_ids, vocab, BLOCK)
            weights = weights_at(tokens, is_lead, logits, tops, top, best, temperature, TILE, GREEDY_BELOW)
            bin_of = bins_of(tokens, first, WIDTH)
            # Tokens along the lanes of a warp, which have just computed their weights.
            taken += tl.sum(tl.where(bins[:, None] == bin_of[None, :], weights[None, :], 0.0), axis=1)
        without = tl.maximum(mass - taken, 0.0)
        none = (tl.max(without, axis=0) == 0.0).to(tl.int32)
        without = tl.where(none > 0, mass, without)
    taken = tl.zeros([BINS], tl.float64)
    for start in range(0, num_law, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        tokens = tl.load(law_ids + entry, mask=entry < num_law, other=-1).to(tl.int32)
        amounts = tl.load(law_amounts + entry, mask=entry < num_law, other=0.0)
        bin_of = bins_of(tokens, first, WIDTH)
        # Bins along the lanes, so that a thread adds up its own.
        taken += tl.sum(tl.where(bin_of[:, None] == bins[None, :], amounts[:, None], 0.0), axis=0)
    left = tl.maximum(without - taken, 0.0)
    none = (tl.max(left, axis=0) == 0.0).to(tl.int32)
    return tl.where(none > 0, without, left)


@triton.jit
def draw_token(
    uniform,
    mass,
    law_ids,
    law_amounts,
    num_law,
    first_lead,
    last_lead,
    place,
    parents,
    token_ids,
    logits,
    vocab,
    tops,
    top,
    best,
    temperature,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    RRSW: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
):
    """The token at ``uniform``, in ascending id, of the law with these masses per tile, or of its residual."""
    # fmt: off
    bins = tl.arange(0, TILES)
    if RESIDUAL:
        mass = mass_left(
            mass, 0, bins, law_ids, law_amounts, num_law, first_lead, last_lead, place, parents, token_ids, logits,
            vocab, tops, top, best, temperature, TILE, TILES, BLOCK, TILE, RRSW, GREEDY_BELOW,
        )
    tile, point = pick(mass, bins, uniform * tl.sum(mass, axis=0))

    first = tile * TILE
    tile_top = tl.load(tops + tile)
    bins = tl.arange(0, TILE // RUN)
    weights = weights_from(first, logits, vocab, tile_top, top, best, temperature, TILE, GREEDY_BELOW)
    mass = tl.sum(tl.reshape(weights, [TILE // RUN, RUN]), axis=1)
    if RESIDUAL:
        mass = mass_left(
            mass, first, bins, law_ids, law_amounts, num_law, first_lead, last_lead, place, parents, token_ids, logits,
            vocab, tops, top, best, temperature, RUN, TILE // RUN, BLOCK, TILE, RRSW, GREEDY_BELOW,
        )
    run, point = pick(mass, bins, point)

    first += run * RUN
    bins = tl.arange(0, RUN)
    mass = weights_from(first, logits, vocab, tile_top, top, best, temperature, RUN, GREEDY_BELOW)
    if RESIDUAL:
        mass = mass_left(
            mass, first, bins, law_ids, law_amounts, num_law, first_lead, last_lead, place, parents, token_ids, logits,
            vocab, tops, top, best, temperature, 1, RUN, BLOCK, TILE, RRSW, GREEDY_BELOW,
        )
    token, point = pick(mass, bins, point)
    # fmt: on
    return first + token

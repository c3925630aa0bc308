"""Slots of a level in Triton: draft logits to leads, probe and fills, one read of the logits.

Two kernels. ``_tile_candidates``, one program per (row, tile), keeps the tile's ``support`` largest logits.
``_row_slots``, one program per row, cuts those to the row's ``support`` largest, ranks them and makes the slots. A
vocabulary that fits one tile needs the second only.

Logits are selected by threshold: as integers in the order of the floats, the support-th largest is found by bisection
with a count per step, ties at it go to the lowest ids, and a prefix sum gives every chosen token its place. Nothing is
sorted. The laws of a row, ``support`` numbers, are float64 inside; what is stored of q~ is float32, and the stored
numbers are the ones that draw.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels.launching import check_logits, check_shape, check_tile, device_of, power_of_two

TILE = 4096
MAX_SUPPORT = 1024
MAX_CANDIDATES = 16384  # of a row; their prefix sums, twice 16 bits, share an int32

PADDING = tl.constexpr(-(2**31))  # below the key of -inf
# Bits of a float32 that say nothing about a narrower type; without them the bisection takes as many steps fewer.
SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0, torch.float64: 0}


class SlotTensors(NamedTuple):
    """The slots that the nodes of a level offer.

    Attributes:
        token_ids: [batch, width, branching] int64 target ids, in schedule order; 0 where there is no such slot.
        log_scores: [batch, width, branching] float32 logarithm of the path score; -inf where there is no such slot.
        is_probe: [batch, width, branching] bool.
        law_ids: [batch, width, support] int64 target ids in rank order.
        law: [batch, width, support] float32, q~; all 0 where there is no probe.
        failed: [batch, width] bool, logits that are NaN, +inf or all -inf; such a node has no slots.
    """

    token_ids: Tensor
    log_scores: Tensor
    is_probe: Tensor
    law_ids: Tensor
    law: Tensor
    failed: Tensor


@triton.jit
def _to_keys(x, SHIFT: tl.constexpr):
    """int32 in the order of the float32: NaN above everything, -0.0 equal to 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, keys) >> SHIFT


@triton.jit
def _from_keys(keys, SHIFT: tl.constexpr):
    bits = keys << SHIFT
    bits = tl.where(bits < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _pack(keys, ids):
    """Key and id in one int64, so that both move together."""
    return (keys.to(tl.int64) << 32) | ids.to(tl.int64)


@triton.jit
def _key_of(packed):
    return (packed >> 32).to(tl.int32)


@triton.jit
def _id_of(packed):
    return (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _ranked_logit(kept, rank, support, SHIFT: tl.constexpr):
    """The logit at a rank, float64; a load of one number costs less than picking it out of registers."""
    packed = tl.load(kept + rank, mask=rank < support, other=0)
    return _from_keys(_key_of(packed), SHIFT).to(tl.float64)


@triton.jit
def _row_keys(logits, first, vocab, COUNT: tl.constexpr, SHIFT: tl.constexpr):
    """Keys of the COUNT logits from ``first`` on; padding where the vocabulary has ended."""
    ids = first + tl.arange(0, COUNT)
    x = tl.load(logits + ids, mask=ids < vocab, other=0.0).to(tl.float32)
    return tl.where(ids < vocab, _to_keys(x, SHIFT), PADDING >> SHIFT)


@triton.jit
def _cut(keys, wanted, valid, COUNT: tl.constexpr, KEPT: tl.constexpr, SHIFT: tl.constexpr):
    """The ``wanted``-th largest key; or any key that exactly ``wanted`` keys reach. At least ``wanted`` are valid."""
    high = tl.max(keys, axis=0)
    if COUNT > KEPT:
        # KEPT >= wanted disjoint groups, each with a key that reaches the least of the groups' maxima.
        low = tl.min(tl.max(tl.reshape(keys, [COUNT // KEPT, KEPT]), axis=0), axis=0)
    else:
        low = tl.min(keys, axis=0)
    everything = valid <= wanted
    low = tl.where(everything, (PADDING >> SHIFT) + 1, low)
    high = tl.where(everything, low, high)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        reached = tl.sum((keys >= middle).to(tl.int32), axis=0)
        low = tl.where(reached >= wanted, middle, low)
        high = tl.where(reached == wanted, middle, tl.where(reached > wanted, high, middle - 1))
    return low


@triton.jit
def _places(keys, cut, wanted):
    """Which keys are the ``wanted`` largest, ties at the cut to the first; and their places, in index order."""
    above = (keys > cut).to(tl.int32)
    equal = (keys == cut).to(tl.int32)
    counts = tl.cumsum(above + (equal << 16), axis=0)
    room = wanted - tl.sum(above, axis=0)
    num_equal = counts >> 16
    chosen = (above > 0) | ((equal > 0) & (num_equal <= room))
    return chosen, (counts & 0xFFFF) + tl.minimum(num_equal, room) - 1


@triton.jit(do_not_specialize=["width", "support", "num_tiles"])
def _tile_candidates(
    logits,
    stride_batch,
    stride_node,
    candidates,  # [rows, num_tiles, KEPT], packed
    vocab,
    width,
    num_tiles,
    support,
    TILE: tl.constexpr,
    KEPT: tl.constexpr,
    SHIFT: tl.constexpr,
):
    program = tl.program_id(0)
    row, tile = program // num_tiles, program % num_tiles
    logits += (row // width).to(tl.int64) * stride_batch + (row % width).to(tl.int64) * stride_node
    first = tile * TILE
    keys = _row_keys(logits, first, vocab, TILE, SHIFT)
    valid = tl.minimum(TILE, vocab - first)
    wanted = tl.minimum(support, valid)
    cut = _cut(keys, wanted, valid, TILE, KEPT, SHIFT)
    chosen, places = _places(keys, cut, wanted)

    out = candidates + program.to(tl.int64) * KEPT
    tl.store(out + places, _pack(keys, first + tl.arange(0, TILE)), mask=chosen)
    rest = tl.arange(0, KEPT)
    tl.store(out + rest, tl.full([KEPT], PADDING, tl.int64) << (32 - SHIFT), mask=rest >= wanted)


@triton.jit(
    do_not_specialize=["width", "support", "lead_tokens", "branching", "probing"],
    # A level's uniforms are a slice of those of several steps: aligned or not, one compilation.
    do_not_specialize_on_alignment=["uniforms"],
)
def _row_slots(
    logits,
    stride_batch,
    stride_node,
    candidates,  # [rows, num_candidates], packed
    parent_scores,
    temperatures,
    uniforms,
    vocab_map,
    kept,  # [rows, 2, KEPT] scratch, packed: in id order, then in rank order
    token_ids,
    log_scores,
    is_probe,
    law_ids,
    law,
    failed,
    vocab,
    width,
    num_candidates,
    support,
    lead_tokens,
    branching,
    probing,
    COUNT: tl.constexpr,
    KEPT: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    MAPPED: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
):
    row = tl.program_id(0)
    request = row // width
    row64 = row.to(tl.int64)

    # The support, in id order.
    index = tl.arange(0, COUNT)
    if ONE_TILE:
        logits += request.to(tl.int64) * stride_batch + (row % width).to(tl.int64) * stride_node
        keys = _row_keys(logits, 0, vocab, COUNT, SHIFT)
    else:
        inside = index < num_candidates
        nothing = tl.full([COUNT], PADDING, tl.int64) << (32 - SHIFT)
        candidates += row64 * num_candidates
        keys = _key_of(tl.load(candidates + index, mask=inside, other=nothing))
    chosen, places = _places(keys, _cut(keys, support, vocab, COUNT, KEPT, SHIFT), support)
    kept += row64 * 2 * KEPT
    if ONE_TILE:
        packed = _pack(keys, index)
    else:
        packed = tl.load(candidates + index, mask=chosen, other=0)  # again: ids need not wait in registers
    tl.store(kept + places, packed, mask=chosen)
    tl.debug_barrier()

    # Ranks, by counting who is better; the ids ascend with the place, so the place breaks ties.
    place = tl.arange(0, KEPT)
    real = place < support
    packed = tl.load(kept + place, mask=real, other=0)
    keys = _key_of(packed)
    rank = tl.zeros([KEPT], tl.int32)
    for start in range(0, KEPT, BLOCK):
        other = start + tl.arange(0, BLOCK)
        other_keys = _key_of(tl.load(kept + other, mask=other < support, other=0))
        tie = (other_keys[:, None] == keys[None, :]) & (other[:, None] < place[None, :])
        better = (other[:, None] < support) & ((other_keys[:, None] > keys[None, :]) | tie)
        rank += tl.sum(better.to(tl.int32), axis=0)
    tl.store(kept + KEPT + rank, packed, mask=real)
    tl.debug_barrier()

    # From here on a place is a rank.
    kept += KEPT
    packed = tl.load(kept + place, mask=real, other=0)
    targets = _id_of(packed).to(tl.int64)
    if MAPPED:
        targets = tl.load(vocab_map + targets, mask=real, other=0)
    tl.store(law_ids + row64 * support + place, targets, mask=real)
    best = _ranked_logit(kept, 0, support, SHIFT)
    # An integer: the interpreter cannot broadcast the truth value of a float comparison.
    sound = ((best > float("-inf")) & (best < float("inf"))).to(tl.int32)
    best = tl.where(sound > 0, best, 0.0)
    x = tl.where(real & (sound > 0), _from_keys(_key_of(packed), SHIFT).to(tl.float64), float("-inf"))
    weights = tl.exp(x - best)
    total = tl.sum(weights, axis=0)
    log_total = tl.log(total)
    ranked = weights / total > 0.0
    num_ranked = tl.sum(ranked.to(tl.int32), axis=0)

    # q~ on the tail, from the tail's own maximum, and the probe.
    temperature = tl.load(temperatures + request)
    sampled = temperature >= GREEDY_BELOW
    has_probe = (probing != 0) & sampled & (num_ranked > lead_tokens)
    tail = ranked & (place >= lead_tokens) & has_probe
    tail_best = tl.where(has_probe, _ranked_logit(kept, lead_tokens, support, SHIFT), 0.0)
    tail_law = tl.exp(tl.where(tail, (x - tail_best) / tl.where(sampled, temperature, 1.0), float("-inf")))
    tail_law = (tail_law / tl.where(has_probe, tl.sum(tail_law, axis=0), 1.0)).to(tl.float32)
    tl.store(law + row64 * support + place, tail_law, mask=real)
    cumulative = tl.cumsum(tail_law.to(tl.float64), axis=0)
    point = tl.load(uniforms + row64) * tl.max(cumulative, axis=0)
    drawable = tail_law > 0.0
    last = tl.max(tl.where(drawable, place, 0), axis=0)
    probe = tl.min(tl.where(drawable & (cumulative > point), place, last), axis=0)

    # The probe's weight: min(q(x_m), tail mass), not below q(x_{m+1}).
    tail_mass = tl.sum(tl.where(tail, weights, 0.0), axis=0)
    ceiling = _ranked_logit(kept, tl.maximum(lead_tokens, 1) - 1, support, SHIFT) - best
    proxy = tl.maximum(tail_best - best, tl.minimum(ceiling, tl.log(tl.where(has_probe, tail_mass, 1.0))))

    # Leads keep their rank as their slot, the probe comes behind them, and what it overtook moves on by one.
    at_probe = has_probe & (place == probe)
    moved = has_probe & (place >= lead_tokens) & (place < probe)
    slot = tl.where(at_probe, lead_tokens, place + moved.to(tl.int32))
    parent = tl.load(parent_scores + row64).to(tl.float64)
    scores = parent + (tl.where(at_probe, proxy, x - best) - log_total)
    scores = tl.where(ranked, scores, float("-inf")).to(tl.float32)
    out = row64 * branching
    filled = real & (slot < branching)
    tl.store(token_ids + out + slot, tl.where(ranked, targets, 0), mask=filled)
    tl.store(log_scores + out + slot, scores, mask=filled)
    tl.store(is_probe + out + slot, at_probe, mask=filled)
    empty = tl.arange(0, SLOTS)
    missing = (empty >= support) & (empty < branching)
    tl.store(token_ids + out + empty, tl.zeros([SLOTS], tl.int64), mask=missing)
    tl.store(log_scores + out + empty, tl.full([SLOTS], float("-inf"), tl.float32), mask=missing)
    tl.store(is_probe + out + empty, tl.zeros([SLOTS], tl.int1), mask=missing)
    tl.store(failed + row64, sound == 0)


def tile_for(kept: int) -> int:
    """Logits per program of the first kernel: many more than it keeps."""
    return max(TILE, 16 * kept)


def tile_warps(tile: int) -> int:
    """Warps of the first kernel."""
    return max(1, min(16, tile // 512))


def row_warps(count: int) -> int:
    """Warps of the second kernel."""
    return min(16, max(4, count // 512))


def rank_block(kept: int) -> int:
    """How many of the kept logits each is compared with at a time."""
    return min(kept, 8192 // kept)


def level_slots(
    logits: Tensor,
    parent_scores: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    vocab_map: Tensor | None = None,
    *,
    lead_tokens: int,
    branching: int,
    support: int = 128,
    proposal_is_rheo: bool = True,
    greedy_below: float = 1e-5,
    tile: int | None = None,
) -> SlotTensors:
    """Slots of every node of a level (docs/algorithm.md, "Slots of one node").

    Args:
        logits: [batch, width, draft vocab] of any float type; float64 is rounded to float32. Only the last dimension
            need be contiguous.
        parent_scores: [batch, width] float32 logarithm of the nodes' path scores; -inf for a node that is padding.
        temperatures: [batch], one per request.
        uniforms: [batch, width] in [0, 1), one per node.
        vocab_map: [draft vocab] int64, increasing, the target id of each draft id; None when they are the same.
        lead_tokens, branching, support: m, K and S of the tree.
        proposal_is_rheo: whether nodes have probes at all.
        greedy_below: temperatures below it have no probe.
        tile: logits per program; the results do not depend on it.

    Raises:
        ValueError: shapes that do not fit together, more support, vocabulary or tile than the kernels hold.
    """
    logits = check_logits(logits, "width")
    batch, width, vocab = logits.shape
    if lead_tokens < 0 or branching < 1 or support < 1:
        raise ValueError(
            f"lead_tokens must be >= 0, branching and support >= 1; got {lead_tokens}, {branching} and {support}"
        )
    support = min(support, vocab)
    if support > MAX_SUPPORT:
        raise ValueError(f"support must be at most {MAX_SUPPORT}, got {support}; the Torch path takes more")
    kept = power_of_two(support)
    tile = check_tile(tile, tile_for(kept), vocab)
    if tile > MAX_CANDIDATES:
        raise ValueError(f"tile must be at most {MAX_CANDIDATES}, got {tile}")
    num_tiles = triton.cdiv(vocab, tile)
    one_tile = num_tiles == 1
    # A tile that holds no more than the support is a candidate as a whole.
    tile_kept = min(kept, tile)
    num_candidates = vocab if one_tile else num_tiles * tile_kept
    count = max(power_of_two(num_candidates), 16)
    if count > MAX_CANDIDATES:
        raise ValueError(
            f"support {support} over {vocab} tokens in tiles of {tile} makes {num_candidates} candidates per row, more "
            f"than {MAX_CANDIDATES}; take a smaller support or wider tiles"
        )
    parent_scores = check_shape("parent_scores", parent_scores, batch, width).float()
    temperatures = check_shape("temperatures", temperatures, batch).double()
    uniforms = check_shape("uniforms", uniforms, batch, width).double()
    if vocab_map is not None:
        vocab_map = check_shape("vocab_map", vocab_map, vocab)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(batch, width, *shape, dtype=dtype, device=logits.device)

    out = SlotTensors(
        token_ids=empty(branching, dtype=torch.int64),
        log_scores=empty(branching, dtype=torch.float32),
        is_probe=empty(branching, dtype=torch.bool),
        law_ids=empty(support, dtype=torch.int64),
        law=empty(support, dtype=torch.float32),
        failed=empty(dtype=torch.bool),
    )
    scratch = empty(2, kept, dtype=torch.int64)
    candidates = scratch
    shift = SHIFTS[logits.dtype]
    rows = batch * width
    if not one_tile:
        candidates = empty(num_tiles, tile_kept, dtype=torch.int64)
    with device_of(logits):
        if not one_tile:
            _tile_candidates[(rows * num_tiles,)](
                logits,
                logits.stride(0),
                logits.stride(1),
                candidates,
                vocab,
                width,
                num_tiles,
                support,
                TILE=tile,
                KEPT=tile_kept,
                SHIFT=shift,
                num_warps=tile_warps(tile),
            )
        _row_slots[(rows,)](
            logits,
            logits.stride(0),
            logits.stride(1),
            candidates,
            parent_scores,
            temperatures,
            uniforms,
            scratch if vocab_map is None else vocab_map,
            scratch,
            *out,
            vocab,
            width,
            num_candidates,
            support,
            lead_tokens,
            branching,
            int(proposal_is_rheo and lead_tokens < branching),
            COUNT=count,
            KEPT=kept,
            SLOTS=power_of_two(branching),
            BLOCK=rank_block(kept),
            SHIFT=shift,
            ONE_TILE=one_tile,
            MAPPED=vocab_map is not None,
            GREEDY_BELOW=greedy_below,
            num_warps=row_warps(count),
        )
    return out

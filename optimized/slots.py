"""Slots of a whole level at once: draft logits to leads, probes and fills, for every node of every request's beam."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from optimized.ranges import arange, constant
from reference.api import GREEDY_TEMPERATURE, RheoConfig


@dataclass(frozen=True, eq=False)
class LevelSlots:
    """The slots that the expanded nodes of a level offer.

    Attributes:
        token_ids: [batch, beam, branching] long target ids, in schedule order.
        log_scores: [batch, beam, branching] float64, logarithm of the path score; -inf where there is no such slot.
        is_probe: [batch, beam, branching] bool.
        law_ids: [batch, beam, support] long target ids in rank order.
        law: [batch, beam, support] float64, q~ of the first probe; all 0 where there is no probe.
        failed: [batch, beam] bool, logits that are NaN, +inf or all -inf.
    """

    token_ids: Tensor
    log_scores: Tensor
    is_probe: Tensor
    law_ids: Tensor
    law: Tensor
    failed: Tensor


def rank_logits(logits: Tensor, support: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row, best first, ties by lower id; ``torch.topk`` alone promises no order among ties.

    Args:
        logits: [..., vocab] float16, bfloat16 or float32; NaN ranks first.
        support: how many to keep.

    Returns:
        Values [..., support] float64 and ids [..., support] long.
    """
    logits = logits.float()
    support = min(support, logits.shape[-1])
    values, ids = (_candidates if logits.device.type == "cpu" else _largest)(logits, support)
    ranking = values.sort(dim=-1, descending=True, stable=True)
    order = ranking.indices[..., :support]
    return ranking.values[..., :support].double(), ids.gather(-1, order)


def _candidates(logits: Tensor, support: int) -> tuple[Tensor, Tensor]:
    """On a CPU: values and ids [..., n] of at least the ``support`` largest and all that tie with them, ids ascending.

    The k-th largest of the maxima of some groups is a bound below which nothing can be among the k largest; with four
    groups to a place it leaves little more than those. One pass and a comparison: five times faster than torch.topk.
    """
    rows = logits.flatten(0, -2).numpy()
    vocab = rows.shape[1]
    groups = 4 * support
    if vocab < 2 * groups:
        return logits, arange(vocab, logits.device).expand_as(logits)
    grouped = rows[:, : vocab // groups * groups].reshape(len(rows), -1, groups).max(axis=1)
    bound = np.partition(grouped, groups - support, axis=1)[:, groups - support, None]
    row, token = np.nonzero(~(rows < bound))  # so that NaN is found, and ranks first
    counts = np.bincount(row, minlength=len(rows))
    place = np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)
    values = np.full((len(rows), counts.max()), -np.inf, dtype=rows.dtype)
    ids = np.zeros(values.shape, dtype=np.int64)
    values[row, place] = rows[row, token]
    ids[row, place] = token
    shape = (*logits.shape[:-1], values.shape[1])
    return torch.from_numpy(values).view(shape), torch.from_numpy(ids).view(shape)


def _largest(logits: Tensor, support: int) -> tuple[Tensor, Tensor]:
    """On a device, without a look at the data: values and ids [..., support] of the largest, ids ascending."""
    best = logits.topk(support, dim=-1)
    cut = best.values[..., -1:]
    # More tokens may tie at the cut than there is room: fill the places at the cut with the lowest tied ids.
    places = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.float32)  # exact below 2**24
    lowest = torch.where(logits == cut, -places, -torch.inf).topk(support, dim=-1).indices
    above = (best.values > cut).sum(dim=-1, keepdim=True)
    order = arange(support, logits.device).expand_as(lowest)
    ids = torch.where(order < above, best.indices, lowest.gather(-1, (order - above).clamp(min=0))).sort(dim=-1).values
    return logits.gather(-1, ids), ids


def level_slots(
    config: RheoConfig,
    logits: Tensor,
    parent_scores: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    vocab_map: Tensor | None = None,
    children: tuple[int, ...] | None = None,
) -> LevelSlots:
    """Slots of every node of a level (docs/algorithm.md, "Slots of one node").

    Args:
        config: the tree's shape.
        logits: [batch, beam, draft vocab] the draft's logits at the expanded nodes; float64 is rounded to float32.
        parent_scores: [batch, beam] float64, logarithm of the expanded nodes' path scores; -inf for padding.
        temperatures: [batch] the requests' temperatures; below ``GREEDY_TEMPERATURE`` there is no probe.
        uniforms: [batch, beam] in [0, 1), one per node, or [batch, beam, probes], one per probe.
        vocab_map: [draft vocab] long, increasing, the target id of each draft id; None when they are the same.
        children: of a static tree, how many slots each node of the level has; None for the other trees.
    """
    m, branching = config.lead_tokens, config.branching
    kept, ids = rank_logits(logits, config.draft_support)
    failed = ~torch.isfinite(kept[..., 0])  # NaN ranks first; where it or +inf does, q is NaN and nothing is ranked
    if vocab_map is not None:
        ids = vocab_map[ids]
    support = kept.shape[-1]
    place = arange(support, logits.device)

    q = torch.softmax(kept, dim=-1)
    ranked = q > 0
    num_ranked = ranked.sum(dim=-1, keepdim=True)
    num_slots = num_ranked.clamp(max=branching)
    if children is not None:
        num_slots = torch.minimum(num_slots, constant(children, logits.device).unsqueeze(1))

    schedule = arange(branching, logits.device)
    draws = min(config.probes, branching - m, support - m) if children is None else min(max(children), support)
    if config.proposal != "topk" and draws > 0:
        greedy = (temperatures < GREEDY_TEMPERATURE).view(-1, 1, 1)
        has_probe = ~greedy & (num_ranked > m)
        tail = ranked & (place >= m)
        tempered = kept / torch.where(greedy, 1.0, temperatures.double().view(-1, 1, 1))
        law = torch.softmax(tempered.masked_fill(~tail | ~has_probe, -torch.inf), dim=-1).nan_to_num(0.0)
        if children is not None:
            num_slots = torch.where(has_probe, torch.minimum(num_slots, (law > 0).sum(dim=-1, keepdim=True)), num_slots)

        lead = max(m, 1) - 1
        q_tail = q * tail
        proxy = _proxy(q[..., m : m + 1], q[..., lead : lead + 1], q_tail)
        drawn = _draw_probes(law, q_tail, proxy, has_probe, num_slots - m, uniforms, draws)
        # Behind the probes stand the ranked tokens in order, passing over those that were drawn.
        behind = schedule - (drawn.exists.long() if draws == 1 else drawn.exists.sum(dim=-1, keepdim=True))
        passed = torch.where(drawn.exists, drawn.places, support + branching)
        for taken in passed.sort(dim=-1).values.split(1, dim=-1) if draws > 1 else (passed,):
            behind = behind + (taken <= behind)

        def in_slots(values: Tensor) -> Tensor:  # a single probe's value broadcasts
            return values if draws == 1 else torch.nn.functional.pad(values, (m, branching - m - draws))

        is_probe = drawn.exists & (schedule == m) if draws == 1 else in_slots(drawn.exists)
        index = torch.where(is_probe, in_slots(drawn.places), torch.where(schedule < m, schedule, behind))
        weights = torch.where(is_probe, in_slots(drawn.proxies), q.gather(-1, index.clamp(max=support - 1)))
    else:
        index = schedule.expand(*failed.shape, branching)
        law = torch.zeros_like(q)
        is_probe = torch.zeros(*failed.shape, branching, dtype=torch.bool, device=logits.device)
        weights = q.gather(-1, index.clamp(max=support - 1))
    log_weights = torch.zeros_like(weights) if config.proposal == "static" else weights.log()
    return LevelSlots(
        token_ids=ids.gather(-1, index.clamp(max=support - 1)),
        log_scores=parent_scores.unsqueeze(2) + torch.where(schedule < num_slots, log_weights, -torch.inf),
        is_probe=is_probe,
        law_ids=ids,
        law=law,
        failed=failed,
    )


@dataclass(frozen=True, eq=False)
class _Draws:
    """The probes of every node, [batch, beam, draws] each: whether there is a j-th, its place and its proxy."""

    exists: Tensor
    places: Tensor
    proxies: Tensor


def _proxy(floor: Tensor, ceiling: Tensor, q_tail: Tensor) -> Tensor:
    """A probe's weight: the mass of the tail it is drawn from, between the best token there and the slot before."""
    return torch.maximum(floor, torch.minimum(ceiling, q_tail.sum(dim=-1, keepdim=True)))


def _draw_probes(
    law: Tensor, q_tail: Tensor, proxy: Tensor, exists: Tensor, room: Tensor, uniforms: Tensor, draws: int
) -> _Draws:
    """Draw without replacement: each probe from what the earlier ones left of q~.

    Args:
        law: [batch, beam, support] q~.
        q_tail: [batch, beam, support] q, 0 on the leads.
        proxy: [batch, beam, 1] the first probe's.
        exists: [batch, beam, 1] bool, whether there is a first probe.
        room: [batch, beam, 1] how many slots are left for probes.
        uniforms: [batch, beam] or [batch, beam, draws or more].
        draws: how many probes, at most.
    """
    place = arange(law.shape[-1], law.device)
    each = uniforms.unsqueeze(-1) if uniforms.ndim == 2 else uniforms
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for draw in range(draws):
        cumulative = law.cumsum(dim=-1)
        total = cumulative[..., -1:]
        beyond = cumulative > each[..., draw : draw + 1] * total
        last = torch.where(law > 0, place, 0).amax(dim=-1, keepdim=True)
        probe = torch.where(beyond, place, last).amin(dim=-1, keepdim=True)
        if draw > 0:
            exists = exists & (total > 0) & (room > draw)
            proxy = _proxy(q_tail.amax(dim=-1, keepdim=True), proxy, q_tail)
        found.append((exists, probe, proxy))
        if draw + 1 < draws:
            taken = place == probe
            law, q_tail = law.masked_fill(taken, 0.0), q_tail.masked_fill(taken, 0.0)
    if draws == 1:
        return _Draws(*found[0])
    return _Draws(*(torch.cat(parts, dim=-1) for parts in zip(*found, strict=True)))

"""Slots of a whole level at once: draft logits to leads, probe and fills, for every node of every request's beam."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from optimized.ranges import arange
from reference.api import GREEDY_TEMPERATURE, RheoConfig


@dataclass(frozen=True, eq=False)
class LevelSlots:
    """The slots that the expanded nodes of a level offer.

    Attributes:
        token_ids: [batch, beam, branching] long target ids, in schedule order.
        log_scores: [batch, beam, branching] float64, logarithm of the path score; -inf where there is no such slot.
        is_probe: [batch, beam, branching] bool.
        law_ids: [batch, beam, support] long target ids in rank order.
        law: [batch, beam, support] float64, q~; all 0 where there is no probe.
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
) -> LevelSlots:
    """Slots of every node of a level (docs/algorithm.md, "Slots of one node").

    Args:
        config: the tree's shape.
        logits: [batch, beam, draft vocab] the draft's logits at the expanded nodes; float64 is rounded to float32.
        parent_scores: [batch, beam] float64, logarithm of the expanded nodes' path scores; -inf for padding.
        temperatures: [batch] the requests' temperatures; below ``GREEDY_TEMPERATURE`` there is no probe.
        uniforms: [batch, beam] in [0, 1), one per node.
        vocab_map: [draft vocab] long, increasing, the target id of each draft id; None when they are the same.
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

    schedule = arange(branching, logits.device)
    index = schedule.expand(*failed.shape, branching)
    if config.proposal == "rheo" and m < branching and m < support:
        greedy = (temperatures < GREEDY_TEMPERATURE).view(-1, 1, 1)
        has_probe = ~greedy & (num_ranked > m)
        tail = ranked & (place >= m)
        tempered = kept / torch.where(greedy, 1.0, temperatures.double().view(-1, 1, 1))
        law = torch.softmax(tempered.masked_fill(~tail | ~has_probe, -torch.inf), dim=-1).nan_to_num(0.0)

        cumulative = law.cumsum(dim=-1)
        beyond = cumulative > uniforms.unsqueeze(-1) * cumulative[..., -1:]
        last = torch.where(law > 0, place, 0).amax(dim=-1, keepdim=True)
        probe = torch.where(beyond, place, last).amin(dim=-1, keepdim=True)

        ceiling = q[..., max(m, 1) - 1 : max(m, 1)]
        proxy = torch.maximum(q[..., m : m + 1], torch.minimum(ceiling, (q * tail).sum(dim=-1, keepdim=True)))
        # Behind the probe the k-th slot holds the (k-1)-th ranked token, or the k-th once the probe's own is passed.
        fills = torch.where(schedule - 1 < probe, schedule - 1, schedule)
        with_probe = torch.where(schedule < m, schedule, torch.where(schedule == m, probe, fills))
        index = torch.where(has_probe, with_probe, schedule)
        is_probe = has_probe & (schedule == m)
        weights = torch.where(is_probe, proxy, q.gather(-1, index.clamp(max=support - 1)))
    else:
        law = torch.zeros_like(q)
        is_probe = torch.zeros(*failed.shape, branching, dtype=torch.bool, device=logits.device)
        weights = q.gather(-1, index.clamp(max=support - 1))
    log_weights = torch.where(schedule < num_slots, weights.log(), -torch.inf)
    return LevelSlots(
        token_ids=ids.gather(-1, index.clamp(max=support - 1)),
        log_scores=parent_scores.unsqueeze(2) + log_weights,
        is_probe=is_probe,
        law_ids=ids,
        law=law,
        failed=failed,
    )

"""Slots of a whole level at once: draft logits to leads, probes and fills, for every node of every request's beam."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from optimized.ranges import arange, between, constant
from optimized.weighing import Chances, lead_count, least_log_score, slot_chances
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
        masses: [batch, beam, support] float64, with calibrated weights what their curves are read at; else None.
    """

    token_ids: Tensor
    log_scores: Tensor
    is_probe: Tensor
    law_ids: Tensor
    law: Tensor
    failed: Tensor
    masses: Tensor | None = None


def rank_logits(logits: Tensor, support: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row, best first, ties by lower id; ``torch.topk`` alone promises no order among ties.

    Args:
        logits: [..., nodes, vocab] float16, bfloat16 or float32; NaN ranks first.
        support: how many to keep.

    Returns:
        Values [..., support] float64 and ids [..., support] long; what stands behind a value of -inf is no particular
        token.
    """
    logits = logits.float()
    support = min(support, logits.shape[-1])
    values, ids = (_candidates if logits.device.type == "cpu" else _largest)(logits, support)
    ranking = values.sort(dim=-1, descending=True, stable=True)
    order = ranking.indices[..., :support]
    return ranking.values[..., :support].double(), ids.gather(-1, order)


def _candidates(logits: Tensor, support: int) -> tuple[Tensor, Tensor]:
    """On a CPU: values and ids [..., n] of at least the ``support`` largest and all that tie with them, ids ascending.

    A row's tokens at -inf may be left out; where too few are left, token 0 stands for them.

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
    bound = np.maximum(bound, np.finfo(rows.dtype).min)  # what is -inf is never ranked, be it a whole row
    found = np.flatnonzero(~(rows < bound))  # so that NaN is found, and ranks first; flat is ten times faster
    row, token = np.divmod(found, vocab)
    counts = np.bincount(row, minlength=len(rows))
    filled = np.arange(max(counts.max(), support)) < counts[:, None]
    values = np.full(filled.shape, -np.inf, dtype=rows.dtype)
    ids = np.zeros(filled.shape, dtype=np.int64)
    values[filled] = rows.reshape(-1)[found]
    ids[filled] = token
    shape = (*logits.shape[:-1], values.shape[1])
    return torch.from_numpy(values).view(shape), torch.from_numpy(ids).view(shape)


def _largest(logits: Tensor, support: int) -> tuple[Tensor, Tensor]:
    """On a device, without a look at the data: values and ids [..., support] of the largest, ids ascending."""
    best = logits.topk(support, dim=-1)
    cut = best.values[..., -1:]
    # More tokens may tie at the cut than there is room: fill the places at the cut with the lowest tied ids.
    places = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.float32)  # exact below 2**24
    lowest = torch.where(logits == cut, -places, -torch.inf).topk(support, dim=-1).indices
    above = (~(best.values <= cut)).sum(dim=-1, keepdim=True)  # NaN is above everything
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
    branching = config.branching
    kept, ids = rank_logits(logits, config.draft_support)
    if vocab_map is not None:
        ids = vocab_map.take(ids)
    support = kept.shape[-1]

    q = torch.softmax(kept, dim=-1)
    failed = q[..., 0].isnan()  # where NaN, +inf or -inf ranks first, all of q is NaN and nothing is ranked
    ranked = q > 0  # the first so many
    num_slots = ranked[..., :branching].sum(dim=-1, keepdim=True)
    if children is not None:
        num_slots = torch.minimum(num_slots, constant(children, logits.device).unsqueeze(1))

    schedule = arange(branching, logits.device)
    m: int | Tensor = config.fewest_leads
    room = min(branching, support) - config.fewest_leads
    draws = min(config.probes, room) if children is None else min(max(children), support)
    probing = config.proposal != "topk" and draws > 0
    if probing or config.weights is not None:
        sampled = (temperatures >= GREEDY_TEMPERATURE).view(-1, 1, 1)
        tempered = kept / torch.where(sampled, temperatures.view(-1, 1, 1), 1.0)
    lead_weights = q
    chances: Chances | None = None
    if config.weights is not None:
        masses = torch.where(ranked, torch.softmax(tempered, dim=-1), 0.0)
        chances = slot_chances(config.weights, masses, temperatures, config.probes)
        lead_weights = chances.lead
        if config.lead_tokens == "auto":
            drawable = (masses > 0).sum(dim=-1, keepdim=True)
            m = lead_count(chances, drawable, num_slots, branching, parent_scores, float(config.node_price))
    if probing:
        has_probe = sampled & (num_slots > m)
        tail = ranked & between(m, support, support, logits.device)
        law = torch.softmax(torch.where(tail & has_probe, tempered, -torch.inf), dim=-1).nan_to_num(0.0)
        if children is not None:
            num_slots = torch.where(has_probe, torch.minimum(num_slots, (law > 0).sum(dim=-1, keepdim=True)), num_slots)

        free = chances is not None and config.verification == "rheo"  # rrsw verifies in the order of the weights
        ceiling = torch.ones_like(q[..., :1]) if free else _last_lead(lead_weights, m, chances is None)
        promises: Tensor | None = None
        if chances is not None:
            leads = torch.full_like(num_slots, m) if isinstance(m, int) else m
            promises = chances.probes(leads.squeeze(-1), draws)
        drawn = _draw_probes(law, q * tail, promises, ceiling, has_probe, num_slots - m, uniforms, draws)
        # Behind the probes stand the ranked tokens in order, passing over those that were drawn.
        behind = schedule - (drawn.exists.long() if draws == 1 else drawn.exists.sum(dim=-1, keepdim=True))
        passed = torch.where(drawn.exists, drawn.places, support + branching)
        for taken in passed.sort(dim=-1).values.split(1, dim=-1) if draws > 1 else (passed,):
            behind = behind + (taken <= behind)

        def in_slots(values: Tensor) -> Tensor:
            if draws == 1:  # broadcasts
                return values
            return values.gather(-1, (schedule - m).clamp(0, draws - 1).expand(*failed.shape, branching))

        is_probe = in_slots(drawn.exists) & between(m, m + draws, branching, logits.device)
        others = torch.where(between(m, branching, branching, logits.device), behind, schedule)
        index = torch.where(is_probe, in_slots(drawn.places), others)
    else:
        index = schedule.expand(*failed.shape, branching)
        law = torch.zeros_like(q)
        is_probe = torch.zeros(*failed.shape, branching, dtype=torch.bool, device=logits.device)
    ranks = index if branching <= support else index.clamp(max=support - 1)
    weights = lead_weights.gather(-1, ranks)
    if probing:
        if chances is not None:
            lowest = torch.where(drawn.exists, drawn.proxies, torch.inf).amin(dim=-1, keepdim=True)
            is_lead = between(0, m, branching, logits.device) | ~has_probe
            weights = torch.where(is_lead, weights, torch.minimum(chances.fill.gather(-1, ranks), lowest))
        weights = torch.where(is_probe, in_slots(drawn.proxies), weights)
    log_weights = torch.zeros_like(weights) if config.proposal == "static" else weights.log()
    log_scores = parent_scores.unsqueeze(2) + torch.where(schedule < num_slots, log_weights, -torch.inf)
    if config.score_threshold > 0:
        log_scores = log_scores.masked_fill(log_scores < least_log_score(config.score_threshold), -torch.inf)
    return LevelSlots(
        token_ids=ids.gather(-1, ranks),
        log_scores=log_scores,
        is_probe=is_probe,
        law_ids=ids,
        law=law,
        failed=failed,
        masses=None if chances is None else masses,
    )


def _last_lead(lead_weights: Tensor, m: int | Tensor, or_first: bool) -> Tensor:
    """[batch, beam, 1] the last lead's weight; without leads the first token's if ``or_first``, else 1."""
    if isinstance(m, int):
        last = lead_weights[..., max(m, 1) - 1 : max(m, 1)]
        return last if m > 0 or or_first else torch.ones_like(last)
    last = lead_weights.gather(-1, (m - 1).clamp(min=0))
    return last if or_first else last.masked_fill(m == 0, 1.0)


@dataclass(frozen=True, eq=False)
class _Draws:
    """The probes of every node, [batch, beam, draws] each: whether there is a j-th, its place and its proxy."""

    exists: Tensor
    places: Tensor
    proxies: Tensor


def _draw_probes(
    law: Tensor,
    proxies: Tensor,
    promises: Tensor | None,
    ceiling: Tensor,
    exists: Tensor,
    room: Tensor,
    uniforms: Tensor,
    draws: int,
) -> _Draws:
    """Draw without replacement: each probe from what the earlier ones left of q~.

    Args:
        law: [batch, beam, support] q~.
        proxies: [batch, beam, support] what the probes' weights are made of: q on the tail and 0 on the leads.
        promises: [batch, beam, draws] their weights by calibrated curves, which then count instead.
        ceiling: [batch, beam, 1] what the first probe's weight may not exceed.
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
        # Where rounding leaves none. It cannot at first: a uniform below 1 times a total about 1 stays below the total.
        last = law.shape[-1] - 1 if draw == 0 else torch.where(law > 0, place, 0).amax(dim=-1, keepdim=True)
        probe = torch.where(beyond, place, last).amin(dim=-1, keepdim=True)
        if draw > 0:
            exists = exists & (total > 0) & (room > draw)
        if promises is not None:
            ceiling = torch.minimum(ceiling, promises[..., draw : draw + 1])
        else:  # the mass of its tail, between the best token there and the slot before
            largest, mass = proxies.amax(dim=-1, keepdim=True), proxies.sum(dim=-1, keepdim=True)
            ceiling = torch.maximum(largest, torch.minimum(ceiling, mass))
        found.append((exists, probe, ceiling))
        if draw + 1 < draws:
            taken = place == probe
            law, proxies = law.masked_fill(taken, 0.0), proxies.masked_fill(taken, 0.0)
    if draws == 1:
        return _Draws(*found[0])
    return _Draws(*(torch.cat(parts, dim=-1) for parts in zip(*found, strict=True)))

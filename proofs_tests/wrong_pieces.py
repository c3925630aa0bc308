"""Pieces of a ``Variant`` that somebody could write by mistake, and some that look as suspicious and are sound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from proofs_tests.variants import (
    GRID,
    ONE,
    Law,
    Node,
    Offer,
    Path,
    Slot,
    Stand,
    Step,
    Variant,
    draw_one_probe,
    leads_probe_fills,
    normalised,
    positive_part,
    probe_then_draw,
    same_law,
    total_order,
)
from reference.api import DraftLaw
from reference.slots import SlotPlan


def reweighed(weight: Callable[[Offer, Slot, int], Fraction]) -> Callable[[Offer], list[Slot]]:
    """The specification's slots with other weights: a function of the offer, the slot and its place."""

    def slots(offer: Offer) -> list[Slot]:
        own = leads_probe_fills(offer)
        return [Slot(slot.token, weight(offer, slot, place), slot.probe) for place, slot in enumerate(own)]

    return slots


def is_lead(offer: Offer, place: int) -> bool:
    return place < offer.plan.lead_tokens


def own_probability(offer: Offer, slot: Slot, place: int) -> Fraction:
    return offer.q[slot.token]


def leads_share_what_the_probe_leaves(offer: Offer, slot: Slot, place: int) -> Fraction:
    taken = sum((offer.q[probe] for probe in offer.probes), Fraction(0))
    return slot.weight * (1 - taken) if is_lead(offer, place) else slot.weight


def worse_ranked_mate(offer: Offer, slot: Slot, place: int) -> Fraction:
    """Halved when the next in the beam is a probe whose token is odd."""
    after = offer.beam[offer.rank + 1 : offer.rank + 2]
    return slot.weight / 2 if after and after[0] and after[0].probe == 0 and after[0].token % 2 else slot.weight


def better_ranked_mate(offer: Offer, slot: Slot, place: int) -> Fraction:
    """Halved when the one before in the beam is a probe whose token is odd."""
    before = offer.beam[max(offer.rank - 1, 0) : offer.rank]
    return slot.weight / 2 if before and before[0] and before[0].probe == 0 and before[0].token % 2 else slot.weight


def learned_within_the_step(offer: Offer, slot: Slot, place: int) -> Fraction:
    """Halved below the first level when the root's probe is odd."""
    top = offer.parent
    while top is not None and top.parent is not None:
        top = top.parent
    return slot.weight / 2 if top and top.offer.probes and top.offer.probes[0] % 2 else slot.weight


def above_one(offer: Offer, slot: Slot, place: int) -> Fraction:
    """Three times as much below the first level: deep nodes are worth more."""
    return slot.weight * 3 if offer.parent else slot.weight


def uncapped(offer: Offer, slot: Slot, place: int) -> Fraction:
    """The probe stands for the whole tail: z, however much that is."""
    return sum(offer.plan.weights[offer.plan.lead_tokens :], Fraction(0)) if slot.probe == 0 else slot.weight


def discounted_fills(offer: Offer, slot: Slot, place: int) -> Fraction:
    return slot.weight if slot.probe == 0 or is_lead(offer, place) else slot.weight / 2


def probe_in_the_last_slot(offer: Offer) -> list[Slot]:
    """Leads, fills, probe; the probe has the weight of x_K, so weights still fall."""
    own = leads_probe_fills(offer)
    if not offer.probes:
        return own
    probe = Slot(offer.probes[0], min(slot.weight for slot in own), 0)
    return [*(slot for slot in own if slot.probe is None), probe]


def fills_that_may_repeat_the_probe(offer: Offer) -> list[Slot]:
    """The ranked tokens after the leads, the probe's own among them."""
    if not offer.probes:
        return leads_probe_fills(offer)
    ranked = [Slot(token, weight) for token, weight in offer.q.items()]
    leads = offer.plan.lead_tokens
    return [*ranked[:leads], Slot(offer.probes[0], offer.plan.proxy, 0), *ranked[leads:]][: offer.plan.num_slots]


def draw_two_probes(plan: SlotPlan, draft: DraftLaw) -> dict[tuple[int, ...], Fraction]:
    """Without replacement, where the tail and the slots have room for two."""
    one = draw_one_probe(plan, draft)
    if len(one) < 2 or plan.num_slots - plan.lead_tokens < 2:
        return one
    tail = {token: q for (token,), q in one.items()}
    return {(a, b): tail[a] * tail[b] / (1 - tail[a]) for a in tail for b in tail if a != b}


def two_probes(second_first: bool) -> Callable[[Offer], list[Slot]]:
    """Leads, two probes of the same proxy, fills."""

    def slots(offer: Offer) -> list[Slot]:
        if len(offer.probes) < 2:
            return leads_probe_fills(offer)
        ranked = [Slot(token, weight) for token, weight in offer.q.items()]
        leads = offer.plan.lead_tokens
        probes = [Slot(token, offer.plan.proxy, index) for index, token in enumerate(offer.probes)]
        fills = [slot for slot in ranked[leads:] if slot.token not in offer.probes]
        return [*ranked[:leads], *(reversed(probes) if second_first else probes), *fills][: offer.plan.num_slots]

    return slots


def sorted_probes(offer: Offer) -> list[Slot]:
    """The probes laid out, and so verified, by rank instead of in drawing order."""
    return leads_probe_fills(replace(offer, probes=tuple(sorted(offer.probes, key=offer.plan.tokens.index))))


def weight_without_the_own_token(offer: Offer, slot: Slot, place: int) -> Fraction:
    """A further probe's weight taken when its own token has left the tail, too."""
    if not slot.probe:
        return slot.weight
    taken = offer.probes[: slot.probe + 1]
    left = [weight for token, weight in list(offer.q.items())[offer.plan.lead_tokens :] if token not in taken]
    return min(slot.weight, sum(left)) if left else slot.weight


def draw_with_replacement(plan: SlotPlan, draft: DraftLaw) -> dict[tuple[int, ...], Fraction]:
    """Two draws from q~, which may agree."""
    one = draw_one_probe(plan, draft)
    if plan.num_probes < 2:
        return one
    return {(a, b): one[a,] * one[b,] for (a,) in one for (b,) in one}


def repeat_its_token(offer: Offer) -> list[Slot]:
    """The specification's slots, a repeated token standing in two of them."""
    slots = offer.plan.slots(offer.probes)
    probes = iter(range(len(offer.probes)))
    return [Slot(slot.token_id, slot.weight, next(probes) if slot.is_probe else None) for slot in slots]


def drop_the_repeat(offer: Offer) -> list[Slot]:
    """The specification's slots for the distinct tokens that were drawn."""
    distinct = tuple(dict.fromkeys(offer.probes))
    return leads_probe_fills(replace(offer, probes=distinct, plan=replace(offer.plan, num_probes=len(distinct))))


def law_not_renormalised(q: Law, token: int) -> Law:
    return {other: mass for other, mass in q.items() if other != token}


def target_law_itself(p: Law, stand: Stand) -> Law:
    return stand.p


def ties_by_token(node: Node) -> tuple[Any, ...]:
    return (-node.score, node.token, *total_order(node))


def stop_before_an_odd_probe(ranking: Sequence[Node], tree_size: int) -> Sequence[Node]:
    kept = ranking[:tree_size]
    odd = [place for place, node in enumerate(kept) if node.probe == 0 and node.token % 2]
    return kept[: odd[0]] if odd else kept


def stop_after_an_odd_probe(ranking: Sequence[Node], tree_size: int) -> Sequence[Node]:
    kept = ranking[:tree_size]
    odd = [place for place, node in enumerate(kept) if node.probe == 0 and node.token % 2]
    return kept[: odd[0] + 1] if odd else kept


def half_if_shallow(ranking: Sequence[Node], tree_size: int) -> Sequence[Node]:
    """Grow the whole tree; keep its better half only when that made it no deeper than one level."""
    kept = ranking[:tree_size]
    return kept if any(node.level > 1 for node in kept) else kept[: tree_size // 2]


def drop_unlikely_probes(ranking: Sequence[Node], tree_size: int) -> Sequence[Node]:
    """Probes below half of the largest q are pruned with what hangs on them; others take their places."""

    def unlikely(node: Node) -> bool:
        return node.probe == 0 and 2 * node.offer.q[node.token] < node.offer.plan.weights[0]

    return [n for n in ranking if not unlikely(n) and not any(map(unlikely, n.ancestors))][:tree_size]


def with_ancestors(ranking: Sequence[Node], tree_size: int) -> Sequence[Node]:
    """A node brings along the ancestors that are not in the tree yet."""
    kept: list[Node] = []
    for node in ranking:
        missing = [above for above in reversed(list(node.ancestors)) if above not in kept]
        new = [*missing, *([node] if node not in kept else [])]
        if len(kept) + len(new) <= tree_size:
            kept += new
    return kept


def below_a_likely_best(ranking: Sequence[Node], width: int) -> Sequence[Node]:
    return ranking[:width] if ranking and ranking[0].score >= Fraction(1, 2) else ()


def below_a_likely_level(ranking: Sequence[Node], width: int) -> Sequence[Node]:
    return ranking[:width] if sum(node.score for node in ranking) >= Fraction(17, 20) else ()


def likely_ones(ranking: Sequence[Node], width: int) -> Sequence[Node]:
    return [node for node in ranking[:width] if node.score >= Fraction(1, 6)]


def score_threshold(ranking: Sequence[Node], tree_size: int) -> Sequence[Node]:
    return [node for node in ranking if node.score >= Fraction(1, 6)]


def construction_law(stand: Stand) -> Law:
    return normalised(dict(enumerate(stand.draft.construction)))


def sampling_law_with_leads(stand: Stand) -> Law:
    assert stand.draft.sampling is not None
    return normalised(dict(enumerate(stand.draft.sampling)))


def proxy_for_probability(stand: Stand) -> Law:
    probe = stand.probes[0]
    return {**same_law(stand), probe.token: probe.score / (probe.parent.score if probe.parent else 1)}


def draw_at_temperature_one(plan: SlotPlan, draft: DraftLaw) -> dict[tuple[int, ...], Fraction]:
    if plan.probe_law is None:
        return {(): ONE}
    tail = normalised({token: draft.construction[token] for token in plan.probe_law[0]})
    return {(token,): q for token, q in tail.items()}


def target_itself(p: Law, q: Law, stand: Stand) -> Law:
    return p


def residual_of_the_construction_law(p: Law, q: Law, stand: Stand) -> Law:
    return positive_part(p, construction_law(stand), stand)


def residual_not_normalised(p: Law, q: Law, stand: Stand) -> Law:
    """u runs to 1 where the residual ends before: what is missing goes to the last token."""
    rest = {token: max(p[token] - q.get(token, 0), Fraction(0)) for token in p}
    rest = {token: mass for token, mass in rest.items() if mass > 0}
    return {**rest, max(rest): rest[max(rest)] + 1 - sum(rest.values())} if rest else p


def probes_own_uniform(p_probe: Fraction, q_probe: Fraction, below: Fraction) -> Fraction:
    """The uniform that drew the probe lies in [below, below + q~)."""
    accepted_below = min(p_probe / q_probe, ONE)
    return max(min(accepted_below, below + q_probe) - below, Fraction(0)) / q_probe


def below_on_the_grid(p_probe: Fraction, q_probe: Fraction, below: Fraction) -> Fraction:
    """u q~ < p with u a multiple of 2**-24; the right rule."""
    return Fraction(min(-(-GRID * p_probe // q_probe), GRID), GRID)


def at_most_on_the_grid(p_probe: Fraction, q_probe: Fraction, below: Fraction) -> Fraction:
    """u q~ <= p with u a multiple of 2**-24."""
    return Fraction(min(GRID * p_probe // q_probe + 1, GRID), GRID)


def leads_in_slot_order(stand: Stand) -> Sequence[Node]:
    probes = stand.probes
    return [child for child in stand.children if probes and child.slot < probes[0].slot]


def fills_first(stand: Stand) -> Sequence[Node]:
    probes = stand.probes
    return [child for child in stand.children if probes and child.slot > probes[0].slot]


def leads_stay(p: Law, tokens: Sequence[int]) -> Law:
    return p


def leads_leave_a_gap(p: Law, tokens: Sequence[int]) -> Law:
    return {token: mass for token, mass in p.items() if token not in tokens} or p


def bonus_from_the_draft(stand: Stand, p: Law) -> Law:
    return p if stand.children else construction_law(stand)


def row_of_the_parent(path: Path) -> Path:
    return path[:-1]


def top_k_as_if_sampled(variant: Variant, stand: Stand) -> Step:
    """Speculative sampling's rule for children that nobody sampled: accept with p / q, or go on with the residual."""
    p, reached, q = stand.p, ONE, construction_law(stand)
    for child in stand.children:
        accepted = min(p.get(child.token, Fraction(0)) / q[child.token], ONE)
        yield child.token, child, reached * accepted
        reached *= 1 - accepted
        if reached == 0:
            return
        p = positive_part(p, q, stand)
    for token, mass in p.items():
        yield token, None, reached * mass


def children_by_token(variant: Variant, stand: Stand) -> Step:
    """The walk keeps the children in a table by token, where a fill takes the place of the probe that it repeats."""
    table = {child.token: child for child in stand.children}
    return probe_then_draw(variant, replace(stand, children=tuple(table.values())))


# --- Where they are tried ------------------------------------------------------------------------------------------

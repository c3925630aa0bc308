"""Deliberately wrong variants of growth and verification, and the exact bias of each.

A test of losslessness that no wrong algorithm fails proves nothing. So here is the algorithm cut into small pieces
(``Variant``), the *mutants* that each replace one of them by a bug somebody could write, and *twins*: variants that
look as suspicious and are lossless by the theorem (docs/generalisations.md). Everything is a Fraction: the law of the
output is summed over every probe of every expanded node and every walk, so a mutant is told from the algorithm by a
total variation that is not exactly 0.

    python -m proofs_tests.mutants        prints docs/_generated/mutants.md

The pieces work on trees of ``Node``s, not on ``DraftTree``, which refuses some of what mutants grow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from optimized.evidence.cases import HARD_CASES_BY_NAME, Case, law, tempered
from optimized.evidence.markov import MarkovModel, block_counts, block_law, sample_blocks
from optimized.randomness import StepNoise
from optimized.sampling_params import SamplingParams
from proofs_tests.statistics import SUITE_ALPHA
from reference.api import DraftLaw, Proposal, RheoConfig
from reference.exact import target_law, total_variation
from reference.slots import SlotPlan, plan_slots
from reference.statistics import Comparison, compare

Path = tuple[int, ...]
Law3 = tuple[Fraction, ...]
Law = dict[int, Fraction]  # token -> positive probability
ONE = Fraction(1)
GRID = 2**24  # accept uniforms are multiples of 1 / GRID


@dataclass(frozen=True)
class Slot:
    """A child offered at a node: its token, its weight, and which probe it is (0, 1, ... in drawing order; None)."""

    token: int
    weight: Fraction
    probe: int | None = None


@dataclass(frozen=True, eq=False)
class Offer:
    """What is known where a node offers its slots.

    Attributes:
        plan: the reference's plan of the node's slots.
        probes: the tokens that were drawn here, in drawing order.
        parent: the node; None for the root.
        beam: the nodes that are expanded on its level, best first.
        rank: its place among them.
    """

    plan: SlotPlan
    probes: tuple[int, ...]
    parent: Node | None
    beam: Sequence[Node | None]
    rank: int

    @property
    def q(self) -> Law:
        """The construction law."""
        return dict(zip(self.plan.tokens, self.plan.weights, strict=True))


@dataclass(frozen=True, eq=False)
class Node:
    """An offered node; ``offer`` is where it comes from."""

    token: int
    path: Path
    parent: Node | None
    level: int
    slot: int
    probe: int | None
    score: Fraction
    offer: Offer

    @property
    def ancestors(self) -> Iterator[Node]:
        """Parent, grandparent, ... without the root."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, eq=False)
class Stand:
    """Where the walk stands: a node, its children in the tree, and the laws there.

    Attributes:
        children: in the order in which they entered the tree.
        p: the target's law.
        draft: the draft's law.
        q_tilde: the law of the node's probe, when there is one.
    """

    node: Node | None
    children: tuple[Node, ...]
    p: Law
    draft: DraftLaw
    q_tilde: Law | None

    @property
    def probes(self) -> list[Node]:
        """The probes in the tree, in drawing order."""
        return sorted((child for child in self.children if child.probe is not None), key=lambda child: child.probe or 0)


Step = Iterator[tuple[int, Node | None, Fraction]]  # emitted token, the child it leads to, probability


# --- The algorithm in pieces ---------------------------------------------------------------------------------------


def draw_one_probe(plan: SlotPlan, draft: DraftLaw) -> dict[tuple[int, ...], Fraction]:
    """The probe's law; without a probe the empty draw is certain."""
    if plan.probe_law is None:
        return {(): ONE}
    return {(token,): q for token, q in zip(*plan.probe_law, strict=True) if q > 0}


def leads_probe_fills(offer: Offer) -> list[Slot]:
    """The specification's slots."""
    probe = offer.probes[0] if offer.probes else None
    return [Slot(s.token_id, s.weight, 0 if s.is_probe else None) for s in offer.plan.slots(probe)]


def total_order(node: Node) -> tuple[Any, ...]:
    """Score, level, the parent's rank, slot."""
    return (-node.score, node.level, node.offer.rank, node.slot)


def best(ranking: Sequence[Node], tree_size: int) -> Sequence[Node]:
    """The budget: the best ``tree_size`` nodes."""
    return ranking[:tree_size]


def same_law(stand: Stand) -> Law:
    """The law that verifies the probe: the one that drew it."""
    assert stand.q_tilde is not None
    return stand.q_tilde


def accept(p_probe: Fraction, q_probe: Fraction, below: Fraction) -> Fraction:
    """The probability that u q~ < p; ``below`` is the probability of the tokens ranked before the probe."""
    return min(p_probe / q_probe, ONE) if q_probe else Fraction(p_probe > 0)


def positive_part(p: Law, q: Law, stand: Stand) -> Law:
    """norm(max(0, p - q~)); p where nothing is left."""
    return normalised({token: p[token] - q.get(token, 0) for token in p}) or p


def none_first(stand: Stand) -> Sequence[Node]:
    """The children that are drawn for before the probe is tested: none, the rule "rheo"."""
    return ()


def entered_before_the_probe(stand: Stand) -> Sequence[Node]:
    """The rule "rrsw": the siblings that entered the tree before the probe."""
    probes = stand.probes
    return stand.children[: stand.children.index(probes[0])] if probes else ()


def target_of_the_node(path: Path) -> Path:
    """Which row of the target verifies the children of ``path``."""
    return path


def probe_then_draw(variant: Variant, stand: Stand) -> Step:
    """One node of the walk: the children that come first, the probes in turn, then one draw for the rest."""
    p, reached, left = stand.p, ONE, list(stand.children)
    first = variant.before_probe(stand)
    for child in first:
        yield child.token, child, p.get(child.token, Fraction(0))
        left.remove(child)
    if first:
        reached -= sum(p.get(child.token, Fraction(0)) for child in first)
        p = variant.without(p, [child.token for child in first])
    q = variant.verified_with(stand) if stand.probes else {}
    for probe in stand.probes:
        if reached == 0:
            return
        below = sum((mass for token, mass in q.items() if _before(stand, token, probe.token)), Fraction(0))
        accepted = variant.accept(p.get(probe.token, Fraction(0)), q.get(probe.token, Fraction(0)), below)
        yield probe.token, probe, reached * accepted
        left.remove(probe)
        reached *= 1 - accepted
        p = variant.residual(p, q, stand)
        q = normalised({token: mass for token, mass in q.items() if token != probe.token})
    matched = {child.token: child for child in left}
    for token, mass in variant.last_draw(stand, p).items():
        yield token, matched.get(token), reached * mass


def _before(stand: Stand, token: int, other: int) -> bool:
    tokens = stand.draft.ranked_tokens().tolist()
    return tokens.index(token) < tokens.index(other)


def without_tokens(p: Law, tokens: Sequence[int]) -> Law:
    """p without some tokens, normalised."""
    return normalised({token: mass for token, mass in p.items() if token not in tokens}) or p


def draw_from_what_is_left(stand: Stand, p: Law) -> Law:
    """The law of the recovered or bonus token."""
    return p


@dataclass(frozen=True)
class Variant:
    """The algorithm; every attribute is one of its pieces and may be replaced."""

    draws: Callable[[SlotPlan, DraftLaw], dict[tuple[int, ...], Fraction]] = draw_one_probe
    slots: Callable[[Offer], list[Slot]] = leads_probe_fills
    order: Callable[[Node], tuple[Any, ...]] = total_order
    keep: Callable[[Sequence[Node], int], Sequence[Node]] = best
    target_row: Callable[[Path], Path] = target_of_the_node
    step: Callable[[Variant, Stand], Step] = probe_then_draw
    before_probe: Callable[[Stand], Sequence[Node]] = none_first
    without: Callable[[Law, Sequence[int]], Law] = without_tokens
    verified_with: Callable[[Stand], Law] = same_law
    accept: Callable[[Fraction, Fraction, Fraction], Fraction] = accept
    residual: Callable[[Law, Law, Stand], Law] = positive_part
    last_draw: Callable[[Stand, Law], Law] = draw_from_what_is_left


RHEO = Variant()
RRSW = Variant(before_probe=entered_before_the_probe)


def normalised(weights: Mapping[int, Fraction]) -> Law:
    """The positive weights as a law; empty when there are none."""
    positive = {token: weight for token, weight in weights.items() if weight > 0}
    total = sum(positive.values())
    return {token: weight / total for token, weight in positive.items()}


# --- The exact law of a variant's output ---------------------------------------------------------------------------


def grown_trees(variant: Variant, config: RheoConfig, case: Case) -> Iterator[tuple[tuple[Node, ...], Fraction]]:
    """Every tree, its nodes best first, for every combination of probes; equal trees may come several times."""
    draws_at = cache(lambda path: variant.draws(plan_at(config, case, path), draft_at(case, path)))

    def grow(level: int, beam: list[Node | None], offered: list[Node], probability: Fraction):
        if level > config.depth:
            ranking = sorted(offered, key=variant.order)
            yield tuple(variant.keep(ranking, config.tree_size)), probability
            return
        paths = [node.path if node else () for node in beam]
        for drawn in product(*(draws_at(path).items() for path in paths)):
            here: list[Node] = []
            weight = probability
            for rank, (node, path, (probes, chance)) in enumerate(zip(beam, paths, drawn, strict=True)):
                weight *= chance
                offer = Offer(plan_at(config, case, path), probes, node, beam, rank)
                score = node.score if node else ONE
                here += [
                    Node(slot.token, (*path, slot.token), node, level, place, slot.probe, score * slot.weight, offer)
                    for place, slot in enumerate(variant.slots(offer))
                ]
            best_here = sorted(here, key=variant.order)[: config.beam_width]
            yield from grow(level + 1, list(best_here), offered + here, weight)

    yield from grow(1, [None], [], ONE)


def emitted_on(variant: Variant, tree: Sequence[Node], config: RheoConfig, case: Case) -> dict[Path, Fraction]:
    """The law of what the walk on one tree emits."""
    children: defaultdict[int, list[Node]] = defaultdict(list)
    for node in tree:
        children[id(node.parent)].append(node)
    emitted: defaultdict[Path, Fraction] = defaultdict(Fraction)

    def walk(node: Node | None, path: Path, reached: Fraction) -> None:
        plan = plan_at(config, case, path)
        stand = Stand(
            node=node,
            children=tuple(children.get(id(node), ())),
            p=target_at(case, variant.target_row(path)),
            draft=draft_at(case, path),
            q_tilde=normalised(dict(zip(*plan.probe_law, strict=True))) if plan.probe_law else None,
        )
        for token, child, probability in variant.step(variant, stand):
            if probability > 0 and child is not None:
                walk(child, (*path, token), reached * probability)
            elif probability > 0:
                emitted[(*path, token)] += reached * probability

    walk(None, (), ONE)
    return dict(emitted)


@cache
def draft_at(case: Case, path: Path) -> DraftLaw:
    return case.draft()(path)


@cache
def plan_at(config: RheoConfig, case: Case, path: Path) -> SlotPlan:
    return plan_slots(config, draft_at(case, path))


@cache
def target_at(case: Case, path: Path) -> Law:
    return normalised(dict(enumerate(case.target(path))))


def tree_key(tree: Sequence[Node]) -> tuple[tuple[int, int, int, bool], ...]:
    """``DraftTree.key`` of the same tree: rows by level, the parent's rank, slot."""
    rows = sorted(tree, key=lambda node: (node.level, node.offer.rank, node.slot))
    row_of = {id(None): 0} | {id(node): row for row, node in enumerate(rows, start=1)}
    return tuple((row_of[id(node.parent)], node.slot, node.token, node.probe is not None) for node in rows)


def merged_trees(variant: Variant, config: RheoConfig, case: Case) -> dict[Any, tuple[tuple[Node, ...], Fraction]]:
    """Each tree once, with the probability of all outcomes that give it; the order of entry is part of what it is."""
    merged: dict[Any, tuple[tuple[Node, ...], Fraction]] = {}
    for tree, probability in grown_trees(variant, config, case):
        key = tree_key(tree), tuple(node.path for node in tree)
        merged[key] = tree, probability + merged.get(key, (tree, Fraction(0)))[1]
    return merged


def variant_output_law(variant: Variant, config: RheoConfig, case: Case, horizon: int) -> dict[Path, Fraction]:
    """The law of the first ``horizon`` tokens: one tree, one walk, then free sampling from the target."""
    emitted: defaultdict[Path, Fraction] = defaultdict(Fraction)
    for tree, probability in merged_trees(variant, config, case).values():
        for path, share in emitted_on(variant, tree, config, case).items():
            emitted[path[:horizon]] += probability * share
    return sampled_on(emitted, case, horizon)


def sampled_on(emitted: Mapping[Path, Fraction], case: Case, horizon: int) -> dict[Path, Fraction]:
    """Continue every prefix by free sampling from the target."""
    laws: list[defaultdict[Path, Fraction]] = [defaultdict(Fraction) for _ in range(horizon + 1)]
    for path, probability in emitted.items():
        laws[len(path)][path] += probability
    for length in range(horizon):
        for path, probability in laws[length].items():
            for token, mass in target_at(case, path).items():
                laws[length + 1][*path, token] += probability * mass
    return dict(laws[horizon])


def bias(variant: Variant, config: RheoConfig, case: Case) -> Fraction:
    """Total variation between the output's law and the target's, over one token more than the tree is deep."""
    horizon = config.depth + 1
    found = total_variation(variant_output_law(variant, config, case, horizon), target_law(case.target, horizon))
    return Fraction(found)


# --- Mutants of growth ---------------------------------------------------------------------------------------------


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


def score_threshold(ranking: Sequence[Node], tree_size: int) -> Sequence[Node]:
    return [node for node in ranking if node.score >= Fraction(1, 6)]


# --- Mutants of verification ---------------------------------------------------------------------------------------


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


def _by_last_token(name: str, q: Sequence[Law3], p: Sequence[Law3], power: int = 1) -> Case:
    """Laws at the root, and after each token; the last given one goes for the remaining tokens."""

    def at(laws: Sequence[Law3], path: Path) -> Law3:
        return laws[min(path[-1] + 1 if path else 0, len(laws) - 1)]

    return Case(
        name, lambda path: at(q, path), lambda path: at(p, path), len(q[0]), lambda path, q_: tempered(q_, power)
    )


PEAK, FLAT = law(98, 1, 1), law(1, 1, 1)
CASES = (
    HARD_CASES_BY_NAME["p equals q"],
    HARD_CASES_BY_NAME["opposite rankings"],
    HARD_CASES_BY_NAME["uniform draft, all ties"],
    HARD_CASES_BY_NAME["cold sampling law"],
    HARD_CASES_BY_NAME["hot sampling law"],
    _by_last_token("certain target", [law(2, 1, 1)], [law(1, 0, 0)], power=2),
    _by_last_token("two tied, cold", [law(3, 3, 1)], [law(3, 1, 3)], power=2),
    _by_last_token(
        "steep, cold, turning", [law(1, 3, 5), law(5, 3, 1), law(3, 8, 1)], [law(3, 5, 1), law(1, 0, 4)], power=3
    ),
    Case("hot draft", lambda path: law(5, 3, 1), lambda path: law(0, 1, 1), 3, lambda path, q: law(1, 1, 1)),
    _by_last_token("peaked after 1, flat after 2", [law(4, 3, 3), FLAT, PEAK, FLAT], [law(0, 1, 1)]),
    _by_last_token("the same, other target", [law(4, 3, 3), FLAT, PEAK, FLAT], [law(1, 1, 0)]),
)
CERTAIN = tuple(case for case in CASES if case.name == "certain target")
CONFIGS = [
    RheoConfig(lead_tokens, branching, depth, tree_size, beam)
    for lead_tokens, branching, depth, tree_size, beam in (
        (0, 2, 1, 2, 1),
        (0, 3, 1, 1, 1),
        (1, 2, 1, 1, 1),
        (1, 2, 1, 2, 1),
        (1, 3, 1, 2, 1),
        (2, 3, 1, 3, 1),
        (0, 2, 2, 2, 1),
        (1, 2, 2, 2, 1),
        (1, 2, 2, 3, 2),
        (0, 2, 2, 6, 2),
        (0, 3, 2, 2, 1),
        (1, 3, 2, 2, 1),
        (0, 3, 2, 4, 1),
        (1, 3, 2, 3, 2),
        (2, 3, 2, 4, 1),
    )
]
# A worse-ranked mate takes three levels to tell; a weight above one wants the draft to turn with the path.
THREE_LEVELS = (
    _by_last_token(
        "three levels",
        [law(8, 2, 1), law(8, 1, 8), law(8, 5, 2), law(1, 1, 3)],
        [law(1, 3, 1), law(1, 8, 1), law(8, 2, 1), law(1, 0, 1)],
    ),
    RheoConfig(1, 3, 3, 3, 2),
)
TURNING = (
    _by_last_token("turning", [law(3, 0, 1), law(0, 3, 8), law(4, 4, 1), law(1, 8, 3)], [law(8, 2, 3), law(1, 1, 8)]),
    RheoConfig(0, 2, 2, 2, 2),
)


@dataclass(frozen=True, eq=False)
class Mutant:
    """A variant with a bug, or a twin without one.

    Attributes:
        name: what the bug is called.
        breaks: the assumption of docs/theory.md that it gives up; for a twin, why it does not give up any.
        variant: the algorithm with the bug.
        known: the total variation of another case, found before these tests were written, if any.
        tailored: a case beside ``CASES`` and ``CONFIGS``.
        proposal: of the configurations it is tried on.
        cases: what takes the place of ``CASES``.
    """

    name: str
    breaks: str
    variant: Variant
    known: str = ""
    tailored: tuple[Case, RheoConfig] | None = None
    proposal: Proposal = "rheo"
    cases: Sequence[Case] = CASES

    def trials(self) -> Iterator[tuple[Case, RheoConfig]]:
        """What it is tried on."""
        yield from ((case, replace(config, proposal=self.proposal)) for case in self.cases for config in CONFIGS)
        if self.tailored:
            yield self.tailored


@dataclass(frozen=True)
class Finding:
    """The largest bias of a variant and where it was found."""

    tv: Fraction
    case: str
    config: RheoConfig


@cache
def worst_case(mutant: Mutant) -> Finding:
    """The trial of the largest bias; the first one among equals."""
    findings = (Finding(bias(mutant.variant, config, case), case.name, config) for case, config in mutant.trials())
    return max(findings, key=lambda finding: finding.tv)


TWO = Variant(draws=draw_two_probes, slots=two_probes(second_first=False))
UNCAPPED = Variant(slots=reweighed(uncapped))

MUTANTS = [
    Mutant("true q as the proxy", "A2", Variant(slots=reweighed(own_probability)), "0.24"),
    Mutant("ties broken by token id", "A1", Variant(order=ties_by_token), "0.24"),
    Mutant("leads share what the probe leaves of q", "A2",
           Variant(slots=reweighed(leads_share_what_the_probe_leaves)), "0.25"),
    Mutant("fills ranked before the probe", "A2", Variant(slots=probe_in_the_last_slot), "0.19"),
    Mutant("second probe ranked above the first", "A2", replace(TWO, slots=two_probes(second_first=True)), "0.56"),
    Mutant("weight that depends on a worse-ranked beam mate", "A2", Variant(slots=reweighed(worse_ranked_mate)),
           "0.14", THREE_LEVELS),
    Mutant("weights above 1", "A1", Variant(slots=reweighed(above_one), keep=with_ancestors), "0.18", TURNING),
    Mutant("stopping before an odd probe", "no stopping time", Variant(keep=stop_before_an_odd_probe), "0.26"),
    Mutant("half the budget when the finished tree is shallow", "no stopping time",
           Variant(keep=half_if_shallow), "0.17"),
    Mutant("unlikely probes pruned", "A2", Variant(keep=drop_unlikely_probes)),
    Mutant("fill equal to the probe, children found by token", "A3",
           Variant(slots=fills_that_may_repeat_the_probe, step=children_by_token)),
    Mutant("verified with q instead of q~", "A4", Variant(verified_with=construction_law), "0.59"),
    Mutant("verified with q_T, leads not removed", "A4", Variant(verified_with=sampling_law_with_leads)),
    Mutant("verified with the proxy", "A4", Variant(verified_with=proxy_for_probability)),
    Mutant("probe drawn at temperature 1, verified at T", "A4", Variant(draws=draw_at_temperature_one)),
    Mutant("residual from p instead of max(0, p - q~)", "lemma 4", Variant(residual=target_itself)),
    Mutant("residual max(0, p - q) of the construction law", "A4", Variant(residual=residual_of_the_construction_law)),
    Mutant("residual not normalised", "lemma 4", Variant(residual=residual_not_normalised)),
    Mutant("probe's uniform used again to accept it", "A5", Variant(accept=probes_own_uniform)),
    Mutant("accept u q~ <= p, u on the grid of 2^-24", "lemma 4", Variant(accept=at_most_on_the_grid), cases=CERTAIN),
    Mutant("fills drawn for before the probe is tested", "A6", Variant(before_probe=fills_first)),
    Mutant("rrsw in slot order, probe ranked above a lead", "A6",
           replace(UNCAPPED, before_probe=leads_in_slot_order), "0.25"),
    Mutant("rrsw tests the probe against p, leads not taken out", "lemma 4", replace(RRSW, without=leads_stay)),
    Mutant("rrsw takes the leads out and does not normalise", "lemma 4", replace(RRSW, without=leads_leave_a_gap)),
    Mutant("bonus token at a leaf drawn from the draft", "lemma 4", Variant(last_draw=bonus_from_the_draft)),
    Mutant("children verified by the parent's row of the target", "lemma 4", Variant(target_row=row_of_the_parent)),
    Mutant("top-K children accepted with p/q as if sampled", "A4", Variant(step=top_k_as_if_sampled), proposal="topk"),
]  # fmt: skip

TWINS = [
    Mutant("the algorithm, rheo", "Theorem 1", RHEO, tailored=THREE_LEVELS),
    Mutant("the algorithm, rrsw", "Theorem 1", RRSW, tailored=THREE_LEVELS),
    Mutant("the algorithm without probes", "Theorem 1", RHEO, proposal="topk"),
    Mutant("the algorithm, u on the grid of 2^-24", "p / q~ is 0 or at least 1, so the grid is fine enough",
           Variant(accept=below_on_the_grid), cases=CERTAIN),
    Mutant("uncapped proxy, above the leads, rheo", "known before the probe's token", UNCAPPED),
    Mutant("uncapped proxy, above the leads, rrsw in order of entry", "verified in the total order",
           replace(UNCAPPED, before_probe=entered_before_the_probe)),
    Mutant("two probes in drawing order", "the second is drawn and verified after the first", TWO),
    Mutant("stopping after an odd probe", "a stopping time", Variant(keep=stop_after_an_odd_probe)),
    Mutant("threshold tree", "a stopping time", Variant(keep=score_threshold)),
    Mutant("fills discounted by half", "known before the fills", Variant(slots=reweighed(discounted_fills))),
    Mutant("weight that depends on a better-ranked beam mate", "revealed before the weight is needed",
           Variant(slots=reweighed(better_ranked_mate)), tailored=THREE_LEVELS),
]  # fmt: skip


# --- Mutants of the noise: the real batched code, tampered with ------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NoiseMutant:
    """The batched path with its randomness misused; told from the law by frequencies, as ``test_chi_square`` does."""

    name: str
    with_noise: Callable[[StepNoise], StepNoise] = lambda noise: noise
    step_counter: Callable[[int], int] = lambda step: step


NOISE_MUTANTS = [
    NoiseMutant("step counter that never advances", step_counter=lambda step: 1),
    NoiseMutant("accept and residual uniforms share their bits",
                lambda noise: replace(noise, residual_uniforms=noise.accept_uniforms)),
    NoiseMutant("one accept uniform for the whole walk",
                lambda noise: replace(noise, accept_uniforms=_first_everywhere(noise.accept_uniforms))),
    NoiseMutant("one probe uniform for the whole tree",
                lambda noise: replace(noise, probe_uniforms=_first_everywhere(noise.probe_uniforms))),
]  # fmt: skip
SOUND_NOISE = NoiseMutant("the noise as it is")
NOISE_DRAWS = 40_000
NOISE_CONFIG = RheoConfig(lead_tokens=0, branching=3, depth=3, tree_size=3, beam=1)


def _first_everywhere(uniforms: Tensor) -> Tensor:
    first = uniforms.flatten(1)[:, 0]
    return first.view(-1, *[1] * (uniforms.ndim - 1)).expand_as(uniforms).contiguous()


@cache
def noise_comparison(mutant: NoiseMutant) -> Comparison:
    """Blocks of three tokens under this noise, compared with the target's law."""
    target = 1.5 * torch.randn((8, 8), generator=torch.Generator().manual_seed(7))
    draft = torch.tensor([2.0, 6.0, 0.1, 4.0, *[0.1] * 4]).log()  # after every token; the best is not the lowest id
    model = MarkovModel(target, draft.repeat(8, 1))
    params = SamplingParams(temperature=0.8)
    blocks = sample_blocks(
        model,
        NOISE_CONFIG,
        [params],
        range(NOISE_DRAWS),
        with_noise=mutant.with_noise,
        step_counter=mutant.step_counter,
    )
    return compare(block_counts(blocks, model.vocab_size), block_law(model, params), alpha=SUITE_ALPHA)


def mutants_table() -> str:
    """The mutants and their twins as Markdown: the largest total variation found, and where."""
    lines = [
        "Found by exact enumeration. *Known* is the bias of another case, found before these tests were written; m, K, "
        "depth, R and beam are the settings of the worst case.",
        "",
        "| mutant | breaks | total variation | known | worst case | m, K, depth, R, beam |",
        "|---|---|---|---|---|---|",
    ]
    for mutant in MUTANTS:
        found = worst_case(mutant)
        shape = found.config
        numbers = (shape.lead_tokens, shape.branching, shape.depth, shape.tree_size, shape.beam_width)
        lines.append(
            f"| {mutant.name} | {mutant.breaks} | {_readable(found.tv)} | {mutant.known} | {found.case} | "
            f"{', '.join(map(str, numbers))} |"
        )
    lines += [
        "",
        f"Found by frequencies: the batched code with misused randomness (A5), {NOISE_DRAWS:,} blocks of three tokens.",
        "",
        "| mutant | p-value |",
        "|---|---|",
    ]
    for tampered in [*NOISE_MUTANTS, SOUND_NOISE]:
        p_value = noise_comparison(tampered).p_value
        lines.append(f"| {tampered.name} | {f'{p_value:.2g}' if p_value else 'below 1e-300'} |")
    lines += [
        "",
        "Twins: just as suspicious, and lossless. They show that the enumeration does not simply reject every change.",
        "",
        "| twin | total variation | why it is lossless |",
        "|---|---|---|",
    ]
    lines += [f"| {twin.name} | {_readable(worst_case(twin).tv)} | {twin.breaks} |" for twin in TWINS]
    return "\n".join(lines) + "\n"


def _readable(tv: Fraction) -> str:
    if tv == 0:
        return "exactly 0"
    return f"{float(tv):.3f}" if tv > Fraction(1, 1000) else f"{float(tv):.2g}"


if __name__ == "__main__":
    print(mutants_table(), end="")

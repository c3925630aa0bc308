"""The algorithm cut into small pieces, and the exact law of the output for any choice of them.

A ``Variant`` is a choice of pieces: how probes are drawn, slots laid out, nodes ordered and kept, how a walk goes on.
With the right ones it is the algorithm itself (``RHEO``, ``RRSW``); ``proofs_tests.wrong_pieces`` has others. The law
is summed in Fractions over every probe of every expanded node and every walk. The pieces work on trees of ``Node``s,
not on ``DraftTree``, which refuses some of what mutants grow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

from optimized.evidence.cases import Case
from reference.api import DraftLaw, RheoConfig
from reference.exact import target_law, total_variation
from reference.slots import SlotPlan, plan_slots

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


def draw_one_probe(plan: SlotPlan, draft: DraftLaw) -> dict[tuple[int, ...], Fraction]:
    """The law of the probe; without one the empty draw is certain."""
    if plan.probe_law is None:
        return {(): ONE}
    return {(token,): q for token, q in zip(*plan.probe_law, strict=True) if q > 0}


def draw_probes(plan: SlotPlan, draft: DraftLaw) -> dict[tuple[int, ...], Fraction]:
    """The law of all probes, in drawing order: without replacement."""
    drawn: dict[tuple[int, ...], Fraction] = {(): ONE}
    tail = draw_one_probe(plan, draft)
    for _ in range(plan.num_probes):
        drawn = {
            (*tokens, token): chance * q / sum(tail[other,] for (other,) in tail if other not in tokens)
            for tokens, chance in drawn.items()
            for (token,), q in tail.items()
            if token not in tokens
        }
    return drawn


def leads_probe_fills(offer: Offer) -> list[Slot]:
    """The specification's slots."""
    slots = offer.plan.slots(offer.probes)
    return [Slot(s.token_id, s.weight, offer.probes.index(s.token_id) if s.is_probe else None) for s in slots]


def total_order(node: Node) -> tuple[Any, ...]:
    """Score, level, the parent's rank, slot."""
    return (-node.score, node.level, node.offer.rank, node.slot)


def best(ranking: Sequence[Node], most: int) -> Sequence[Node]:
    """The budget, of all nodes, or the beam, of a level's."""
    return ranking[:most]


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


def residual_so_far(p: Law, stand: Stand) -> Law:
    """The law that a probe is tested against: p, or the residual that the probes before it left."""
    return p


def without_the_drawn(q: Law, token: int) -> Law:
    """The law of the next probe: without replacement."""
    return normalised({other: mass for other, mass in q.items() if other != token})


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
        against = variant.tested_against(p, stand)
        accepted = variant.accept(against.get(probe.token, Fraction(0)), q.get(probe.token, Fraction(0)), below)
        yield probe.token, probe, reached * accepted
        left.remove(probe)
        reached *= 1 - accepted
        p = variant.residual(p, q, stand)
        q = variant.law_left(q, probe.token)
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

    draws: Callable[[SlotPlan, DraftLaw], dict[tuple[int, ...], Fraction]] = draw_probes
    slots: Callable[[Offer], list[Slot]] = leads_probe_fills
    order: Callable[[Node], tuple[Any, ...]] = total_order
    keep: Callable[[Sequence[Node], int], Sequence[Node]] = best
    expand: Callable[[Sequence[Node], int], Sequence[Node]] = best
    target_row: Callable[[Path], Path] = target_of_the_node
    step: Callable[[Variant, Stand], Step] = probe_then_draw
    before_probe: Callable[[Stand], Sequence[Node]] = none_first
    without: Callable[[Law, Sequence[int]], Law] = without_tokens
    verified_with: Callable[[Stand], Law] = same_law
    accept: Callable[[Fraction, Fraction, Fraction], Fraction] = accept
    residual: Callable[[Law, Law, Stand], Law] = positive_part
    tested_against: Callable[[Law, Stand], Law] = residual_so_far
    law_left: Callable[[Law, int], Law] = without_the_drawn
    last_draw: Callable[[Stand, Law], Law] = draw_from_what_is_left


RHEO = Variant()
RRSW = Variant(before_probe=entered_before_the_probe)


def normalised(weights: Mapping[int, Fraction]) -> Law:
    """The positive weights as a law; empty when there are none."""
    positive = {token: weight for token, weight in weights.items() if weight > 0}
    total = sum(positive.values())
    return {token: weight / total for token, weight in positive.items()}


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
            beam_below = variant.expand(sorted(here, key=variant.order), config.beam_width)
            yield from grow(level + 1, list(beam_below), offered + here, weight)

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

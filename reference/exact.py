"""The proof, executable: every tree, every walk and every output with its probability (docs/theory.md).

Exact when the laws are Fractions, float64 otherwise. The growth below is a second one, written as the proof thinks of
it: *best first*. Places (parent, slot) wait in a queue in the total order; a probe's token is revealed only when its
place comes up, and the next probe's place, or the fills, join the queue then. Probes that never come up are never
enumerated: they integrate to one (lemma 3), which is what makes the enumeration of equivalence classes small enough to
run.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

import numpy as np

from reference.api import RheoConfig, Verification, VerifyResult
from reference.growth import Draft, OfferedNode, build_tree
from reference.numbers import Number, Vector, check_law
from reference.slots import SlotPlan, plan_slots
from reference.tree import DraftTree, ProbeLaw, law_without
from reference.verification import check_rule, check_target, residual, without_tokens

Path = tuple[int, ...]
Target = Callable[[Path], Sequence[Number] | Vector]  # path, the tokens below the root -> [vocab_size] law after it
OutputLaw = dict[Path, Number]  # token sequence -> probability; impossible sequences are left out


@dataclass(frozen=True, order=True)
class Place:
    """A place waiting in the queue; places compare by the one strict total order, best first.

    Attributes:
        negated_score: minus the path score that a node here will have.
        level: 1 for the root's children.
        parent_rank: the parent's rank in its beam.
        slot: place among the parent's slots in schedule order.
        parent: the node above; None for the root.
        token_id: the token offered here; None for a probe, whose token is revealed when its place comes up.
        drawn: for a probe, the tokens of the same node's earlier probes.
    """

    negated_score: Number
    level: int
    parent_rank: int
    slot: int
    parent: OfferedNode | None = field(compare=False)
    token_id: int | None = field(compare=False)
    drawn: Path = field(compare=False, default=())

    @property
    def parent_path(self) -> Path:
        """Tokens below the root down to the parent; empty when the parent is the root."""
        return self.parent.path if self.parent else ()


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """T_r, the first r nodes of the final tree in the total order, and what follows them.

    Attributes:
        nodes: N_1, ..., N_r.
        waiting: a heap of places; the first is N_{r+1}'s. Empty when the tree is complete.
        probability: of T_r; the product of q~ over the probes in it (lemma 3).
        probe_laws: the law of each of these nodes' first probe, by the parent's path.
    """

    nodes: tuple[OfferedNode, ...]
    waiting: tuple[Place, ...]
    probability: Number
    probe_laws: Mapping[Path, ProbeLaw]

    @property
    def next_place(self) -> Place | None:
        """Where N_{r+1} stands, a function of T_r (lemma 2); None when the tree is complete."""
        return self.waiting[0] if self.waiting else None

    def tree(self) -> DraftTree:
        """T_r as a draft tree: exactly the tree that a budget of r gives."""
        return build_tree(list(self.nodes), dict(self.probe_laws))


class _BestFirst:
    def __init__(self, config: RheoConfig, draft: Draft) -> None:
        self.config = config
        self._plan_at = cache(lambda path, slots, score: plan_slots(config, draft(path), slots, score=score))
        shape = config.shape
        self._inner = {inner: rank for level in shape.inner for rank, inner in enumerate(level)} if shape else {}

    def plan(self, node: OfferedNode | None) -> SlotPlan:
        """The slots of a node; None is the root."""
        path, score = (node.path, node.score) if node else ((), 1)
        shape, slots = self.config.shape, None
        if shape is not None:
            slots = shape.children[len(path)][self._inner[node.slot_path if node else ()]]
        return self._plan_at(path, slots, score)

    def start(self) -> PrefixTree:
        weight = self.plan(None).weights[0]
        one = weight / weight  # in the arithmetic of the draft's laws
        return PrefixTree((), tuple(sorted(self._offer(None, 0))), one, {})

    def extend(self, prefix: PrefixTree) -> Iterator[PrefixTree]:
        """One T_{r+1} for each token that the next place may hold."""
        rest = list(prefix.waiting)
        place = heapq.heappop(rest)
        full = len(prefix.nodes) + 1 == self.config.budget
        for token_id, probability in self._reveal(place):
            is_probe = place.token_id is None
            node = OfferedNode(
                path=(*place.parent_path, token_id),
                parent=place.parent,
                level=place.level,
                parent_rank=place.parent_rank,
                slot=place.slot,
                is_probe=is_probe,
                score=-place.negated_score,
            )
            probe_laws = prefix.probe_laws
            rank = self._rank(prefix, node)
            joining = [] if rank is None else self._offer(node, rank)
            if is_probe:
                joining += self._behind(place, token_id)
                probe_laws = {**probe_laws, place.parent_path: self._probe_law(place)}
            waiting = list(rest)
            for joined in joining:
                heapq.heappush(waiting, joined)
            yield PrefixTree(
                nodes=(*prefix.nodes, node),
                waiting=() if full else tuple(waiting),
                probability=prefix.probability * probability,
                probe_laws=probe_laws,
            )

    def _rank(self, prefix: PrefixTree, node: OfferedNode) -> int | None:
        """The node's rank in the beam of its level; None when it is not expanded."""
        if self.config.topology is not None:
            return self._inner.get(node.slot_path)
        better = [other for other in prefix.nodes if other.level == node.level]
        best = better[0] if better else node
        pays = best.score >= self.config.level_threshold
        rank = len(better)
        return rank if pays and rank < self.config.beam_width and node.level < self.config.depth else None

    def _reveal(self, place: Place) -> list[tuple[int, Number]]:
        if place.token_id is not None:
            return [(place.token_id, 1)]
        token_ids, weights = self.plan(place.parent).law_after(place.drawn)
        total = weights.sum() if place.drawn else 1
        return [(token, weight / total) for token, weight in zip(token_ids, weights, strict=True) if weight > 0]

    def _probe_law(self, place: Place) -> ProbeLaw:
        law = self.plan(place.parent).probe_law
        assert law is not None, "only a node with a probe has a place without a token"
        return law

    def _offer(self, node: OfferedNode | None, rank: int) -> list[Place]:
        """The places that expanding ``node`` adds: its leads and its first probe; the others wait for its token."""
        plan = self.plan(node)
        level, score = (node.level + 1, node.score) if node else (1, 1)
        places = [
            Place(-score * plan.weights[slot], level, rank, slot, node, plan.tokens[slot])
            for slot in range(plan.lead_tokens)
        ]
        if plan.proxy is not None:
            places.append(Place(-score * plan.proxy, level, rank, plan.lead_tokens, node, None))
        return self._worthy(places)

    def _worthy(self, places: list[Place]) -> list[Place]:
        return [place for place in places if -place.negated_score >= self.config.score_threshold]

    def _behind(self, probe: Place, token_id: int) -> list[Place]:
        """The places that a probe's token adds: the next probe's, or behind the last probe the fills'."""
        plan, drawn = self.plan(probe.parent), (*probe.drawn, token_id)
        score = probe.parent.score if probe.parent else 1

        def place(weight: Number, slot: int, token: int | None, drawn: Path = ()) -> Place:
            return Place(-score * weight, probe.level, probe.parent_rank, slot, probe.parent, token, drawn)

        if len(drawn) < plan.num_probes:
            return self._worthy([place(plan.probe_weight(drawn), probe.slot + 1, None, drawn)])
        slots = plan.slots(drawn)
        fills = [place(slots[slot].weight, slot, slots[slot].token_id) for slot in range(probe.slot + 1, len(slots))]
        return self._worthy(fills)


def prefix_trees(config: RheoConfig, draft: Draft) -> Iterator[PrefixTree]:
    """Every T_r that can occur, r = 0 .. ``budget``, depth first: a prefix comes before those that extend it.

    Args:
        config: the tree's shape.
        draft: path below the root -> the draft's law there; called once per path.
    """
    growth = _BestFirst(config, draft)
    pending = [growth.start()]
    while pending:
        prefix = pending.pop()
        yield prefix
        if prefix.waiting:
            pending.extend(reversed(list(growth.extend(prefix))))


def tree_classes(config: RheoConfig, draft: Draft) -> Iterator[tuple[DraftTree, Number]]:
    """Enumerate the equivalence classes of final trees, lazily (docs/theory.md, "Equivalence classes").

    Args:
        config: the tree's shape.
        draft: path below the root -> the draft's law there; called once per path.

    Yields:
        Each class's tree and its probability, which is positive; the keys (``DraftTree.key``) are distinct.
    """
    for prefix in prefix_trees(config, draft):
        if not prefix.waiting:
            yield prefix.tree(), prefix.probability


def walk_law(tree: DraftTree, target: Target, rule: Verification = "rheo") -> Iterator[tuple[VerifyResult, Number]]:
    """Every result of the verification walk that has positive probability, lazily.

    Args:
        tree: the draft tree.
        target: path below the root -> [vocab_size] target law after it; asked for every row's path.
        rule: "rheo" or "rrsw".

    Raises:
        ValueError: as ``reference.verify``; raised by this call, not by the iteration.
    """
    check_rule(rule)
    laws = check_target(tree, [target(tree.path(row)) for row in range(len(tree))])

    def walk(row: int, emitted: Path, accepted: Path, reached: Number) -> Iterator[tuple[VerifyResult, Number]]:
        entered, mass, last = step_law(tree, row, laws[row], rule)
        for child, probability in entered.items():
            if probability > 0:
                yield from walk(child, (*emitted, tree.token_ids[child]), (*accepted, child), reached * probability)
        if not mass > 0:
            return
        matched = {tree.token_ids[child]: child for child in tree.children(row) if child not in entered}
        for token in np.flatnonzero(last > 0).tolist():
            probability = reached * mass * last[token]
            if token in matched:
                yield from walk(matched[token], (*emitted, token), (*accepted, matched[token]), probability)
            else:
                yield VerifyResult((*emitted, token), accepted), probability

    return walk(0, (), (), 1)


def step_law(
    tree: DraftTree, row: int, law: Vector, rule: Verification, children: Collection[int] | None = None
) -> tuple[dict[int, Number], Number, Vector]:
    """One node of the walk.

    Args:
        tree: the draft tree.
        row: the node.
        law: the target's there.
        rule: "rheo" or "rrsw".
        children: those that count, as if the tree had no others; None for all.

    Returns:
        The children that are entered before the last draw with their probabilities, the probability that it comes to
        the last draw, and the law of that draw, which may still match one of the other children.
    """
    present = [child for child in tree.children(row) if children is None or child in children]
    probes = [child for child in present if tree.is_probe[child]]
    entered: dict[int, Number] = {}
    mass: Number = 1
    if rule == "rrsw":
        leads = [child for child in present if not probes or child < probes[0]]
        if leads:
            tokens = [tree.token_ids[lead] for lead in leads]
            entered = dict(zip(leads, law[tokens], strict=True))
            mass = max(1 - law[tokens].sum(), 0)
            law = without_tokens(law, tokens)
    probe_law = tree.probe_laws.get(row, ((), law))
    for probe in probes:
        token = tree.token_ids[probe]
        q_probe = probe_law[1][probe_law[0].index(token)]
        acceptance = min(law[token] / q_probe, 1)
        entered[probe] = mass * acceptance
        mass = mass * (1 - acceptance)
        law, probe_law = residual(law, probe_law) if mass > 0 else law, law_without(probe_law, token)
    return entered, mass, law


def output_law(config: RheoConfig, draft: Draft, target: Target, horizon: int) -> OutputLaw:
    """The law of the first ``horizon`` tokens: one tree, one walk, then free sampling from the target.

    Args:
        config: the tree's shape and, in ``verification``, the rule of the walk.
        draft: path below the root -> the draft's law there.
        target: path below the root -> [vocab_size] target law after it.
        horizon: how many tokens; at least 1. The walk's further tokens are cut off.

    Raises:
        ValueError: horizon below 1, or a target that is no law (the path is named), or one of another length.
    """
    _check_horizon(horizon)
    law_of = _checked(target)
    emitted: defaultdict[Path, Number] = defaultdict(int)
    for tree, tree_probability in tree_classes(config, draft):
        for result, probability in walk_law(tree, law_of, config.verification):
            emitted[result.token_ids[:horizon]] += tree_probability * probability
    return _sampled_on(emitted, law_of, horizon)


def tree_output_law(tree: DraftTree, target: Target, horizon: int, rule: Verification = "rheo") -> OutputLaw:
    """``output_law`` given the tree: P(output starts with Seq | tree), M_r of docs/theory.md when the tree is T_r."""
    _check_horizon(horizon)
    law_of = _checked(target)
    emitted: defaultdict[Path, Number] = defaultdict(int)
    for result, probability in walk_law(tree, law_of, rule):
        emitted[result.token_ids[:horizon]] += probability
    return _sampled_on(emitted, law_of, horizon)


def target_law(target: Target, horizon: int) -> OutputLaw:
    """The law of ``horizon`` tokens sampled from the target alone: what every output law must equal.

    Raises:
        ValueError: as ``output_law``.
    """
    _check_horizon(horizon)
    return _sampled_on({(): 1}, _checked(target), horizon)


def _sampled_on(emitted: Mapping[Path, Number], law_of: Callable[[Path], Vector], horizon: int) -> OutputLaw:
    """Continue each emitted prefix by free sampling until it has ``horizon`` tokens."""
    by_length: list[defaultdict[Path, Number]] = [defaultdict(int) for _ in range(horizon + 1)]
    for path, probability in emitted.items():
        by_length[len(path)][path] += probability
    for length in range(horizon):
        for path, probability in by_length[length].items():
            law = law_of(path)
            for token in np.flatnonzero(law > 0).tolist():
                by_length[length + 1][*path, token] += probability * law[token]
    return dict(by_length[horizon])


def total_variation(law: Mapping[Path, Number], other: Mapping[Path, Number]) -> Number:
    """Half the sum of |law - other| over all sequences; a missing sequence has probability 0."""
    distance: Number = Fraction(0)
    for sequence in law.keys() | other.keys():
        difference = law.get(sequence, 0) - other.get(sequence, 0)
        distance += max(difference, -difference)
    return distance / 2


def _checked(target: Target) -> Callable[[Path], Vector]:
    """``target`` with its laws checked and remembered."""

    @cache
    def law_of(path: Path) -> Vector:
        law = check_law(target(path), f"target({path})")
        if path and law.size != law_of(()).size:
            raise ValueError(f"target({path}) has {law.size} entries, target(()) has {law_of(()).size}")
        return law

    return law_of


def _check_horizon(horizon: int) -> None:
    if isinstance(horizon, bool) or not isinstance(horizon, int | np.integer) or horizon < 1:
        raise ValueError(f"horizon must be an integer >= 1, got {horizon!r}")

"""The steps of the proof, each by exact enumeration: lemmas 1 to 4 and the martingale (docs/theory.md).

N_1, N_2, ... are the final tree's nodes in the total order and T_r the first r of them. Lemmas 1 to 3 are checked on
``grow_with_probes``: the tree of budget r under fixed probes is T_r. They do not use the best-first enumeration, which
relies on them.
"""

from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise, permutations

import pytest
from hypothesis import given

from optimized.evidence.cases import HARD_CASES_BY_NAME, Case
from proofs_tests.brute_force import grow_replayed, outcomes
from proofs_tests.laws import cases, configs, exact_settings, rheo_configs, sizes, static_configs
from reference.api import RheoConfig
from reference.exact import prefix_trees, target_law, tree_output_law
from reference.slots import plan_slots
from reference.tree import DraftTree
from reference.weights import BANDS, KNOTS, Curve, Curves, Weights

RULES = ("rheo", "rrsw")
Node = tuple[tuple[int, ...], int, bool]  # path, slot, probe flag: a node whatever its row


def nodes(tree: DraftTree) -> frozenset[Node]:
    return frozenset((tree.path(row), tree.slots[row], tree.is_probe[row]) for row in range(1, len(tree)))


@cache
def growths(case: Case, config: RheoConfig) -> list[tuple[Fraction, list[DraftTree]]]:
    """For every outcome of all probes: its probability and T_1, T_2, ..., up to the budget."""
    return [
        (
            outcome.probability,
            [
                grow_replayed(replace(config, tree_size=size), case.draft(), outcome.choices)
                for size in range(1, len(outcome.tree))
            ],
        )
        for outcome in outcomes(config, case.draft())
    ]


def lemma_configs(tree_size: int) -> list[RheoConfig]:
    return [
        *configs([2], [2], beams=(2,), tree_size=tree_size),
        RheoConfig(lead_tokens=1, branching=3, depth=2, tree_size=tree_size, beam=1),
        RheoConfig(lead_tokens=1, branching=2, depth=3, tree_size=tree_size),
        RheoConfig(lead_tokens=1, branching=4, depth=1, tree_size=tree_size, probes=2),
        RheoConfig(lead_tokens=0, branching=2, depth=2, tree_size=tree_size, beam=1, probes=2),
        RheoConfig(lead_tokens=1, branching=3, depth=2, tree_size=tree_size, beam=1, weights=PROBES_FIRST),
        RheoConfig(lead_tokens=2, branching=3, depth=2, tree_size=tree_size, beam=1, weights=PROBES_FIRST),
    ]


def flat(chance: Fraction) -> Curve:
    return Curve((chance,) * len(KNOTS))


# Probes before leads, which stand behind the fills of other nodes: the paper's weights never do that.
PROBES_FIRST = Weights((Curves(flat(Fraction(1, 4)), flat(Fraction(3, 4)), flat(Fraction(1, 2))),) * len(BANDS), "test")


every_hard_case = pytest.mark.parametrize("name", HARD_CASES_BY_NAME)


@every_hard_case
def test_lemma_1_order(name):
    """T_r is closed under parents, and a probe precedes the next and its fills; the paper's leads come before."""
    case = HARD_CASES_BY_NAME[name]
    for config in lemma_configs(5):
        for _, prefixes in growths(case, config):
            for before, after in pairwise([frozenset(), *map(nodes, prefixes)]):
                ((path, slot, _),) = after - before
                assert before < after
                assert len(path) == 1 or any(path[:-1] == other for other, _, _ in before)
                siblings = {other_slot for other, other_slot, _ in before if other[:-1] == path[:-1]}
                in_order = 0 if config.weights is None else config.lead_tokens
                earlier = {other_slot for other_slot in siblings if other_slot >= in_order}
                assert slot < in_order or earlier == set(range(in_order, slot)), (
                    "a later slot came before an earlier one"
                )


@sizes(200, 5000)
def test_lemma_1_order_of_one_node(size):
    """q(x_m) >= proxy >= q(x_{m+1}): weights never increase along the schedule, whatever the probe's token."""

    @given(case=cases(max_vocab=6), config=rheo_configs(max_branching=5))
    @exact_settings(size)
    def check(case, config):
        law = case.draft()(())
        plan = plan_slots(config, law)
        possible = [] if plan.probe_law is None else [token for token, q in zip(*plan.probe_law, strict=True) if q > 0]
        draws = list(permutations(possible, plan.num_probes))
        for probes in draws:
            slots = plan.slots(probes)
            assert all(high.weight >= low.weight for high, low in pairwise(slots))
            assert all(0 < slot.weight <= 1 for slot in slots)
            assert len({slot.token_id for slot in slots}) == len(slots) == plan.num_slots
            assert [slot.token_id for slot in slots if slot.is_probe] == list(probes)
            assert [slot.is_probe for slot in slots[plan.lead_tokens :]] == sorted(
                (slot.is_probe for slot in slots[plan.lead_tokens :]), reverse=True
            )
        for count in range(plan.num_probes + 1):  # what earlier tokens make of the weights, whatever the next one is
            known = plan.lead_tokens + count + (count < plan.num_probes)
            weights = {(probes[:count], tuple(slot.weight for slot in plan.slots(probes))[:known]) for probes in draws}
            assert len(weights) == len({probes[:count] for probes in draws})

    check()


@every_hard_case
def test_lemma_2_predictability(name):
    """The place (parent, slot, whether it is a probe's) of N_{r+1}, or that there is none, is a function of T_r."""
    case = HARD_CASES_BY_NAME[name]
    for config in lemma_configs(5):
        next_places = defaultdict(set)
        for _, prefixes in growths(case, config):
            steps = [frozenset(), *map(nodes, prefixes)]
            for before, after in pairwise(steps):
                ((path, slot, is_probe),) = after - before
                next_places[before].add((path[:-1], slot, is_probe))
            if len(steps) <= config.tree_size:
                next_places[steps[-1]].add(None)
        assert all(len(places) == 1 for places in next_places.values())


@every_hard_case
def test_lemma_3_cylinder(name):
    """P(T_r = t) is the product of q~ over the probes in t, and the next probe is a fresh draw from q~."""
    case = HARD_CASES_BY_NAME[name]
    for config in lemma_configs(5):
        reached: Counter[frozenset[Node]] = Counter()
        step: Counter[tuple[frozenset[Node], Node]] = Counter()
        trees: dict[frozenset[Node], DraftTree] = {}
        for probability, prefixes in growths(case, config):
            found = frozenset()
            for tree in prefixes:
                before, found = found, nodes(tree)
                reached[found] += probability
                trees[found] = tree
                (joined,) = found - before
                step[before, joined] += probability
        for found, probability in reached.items():
            product = Fraction(1)
            for node in found:
                if node[2]:
                    product *= drawn_from(case, config, node[0], earlier_probes(found, node))
            assert probability == product
        reached[frozenset()] = Fraction(1)
        for (before, node), probability in step.items():
            expected = drawn_from(case, config, node[0], earlier_probes(before, node)) if node[2] else 1
            assert probability / reached[before] == expected


def earlier_probes(found: frozenset[Node], node: Node) -> frozenset[int]:
    """Tokens of the probes of the same parent that stand before the node."""
    path, slot, _ = node
    return frozenset(other[-1] for other, at, is_probe in found if is_probe and other[:-1] == path[:-1] and at < slot)


def drawn_from(
    case: Case, config: RheoConfig, path: tuple[int, ...], earlier: frozenset[int] = frozenset()
) -> Fraction:
    """q~ of a probe's token, from the definition: q_T without the leads and the earlier probes, renormalised."""
    q = case.construction(path[:-1])
    q_t = case.sampling(path[:-1], q)
    assert q_t is not None
    leads = sorted(range(len(q)), key=lambda token: (-q[token], token))[: config.lead_tokens]
    return q_t[path[-1]] / sum(mass for token, mass in enumerate(q_t) if token not in leads and token not in earlier)


@pytest.mark.lossless
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("branching", "depth", "tree_size"),
    [
        (2, 2, 5),
        (3, 2, 4),
        pytest.param(2, 3, 8, marks=pytest.mark.deep),
        pytest.param(3, 2, 9, marks=pytest.mark.deep),
        pytest.param(4, 2, 6, marks=pytest.mark.deep),
    ],
)
@every_hard_case
def test_lemma_4_one_step(name, branching, depth, tree_size, rule):
    """Lemma 4: E[P(output starts with Seq | T_{r+1}) | T_r] = P(output starts with Seq | T_r), for every Seq."""
    case = HARD_CASES_BY_NAME[name]
    for config in configs([branching], [depth], beams=(2,), tree_size=tree_size):
        assert_martingale(case, config, rule)


@pytest.mark.lossless
@sizes(40, 2000)
def test_lemma_4_one_step_on_drawn_laws(size):
    @given(case=cases(), config=rheo_configs(max_size=5) | static_configs(max_nodes=4))
    @exact_settings(size)
    def check(case, config):
        assert_martingale(case, config, config.verification)

    check()


def assert_martingale(case: Case, config: RheoConfig, rule: str) -> None:
    horizons = range(1, config.depth + 2)
    pending = {}  # T_r by its nodes: M_r, and what the T_{r+1} found so far contribute to E[M_{r+1} | T_r]
    for prefix in prefix_trees(config, case.draft()):
        tree = prefix.tree()
        values = {horizon: tree_output_law(tree, case.target, horizon, rule) for horizon in horizons}
        if prefix.nodes:
            parent = pending[prefix.nodes[:-1]]
            share = prefix.probability / parent.probability
            parent.revealed += share
            for horizon in horizons:
                for sequence, probability in values[horizon].items():
                    parent.expected[horizon][sequence] += share * probability
        else:
            assert values == {horizon: target_law(case.target, horizon) for horizon in horizons}, "M_0 is not p(Seq)"
        pending[prefix.nodes] = Pending(prefix.probability, values, prefix.next_place is None, horizons)
    for found in pending.values():
        assert found.complete or found.revealed == 1
        if not found.complete:
            assert {horizon: dict(law) for horizon, law in found.expected.items()} == found.values


class Pending:
    """M_r at one T_r, and the mean of M_{r+1} over its successors, summed up as they come."""

    def __init__(self, probability, values, complete, horizons):
        self.probability = probability
        self.values = values
        self.complete = complete
        self.revealed = Fraction(0)
        self.expected = {horizon: Counter() for horizon in horizons}


@pytest.mark.lossless
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "name", ["opposite rankings", "zeros in both", "cold sampling law", "draft turns with the path"]
)
def test_martingale_stops_anywhere_it_may(name, rule):
    """E[M_tau] = p(Seq) for a stopping time that looks at the probes: stop after an odd probe or at four nodes."""
    case = HARD_CASES_BY_NAME[name]
    for lead_tokens in (0, 1):
        config = RheoConfig(lead_tokens, branching=2, depth=2, tree_size=4)
        mixture: Counter[tuple[int, ...]] = Counter()
        stopped = set()
        for prefix in prefix_trees(config, case.draft()):
            if any(prefix.nodes[:size] in stopped for size in range(1, len(prefix.nodes))):
                continue
            if prefix.next_place is None or (
                prefix.nodes and prefix.nodes[-1].is_probe and prefix.nodes[-1].path[-1] % 2
            ):
                stopped.add(prefix.nodes)
                for sequence, probability in tree_output_law(prefix.tree(), case.target, 3, rule).items():
                    mixture[sequence] += prefix.probability * probability
        assert dict(mixture) == target_law(case.target, 3)


@every_hard_case
def test_prefix_trees_are_the_trees_of_smaller_budgets(name):
    """T_r is what a budget of r grows, with the same probability; so every budget stops the same martingale."""
    case = HARD_CASES_BY_NAME[name]
    config = RheoConfig(lead_tokens=1, branching=2, depth=2, tree_size=5)
    prefixes = list(prefix_trees(config, case.draft()))
    for size in range(1, config.tree_size + 1):
        stopped = {
            prefix.tree().key: prefix.probability
            for prefix in prefixes
            if len(prefix.nodes) == size or (prefix.next_place is None and len(prefix.nodes) < size)
        }
        grown: Counter[tuple] = Counter()
        for outcome in outcomes(replace(config, tree_size=size), case.draft()):
            grown[outcome.tree.key] += outcome.probability
        assert stopped == dict(grown)

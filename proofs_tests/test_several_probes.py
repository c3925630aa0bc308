"""Several probes per node and static trees, exactly: the law of the output is the target's, total variation 0.

The drawn laws of ``test_exact_law`` and ``test_martingale`` cover both as well; here are the hard cases, the naive
enumeration, the walk integrated over its uniforms, and what must agree with what.
"""

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from optimized.evidence.cases import HARD_CASES_BY_NAME, law
from proofs_tests.brute_force import cells_between, merged
from proofs_tests.laws import configs, random_case, sizes
from proofs_tests.test_exact_law import (
    RULES,
    assert_lossless,
    assert_same_classes,
    assert_walk_law,
    budgets,
)
from proofs_tests.test_martingale import assert_martingale
from reference.api import DraftLaw, GrowthNoise, RheoConfig
from reference.exact import (
    output_law,
    target_law,
    total_variation,
    tree_classes,
    tree_output_law,
)
from reference.growth import grow_tree
from reference.lengths import expected_acceptance_length
from reference.slots import plan_slots

every_hard_case = pytest.mark.parametrize("name", HARD_CASES_BY_NAME)
every_rule = pytest.mark.parametrize("rule", RULES)

CHAIN = ((0,), (0, 0), (0, 0, 0))
TOPOLOGIES = {
    "one node": ((0,),),
    "chain": CHAIN,
    "fan": ((0,), (1,), (2,)),
    "two levels": ((0,), (1,), (0, 0), (1, 0), (1, 1)),
    "second child inner only": ((0,), (1,), (2,), (1, 0), (1, 1), (1, 0, 0)),
}
LARGEST = "second child inner only"
every_topology = pytest.mark.parametrize(
    "topology", [pytest.param(name, marks=pytest.mark.deep) if name == LARGEST else name for name in TOPOLOGIES]
)


@pytest.mark.lossless
@every_rule
@every_hard_case
@pytest.mark.parametrize(
    ("branching", "depth", "beam", "at_most", "probes"),
    [
        pytest.param(2, 2, 2, 4, 2, id="K2"),
        pytest.param(3, 1, 1, 3, 2, id="K3"),
        pytest.param(4, 1, 1, 4, 3, id="K4"),
        pytest.param(2, 3, 2, 8, 2, marks=pytest.mark.deep, id="K2-deep"),
        pytest.param(3, 2, 2, 9, 2, marks=pytest.mark.deep, id="K3-deep"),
        pytest.param(3, 2, 1, 6, 3, marks=pytest.mark.deep, id="K3-all-deep"),
        pytest.param(4, 2, 1, 8, 2, marks=pytest.mark.deep, id="K4-deep"),
    ],
)
def test_output_law_of_several_probes_is_the_target_law(name, rule, branching, depth, beam, at_most, probes):
    case = HARD_CASES_BY_NAME[name]
    for config in configs([branching], [depth], beams=[beam]):
        several = replace(config, probes=probes)
        for tree_size in budgets(several, case, at_most):
            assert_lossless(case, replace(several, tree_size=tree_size, verification=rule), horizon=depth + 1)


@pytest.mark.lossless
@every_rule
@every_topology
@every_hard_case
def test_output_law_of_static_trees_is_the_target_law(name, topology, rule):
    config = RheoConfig.static(TOPOLOGIES[topology], verification=rule)
    assert_lossless(HARD_CASES_BY_NAME[name], config, horizon=config.depth + 1)


@pytest.mark.lossless
@sizes(60, 2500)
def test_output_law_is_the_target_law_when_every_path_has_its_own_laws(size):
    rng = random.Random(20260902)
    for index in range(size):
        rule = RULES[index % 2]
        if index % 3 == 0:
            config = RheoConfig.static(rng.choice(list(TOPOLOGIES.values())), verification=rule)
        else:
            config = RheoConfig(
                lead_tokens=rng.randrange(3),
                branching=rng.randrange(2, 5),
                depth=rng.randrange(1, 3),
                tree_size=rng.randrange(2, 8),
                beam=rng.randrange(1, 3),
                verification=rule,
                probes=rng.randrange(2, 4),
            )
        assert_lossless(random_case(rng, rng.choice((3, 4))), config, horizon=config.depth + 1)


@every_hard_case
def test_tree_classes_equal_brute_force(name):
    case = HARD_CASES_BY_NAME[name]
    assert_same_classes(case, RheoConfig(0, 3, 2, 4, beam=1, probes=2))
    assert_same_classes(case, RheoConfig(1, 4, 1, 4, beam=1, probes=2))
    for topology in ("chain", "two levels"):
        assert_same_classes(case, RheoConfig.static(TOPOLOGIES[topology]))


@pytest.mark.lossless
@every_rule
@pytest.mark.parametrize("name", ["opposite rankings", "zeros in both", "cold sampling law"])
@pytest.mark.parametrize("static", [False, True])
def test_output_law_equals_brute_force(name, rule, static):
    case = HARD_CASES_BY_NAME[name]
    config = RheoConfig(0, branching=3, depth=2, tree_size=4, beam=1, verification=rule, probes=2)
    if static:
        config = RheoConfig.static(TOPOLOGIES["two levels"], verification=rule)
    mixture = Counter()
    for found in merged(config, case.draft()).values():
        for sequence, probability in tree_output_law(found.tree, case.target, 3, rule).items():
            mixture[sequence] += found.probability * probability
    assert dict(mixture) == output_law(config, case.draft(), case.target, 3) == target_law(case.target, 3)


@pytest.mark.lossless
@every_rule
@every_hard_case
def test_verify_integrated_over_its_uniforms_gives_the_walk_law(name, rule):
    """One node, every decision: accept one of the probes, recovered, bonus, lead."""
    case = HARD_CASES_BY_NAME[name]
    for config in (
        RheoConfig(0, branching=3, depth=1, tree_size=3, probes=2),
        RheoConfig(1, branching=4, depth=1, tree_size=4, probes=2),
        RheoConfig.static(TOPOLOGIES["fan"]),
    ):
        for tree, _ in tree_classes(config, case.draft()):
            assert_walk_law(case, tree, rule)


@pytest.mark.parametrize("name", ["opposite rankings", "uniform draft, all ties", "cold sampling law", "zeros in both"])
@pytest.mark.parametrize("static", [False, True])
def test_grow_tree_integrated_over_its_uniforms_gives_the_classes(name, static):
    """One uniform inside every cell between neighbouring thresholds, weighted by its width, for two probes."""
    case = HARD_CASES_BY_NAME[name]
    config = RheoConfig(lead_tokens=0, branching=3, depth=1, tree_size=3, probes=2)
    if static:
        config = RheoConfig.static(((0,), (1,)))
    plan = plan_slots(config, case.draft()(()))
    tokens, q = plan.probe_law
    edges = {share for draws in [(), *((token,) for token in tokens)] for share in shares(tokens, q, draws)}
    grown = Counter()
    for (first, width), (second, second_width) in product(cells_between(edges), repeat=2):
        tree = grow_tree(config, case.draft(), GrowthNoise(np.array([[[first, second, 0.0]] * 3])))
        grown[tree.key] += width * second_width
    assert dict(grown) == {tree.key: probability for tree, probability in tree_classes(config, case.draft())}


def shares(tokens, q, drawn):
    """Cumulative shares of what the drawn tokens left, from the definition."""
    left = [mass if token not in drawn else Fraction(0) for token, mass in zip(tokens, q, strict=True)]
    return [sum(left[:stop], Fraction(0)) / sum(left) for stop in range(1, len(left))] if any(left) else []


@pytest.mark.lossless
@every_rule
@every_hard_case
def test_one_step_is_a_martingale(name, rule):
    """Lemma 4 for a second probe, and for static trees: E[M_{r+1} | T_r] = M_r, node by node."""
    case = HARD_CASES_BY_NAME[name]
    for lead_tokens in (0, 1):
        assert_martingale(case, RheoConfig(lead_tokens, branching=4, depth=1, tree_size=4, probes=2), rule)
    assert_martingale(case, RheoConfig.static(((0,), (1,), (1, 0))), rule)


# --- What agrees with what ---------------------------------------------------------------------------------------


@every_hard_case
def test_static_trees_are_the_same_under_both_rules(name):
    case = HARD_CASES_BY_NAME[name]
    for tree, _ in tree_classes(RheoConfig.static(((0,), (1,), (1, 0))), case.draft()):
        target_probs = [case.target(tree.path(row)) for row in range(len(tree))]
        by_rule = [tree_output_law(tree, case.target, 3, rule) for rule in RULES]
        assert by_rule[0] == by_rule[1]
        assert len({expected_acceptance_length(tree, target_probs, rule) for rule in RULES}) == 1


@every_hard_case
def test_a_chain_is_plain_speculative_sampling(name):
    """The static chain, the chain that ``rheo`` grows with m = 0, K = 1, and the textbook's acceptance rate."""
    case = HARD_CASES_BY_NAME[name]
    chain = RheoConfig.static(CHAIN)
    grown = RheoConfig(lead_tokens=0, branching=1, depth=3, tree_size=3, beam=1)
    by_config = [
        {tree.key: (tree, probability) for tree, probability in tree_classes(config, case.draft())}
        for config in (chain, grown)
    ]
    assert {key: chance for key, (_, chance) in by_config[0].items()} == {
        key: chance for key, (_, chance) in by_config[1].items()
    }
    for key, (tree, _) in by_config[0].items():
        assert tree_output_law(tree, case.target, 4) == tree_output_law(by_config[1][key][0], case.target, 4)
    q, q_t = case.construction(()), case.sampling((), case.construction(()))
    if q_t is None:
        return
    rate = sum(
        probability * (expected_acceptance_length(tree, [case.target(tree.path(row)) for row in range(2)]) - 1)
        for tree, probability in tree_classes(RheoConfig.static(CHAIN[:1]), case.draft())
    )
    masses = [*q_t, *[Fraction(0)] * (case.vocab_size - len(q))]
    assert rate == sum(min(p, mass) for p, mass in zip(case.target(()), masses, strict=True))


def test_two_sampled_children_by_hand():
    """q = (1/2, 1/3, 1/6) and p reversed: the rate of recursive rejection, children sampled without replacement."""
    draft_law = DraftLaw(law(3, 2, 1), law(3, 2, 1))
    p = law(1, 2, 3)
    rate = Fraction(0)
    for first, second in [(a, b) for a in range(3) for b in range(3) if a != b]:
        q = dict(enumerate(law(3, 2, 1)))
        chance = q[first] * q[second] / (1 - q[first])
        accepted = min(p[first] / q[first], Fraction(1))
        left = {token: max(p[token] - q[token], Fraction(0)) for token in q}
        again = left[second] / sum(left.values()) / (q[second] / (1 - q[first]))
        rate += chance * (accepted + (1 - accepted) * min(again, Fraction(1)))
    found = sum(
        probability * (expected_acceptance_length(tree, [p] * 3) - 1)
        for tree, probability in tree_classes(RheoConfig.static(((0,), (1,))), lambda path: draft_law)
    )
    assert found == rate


def test_a_perfect_draft_accepts_the_first_child_down_to_the_leaf():
    case = HARD_CASES_BY_NAME["p equals q"]
    for topology in TOPOLOGIES.values():
        for tree, _ in tree_classes(RheoConfig.static(topology), case.draft()):
            target_probs = [case.target(tree.path(row)) for row in range(len(tree))]
            first_children = sum(set(path) == {0} for path in topology)
            assert expected_acceptance_length(tree, target_probs) == 1 + first_children


def test_more_probes_than_slots_are_as_many_as_fit():
    case = HARD_CASES_BY_NAME["cold sampling law"]
    for lead_tokens in range(4):
        config = RheoConfig(lead_tokens, branching=3, depth=2, tree_size=5, beam=1)
        room = max(3 - lead_tokens, 1)
        laws = [
            {tree.key: probability for tree, probability in tree_classes(replace(config, probes=n), case.draft())}
            for n in (room, room + 1, 9)
        ]
        assert laws[0] == laws[1] == laws[2]


def test_a_chain_tells_a_wrong_target_from_the_right_one():
    case = HARD_CASES_BY_NAME["opposite rankings"]
    output = output_law(RheoConfig.static(CHAIN), case.draft(), case.target, 1)
    assert total_variation(output, target_law(lambda path: law(2, 2, 2), 1)) == Fraction(1, 6)


@pytest.mark.parametrize(
    ("lead_tokens", "second", "weights"), [(0, 0, [4, 4, 2, 1]), (1, 3, [4, 4, 3, 2]), (2, 3, [4, 2, 2, 1])]
)
def test_weights_of_probes_by_hand(lead_tokens, second, weights):
    """q = (4, 2, 1, 1) / 8, the first probe token 2: the second's weight is what that leaves of z, and capped."""
    config = RheoConfig(lead_tokens, branching=4, depth=1, tree_size=4, probes=2)
    slots = plan_slots(config, DraftLaw(law(4, 2, 1, 1), law(4, 2, 1, 1))).slots((2, second))
    assert [slot.weight * 8 for slot in slots] == weights
    assert [slot.is_probe for slot in slots] == [False] * lead_tokens + [True] * 2 + [False] * (2 - lead_tokens)

"""Theorem 1 by exact enumeration: the output's law is the target's law, total variation exactly 0.

Also: the enumeration of classes equals the enumeration of every probe (``brute_force``), and the enumerated walk equals
``verify`` integrated over its uniforms. So the theorem is checked for the code that samples, not for a model of it.
"""

import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import islice, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimized.evidence.cases import HARD_CASES, HARD_CASES_BY_NAME, Case, law
from proofs_tests.brute_force import cells_between, cumulative, integrated_walk_law, merged
from proofs_tests.laws import cases, configs, exact_settings, random_case, rheo_configs, sizes, static_configs
from reference.api import DraftLaw, GrowthNoise, RheoConfig, VerifyNoise
from reference.exact import (
    output_law,
    prefix_trees,
    target_law,
    total_variation,
    tree_classes,
    tree_output_law,
    walk_law,
)
from reference.growth import grow_tree
from reference.lengths import expected_acceptance_length
from reference.tree import DraftTree
from reference.verification import verify

RULES = ("rheo", "rrsw")
RANDOM_SEED = 20260901

# The same tokens {0, 1} under the root are two classes, by which of them is the probe.
TWO_CLASSES = RheoConfig(lead_tokens=0, branching=2, depth=1, tree_size=2)
TWO_CLASSES_LAW = law(3, 2, 1)


def assert_lossless(case: Case, config: RheoConfig, horizon: int) -> None:
    wanted = target_law(case.target, horizon)
    output = output_law(config, case.draft(), case.target, horizon)
    distance = total_variation(output, wanted)
    assert distance == 0, f"{case.name}: {config}: total variation {distance}"
    assert output == wanted
    assert all(isinstance(probability, Fraction) for probability in output.values())


def budgets(config: RheoConfig, case: Case, at_most: int) -> range:
    """1, 2, ..., the largest tree (or ``at_most``): every budget that makes a difference."""
    largest = max(len(prefix.nodes) for prefix in prefix_trees(replace(config, tree_size=at_most), case.draft()))
    return range(1, largest + 1)


@pytest.mark.lossless
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", HARD_CASES_BY_NAME)
@pytest.mark.parametrize(
    ("branching", "depth", "beams", "at_most"),
    [
        pytest.param(1, 3, (1, 3), 4, id="K1"),
        pytest.param(2, 2, (1, 4), 6, id="K2"),
        pytest.param(3, 2, (2,), 6, id="K3"),
        pytest.param(2, 3, (1, 2, 4), 8, marks=pytest.mark.deep, id="K2-deep"),
        pytest.param(3, 2, (1, 2, 3, 5), 12, marks=pytest.mark.deep, id="K3-deep"),
        pytest.param(4, 2, (2,), 8, marks=pytest.mark.deep, id="K4-deep"),
        pytest.param(3, 3, (2,), 9, marks=pytest.mark.deep, id="K3-depth3-deep"),
    ],
)
def test_output_law_is_the_target_law_on_hard_cases(name, rule, branching, depth, beams, at_most):
    case = HARD_CASES_BY_NAME[name]
    for config in configs([branching], [depth], beams=beams):
        for tree_size in budgets(config, case, at_most):
            assert_lossless(case, replace(config, tree_size=tree_size, verification=rule), horizon=depth + 1)


@pytest.mark.lossless
@sizes(250, 6000)
def test_output_law_is_the_target_law_on_drawn_laws(size):
    @given(case=cases(), config=rheo_configs() | static_configs(), horizon=st.integers(1, 4))
    @exact_settings(size)
    def check(case, config, horizon):
        assert_lossless(case, config, horizon)

    check()


@pytest.mark.lossless
@sizes(60, 2500)
def test_output_law_is_the_target_law_when_every_path_has_its_own_laws(size):
    rng = random.Random(RANDOM_SEED)
    for index in range(size):
        vocab_size = rng.choice((2, 3, 3, 4))
        config = RheoConfig(
            lead_tokens=rng.randrange(3),
            branching=rng.randrange(2, 4),
            depth=rng.randrange(1, 4),
            tree_size=rng.randrange(1, 9),
            beam=rng.randrange(1, 5),
            verification=RULES[index % 2],
        )
        assert_lossless(random_case(rng, vocab_size), config, horizon=config.depth + 1)


@pytest.mark.lossless
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["opposite rankings", "zeros in both", "draft vocabulary smaller"])
def test_output_law_is_the_target_law_without_probes(name, rule):
    case = HARD_CASES_BY_NAME[name]
    for config in configs([2, 3], [1, 3], beams=(2,), tree_size=7):
        assert_lossless(case, replace(config, proposal="topk", verification=rule), horizon=3)


@pytest.mark.lossless
@pytest.mark.parametrize("rule", RULES)
def test_output_law_at_horizons_beyond_and_before_the_tree(rule):
    case = HARD_CASES_BY_NAME["draft turns with the path"]
    config = RheoConfig(lead_tokens=1, branching=2, depth=2, tree_size=4, verification=rule)
    for horizon in range(1, 6):
        assert_lossless(case, config, horizon)


def test_output_law_tells_a_wrong_target_from_the_right_one():
    """The test above can fail: a walk that verifies against another law than it claims is 1/6 off here."""
    case = HARD_CASES_BY_NAME["opposite rankings"]
    config = RheoConfig(lead_tokens=1, branching=2, depth=1, tree_size=2)
    output = output_law(config, case.draft(), case.target, 1)
    assert total_variation(output, target_law(lambda path: law(2, 2, 2), 1)) == Fraction(1, 6)


@pytest.mark.lossless
def test_output_law_in_floats_is_the_target_law_up_to_rounding():
    case = HARD_CASES_BY_NAME["cold sampling law"]

    def draft(path):
        exact = case.draft()(path)
        return DraftLaw(exact.construction.astype(float), exact.sampling.astype(float))

    config = RheoConfig(lead_tokens=1, branching=3, depth=2, tree_size=6)
    output = output_law(config, draft, lambda path: np.array(case.target(path), dtype=float), 2)
    assert all(isinstance(probability, float) for probability in output.values())
    assert total_variation(output, target_law(case.target, 2)) < 1e-14


def test_tree_classes_tell_a_probe_from_a_fill_of_the_same_token():
    found = {tree.key: probability for tree, probability in tree_classes(TWO_CLASSES, example_draft)}
    assert found == {
        ((0, 0, 0, True), (0, 1, 1, False)): Fraction(1, 2),  # the probe is 0, the fill 1
        ((0, 0, 1, True), (0, 1, 0, False)): Fraction(1, 3),  # the probe is 1, the fill 0
        ((0, 0, 2, True), (0, 1, 0, False)): Fraction(1, 6),
    }
    tokens = Counter()
    for tree, probability in tree_classes(TWO_CLASSES, example_draft):
        tokens[frozenset(tree.token_ids[1:])] += probability
    assert tokens[frozenset({0, 1})] == Fraction(5, 6)  # what forgetting the flags would merge


def example_draft(path: tuple[int, ...]) -> DraftLaw:
    return DraftLaw(TWO_CLASSES_LAW, TWO_CLASSES_LAW)


def test_tree_classes_merge_the_outcomes_that_pruning_makes_equal(record_property):
    """Depth 2, beam 2: three probes are drawn, 27 outcomes. Small trees forget most of them."""
    counts = {}
    for tree_size in range(1, 7):
        config = RheoConfig(lead_tokens=0, branching=2, depth=2, tree_size=tree_size)
        counts[tree_size] = Counter(found.outcomes for found in merged(config, example_draft).values())
    record_property("classes by the outcomes they merge, for each budget", str(counts))
    assert counts == {
        1: {9: 3},  # the root's probe
        2: {9: 3},  # and the fill that follows from it
        3: {3: 9},  # the probe's own probe
        4: {3: 7, 1: 6},  # a fill or a third probe, whichever scores more
        5: {1: 27},
        6: {1: 27},
    }


@pytest.mark.parametrize("name", HARD_CASES_BY_NAME)
def test_tree_classes_equal_brute_force_on_hard_cases(name):
    case = HARD_CASES_BY_NAME[name]
    for config in configs([2, 3], [2], beams=(1, 2), tree_size=5):
        assert_same_classes(case, config)


@sizes(60, 2000)
def test_tree_classes_equal_brute_force_on_drawn_laws(size):
    @given(case=cases(), config=rheo_configs(max_depth=2) | static_configs(max_nodes=4, max_depth=2))
    @exact_settings(size)
    def check(case, config):
        assert_same_classes(case, config)

    check()


@pytest.mark.parametrize("name", ["opposite rankings", "uniform draft, all ties", "draft turns with the path"])
@pytest.mark.parametrize(("lead_tokens", "tree_size"), [(0, 7), (1, 5), (1, 14)])
def test_tree_classes_equal_brute_force_at_depth_three(name, lead_tokens, tree_size):
    config = RheoConfig(lead_tokens=lead_tokens, branching=2, depth=3, tree_size=tree_size)
    assert_same_classes(HARD_CASES_BY_NAME[name], config)


def assert_same_classes(case: Case, config: RheoConfig) -> None:
    brute = merged(config, case.draft())
    listed = list(tree_classes(config, case.draft()))
    classes = {tree.key: (tree, probability) for tree, probability in listed}
    assert len(classes) == len(listed), "a class was listed twice"
    assert {key: probability for key, (_, probability) in classes.items()} == {
        key: found.probability for key, found in brute.items()
    }
    assert sum(probability for _, probability in listed) == 1
    for key, found in brute.items():
        tree = classes[key][0]
        assert tree.scores == found.tree.scores
        assert tree.depths == found.tree.depths
        assert {row: (ids, tuple(q)) for row, (ids, q) in tree.probe_laws.items()} == {
            row: (ids, tuple(q)) for row, (ids, q) in found.tree.probe_laws.items()
        }


@pytest.mark.lossless
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "name", ["opposite rankings", "zeros in both", "cold sampling law", "draft turns with the path"]
)
def test_output_law_equals_brute_force(name, rule):
    """The classes forget probes that do not matter: the naive mixture over every outcome is the same law."""
    case = HARD_CASES_BY_NAME[name]
    for lead_tokens in (0, 1):
        config = RheoConfig(lead_tokens, branching=2, depth=2, tree_size=4, verification=rule)
        mixture = Counter()
        for found in merged(config, case.draft()).values():
            for sequence, probability in tree_output_law(found.tree, case.target, 3, rule).items():
                mixture[sequence] += found.probability * probability
        assert dict(mixture) == output_law(config, case.draft(), case.target, 3) == target_law(case.target, 3)


def test_tree_classes_are_lazy():
    """A real tree has far more classes than atoms exist; the first ones are there at once."""
    q = law(*range(1, 65))
    config = RheoConfig(lead_tokens=1, branching=10, depth=8, tree_size=60)
    first = list(islice(tree_classes(config, lambda path: DraftLaw(q, q)), 3))
    assert [len(tree) for tree, _ in first] == [61, 61, 61]


@pytest.mark.parametrize("lead_tokens", [0, 1])
@pytest.mark.parametrize(
    "name", ["opposite rankings", "uniform draft, all ties", "massless tail", "cold sampling law", "zeros in both"]
)
def test_grow_tree_integrated_over_its_uniforms_gives_the_classes(name, lead_tokens):
    """One uniform inside every cell between neighbouring thresholds, weighted by its width, for three probes."""
    case = HARD_CASES_BY_NAME[name]
    config = RheoConfig(lead_tokens=lead_tokens, branching=2, depth=2, tree_size=4)
    grown = Counter()
    cells = cells_between(edge for path in [(), *product(range(4))] for edge in probe_edges(config, case, path))
    for (root, width), (first, first_width), (second, second_width) in product(cells, repeat=3):
        tree = grow_tree(config, case.draft(), GrowthNoise(np.array([[root, 0], [first, second]])))
        grown[tree.key] += width * first_width * second_width
    assert dict(grown) == {tree.key: probability for tree, probability in tree_classes(config, case.draft())}


def probe_edges(config: RheoConfig, case: Case, path: tuple[int, ...]) -> list[Fraction]:
    """Cumulative sums of q~ in rank order, from the definition."""
    q = case.construction(path)
    q_t = case.sampling(path, q)
    ranked = sorted((token for token in range(len(q)) if q[token] > 0), key=lambda token: -q[token])
    return cumulative([q_t[token] for token in ranked[config.lead_tokens :]])


@pytest.mark.lossless
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", HARD_CASES_BY_NAME)
def test_verify_integrated_over_its_uniforms_gives_the_walk_law(name, rule):
    """One node, every decision: accept, recovered, bonus, lead."""
    case = HARD_CASES_BY_NAME[name]
    for lead_tokens in (0, 1, 2):
        config = RheoConfig(lead_tokens, branching=3, depth=1, tree_size=3)
        for tree, _ in tree_classes(config, case.draft()):
            assert_walk_law(case, tree, rule)


@pytest.mark.lossless
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["opposite rankings", "target copies the last token"])
def test_verify_integrated_over_its_uniforms_down_two_levels(name, rule):
    """The uniforms of a row decide at that row only, and a walk uses those of the rows where it stands."""
    case = HARD_CASES_BY_NAME[name]
    for tree, _ in islice(tree_classes(RheoConfig(1, branching=2, depth=2, tree_size=4), case.draft()), 2):
        assert_walk_law(case, tree, rule)


def assert_walk_law(case: Case, tree: DraftTree, rule: str) -> None:
    target_probs = [case.target(tree.path(row)) for row in range(len(tree))]
    enumerated = Counter()
    for result, probability in walk_law(tree, case.target, rule):
        enumerated[result] += probability
    assert integrated_walk_law(tree, target_probs, rule) == dict(enumerated)


@pytest.mark.parametrize("rule", RULES)
@sizes(80, 2000)
def test_walk_law_sums_to_one_and_gives_the_expected_acceptance_length(rule, size):
    @given(case=cases(), config=rheo_configs() | static_configs())
    @exact_settings(size)
    def check(case, config):
        for tree, _ in islice(tree_classes(config, case.draft()), 5):
            listed = list(walk_law(tree, case.target, rule))
            assert all(probability > 0 for _, probability in listed)
            assert sum(probability for _, probability in listed) == 1
            for result, _ in listed:
                assert len(result.token_ids) == len(result.accepted_nodes) + 1
                assert [tree.token_ids[row] for row in result.accepted_nodes] == list(result.token_ids[:-1])
            length = sum(len(result.token_ids) * probability for result, probability in listed)
            target_probs = [case.target(tree.path(row)) for row in range(len(tree))]
            assert expected_acceptance_length(tree, target_probs, rule) == length

    check()


def test_expected_acceptance_length_by_hand():
    """m = 1, K = 2: lead 0, probe 1 with q~ = (2/3, 1/3). A flat target accepts the probe at 1/2, then lead 0 with
    p - q~ = (1/3, -, 0): norm 1 on token 0. 1 + 1/2 + 1/2 * 1 = 2; under rrsw 1 + 1/3 + 2/3 * 3/4 = 11/6."""
    draft_law = DraftLaw(TWO_CLASSES_LAW, TWO_CLASSES_LAW)
    config = RheoConfig(lead_tokens=1, branching=2, depth=1, tree_size=2)
    tree = next(tree for tree, _ in tree_classes(config, lambda path: draft_law) if tree.token_ids[2] == 1)
    flat = [law(1, 1, 1)] * 3
    assert expected_acceptance_length(tree, flat, "rheo") == 2
    assert expected_acceptance_length(tree, flat, "rrsw") == Fraction(11, 6)


@pytest.mark.parametrize("rule", RULES)
def test_expected_acceptance_length_on_a_real_vocabulary(rule):
    """61 rows over 49152 tokens, top-k filtered targets so that the walk can be enumerated too."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(16, 49152)) * 4
    laws = [DraftLaw.from_logits(row) for row in logits]

    @cache
    def target(path):
        shifted = logits[sum(path) % 16] + np.random.default_rng(len(path)).normal(size=49152)
        weights = np.zeros(49152)
        top = np.argsort(-shifted)[:20]
        weights[top] = np.exp(shifted[top])
        return weights / weights.sum()

    tree = grow_tree(RheoConfig(), lambda path: laws[sum(path) % 16], GrowthNoise(rng.random((8, 10))))
    target_probs = np.stack([target(tree.path(row)) for row in range(len(tree))])
    length = expected_acceptance_length(tree, target_probs, rule)
    enumerated = sum(len(result.token_ids) * probability for result, probability in walk_law(tree, target, rule))
    assert len(tree) == 61
    assert length > 1.5
    assert abs(length - enumerated) < 1e-12


@sizes(150, 5000)
def test_float_run_makes_the_decisions_of_the_exact_run(size):
    """Dyadic laws are the same numbers in both arithmetics; odd uniforms keep every draw away from a tie."""
    rng = random.Random(RANDOM_SEED)
    walked = Counter()
    for index in range(size):
        case = random_case(rng, rng.randrange(2, 7), denominator=16)
        config = RheoConfig(
            lead_tokens=rng.randrange(4),
            branching=rng.randrange(1, 5),
            depth=rng.randrange(1, 5),
            tree_size=rng.randrange(1, 20),
            beam=rng.randrange(1, 5),
        )
        exact_draft = case.draft()

        def float_draft(path, exact_draft=exact_draft):
            exact = exact_draft(path)
            return DraftLaw(exact.construction.astype(float), exact.sampling.astype(float))

        def uniforms(*shape):
            return np.array([rng.randrange(1, 2**20, 2) / 2**20 for _ in range(int(np.prod(shape)))]).reshape(shape)

        noise = GrowthNoise(uniforms(config.depth, config.beam_width))
        exact, floats = grow_tree(config, exact_draft, noise), grow_tree(config, float_draft, noise)
        assert exact.key == floats.key
        assert all(isinstance(score, Fraction) for score in exact.scores[1:])
        assert all(isinstance(score, float) for score in floats.scores[1:])
        target_probs = [case.target(exact.path(row)) for row in range(len(exact))]
        verify_noise = VerifyNoise(*uniforms(3, len(exact)))
        rule = RULES[index % 2]
        result = verify(exact, target_probs, verify_noise, rule)
        assert verify(floats, np.array(target_probs, dtype=float), verify_noise, rule) == result
        walked[len(result.accepted_nodes)] += 1
    assert walked[0] > 0
    assert walked[2] > 0, "the walks are too short for this to be a test"


@pytest.mark.parametrize("horizon", [0, -1, 1.5, True])
def test_horizon_must_be_a_positive_integer(horizon):
    case = HARD_CASES[0]
    message = f"horizon must be an integer >= 1, got {horizon}"
    with pytest.raises(ValueError, match=message):
        target_law(case.target, horizon)
    with pytest.raises(ValueError, match=message):
        output_law(TWO_CLASSES, case.draft(), case.target, horizon)


def test_enumeration_names_the_path_of_a_wrong_target():
    draft = HARD_CASES_BY_NAME["p equals q"].draft()
    with pytest.raises(ValueError, match=r"target\(\(0,\)\) sums to 2, not to 1"):
        output_law(TWO_CLASSES, draft, lambda path: law(1, 1, 1) if not path else [Fraction(1)] * 2, 2)
    with pytest.raises(ValueError, match=r"target\(\(0,\)\) has 2 entries, target\(\(\)\) has 3"):
        target_law(lambda path: law(1, 1) if path else law(1, 1, 1), 2)
    with pytest.raises(ValueError, match="row 0 speaks of token 2, but target_probs has 2 columns"):
        output_law(TWO_CLASSES, draft, lambda path: law(1, 1), 1)


def test_enumeration_refuses_an_unknown_rule_at_once():
    tree = next(tree for tree, _ in tree_classes(TWO_CLASSES, example_draft))
    with pytest.raises(ValueError, match=r"rule must be one of .*'rheo', 'rrsw'.*, got 'naive'"):
        walk_law(tree, lambda path: TWO_CLASSES_LAW, "naive")
    with pytest.raises(ValueError, match="got 'naive'"):
        expected_acceptance_length(tree, [TWO_CLASSES_LAW] * 3, "naive")

"""The smoothed acceptance length: the same mean over all trees as the exact one, exactly; less variance, mostly."""

import random
from fractions import Fraction

import numpy as np
from hypothesis import given

from proofs_tests.laws import cases, exact_settings, random_case, rheo_configs, sizes, static_configs
from proofs_tests.test_weights import random_weights
from reference.api import DraftLaw, GrowthNoise, RheoConfig
from reference.exact import tree_classes
from reference.growth import grow_tree
from reference.lengths import expected_acceptance_length, smoothed_acceptance_length


def moments(config, case):
    """Mean and variance of both lengths, over the trees that may grow."""
    trees = [
        (probability, tree, [case.target(tree.path(row)) for row in range(len(tree))])
        for tree, probability in tree_classes(config, case.draft())
    ]
    for length in (expected_acceptance_length, smoothed_acceptance_length):
        values = [(probability, length(tree, laws, config.verification)) for probability, tree, laws in trees]
        mean = sum(probability * value for probability, value in values)
        yield mean, sum(probability * (value - mean) ** 2 for probability, value in values)


@sizes(80, 2000)
def test_both_lengths_have_the_same_mean_over_all_trees(size):
    """Both rules, one probe or several, static trees."""
    smaller = larger = 0

    @given(case=cases(), config=rheo_configs() | static_configs())
    @exact_settings(size)
    def check(case, config):
        nonlocal smaller, larger
        (mean, variance), (smoothed_mean, smoothed_variance) = moments(config, case)
        assert smoothed_mean == mean
        smaller += smoothed_variance < variance
        larger += smoothed_variance > variance  # where all that a node offers is accepted, say

    check()
    assert smaller > 2 * larger
    assert smaller > size / 10


@sizes(60, 1500)
def test_and_with_probes_that_outrank_leads(size):
    """Calibrated weights are in any order, with thresholds that stop growth."""
    rng = random.Random(5)
    for _ in range(size):
        config = RheoConfig(
            lead_tokens=rng.choice(("auto", 0, 1, 2)),
            branching=rng.randrange(1, 4),
            depth=rng.randrange(1, 4),
            tree_size=rng.randrange(1, 7),
            weights=random_weights(rng, exact=True),
            probes=rng.choice((1, 2, 3)),
            score_threshold=rng.choice((0, Fraction(1, 10))),
            verification=rng.choice(("rheo", "rrsw")),
        )
        (mean, _), (smoothed_mean, _) = moments(config, random_case(rng, 3))
        assert smoothed_mean == mean


def test_a_tree_of_one_level_has_no_variance_left_by_hand():
    """m = 1, K = 2, one probe: 1 + p(x_1) + sum of min(p, q~), whatever was drawn."""
    q, p = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    law = DraftLaw(q, q)
    lengths = set()
    for uniform in (0.1, 0.9):
        config = RheoConfig(lead_tokens=1, branching=2, depth=1, tree_size=2)
        tree = grow_tree(config, lambda path: law, GrowthNoise(np.full((1, 2), uniform)))
        lengths.add((tree.token_ids[2], round(float(smoothed_acceptance_length(tree, [p] * 3)), 12)))
    assert lengths == {(1, 1 + 0.2 + 0.3 + 0.4), (2, 1 + 0.2 + 0.3 + 0.4)}


def test_sixty_nodes_over_a_real_vocabulary_vary_far_less():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(16, 49152)) * 4
    laws = [DraftLaw.from_logits(row) for row in logits]
    near = np.exp(logits + 1.5 * rng.normal(size=logits.shape))
    near /= near.sum(axis=1, keepdims=True)
    lengths = (expected_acceptance_length, smoothed_acceptance_length)
    found = []
    for _ in range(40):
        tree = grow_tree(RheoConfig(), lambda path: laws[sum(path) % 16], GrowthNoise(rng.random((8, 10))))
        target_probs = near[[sum(tree.path(row)) % 16 for row in range(len(tree))]]
        found.append([length(tree, target_probs) for length in lengths])
    exact, smoothed = np.array(found).T
    assert smoothed.std() < exact.std() / 1.4
    assert abs((exact - smoothed).mean()) < 4 * (exact - smoothed).std() / 40**0.5
    assert smoothed.mean() > 1.5

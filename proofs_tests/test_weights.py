"""Calibrated weights, m per node and threshold trees: exactly lossless, and the Torch path equal to the reference."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from optimized import weighing
from optimized.backends import Backend
from proofs_tests.brute_force import outcomes
from proofs_tests.laws import random_case as random_exact_case
from proofs_tests.laws import sizes
from proofs_tests.test_differential import BATCH, excused, random_case
from reference import Margin, RheoConfig, exact
from reference.api import GREEDY_TEMPERATURE
from reference.weights import BANDS, KNOTS, Curve, Curves, Weights, band_of, lead_count

pytestmark = pytest.mark.lossless


def random_weights(rng: random.Random, exact: bool) -> Weights:
    """Curves of random steps, many of them flat; different in every band."""

    def curve() -> Curve:
        values = sorted(rng.choice((1, 2, rng.randrange(1, 65))) for _ in KNOTS)
        return Curve(tuple(Fraction(value, 64) if exact else value / 64 for value in values))

    def further() -> tuple[Fraction | float, ...]:
        shares = sorted((rng.randrange(1, 65) for _ in range(rng.randrange(1, 4))), reverse=True)
        return tuple(Fraction(share, 64) if exact else share / 64 for share in shares)

    return Weights(tuple(Curves(curve(), curve(), curve(), further()) for _ in BANDS), "random")


@sizes(300, 6000)
def test_the_law_is_the_targets_whatever_the_curves(size: int) -> None:
    """Any curves and shares, m fixed or auto, one or two probes, with and without thresholds, both rules."""
    rng = random.Random(7)
    autos = short = 0
    for _ in range(size):
        case = random_exact_case(rng, rng.choice((2, 3, 4)))
        config = RheoConfig(
            lead_tokens=rng.choice(("auto", "auto", 0, 1, 2)),
            branching=rng.randrange(1, 4),
            depth=rng.randrange(1, 4),
            tree_size=rng.randrange(1, 7),
            beam=rng.choice((None, 1, 2)),
            weights=random_weights(rng, exact=True),
            probes=rng.choice((1, 1, 2)),
            score_threshold=rng.choice((0, 0, Fraction(1, 10), Fraction(1, 3))),
            level_threshold=rng.choice((0, Fraction(1, 20), Fraction(1, 3))),
            verification=rng.choice(("rheo", "rrsw")),
        )
        law = exact.output_law(config, case.draft(), case.target, 2)
        expected = exact.target_law(case.target, 2)
        assert exact.total_variation(law, expected) == 0, config
        autos += config.lead_tokens == "auto"
        short += config.may_stop
    assert autos > size / 4
    assert short > size / 4


@sizes(60, 1500)
def test_batched_trees_equal_the_reference(size: int, backend: Backend) -> None:
    """Equal noise, equal trees; a difference only where a float decision was within the margin."""
    rng = random.Random(11)
    inside = nodes = 0
    for seed in range(size):
        case = random_case(seed, rng.choice(("one probe", "several probes")))
        if case.config.proposal == "static":
            continue
        case.config = replace(
            case.config,
            weights=random_weights(rng, exact=False),
            lead_tokens=rng.choice(("auto", case.config.lead_tokens)),
            probes=rng.choice((1, case.config.probes)),
            score_threshold=rng.choice((0, 0.03, 0.2)),
            level_threshold=rng.choice((0, 0.1, 0.3)),
        )
        trees = case.grow(backend)
        for b in range(BATCH):
            margins: list[Margin] = []
            expected, actual = case.reference_tree(b, margins), trees.to_tree(b)
            nodes += len(expected) - 1
            if expected.key != actual.key:
                assert excused(margins), f"case {seed} request {b}: {case.config}\n{expected.key}\n{actual.key}"
                inside += 1
                continue
            np.testing.assert_allclose(np.array(expected.scores, dtype=float), actual.scores, rtol=1e-12)
    assert inside <= 2
    assert nodes > size * BATCH


def test_the_enumeration_finds_the_trees_of_the_specification() -> None:
    """Level by level for every probe of every node, or best first by classes: the same trees, equally likely."""
    rng = random.Random(3)
    trees = 0
    for _ in range(60):
        case = random_exact_case(rng, 3)
        config = RheoConfig(
            lead_tokens=rng.choice(("auto", 0, 1)),
            branching=2,
            depth=3,
            tree_size=rng.randrange(2, 8),
            weights=random_weights(rng, exact=True),
            score_threshold=rng.choice((0, Fraction(1, 20))),
            level_threshold=rng.choice((Fraction(1, 20), Fraction(1, 5), Fraction(1, 2))),
        )
        grown: dict[object, Fraction] = {}
        for outcome in outcomes(config, case.draft()):
            grown[outcome.tree.key] = grown.get(outcome.tree.key, Fraction(0)) + outcome.probability
        classes = {tree.key: probability for tree, probability in exact.tree_classes(config, case.draft())}
        assert classes == grown, config
        trees += len(classes)
    assert trees > 150


def test_a_curve_is_linear_between_its_knots_and_to_zero() -> None:
    curve = Curve(tuple(Fraction(k + 1, 64) for k in range(len(KNOTS))))
    for knot, value in zip(KNOTS, curve.values, strict=True):
        assert curve(Fraction(knot)) == value
    assert curve(Fraction(KNOTS[0]) / 2) == curve.values[0] / 2
    middle = (Fraction(KNOTS[3]) + Fraction(KNOTS[4])) / 2
    assert curve(middle) == (curve.values[3] + curve.values[4]) / 2
    assert curve(Fraction(0)) > 0
    assert float(curve(float(middle))) == float(curve(middle))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.5,) * 3, "has 16 values"),
        ((0.0, *(0.5,) * 15), "must lie in"),
        ((*(0.5,) * 15, 1.5), "must lie in"),
        ((*(0.5,) * 15, 0.4), "must not fall"),
    ],
)
def test_a_curve_that_is_none_is_refused(values: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve(values)


def test_a_further_probes_share_is_the_last_one_for_all_beyond_and_never_rises() -> None:
    curve = Curve((0.5,) * len(KNOTS))
    curves = Curves(curve, curve, curve, (0.5, 0.25))
    assert [curves.share(probe) for probe in range(5)] == [1, 0.5, 0.25, 0.25, 0.25]
    assert Curves(curve, curve, curve).share(3) == 1
    with pytest.raises(ValueError, match="further is empty"):
        Curves(curve, curve, curve, ())
    for wrong in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"share is {wrong}; it must lie"):
            Curves(curve, curve, curve, (wrong,))
    with pytest.raises(ValueError, match=r"rises from 0\.25 to 0\.5"):
        Curves(curve, curve, curve, (0.25, 0.5))


def test_a_further_probe_has_its_share_of_the_mean_of_the_tails_first_and_its_own() -> None:
    """Chances equal to masses, shares 1, 1/2, 1/4: harmonic means of 1/2 and each of 1/2, 1/4 and 1/8."""
    mass = Curve(tuple(map(Fraction, KNOTS)))
    curves = Curves(mass, mass, mass, (Fraction(1, 2), Fraction(1, 4)))
    tail = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 8)]
    assert curves.probes(tail) == [Fraction(1, 2), Fraction(1, 6), Fraction(1, 20)]
    assert curves.probes([]) == []
    sure = curves.probes([Fraction(1), Fraction(0), Fraction(0)])  # nothing is left behind the first
    assert sure[0] == 1
    assert 0 < sure[2] < sure[1] < 2.0**-99
    weights = Weights((curves,) * len(BANDS), "")
    masses = torch.tensor([[[0.5, *map(float, tail)]]], dtype=torch.float64)
    chances = weighing.slot_chances(weights, masses, torch.ones(1), 3)
    assert chances.probes(torch.tensor([[1]]), 3).flatten().tolist() == [0.5, 1 / 6, 1 / 20]
    assert chances.probes(torch.tensor([[[1, 0]]]), 2).shape == (1, 1, 2, 2)


def test_bands_begin_where_sampling_does_and_include_their_bounds() -> None:
    assert band_of(0) == 0
    assert band_of(GREEDY_TEMPERATURE / 2) == 0
    assert band_of(GREEDY_TEMPERATURE) == 1
    assert band_of(0.35) == 1
    assert band_of(0.36) == 2
    assert band_of(1.0) == 4
    assert band_of(50.0) == len(BANDS) - 1


def test_auto_takes_the_m_that_promises_most_above_the_price() -> None:
    """Leads worth their mass, a probe worth a flat chance, fills worth nothing."""
    mass, nothing = Curve(tuple(KNOTS)), Curve((2.0**-90,) * len(KNOTS))
    masses = [0.5, 0.25, 0.125, 0.125]
    for chance, score, price, expected in (
        (0.6, 1.0, 0.0, 2),  # free places: the probe takes the last
        (0.01, 1.0, 0.0, 3),  # none: 0.125 is more than 0.01
        (0.6, 1.0, 0.3, 1),  # the second lead is not worth its place
        (0.6, 0.5, 0.2, 1),
        (0.6, 0.5, 0.28, 0),  # only the probe is
        (0.6, 0.1, 0.2, 0),  # nothing is, a tie
    ):
        curves = Curves(mass, Curve((chance,) * len(KNOTS)), nothing)
        assert lead_count(curves, masses, 3, score, price) == expected
        chances = weighing.slot_chances(
            Weights((curves,) * len(BANDS), ""), torch.tensor([[masses]], dtype=torch.float64), torch.ones(1)
        )
        drawable, num_slots, log_score = torch.tensor([[[4]]]), torch.tensor([[[3]]]), torch.tensor([[score]]).log()
        assert weighing.lead_count(chances, drawable, num_slots, 3, log_score, price).item() == expected
    assert lead_count(Curves(nothing, Curve((0.5,) * len(KNOTS)), mass), masses, 3, 1.0, 0.0) == 0
    assert lead_count(curves, [], 3, 1.0, 0.0) == 3


def test_auto_needs_weights_and_a_threshold_is_a_chance() -> None:
    with pytest.raises(ValueError, match="needs weights"):
        RheoConfig(lead_tokens="auto")
    with pytest.raises(ValueError, match=r"score_threshold must lie in \[0, 1\], got 2"):
        RheoConfig(score_threshold=2)
    with pytest.raises(ValueError, match=r"level_threshold must lie in \[0, 1\], got -1"):
        RheoConfig(level_threshold=-1)
    with pytest.raises(ValueError, match='tree_size="auto" goes by what nodes promise'):
        RheoConfig(tree_size="auto")
    with pytest.raises(ValueError, match="takes neither weights nor thresholds"):
        replace(RheoConfig.static([(0,)]), level_threshold=0.1)

"""The statistics are tests themselves, so they are tested: their error rates, their power, and what they refuse."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize, stats

from proofs_tests.statistics import FAMILIES, SUITE_ALPHA, Family, assert_same_law
from reference.statistics import (
    MIN_EXPECTED,
    POWER,
    compare,
    compare_together,
    detectable_tv,
    draws_needed,
    holm,
    likelihood_ratio,
    noncentrality,
    pooled_cells,
)

SAMPLES = 4000
NULL_LAWS = {
    "two cells": (np.array([0.3, 0.7]), 200),
    "nine cells, two pooled": (np.array([0.3, 0.25, 0.2, 0.1, 0.06, 0.04, 0.02, 0.02, 0.01]), 700),
    "500 cells": (np.random.default_rng(0).dirichlet(np.full(500, 2.0)), 20_000),
    "2000 outcomes, mostly pooled": (np.random.default_rng(1).dirichlet(np.full(2000, 0.5)), 3_000),
}


def two_sided(successes: int, trials: int, rate: float) -> float:
    """P-value of a binomial count, twice the smaller tail."""
    tails = stats.binom.cdf(successes, trials, rate), stats.binom.sf(successes - 1, trials, rate)
    return min(1.0, 2 * min(tails))


def test_false_alarms_and_power_are_the_stated_ones():
    """Simulated: rejections at 5 and 1 per cent under the law itself, and under the bias that is hardest to see.

    The chi-square law is an approximation. Its false-alarm rate may be up to a tenth of itself above the stated level
    (a sample of 4,000 could not tell less); the power may be short by one point.
    """
    rng = np.random.default_rng(20260901)
    with Family("calibration", 2 * len(NULL_LAWS) + 3) as family:
        for name, (law, draws) in NULL_LAWS.items():
            samples = rng.multinomial(draws, law, size=SAMPLES)
            p_values = np.array([compare(sample, law, alpha=0.01).p_value for sample in samples])
            for level in (0.05, 0.01):
                rejections = int((p_values <= level).sum())
                excess = stats.binom.sf(rejections - 1, SAMPLES, 1.1 * level)
                lack = stats.binom.cdf(rejections, SAMPLES, 0.8 * level)
                family.add(f"{name} at {level}", min(1.0, 2 * min(excess, lack)))
        for cells, draws, alpha in ((2, 4000, 0.01), (40, 20_000, 1e-6), (300, 60_000, 1e-8)):
            law = np.full(cells, 1 / cells)
            seen = detectable_tv(draws, cells - 1, alpha)
            bias = (
                np.where(np.arange(cells) < cells // 2, 1, -1) * 2 * seen / cells
            )  # half the mass, as Pinsker's worst
            assert np.abs(bias).sum() / 2 == pytest.approx(seen)
            found = sum(
                compare(sample, law, alpha=alpha).p_value <= alpha
                for sample in rng.multinomial(draws, law + bias, size=SAMPLES)
            )
            assert found / SAMPLES < POWER + 0.008, "the stated bias is not the smallest that is seen"
            family.add(f"power, {cells} cells", float(stats.binom.cdf(found, SAMPLES, POWER - 0.005)))


def test_false_alarms_far_out_are_the_stated_ones_and_pearsons_are_not():
    """At 1e-9 nothing can be simulated; two cells are summed exactly, many by tilting and a Fourier transform."""
    for draws, rate in ((100, 0.1), (1000, 0.01), (5000, 0.3)):
        observed = np.arange(draws + 1)
        expected = np.array([draws * rate, draws * (1 - rate)])
        p_values = np.array([compare([k, draws - k], [rate, 1 - rate], alpha=0.01).p_value for k in observed.tolist()])
        for level in (1e-6, 1e-9):
            alarms = stats.binom.pmf(observed[p_values <= level], draws, rate).sum()
            assert alarms <= 2 * level, f"{draws} draws, {expected} expected: {alarms} at level {level}"
    for cells in (10, 100, 500):
        assert 0.5 < tail_of_many_cells(cells, MIN_EXPECTED, 1e-9, pearson=False) / 1e-9 < 2
    assert tail_of_many_cells(10, MIN_EXPECTED, 1e-9, pearson=True) > 100e-9
    assert tail_of_many_cells(10, 5.0, 1e-9, pearson=True) > 500e-9


def tail_of_many_cells(cells: int, expected: float, level: float, pearson: bool) -> float:
    """The false-alarm rate over independent Poisson cells (a multinomial sample of random size), at a tiny level."""
    count = np.arange(int(expected + 40 * np.sqrt(expected) + 60))
    mass = stats.poisson.pmf(count, expected)
    if pearson:
        terms = (count - expected) ** 2 / expected
    else:
        terms = 2 * (count * np.log(np.maximum(count, 1) / expected) - (count - expected)) / (1 + 1 / (6 * expected))
    critical = stats.chi2.isf(level, cells)

    def tilted(theta: float) -> np.ndarray:
        return mass * np.exp(theta * terms)

    def mean_excess(theta: float) -> float:
        return float(cells * (tilted(theta) * terms).sum() / tilted(theta).sum() - critical)

    high = 0.002
    while mean_excess(high) < 0:
        high *= 1.15
    theta = optimize.brentq(mean_excess, 0, high)
    grid = 2**15
    step = 4 * critical / grid
    places = np.round(terms / step).astype(int)
    total = tilted(theta).sum()
    cell = np.bincount(places[places < grid], (tilted(theta) / total)[places < grid], grid)
    tail = np.fft.irfft(np.fft.rfft(cell) ** cells, grid)
    values = np.arange(grid) * step
    return float((tail * np.exp(cells * np.log(total) - theta * values))[values >= critical].sum())


def test_likelihood_ratio_by_hand():
    observed, expected = np.array([30.0, 10.0]), np.array([20.0, 20.0])
    raw = 2 * (30 * np.log(1.5) + 10 * np.log(0.5))
    correction = 1 + (2 + 2 - 1) / (6 * 40)
    assert likelihood_ratio(observed, expected) == pytest.approx(raw / correction)
    assert likelihood_ratio(expected, expected) == 0
    assert likelihood_ratio(np.array([0.0, 40.0]), expected) == pytest.approx(2 * 40 * np.log(2) / correction)
    assert compare([30, 10], [0.5, 0.5], alpha=0.01).p_value == pytest.approx(stats.chi2.sf(raw / correction, 1))


def test_impossible_outcome_fails_at_once():
    law = {(0, 1): 0.5, (1, 0): 0.5, (1, 1): 0.0}
    with pytest.raises(AssertionError, match=r"\(1, 1\) is impossible and came up 1 times"):
        compare({(0, 1): 50_000, (1, 0): 50_000, (1, 1): 1}, law, alpha=1e-6)
    with pytest.raises(AssertionError, match=r"\(2, 0\) is impossible and came up 3 times"):
        compare({(0, 1): 5, (2, 0): 3}, law, alpha=1e-6)
    with pytest.raises(AssertionError, match="2 is impossible and came up 1 times"):
        compare([500, 500, 1], [0.5, 0.5, 0.0], alpha=1e-6)
    with pytest.raises(AssertionError, match="the cold one: 1 is impossible"):
        Family("calibration", 1).compare("the cold one", [9, 1], [1.0, 0.0], min_detectable_tv=1.0)


def test_sample_that_is_too_small_fails_and_says_what_is_needed():
    law = np.full(100, 0.01)
    with pytest.raises(AssertionError, match=r"10000 draws show a bias of 0\.\d+, not of 0.02, .* needs (\d+) draws"):
        assert_same_law(np.full(100, 100), law, alpha=1e-6, min_detectable_tv=0.02)
    needed = draws_needed(law, 1e-6, 0.02)
    assert needed % 100, "the largest multiple below is one too few"
    assert_same_law(np.full(100, needed // 100 + 1), law, alpha=1e-6, min_detectable_tv=0.02)
    with pytest.raises(AssertionError, match="draws show a bias"):
        assert_same_law(np.full(100, needed // 100), law, alpha=1e-6, min_detectable_tv=0.02)


def test_law_that_is_certain_needs_no_sample():
    comparison = assert_same_law({(3, 3): 2}, {(3, 3): 1.0}, alpha=1e-6, min_detectable_tv=0.001)
    assert (comparison.p_value, comparison.degrees, comparison.detectable_tv) == (1.0, 0, float("inf"))


def test_assert_same_law_rejects_another_law():
    law = {(token,): 0.25 for token in range(4)}
    counts = {(0,): 2600, (1,): 2400, (2,): 2600, (3,): 2400}
    with pytest.raises(AssertionError, match="tokens: the law is another one"):
        assert_same_law(counts, law, alpha=1e-2, min_detectable_tv=0.03, name="tokens")
    assert_same_law(counts, law, alpha=1e-6, min_detectable_tv=0.05)


def test_detectable_tv_by_hand():
    """One degree of freedom is a two-sided normal test: power 0.99 at 0.05 takes (1.960 + 2.326) standard errors."""
    assert noncentrality(1, 0.05) == pytest.approx((1.95996 + 2.32635) ** 2, rel=1e-4)
    # A coin: t = 4.286 / (2 sqrt(n)), the standard error of a frequency being 1 / (2 sqrt(n)).
    assert detectable_tv(10_000, 1, 0.05) == pytest.approx(4.2863 / 200, rel=1e-4)
    assert detectable_tv(40_000, 7, 1e-6) == pytest.approx(detectable_tv(10_000, 7, 1e-6) / 2)


def test_pooling_by_hand():
    assert MIN_EXPECTED == 10
    law = np.array([80, 4, 6, 60, 4, 12, 7, 12, 12, 3]) / 200
    assert pooled_cells(law, 200).tolist() == [0, 5, 5, 1, 6, 2, 6, 3, 4, 6]  # the 3 at the end joins 4 + 7
    assert pooled_cells(law, 400).tolist() == [0, 7, 1, 2, 7, 3, 4, 5, 6, 7]  # 8 + 8, and the 6 at the end
    assert pooled_cells(law, 160).tolist() == [0, 2, 2, 1, 2, 3, 3, 4, 4, 4]  # 64 48, 3.2 + 4.8 + 3.2, 9.6 + 5.6, ...
    assert pooled_cells(law, 20).tolist() == [0] * 10  # 8 + 0.4 + 0.6 + 6; what is left is 5
    assert pooled_cells(law, 9).tolist() == [0] * 10
    lonely = np.array([0.5, 0.3, 0.005, 0.195])
    assert pooled_cells(lonely, 1000).tolist() == [0, 1, 2, 2]  # nobody to pool with: the least common outcome


@pytest.mark.parametrize("draws", [1, 9, 10, 100, 5000, 10**6])
def test_pooled_cells_expect_enough_and_do_not_depend_on_the_counts(draws):
    law = np.random.default_rng(draws).dirichlet(np.full(999, 0.3))
    cells = pooled_cells(law, draws)
    expected = np.bincount(cells, draws * law)
    assert sorted(set(cells.tolist())) == list(range(expected.size))
    assert expected.min() >= min(MIN_EXPECTED, draws * (1 - 1e-12))
    alone = np.flatnonzero(draws * law >= MIN_EXPECTED)
    assert expected.size >= alone.size


def test_pooled_mass_is_what_shares_a_cell():
    comparison = compare([160, 6, 14, 220], [0.4, 0.02, 0.03, 0.55], alpha=0.01)  # 8 expected joins the 12
    assert comparison.cells == 3
    assert comparison.pooled_mass == pytest.approx(0.05)
    assert comparison.p_value == 1.0


def test_samples_together_add_statistics_and_degrees():
    first, second = ([30, 70], [0.4, 0.6]), ([50, 25, 25], [0.4, 0.3, 0.3])
    together = compare_together([first, second], alpha=0.01)
    statistic = sum(likelihood_ratio(np.array(c, float), np.array(law) * sum(c)) for c, law in (first, second))
    assert (together.draws, together.cells, together.degrees) == (200, 5, 3)
    assert together.p_value == pytest.approx(stats.chi2.sf(statistic, 3))
    assert together.detectable_tv == detectable_tv(200, 3, 0.01)


def test_holm_by_hand():
    p_values = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}
    # In order 0.005, 0.01, 0.03, 0.04 against 0.0125, 0.0167, 0.025, 0.05: the third fails, so the fourth does too.
    assert list(holm(p_values, 0.05)) == ["d", "a"]
    assert list(holm({"a": 0.01, "b": 0.02, "c": 0.03}, 0.06)) == ["a", "b", "c"]
    assert holm({"a": 0.03, "b": 0.03}, 0.05) == {}
    assert list(holm({"a": 0.025, "b": 0.05}, 0.05)) == ["a", "b"]
    assert holm({}, 0.05) == {}


def test_family_judges_all_of_its_tests_and_misses_none():
    alpha = SUITE_ALPHA / len(FAMILIES)
    family = Family("calibration", 2)
    assert family.test_alpha == alpha / 2
    family.add("first", alpha / 2.1)
    with pytest.raises(ValueError, match="two tests called 'first'"):
        family.add("first", 0.5)
    with pytest.raises(AssertionError, match="1 tests, 2 announced"):
        family.check()
    family.add("second", 0.5)
    with pytest.raises(AssertionError, match=r"other laws than stated, by p-value: .*first"):
        family.check()
    with pytest.raises(AssertionError, match="other laws"), Family("calibration", 1) as one:
        one.add("only", alpha)
    with Family("calibration", 1) as one:
        one.add("only", 1.01 * alpha)
    with pytest.raises(ValueError, match=r"'new' is not in statistics\.FAMILIES"):
        Family("new", 1)


def test_every_family_of_the_suite_is_in_the_list_and_has_its_share_once():
    """The budget holds for the whole suite only if every family is listed and none is judged twice."""
    used: Counter[str] = Counter()
    for file in Path(__file__).parent.glob("*.py"):
        if file == Path(__file__):
            used["calibration"] += 1  # once here; the others in this file are hand-made examples
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Family":
                name = ast.unparse(node.args[0])
                rules = ("rheo", "rrsw", "topk") if "{rule}" in name else ("",)
                backends = ("torch", "numba") if "{backend.name}" in name else ("",)
                pattern = ast.literal_eval(name.lstrip("f")).replace("{backend.name}", "{backend}")
                used.update(pattern.format(rule=rule, backend=backend) for rule in rules for backend in backends)
    assert dict(used) == dict.fromkeys(FAMILIES, 1)
    assert SUITE_ALPHA == 1e-6


def test_what_is_no_law_is_refused():
    for counts, law, message in (
        ([1, 1], [0.5, 0.4], "the law is none: it sums to 0.9"),
        ([1, 1], [1.5, -0.5], "smallest entry -0.5"),
        ([0, 0], [0.5, 0.5], "counts are empty"),
        ([1, 1, 1], [0.5, 0.5], "counts have shape"),
        ([1], {(0,): 1.0}, "both be mappings"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(counts, law, alpha=0.01)

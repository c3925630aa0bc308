"""Statistical tests of losslessness that say how often they err and what they can see.

Counts of *joint* token blocks are compared with their exact law. Three numbers make such a test honest:

* The false-alarm rate. The whole suite has one budget, ``SUITE_ALPHA``, shared equally by ``FAMILIES``; within a
  family Holm's procedure holds for any dependence between its tests. Seeds are fixed, so a verdict never changes by
  rerunning.
* The smallest bias it can see. A law at total variation t or more from the stated one gives the statistic a
  noncentrality of 2 n KL >= 4 n t^2 (Pinsker), whatever the direction of the bias; the worst direction moves mass out
  of cells that hold half of it. ``detectable_tv`` is the t that is found with probability ``POWER``.
* The sample size, which must suffice for the bias that the test claims to see.

The statistic is the likelihood ratio G = 2 sum O log(O / E) with Williams' correction, referred to the chi-square law.
Pearson's sum (O - E)^2 / E agrees at the usual levels, but a budget of 1e-6 sits far out in the tail, where a Poisson
count is not Gaussian: with ten cells of ten, Pearson's rate at a level of 1e-9 is 140 times that level, G's is 1.2
times (``test_statistics`` computes both).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

SUITE_ALPHA = 1e-6  # false alarms of the whole suite
POWER = 0.99
MIN_EXPECTED = 10.0  # per cell; the usual rule of 5 is meant for levels of a few per cent
FAMILIES = (
    "calibration",
    "chi square rheo",
    "chi square rrsw",
    "chi square topk",
    "chi square deep",
    "real model",
    "statistical mutants",
)
"""Every family of tests in the suite, by the name given to ``Family``; ``test_statistics`` checks the list."""

Block = tuple[int, ...]
Counts = Mapping[Block, int] | Sequence[int] | NDArray[np.int64]
Law = Mapping[Block, float] | Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """The outcome of comparing counts with a law.

    Attributes:
        draws: the sample size.
        cells: how many cells were left after pooling.
        degrees: of freedom; one less than cells for each sample.
        pooled_mass: what the law gives to outcomes that share a cell. A bias that only moves mass around inside such
            cells is not seen; any other counts towards the total variation between cells.
        p_value: of the statistic; 1 when there is nothing to compare, a single cell.
        detectable_tv: smallest total variation between cells that a test at level ``alpha`` sees with probability
            ``POWER`` (of several samples: its mean, weighted by draws); infinite when there is nothing to compare.
        alpha: the level that ``detectable_tv`` is for.
    """

    draws: int
    cells: int
    degrees: int
    pooled_mass: float
    p_value: float
    detectable_tv: float
    alpha: float


def compare(counts: Counts, law: Law, *, alpha: float) -> Comparison:
    """Compare counts with a law.

    Args:
        counts: how often each outcome came up: block -> count, or [outcomes] integers.
        law: the probability of each outcome in the same form; a block that is missing is impossible.
        alpha: the level of the test, for ``detectable_tv``; the p-value does not depend on it.

    Raises:
        AssertionError: an impossible outcome came up; it is named.
        ValueError: the law is not one, there are no counts, or the two have different forms.
    """
    return compare_together([(counts, law)], alpha=alpha)


def compare_together(samples: Sequence[tuple[Counts, Law]], *, alpha: float) -> Comparison:
    """Compare several independent samples with their laws in one test: their statistics and degrees of freedom add.

    Args:
        samples: counts and law of each, as for ``compare``.
        alpha: as for ``compare``.

    Raises:
        AssertionError, ValueError: as ``compare``.
    """
    draws = cells = 0
    statistic = pooled_mass = 0.0
    for counts, law in samples:
        observed, probabilities = _aligned(counts, law)
        size = int(observed.sum())
        if size == 0:
            raise ValueError("counts are empty: nothing was drawn")
        cell_of = pooled_cells(probabilities, size)
        statistic += likelihood_ratio(np.bincount(cell_of, observed), np.bincount(cell_of, size * probabilities))
        pooled_mass += size * float(probabilities[np.bincount(cell_of)[cell_of] > 1].sum())
        draws, cells = draws + size, cells + int(cell_of.max()) + 1
    degrees = cells - len(samples)
    return Comparison(
        draws=draws,
        cells=cells,
        degrees=degrees,
        pooled_mass=pooled_mass / draws,
        p_value=float(stats.chi2.sf(statistic, degrees)) if degrees else 1.0,
        detectable_tv=detectable_tv(draws, degrees, alpha),
        alpha=alpha,
    )


def assert_same_law(counts: Counts, law: Law, *, alpha: float, min_detectable_tv: float, name: str = "") -> Comparison:
    """Assert that the counts are a sample of the law, and that the sample could have shown otherwise.

    Args:
        counts, law: as for ``compare``.
        alpha: the probability of a false alarm.
        min_detectable_tv: the bias, in total variation between cells, that must be seen with probability ``POWER``.
        name: how messages call the test.

    Raises:
        AssertionError: an impossible outcome, a sample too small for ``min_detectable_tv`` (the message gives the size
            needed), or a p-value below ``alpha``.
    """
    comparison = compare(counts, law, alpha=alpha)
    _assert_sample_suffices(comparison, [(counts, law)], min_detectable_tv, name)
    assert comparison.p_value > alpha, f"{name or 'counts'}: the law is another one: {comparison}"
    return comparison


@dataclass
class Family:
    """Tests that share one part of the suite's false-alarm budget; a context manager that judges them at its end.

    Attributes:
        name: one of ``FAMILIES``.
        tests: how many tests the family has. Power is computed for a level of alpha / ``tests``, the least that Holm's
            procedure gives any of them.
        p_values: what was added so far.
    """

    name: str
    tests: int
    p_values: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in FAMILIES:
            raise ValueError(f"{self.name!r} is not in statistics.FAMILIES: a new family must share the budget")

    @property
    def alpha(self) -> float:
        """The family's false-alarm budget."""
        return SUITE_ALPHA / len(FAMILIES)

    @property
    def test_alpha(self) -> float:
        """The least level that a single test has."""
        return self.alpha / self.tests

    def compare(self, label: str, counts: Counts, law: Law, *, min_detectable_tv: float) -> Comparison:
        """Add a test; what does not wait for the others fails here (impossible outcome, too small a sample)."""
        return self.compare_together(label, [(counts, law)], min_detectable_tv=min_detectable_tv)

    def compare_together(
        self, label: str, samples: Sequence[tuple[Counts, Law]], *, min_detectable_tv: float
    ) -> Comparison:
        """Add a test of several independent samples at once."""
        try:
            comparison = compare_together(samples, alpha=self.test_alpha)
        except AssertionError as error:
            raise AssertionError(f"{label}: {error}") from None
        _assert_sample_suffices(comparison, samples, min_detectable_tv, label)
        self.add(label, comparison.p_value)
        return comparison

    def add(self, label: str, p_value: float) -> None:
        """Add the p-value of a test made elsewhere."""
        if label in self.p_values:
            raise ValueError(f"{self.name} has two tests called {label!r}")
        self.p_values[label] = p_value

    def check(self) -> None:
        """Judge all tests of the family.

        Raises:
            AssertionError: another number of tests than announced, or some of them rejected.
        """
        assert len(self.p_values) == self.tests, f"{self.name}: {len(self.p_values)} tests, {self.tests} announced"
        rejected = holm(self.p_values, self.alpha)
        assert not rejected, f"{self.name}: other laws than stated, by p-value: {rejected}"

    def __enter__(self) -> Family:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.check()


def holm(p_values: Mapping[str, float], alpha: float) -> dict[str, float]:
    """Holm's procedure: what is rejected at a family-wise error of ``alpha``, smallest p-value first."""
    rejected: dict[str, float] = {}
    for label, p_value in sorted(p_values.items(), key=lambda item: item[1]):
        if p_value > alpha / (len(p_values) - len(rejected)):
            break
        rejected[label] = p_value
    return rejected


def pooled_cells(probabilities: NDArray[np.float64], draws: int) -> NDArray[np.int64]:
    """Which cell each outcome belongs to, so that every cell expects at least ``MIN_EXPECTED`` draws.

    Depends on the law and on the sample size, never on what was drawn. Common outcomes are cells of their own. Rare
    ones join their rare neighbours in the order given, so blocks that begin with the same tokens stay together. A last
    group that stays too small joins the one before it or, when it is the only one, the least common outcome that is a
    cell of its own.

    Args:
        probabilities: [outcomes] the law.
        draws: the sample size.

    Returns:
        [outcomes] numbers of cells, 0, 1, ...
    """
    expected = probabilities * draws
    cell_of = np.full(expected.size, -1)
    common = np.flatnonzero(expected >= MIN_EXPECTED)
    cell_of[common] = np.arange(common.size)
    rare = np.flatnonzero(expected < MIN_EXPECTED)
    cell, total = common.size, 0.0
    groups = np.empty(rare.size, dtype=np.int64)
    for place, value in enumerate(expected[rare].tolist()):
        groups[place] = cell
        total += value
        if total >= MIN_EXPECTED:
            cell, total = cell + 1, 0.0
    if cell > common.size:
        groups = np.minimum(groups, cell - 1)
    elif common.size:
        groups[:] = cell_of[common[np.argmin(expected[common])]]
    cell_of[rare] = groups
    return cell_of


def likelihood_ratio(observed: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """G = 2 sum O log(O / E), divided by Williams' correction, which gives it the mean of its chi-square law.

    Args:
        observed: [cells] counts.
        expected: [cells] their expectations, positive, of the same total.
    """
    cells = observed.size
    if cells == 1:
        return 0.0
    terms = np.where(observed > 0, observed * np.log(np.maximum(observed, 1) / expected), 0.0)
    correction = 1 + ((expected.sum() / expected).sum() - 1) / (6 * expected.sum() * (cells - 1))
    return float(2 * terms.sum() / correction)


@cache
def noncentrality(degrees: int, alpha: float, power: float = POWER) -> float:
    """The noncentrality that a chi-square test with these degrees of freedom detects at this level with this power."""
    critical = stats.chi2.isf(alpha, degrees)

    def excess(value: float) -> float:
        return float(stats.ncx2.sf(critical, degrees, value)) - power

    high = float(critical) + 10.0
    while excess(high) < 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-6))


def detectable_tv(draws: int, degrees: int, alpha: float, power: float = POWER) -> float:
    """The smallest total variation between cells that so many draws show: 4 n t^2 = noncentrality."""
    return math.sqrt(noncentrality(degrees, alpha, power) / (4 * draws)) if degrees else math.inf


def draws_needed(law: Law, alpha: float, min_detectable_tv: float, power: float = POWER) -> int:
    """How many draws show a bias of ``min_detectable_tv``; more draws make finer cells, which is taken into account."""
    probabilities = _aligned({} if isinstance(law, Mapping) else [0] * len(law), law)[1]
    draws = 1
    while True:
        degrees = max(1, int(pooled_cells(probabilities, draws).max()))
        needed = math.ceil(noncentrality(degrees, alpha, power) / (4 * min_detectable_tv**2))
        if needed <= draws:
            return draws
        draws = needed


def _assert_sample_suffices(
    comparison: Comparison, samples: Sequence[tuple[Counts, Law]], min_detectable_tv: float, name: str
) -> None:
    if comparison.detectable_tv <= min_detectable_tv:
        return
    if all(np.count_nonzero(_aligned({}, law)[1]) == 1 for _, law in samples):
        return  # a law that is certain needs no sample: any other outcome is impossible
    message = (
        f"{name or 'the sample'}: {comparison.draws} draws show a bias of {comparison.detectable_tv:.4f}, not of "
        f"{min_detectable_tv}, at level {comparison.alpha:.2g} with power {POWER}"
    )
    if len(samples) == 1:
        message += f"; that needs {draws_needed(samples[0][1], comparison.alpha, min_detectable_tv)} draws"
    raise AssertionError(message)


def _aligned(counts: Counts, law: Law) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Counts and probabilities of the possible outcomes, in lexicographic order."""
    if isinstance(law, Mapping):
        if not isinstance(counts, Mapping):
            raise ValueError("counts and law must both be mappings or both be arrays")
        blocks = sorted(block for block, probability in law.items() if probability != 0)
        impossible = sorted(block for block, count in counts.items() if count and law.get(block, 0) == 0)
        assert not impossible, f"{impossible[0]} is impossible and came up {counts[impossible[0]]} times"
        observed = np.array([counts.get(block, 0) for block in blocks], dtype=np.int64)
        probabilities = np.array([float(law[block]) for block in blocks])
    else:
        everything = np.asarray(law, dtype=np.float64)
        observed = np.zeros(everything.size, np.int64) if isinstance(counts, Mapping) else np.asarray(counts)
        if observed.shape != everything.shape or everything.ndim != 1:
            raise ValueError(f"counts have shape {observed.shape}, the law {everything.shape}; both must be [outcomes]")
        impossible = np.flatnonzero((everything == 0) & (observed > 0))
        assert not impossible.size, f"{impossible[0]} is impossible and came up {observed[impossible[0]]} times"
        observed, probabilities = observed[everything != 0], everything[everything != 0]
    if not (probabilities > 0).all() or abs(probabilities.sum() - 1) > 1e-9:
        raise ValueError(f"the law is none: it sums to {probabilities.sum()}, smallest entry {probabilities.min()}")
    return observed, probabilities

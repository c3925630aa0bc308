"""Comparing counts with a law, so that the test says how often it errs and what it can see.

Counts of *joint* token blocks are compared with their exact law. Three numbers make such a test honest:

* The false-alarm rate, ``alpha``. Of several tests, ``holm`` says which are rejected so that the probability of any
  false alarm among them is at most ``alpha``, whatever their dependence.
* The smallest bias it can see. A law at total variation t or more from the stated one gives the statistic a
  noncentrality of 2 n KL >= 4 n t^2 (Pinsker), whatever the direction of the bias; the worst direction moves mass out
  of cells that hold half of it. ``detectable_tv`` is the t that is found with probability ``POWER``.
* The sample size, which must suffice for the bias that the test claims to see: ``draws_needed``.

The statistic is the likelihood ratio G = 2 sum O log(O / E) with Williams' correction, referred to the chi-square law.
Pearson's sum (O - E)^2 / E agrees at the usual levels, but far out in the tail, where a Poisson count is not Gaussian,
it does not: with ten cells of ten, Pearson's rate at a level of 1e-9 is 140 times that level, G's is 1.2 times.

All of it is valid under one condition: the cells may depend on the law and on the sample size, never on what was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

POWER = 0.99  # the probability of seeing a bias of ``detectable_tv``
MIN_EXPECTED = 10.0  # per cell; the usual rule of 5 is meant for levels of a few per cent

Block = tuple[int, ...]
Counts = Mapping[Block, int] | Sequence[int] | NDArray[np.int64]
Law = Mapping[Block, float] | Sequence[float] | NDArray[np.float64]


class ImpossibleOutcomeError(AssertionError):
    """Something came up that the law gives probability 0: no sample is needed to reject the law.

    An ``AssertionError`` so that a test that compares fails, and does not break, where one comes up.

    Attributes:
        outcome: a block, or the place of the outcome in the law's array.
        count: how often it came up.
    """

    def __init__(self, outcome: Block | int, count: int) -> None:
        super().__init__(f"{outcome} is impossible and came up {count} times")
        self.outcome = outcome
        self.count = count


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
        ImpossibleOutcomeError: an impossible outcome came up; it is named.
        ValueError: the law is not one, there are no counts, or the two have different forms.
    """
    return compare_together([(counts, law)], alpha=alpha)


def compare_together(samples: Sequence[tuple[Counts, Law]], *, alpha: float) -> Comparison:
    """Compare several independent samples with their laws in one test: their statistics and degrees of freedom add.

    Args:
        samples: counts and law of each, as for ``compare``.
        alpha: as for ``compare``.

    Raises:
        ImpossibleOutcomeError, ValueError: as ``compare``.
    """
    draws = cells = 0
    statistic = pooled_mass = 0.0
    for counts, law in samples:
        observed, probabilities = aligned(counts, law)
        size = int(observed.sum())
        if size == 0:
            raise ValueError("counts are empty: nothing was drawn")
        cell_of = pooled_cells(probabilities, size)
        in_cells = (np.bincount(cell_of, values).astype(np.float64) for values in (observed, size * probabilities))
        statistic += likelihood_ratio(*in_cells)
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


def holm(p_values: Mapping[str, float], alpha: float) -> dict[str, float]:
    """Holm's procedure: what is rejected at a family-wise error of ``alpha``, smallest p-value first.

    Args:
        p_values: of each test, by its name; they may depend on each other.
        alpha: the probability of any false alarm among them, at most.

    Returns:
        The rejected tests' p-values.
    """
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
    """The noncentrality that a chi-square test with these degrees of freedom detects at this level with this power.

    Args:
        degrees: of freedom, at least 1.
        alpha: the test's level.
        power: the probability to detect it.
    """
    critical = stats.chi2.isf(alpha, degrees)

    def excess(value: float) -> float:
        return float(stats.ncx2.sf(critical, degrees, value)) - power

    high = float(critical) + 10.0
    while excess(high) < 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-6))


def detectable_tv(draws: int, degrees: int, alpha: float, power: float = POWER) -> float:
    """The smallest total variation between cells that so many draws show: 4 n t^2 = noncentrality.

    Infinite with 0 ``degrees``: where there is a single cell, there is nothing to compare.
    """
    return math.sqrt(noncentrality(degrees, alpha, power) / (4 * draws)) if degrees else math.inf


def draws_needed(law: Law, alpha: float, min_detectable_tv: float, power: float = POWER) -> int:
    """How many draws show a bias of ``min_detectable_tv``; more draws make finer cells, which is taken into account.

    Args:
        law: as for ``compare``.
        alpha: the level of the test.
        min_detectable_tv: the total variation between cells that is to be seen, with probability ``power``.
        power: that probability.

    Raises:
        ValueError: the law is not one.
    """
    probabilities = aligned({} if isinstance(law, Mapping) else [0] * len(law), law)[1]
    draws = 1
    while True:
        degrees = max(1, int(pooled_cells(probabilities, draws).max()))
        needed = math.ceil(noncentrality(degrees, alpha, power) / (4 * min_detectable_tv**2))
        if needed <= draws:
            return draws
        draws = needed


def aligned(counts: Counts, law: Law) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Counts and probabilities of the possible outcomes, in lexicographic order (arrays: in their own).

    Returns:
        ``(counts [outcomes], probabilities [outcomes])``, every probability positive.

    Raises:
        ImpossibleOutcomeError, ValueError: as ``compare``.
    """
    if isinstance(law, Mapping):
        if not isinstance(counts, Mapping):
            raise ValueError("counts and law must both be mappings or both be arrays")
        blocks = sorted(block for block, probability in law.items() if probability != 0)
        impossible = sorted(block for block, count in counts.items() if count and law.get(block, 0) == 0)
        if impossible:
            raise ImpossibleOutcomeError(impossible[0], counts[impossible[0]])
        observed = np.array([counts.get(block, 0) for block in blocks], dtype=np.int64)
        probabilities = np.array([float(law[block]) for block in blocks])
    else:
        everything = np.asarray(law, dtype=np.float64)
        observed = np.zeros(everything.size, np.int64) if isinstance(counts, Mapping) else np.asarray(counts)
        if observed.shape != everything.shape or everything.ndim != 1:
            raise ValueError(f"counts have shape {observed.shape}, the law {everything.shape}; both must be [outcomes]")
        unexpected = np.flatnonzero((everything == 0) & (observed > 0))
        if unexpected.size:
            raise ImpossibleOutcomeError(int(unexpected[0]), int(observed[unexpected[0]]))
        observed, probabilities = observed[everything != 0], everything[everything != 0]
    if not (probabilities > 0).all() or abs(probabilities.sum() - 1) > 1e-9:
        raise ValueError(f"the law is none: it sums to {probabilities.sum()}, smallest entry {probabilities.min()}")
    return observed, probabilities

"""Statistical tests of losslessness that say how often they err and what they can see.

``reference.statistics`` compares counts of *joint* token blocks with their exact law, and says which bias it can see.
Here is what a suite of such tests needs on top: one false-alarm budget, ``SUITE_ALPHA``, shared by ``FAMILIES`` and
within a family by Holm's procedure, which holds for any dependence between its tests; and assertions that the sample
suffices for the bias a test claims to see. Seeds are fixed, so a verdict never changes by rerunning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from reference.statistics import (
    POWER,
    Comparison,
    Counts,
    Law,
    aligned,
    compare,
    compare_together,
    draws_needed,
    holm,
)

SUITE_ALPHA = 1e-6  # false alarms of the whole suite
FAMILIES = (
    "calibration",
    "chi square torch rheo",
    "chi square torch rrsw",
    "chi square torch topk",
    "chi square torch deep",
    "chi square numba rheo",
    "chi square numba rrsw",
    "chi square numba topk",
    "chi square numba deep",
    "weights while they are learned",
    "weights while they are learned deep",
    "sizes while they are learned",
    "sizes while they are learned deep",
    "chi square triton",
    "chi square triton deep",
    "real model",
    "statistical mutants",
)
"""Every family of tests in the suite, by the name given to ``Family``; ``test_statistics`` checks the list."""


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


def _assert_sample_suffices(
    comparison: Comparison, samples: Sequence[tuple[Counts, Law]], min_detectable_tv: float, name: str
) -> None:
    if comparison.detectable_tv <= min_detectable_tv:
        return
    if all(np.count_nonzero(aligned({}, law)[1]) == 1 for _, law in samples):
        return  # a law that is certain needs no sample: any other outcome is impossible
    message = (
        f"{name or 'the sample'}: {comparison.draws} draws show a bias of {comparison.detectable_tv:.4f}, not of "
        f"{min_detectable_tv}, at level {comparison.alpha:.2g} with power {POWER}"
    )
    if len(samples) == 1:
        message += f"; that needs {draws_needed(samples[0][1], comparison.alpha, min_detectable_tv)} draws"
    raise AssertionError(message)

"""One statistical test and what may be concluded from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reference.statistics import Comparison, Counts, ImpossibleOutcomeError, Law, compare_together


@dataclass(frozen=True)
class Judgement:
    """Counts compared with their law.

    Attributes:
        p_value: 0 when something impossible came up.
        comparison: cells, power and the rest; None when something impossible came up.
        impossible: what it was; None when nothing was.
    """

    p_value: float
    comparison: Comparison | None = None
    impossible: ImpossibleOutcomeError | None = None

    @property
    def detectable_tv(self) -> float | None:
        """The smallest bias that the test sees with probability ``reference.statistics.POWER``; None without cells."""
        return self.comparison.detectable_tv if self.comparison and self.comparison.degrees else None


def judge(samples: Sequence[tuple[Counts, Law]], alpha: float) -> Judgement:
    """Compare independent samples with their laws in one test.

    Args:
        samples: as for ``reference.statistics.compare_together``.
        alpha: the level that the detectable bias is for.
    """
    try:
        comparison = compare_together(samples, alpha=alpha)
    except ImpossibleOutcomeError as error:
        return Judgement(0.0, impossible=error)
    return Judgement(comparison.p_value, comparison)


def check_alpha(alpha: float) -> None:
    """Refuse a level that is none.

    Raises:
        ValueError: not in (0, 1).
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, got {alpha}")

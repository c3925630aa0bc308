"""Calibrated weights: what a place in the tree is worth, the chance that the walk goes on through it.

A path score that is a product of chances is the chance that the whole path is accepted, so ranking by it spends the
budget where it pays. Any weight in (0, 1] that is known before the probe's token, a fill's never above its probe's,
keeps the output lossless (docs/generalisations.md); how good the chances are decides the acceptance only.

A chance is read off a curve. The argument is the draft's own mass, under the law that draws at the request's
temperature (at temperature 1 for a greedy request): of the token for leads and fills, and for a probe that of the
likeliest token it may be. (The mass of all its tail says little: where the tail is heavy, the draft matches badly.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from reference.numbers import Number

# Where curves bend. Dyadic, so that exact and float arithmetic agree on them.
KNOTS: tuple[float, ...] = (*(2.0**-k for k in range(12, 0, -1)), 0.625, 0.75, 0.875, 1.0)


LEAST = 2.0**-100


@dataclass(frozen=True)
class Curve:
    """A nondecreasing chance over the mass in [0, 1]: linear between the knots, and from 0 at 0 to the first.

    Attributes:
        values: the chance at each of ``KNOTS``, each in (0, 1], none below the one before.

    Raises:
        ValueError: another number of values, or one out of its range or order; it is named.
    """

    values: tuple[Number, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if len(self.values) != len(KNOTS):
            raise ValueError(f"a curve has {len(KNOTS)} values, one per knot, got {len(self.values)}")
        for knot, value in zip(KNOTS, self.values, strict=True):
            if not 0 < value <= 1:
                raise ValueError(f"the chance at mass {knot} is {value}; it must lie in (0, 1]")
        for (knot, value), (_, following) in pairwise(zip(KNOTS, self.values, strict=True)):
            if following < value:
                raise ValueError(f"the chance falls from {value} to {following} behind mass {knot}; it must not fall")

    def __call__(self, mass: Number) -> Number:
        """The chance at a mass in [0, 1], in the arithmetic of both; at least ``LEAST``, for a weight is positive."""
        exact = not isinstance(mass, float)
        above = min(bisect_left(KNOTS, mass), len(KNOTS) - 1)
        high, to = type(mass)(KNOTS[above]), self.values[above]
        low, start = (type(mass)(KNOTS[above - 1]), self.values[above - 1]) if above else (high * 0, to * 0)
        share = min((mass - low) / (high - low), 1 if exact else 1.0)
        return max(start + (to - start) * share, type(mass)(LEAST))


@dataclass(frozen=True)
class Curves:
    """The chances of one range of temperatures.

    Attributes:
        lead: of a token that is offered before the probe, or at a node without one.
        probe: of a probe, over the mass of the likeliest token that it may be.
        fill: of a token that is offered behind the probe.
        further: the shares of the second probe of a node, the third and so on, see ``probes``: each is drawn from what
            the earlier ones left, and is tested only where they were turned down. The last is for all beyond.

    Raises:
        ValueError: ``further`` is empty, or a share in it is out of (0, 1] or above the one before; it is named.
    """

    lead: Curve
    probe: Curve
    fill: Curve
    further: tuple[Number, ...] = (1,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "further", tuple(self.further))
        if not self.further:
            raise ValueError("further is empty; it needs the second probe's share at least")
        for before, share in pairwise((1, *self.further)):
            if not 0 < share <= 1:
                raise ValueError(f"a further probe's share is {share}; it must lie in (0, 1]")
            if share > before:
                raise ValueError(f"a further probe's share rises from {before} to {share}; it must not rise")

    def share(self, probe: int) -> Number:
        """Of a probe, counted from 0; the first has all."""
        return 1 if probe == 0 else self.further[min(probe, len(self.further)) - 1]

    def probes(self, tail: Sequence[Number]) -> list[Number]:
        """The chances of a node's probes, one for each mass in ``tail``.

        The j-th has its share of the harmonic mean of what the curve says of the tail's likeliest token and of its
        j-th: a further probe needs mass behind the earlier ones, and where the first is sure nothing is left for it.

        Args:
            tail: the largest masses that a probe may be drawn from, largest first.
        """
        read = [self.probe(mass) for mass in tail]
        return [self.share(j) * (2 * read[0] * chance / (read[0] + chance)) for j, chance in enumerate(read)]


# Requests up to each temperature share curves; greedy ones have their own, and the last are for all above.
BANDS: tuple[float, ...] = (1e-5, 0.35, 0.65, 0.9, 1.15, float("inf"))


@dataclass(frozen=True)
class Weights:
    """Curves for all temperatures.

    Attributes:
        bands: one per entry of ``BANDS``: greedy requests, then up to each temperature.
        source: where the curves come from, in words.

    Raises:
        ValueError: another number of bands.
    """

    bands: tuple[Curves, ...]
    source: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", tuple(self.bands))
        if len(self.bands) != len(BANDS):
            raise ValueError(f"weights have {len(BANDS)} bands of temperature, got {len(self.bands)}")

    def at(self, temperature: float) -> Curves:
        """The curves of a request's temperature."""
        return self.bands[band_of(temperature)]


def band_of(temperature: float) -> int:
    """Index into ``BANDS``; the first's bound, where sampling begins, is excluded, the others' are included."""
    return 0 if temperature < BANDS[0] else 1 + bisect_left(BANDS[1:], temperature)


MOST_LEADS = 5  # what "auto" considers


def lead_count(
    curves: Curves,
    masses: Sequence[Number],
    slots: int,
    score: Number,
    price: Number,
    record: Callable[[float], None] | None = None,
    probes: int = 1,
) -> int:
    """The m of ``lead_tokens="auto"``: whose slots promise most, each what its path score has above the price.

    Were places free, more leads would accept more on average; but a lead takes from the probe what it brings, and a
    place besides. A function of the path, the draft's law and the curves; ties go to the smaller m, and to a probe
    against none.

    Args:
        curves: of the request's temperature.
        masses: of the ranked tokens, largest first; only those with mass to sample.
        slots: how many slots the node has.
        score: the node's path score.
        price: the path score that earns a place in the tree.
        record: is told how close each comparison was.
        probes: how many a node has where there is room for them.

    Returns:
        m in 0 .. ``MOST_LEADS``; ``slots`` where a node without a probe promises more.
    """

    def above(chance: Number) -> Number:
        return max(score * chance - price, price * 0)

    leads = [above(curves.lead(mass)) for mass in masses[:slots]]
    best, promise = slots, sum(leads)
    for m in range(min(MOST_LEADS, slots - 1, len(masses) - 1), -1, -1):
        count = min(probes, slots - m, len(masses) - m)
        drawn = curves.probes(masses[m : m + count])
        fills = sum(above(min(drawn[-1], curves.fill(mass))) for mass in masses[m : slots - count])
        total = sum(leads[:m]) + sum(map(above, drawn)) + fills
        if record is not None:
            record(abs(float(total - promise)))
        if total >= promise:
            best, promise = m, total
    return best

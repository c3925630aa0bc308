"""Calibrated weights on tensors: ``reference.weights`` for every node of a level at once."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from reference.weights import BANDS, KNOTS, LEAST, Weights

LEAD, PROBE, FILL = range(3)
TIE = 1e-13  # far above the rounding of a sum of logs, far below what a decision may depend on


def reaches(log_scores: Tensor, threshold: float | Fraction) -> Tensor:
    """Which path scores are at least the threshold; a sum of logs may be below the log of an equal product."""
    return log_scores >= math.log(threshold) - TIE


class LevelCurves:
    """The curves of every request of a batch.

    Args:
        weights: for all temperatures.
        temperatures: [batch] one per request.
    """

    def __init__(self, weights: Weights, temperatures: Tensor) -> None:
        table, self._knots, bounds = _tables(weights, temperatures.device)
        above = 1 + torch.bucketize(temperatures.double(), bounds)
        band = torch.where(temperatures < BANDS[0], 0, above)
        self._curves = table[band]  # [batch, 3, knots + 1]

    def chance(self, kind: int, masses: Tensor) -> Tensor:
        """The chance at masses [batch, ...] in [0, 1], float64; ``kind`` is LEAD, PROBE or FILL."""
        above = torch.bucketize(masses, self._knots[1:]).clamp(max=len(KNOTS) - 1) + 1
        low, high = self._knots[above - 1], self._knots[above]
        curve, flat = self._curves[:, kind], above.flatten(1)
        start, to = (curve.gather(1, index).view_as(masses) for index in (flat - 1, flat))
        share = ((masses - low) / (high - low)).clamp(max=1.0)
        return (start + (to - start) * share).clamp(min=LEAST)

    def lead_count(self, masses: Tensor, num_slots: Tensor, parent_scores: Tensor, price: float | Fraction) -> Tensor:
        """The m of each node; ``reference.weights.lead_count``.

        Args:
            masses: [batch, beam, support] of the ranked tokens, largest first.
            num_slots: [batch, beam, 1].
            parent_scores: [batch, beam] float64, logarithm of the nodes' path scores.
            price: the path score that earns a place.

        Returns:
            [batch, beam, 1] long; ``num_slots`` where a probe would not earn a place.
        """
        scores = parent_scores.unsqueeze(2)
        most = torch.minimum(num_slots, (masses > 0).sum(dim=-1, keepdim=True)) - 1
        earning = reaches(scores + self.chance(LEAD, masses).log(), price).sum(dim=-1, keepdim=True)
        m = torch.minimum(earning, most).clamp(min=0)
        probe = self.chance(PROBE, masses.gather(-1, m))
        return torch.where((most >= 0) & reaches(scores + probe.log(), price), m, num_slots)


@lru_cache(maxsize=8)
def _tables(weights: Weights, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """[bands, 3, knots + 1] chances with that of no mass first, [knots + 1] the knots likewise, the bands' bounds."""
    curves = [
        [[0.0, *map(float, curve.values)] for curve in (band.lead, band.probe, band.fill)] for band in weights.bands
    ]
    table = torch.tensor(curves, dtype=torch.float64, device=device)
    knots = torch.tensor([0.0, *KNOTS], dtype=torch.float64, device=device)
    return table, knots, torch.tensor(BANDS[1:], dtype=torch.float64, device=device)

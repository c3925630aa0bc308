"""Calibrated weights on tensors: ``reference.weights`` for every node of a level at once."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from optimized.ranges import arange
from reference.weights import BANDS, KNOTS, LEAST, MOST_LEADS, Weights

LEAD, PROBE, FILL = range(3)


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

    def lead_count(self, masses: Tensor, num_slots: Tensor) -> Tensor:
        """The m that promises most at each node; ``reference.weights.lead_count``.

        Args:
            masses: [batch, beam, support] of the ranked tokens, largest first.
            num_slots: [batch, beam, 1].

        Returns:
            [batch, beam, 1] long; ``num_slots`` where a node without a probe promises more.
        """
        most = masses.shape[-1]
        place = arange(most, masses.device)
        leads = torch.where(place < num_slots, self.chance(LEAD, masses), 0.0)
        fills = torch.where(place < num_slots - 1, self.chance(FILL, masses), 0.0)
        drawable = (masses > 0).sum(dim=-1, keepdim=True)
        before = torch.nn.functional.pad(leads.cumsum(dim=-1), (1, 0))
        best, promise = num_slots, before[..., -1:]
        for m in range(min(MOST_LEADS, most - 1), -1, -1):
            tail = masses[..., m:].sum(dim=-1, keepdim=True).clamp(max=1.0)
            probe = self.chance(PROBE, tail)
            total = before[..., m : m + 1] + probe + torch.minimum(fills[..., m:], probe).sum(dim=-1, keepdim=True)
            better = (total >= promise) & (m < num_slots) & (m < drawable)
            best, promise = torch.where(better, m, best), torch.where(better, total, promise)
        return best


@lru_cache(maxsize=8)
def _tables(weights: Weights, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """[bands, 3, knots + 1] chances with that of no mass first, [knots + 1] the knots likewise, the bands' bounds."""
    curves = [
        [[0.0, *map(float, curve.values)] for curve in (band.lead, band.probe, band.fill)] for band in weights.bands
    ]
    table = torch.tensor(curves, dtype=torch.float64, device=device)
    knots = torch.tensor([0.0, *KNOTS], dtype=torch.float64, device=device)
    return table, knots, torch.tensor(BANDS[1:], dtype=torch.float64, device=device)

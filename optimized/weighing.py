"""Calibrated weights on tensors: ``reference.weights`` for every node of a level at once."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from optimized.ranges import arange
from reference.weights import BANDS, KNOTS, LEAST, MOST_LEADS, Weights

LEAD, PROBE, FILL = range(3)
TIE = 1e-13  # far above the rounding of a sum, far below what a decision may depend on


def reaches(log_scores: Tensor, threshold: float | Fraction) -> Tensor:
    """Which path scores, given as logarithms of any shape, are at least the threshold (> 0), which is not.

    A sum of logarithms may lie below the logarithm of an equal product by its rounding; that much is forgiven.
    """
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
        above = torch.bucketize(masses.contiguous(), self._knots[1:]).clamp(max=len(KNOTS) - 1) + 1
        low, high = self._knots[above - 1], self._knots[above]
        curve, flat = self._curves[:, kind], above.flatten(1)
        start, to = (curve.gather(1, index).view_as(masses) for index in (flat - 1, flat))
        share = ((masses - low) / (high - low)).clamp(max=1.0)
        return (start + (to - start) * share).clamp(min=LEAST)

    def lead_count(
        self, masses: Tensor, num_slots: Tensor, branching: int, parent_scores: Tensor, price: float
    ) -> Tensor:
        """The m of each node; ``reference.weights.lead_count``.

        Args:
            masses: [batch, beam, support] of the ranked tokens, largest first.
            num_slots: [batch, beam, 1].
            branching: the most slots that a node may have.
            parent_scores: [batch, beam] float64, logarithm of the nodes' path scores.
            price: the path score that earns a place in the tree.

        Returns:
            [batch, beam, 1] long; ``num_slots`` where a node without a probe promises more.
        """
        top, scores = masses[..., :branching], parent_scores.exp().unsqueeze(2)
        place = arange(top.shape[-1], masses.device)
        drawable = (masses > 0).sum(dim=-1, keepdim=True)
        leads = (scores * self.chance(LEAD, top) - price).clamp(min=0) * (place < num_slots)
        before = torch.nn.functional.pad(leads.cumsum(dim=-1), (1, 0))
        m = place[: MOST_LEADS + 1]
        probes = self.chance(PROBE, top[..., : len(m)])
        fills = torch.minimum(self.chance(FILL, top).unsqueeze(2), probes.unsqueeze(3))  # [batch, beam, m, place]
        is_fill = (place >= m.unsqueeze(1)) & (place < num_slots.unsqueeze(3) - 1)
        behind = ((scores.unsqueeze(3) * fills - price).clamp(min=0) * is_fill).sum(dim=-1)
        total = before[..., : len(m)] + (scores * probes - price).clamp(min=0) + behind
        total = total.masked_fill((m >= num_slots) | (m >= drawable), -torch.inf)
        best = total.amax(dim=-1, keepdim=True)
        first = (total >= best - TIE).int().argmax(dim=-1, keepdim=True)
        return torch.where(best >= before[..., -1:] - TIE, first, num_slots)


@lru_cache(maxsize=8)
def _tables(weights: Weights, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """[bands, 3, knots + 1] chances with that of no mass first, [knots + 1] the knots likewise, the bands' bounds."""
    curves = [
        [[0.0, *map(float, curve.values)] for curve in (band.lead, band.probe, band.fill)] for band in weights.bands
    ]
    table = torch.tensor(curves, dtype=torch.float64, device=device)
    knots = torch.tensor([0.0, *KNOTS], dtype=torch.float64, device=device)
    return table, knots, torch.tensor(BANDS[1:], dtype=torch.float64, device=device)

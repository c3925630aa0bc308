"""Calibrated weights on tensors: ``reference.weights`` for every node of a level at once."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from optimized.ranges import arange, constant, kept
from reference.weights import BANDS, KNOTS, LEAST, MOST_LEADS, Weights

TIE = 1e-13  # far above the rounding of a sum, far below what a decision may depend on
# The highest temperature of each band but the last; the first one's bound is excluded.
HOTTEST = (math.nextafter(BANDS[0], 0.0), *BANDS[1:-1])
LOWS = (0.0, *KNOTS[:-1])  # where the segments of a curve begin, and how wide they are
WIDTHS = tuple(high - low for low, high in zip(LOWS, KNOTS, strict=True))


def least_log_score(threshold: float | Fraction) -> float:
    """What the logarithm of a path score must reach where the score must reach a threshold; -inf for one of 0.

    A sum of logarithms may lie below the logarithm of an equal product by its rounding; that much is forgiven.
    """
    return math.log(threshold) - TIE if threshold > 0 else -math.inf


class Chances(NamedTuple):
    """What every ranked token of a level is worth, [batch, beam, support] float64 each, by the request's curves.

    Attributes:
        lead, fill: in such a slot.
        probe: of a first probe whose likeliest token it is.
        shares: [batch, probes] float64, of each probe of a node, see ``probes``.
    """

    lead: Tensor
    probe: Tensor
    fill: Tensor
    shares: Tensor

    def probes(self, m: Tensor, count: int) -> Tensor:
        """[batch, beam, ..., count] chances of the probes behind m leads, [batch, beam, ...]: ``Curves.probes``.

        Where the tail has fewer than ``count`` tokens, those of the last ones mean nothing.
        """
        places = m.unsqueeze(-1) + arange(count, m.device)
        last = self.probe.shape[-1] - 1
        read = self.probe.gather(-1, places.clamp(max=last).flatten(2)).view(places.shape)
        first = read[..., :1]
        shares = self.shares[:, :count].view(-1, *[1] * (places.ndim - 2), count)
        return shares * (2 * first * read / (first + read))


def slot_chances(weights: Weights, masses: Tensor, temperatures: Tensor, probes: int = 1) -> Chances:
    """The chances of a whole level; ``reference.weights.Curve`` at every mass.

    Args:
        weights: for all temperatures.
        masses: [batch, beam, support] float64 in [0, 1], what the curves are read at.
        temperatures: [batch] one per request.
        probes: of a node, at most.
    """
    device, bands = temperatures.device, band_of(temperatures)
    of_request = curve_table(weights, device)[bands]
    segment = torch.bucketize(masses, _constant(KNOTS, device)).clamp(max=len(KNOTS) - 1).flatten(1)
    found = of_request.gather(2, segment.unsqueeze(1).expand(-1, of_request.shape[1], -1))
    start, rise = found.unflatten(2, masses.shape[1:]).chunk(2, dim=1)
    low, width = (_constant(ends, device).take(segment).view_as(masses) for ends in (LOWS, WIDTHS))
    share = ((masses - low) / width).clamp(max=1.0)
    lead, probe, fill = (start + rise * share.unsqueeze(1)).clamp(min=LEAST).unbind(1)
    return Chances(lead, probe, fill, probe_shares(weights, probes, device)[bands])


def lead_count(
    chances: Chances,
    drawable: Tensor,
    num_slots: Tensor,
    branching: int,
    parent_scores: Tensor,
    price: float,
) -> Tensor:
    """The m of each node; ``reference.weights.lead_count``.

    Args:
        chances: of the ranked tokens, likeliest first.
        drawable: [batch, beam, 1] long, how many of them have mass to sample.
        num_slots: [batch, beam, 1].
        branching: the most slots that a node may have.
        parent_scores: [batch, beam] float64, logarithm of the nodes' path scores.
        price: the path score that earns a place in the tree.

    Returns:
        [batch, beam, 1] long; ``num_slots`` where a node without a probe promises more.
    """
    shares = chances.shares
    lead, fill = (one[..., :branching] for one in (chances.lead, chances.fill))
    scores, place = parent_scores.exp().unsqueeze(2), arange(lead.shape[-1], lead.device)
    leads = (scores * lead - price).clamp(min=0) * (place < num_slots)
    before = torch.nn.functional.pad(leads.cumsum(dim=-1), (1, 0))
    m = place[: MOST_LEADS + 1]
    # [batch, beam, m, probe or place]
    count = (torch.minimum(num_slots, drawable) - m).clamp(1, shares.shape[1]).unsqueeze(3)
    drawn = chances.probes(m.expand(*lead.shape[:2], -1), shares.shape[1])
    is_drawn = arange(shares.shape[1], lead.device) < count
    fills = torch.minimum(fill.unsqueeze(2), drawn.gather(3, count - 1))
    is_fill = (place >= m.unsqueeze(1)) & (place < num_slots.unsqueeze(3) - count)
    behind = ((scores.unsqueeze(3) * fills - price).clamp(min=0) * is_fill).sum(dim=-1)
    promised = ((scores.unsqueeze(3) * drawn - price).clamp(min=0) * is_drawn).sum(dim=-1)
    total = before[..., : len(m)] + promised + behind
    total = total.masked_fill((m >= num_slots) | (m >= drawable), -torch.inf)
    best = total.amax(dim=-1, keepdim=True)
    first = (total >= best - TIE).int().argmax(dim=-1, keepdim=True)
    return torch.where(best >= before[..., -1:] - TIE, first, num_slots)


@kept
def curve_table(weights: Weights, device: torch.device) -> Tensor:
    """[bands, 6, segments] where leads, probes and fills start in each segment, and how much they rise in it.

    A segment lies between two knots; the first begins at 0.
    """
    bands = [[[0.0, *map(float, curve.values)] for curve in (one.lead, one.probe, one.fill)] for one in weights.bands]
    values = torch.tensor(bands, dtype=torch.float64)
    return torch.cat([values[..., :-1], values.diff(dim=-1)], dim=1).to(device)


@kept
def probe_shares(weights: Weights, probes: int, device: torch.device) -> Tensor:
    """[bands, probes] float64: the share of each probe of a node."""
    shares = [[float(band.share(probe)) for probe in range(probes)] for band in weights.bands]
    return torch.tensor(shares, dtype=torch.float64, device=device)


def band_of(temperatures: Tensor) -> Tensor:
    """[batch] long, which of ``Weights.bands`` are each request's."""
    return torch.bucketize(temperatures.double(), _constant(HOTTEST, temperatures.device))


def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    return constant(values, device, torch.float64)

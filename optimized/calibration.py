"""Calibration: the curves of ``reference.weights`` learned from what verification computes anyway.

At every node where a walk stands the target's law p is known, and with it, exactly and not as one outcome, the chance
of everything the node could have offered: p(x) of a lead x, the overlap of p and q~ of a probe, max(0, p - q~)(x) of a
fill. Each is a point of a curve. Weights made of them are used from a later step on, so they are fixed before that
step's probes are drawn, and the text keeps the target's distribution (docs/generalisations.md).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from torch import Tensor

from optimized.files import read_json, write_json
from optimized.models.embedded import embedded_head_dir
from optimized.ranges import arange
from optimized.trees import TreeBatch
from optimized.verification import VerifyBatch
from reference.weights import BANDS, KNOTS, LEAST, MOST_LEADS, Curve, Curves, Weights, band_of

KINDS = ("lead", "probe", "fill")
FURTHER = 9  # probes behind the first whose shares are learned
PRIOR_CHANCES = 4.0  # what the prior's shares count for: so many probes that are sure to be accepted
PRIOR_POINTS = 20.0  # what the prior counts for at each knot, in observed points
FORMAT = 4


def prior_weights() -> Weights:
    """What an EAGLE-3 head of middling quality is worth, where nothing has been seen yet.

    A lead is accepted with three quarters of its mass, a fill with two fifths; a probe with half of what its
    likeliest token has, and a sixteenth for the others; further probes have a half, a third, a quarter and so on.
    """
    lead = Curve(tuple(0.75 * knot for knot in KNOTS))
    fill = Curve(tuple(0.4 * knot for knot in KNOTS))
    probe = Curve(tuple(min(2 * knot, 0.0625 + 0.5 * knot) for knot in KNOTS))
    further = tuple(1 / (before + 1) for before in range(1, FURTHER + 1))  # by how many probes come before
    return Weights((Curves(lead, probe, fill, further),) * len(BANDS), "prior")


@dataclass(frozen=True, eq=False)
class Points:
    """What the walks of one step show, for one kind of slot: where its curve is read, and the exact chance there.

    Attributes:
        bands: [n] int, of the requests' temperatures.
        masses: [n] in [0, 1].
        chances: [n] in [0, 1].
    """

    bands: NDArray[np.int64]
    masses: NDArray[np.float64]
    chances: NDArray[np.float64]


class Calibrator:
    """Learns weights from walks, in the order in which they come.

    Args:
        prior: what holds until enough has been seen.
        source: how the weights that come out name their origin.
    """

    def __init__(self, prior: Weights | None = None, source: str = "learned online") -> None:
        self.prior = prior or prior_weights()
        self.source = source
        self.points = 0
        # That have been decoded with it; see ``RheoDecoder``. Every prior counts from elsewhere: its weights must not
        # meet the random numbers again that shaped them.
        self.requests = 0 if prior is None else zlib.crc32(repr(prior.bands).encode()) << 32
        shape = (len(BANDS), len(KINDS), len(KNOTS))
        self._counts = np.full(shape, PRIOR_POINTS)
        shares = [[float(band.share(probe)) for probe in range(FURTHER + 1)] for band in self.prior.bands]
        self._probe_chances = PRIOR_CHANCES * np.array(shares)  # summed over nodes, of every probe in turn
        self._probe_means = np.full_like(self._probe_chances, PRIOR_CHANCES)  # and what shares are taken of
        self._sums = PRIOR_POINTS * np.array(
            [[[float(v) for v in getattr(band, kind).values] for kind in KINDS] for band in self.prior.bands]
        )

    def observe(
        self,
        trees: TreeBatch,
        walk: VerifyBatch,
        laws: list[Tensor],
        branching: int,
        temperatures: Tensor,
        failed: Tensor | None = None,
    ) -> None:
        """Learn from the walks of one step.

        Args:
            trees: grown with calibrated weights.
            walk: of these trees.
            laws: the target's laws at every level of the walk, [batch, vocab] each, in order (``TargetLaws.kept``).
            branching: slots of a node.
            temperatures: [batch].
            failed: [batch] bool, whose logits were unusable: nothing is learned from them.
        """
        if trees.law_rows is None:  # roots only: nothing was drafted
            return
        if failed is not None:
            walk = replace(walk, rows=walk.rows.masked_fill(failed[:, None], -1))
        nodes = walked_nodes(trees, walk, laws)
        of_request = np.array([band_of(float(temperature)) for temperature in temperatures.tolist()], dtype=np.int64)
        bands = of_request[nodes.requests]
        for kind, points in enumerate(_points(nodes, bands, branching)):
            self._add(kind, points)
        if trees.probes > 1:
            self._add_probes(nodes, bands)

    def _add(self, kind: int, points: Points) -> None:
        knots = np.array(KNOTS)
        seen = points.masses >= knots[0]  # below, a curve is a line to 0 and has nothing to learn
        masses, bands, chances = points.masses[seen].clip(max=1.0), points.bands[seen], points.chances[seen]
        above = np.searchsorted(knots, masses).clip(1)
        share = (masses - knots[above - 1]) / (knots[above] - knots[above - 1])
        for knot, part in ((above - 1, 1 - share), (above, share)):
            np.add.at(self._counts, (bands, kind, knot), part)
            np.add.at(self._sums, (bands, kind, knot), part * chances)
        self.points += len(masses)

    def _add_probes(self, nodes: WalkedNodes, bands: NDArray[np.int64]) -> None:
        """Several probes behind a lead: the chance of each, and the mean that ``Curves.probes`` takes a share of."""
        leads = min(1, nodes.masses.shape[1] - 1)
        chances, _, _ = nodes.probes(leads, FURTHER + 1, np.random.default_rng(self.points))
        masses = nodes.masses[:, leads : leads + FURTHER + 1]
        for band in np.unique(bands[bands > 0]):
            curve = self._curve(band, KINDS.index("probe"))
            values = np.array([0.0, *curve.values], dtype=float)
            read = np.interp(masses[bands == band], (0.0, *KNOTS), values).clip(min=LEAST)
            means = 2 * read[:, :1] * read / (read[:, :1] + read)
            self._probe_chances[band] += chances[bands == band].sum(axis=0)
            self._probe_means[band, : means.shape[1]] += means.sum(axis=0)

    def weights(self) -> Weights:
        """The curves by everything seen so far."""
        bands = [
            Curves(**{kind: self._curve(band, index) for index, kind in enumerate(KINDS)}, further=self._further(band))
            for band in range(len(BANDS))
        ]
        return Weights(tuple(bands), f"{self.source}, {self.points} points")

    def _curve(self, band: int, kind: int) -> Curve:
        counts = self._counts[band, kind]
        rising = isotonic_regression(self._sums[band, kind] / counts, weights=counts).x
        return Curve(tuple(float(value) for value in np.maximum.accumulate(rising.clip(LEAST, 1.0))))

    def _further(self, band: int) -> tuple[float, ...]:
        shares = (self._probe_chances[band] / self._probe_means[band])[1:]
        return tuple(float(share) for share in np.minimum.accumulate(shares.clip(LEAST, 1.0)))


@dataclass(frozen=True, eq=False)
class WalkedNodes:
    """The expanded nodes where walks stood: what the draft offered there, and the target's law of it.

    Attributes:
        requests: [n] int.
        masses: [n, support] of the ranked tokens, under the law that draws at the request's temperature.
        target_probs: [n, support] of the same tokens.
    """

    requests: NDArray[np.int64]
    masses: NDArray[np.float64]
    target_probs: NDArray[np.float64]

    def probe(self, m: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Behind m leads: [n] the overlap of p and q~, and [n, support - m] max(0, p - q~)."""
        mass = self.masses[:, m:].sum(axis=1, keepdims=True)
        law = np.divide(self.masses[:, m:], mass, out=np.zeros_like(self.masses[:, m:]), where=mass > 0)
        target_probs = self.target_probs[:, m:]
        return np.minimum(target_probs, law).sum(axis=1), np.maximum(target_probs - law, 0)

    def probes(
        self, m: int, count: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
        """Behind m leads and so many probes, drawn here; those of greedy requests say nothing.

        Returns:
            [n, count] the chance that the walk goes on through the first probe, the second and so on, each exact but
            for the earlier ones' tokens; [n, support - m] that of a fill behind them; and which tokens were drawn.
        """
        left, target_probs = self.masses[:, m:].copy(), self.target_probs[:, m:].copy()
        alive, rows, drawn = np.ones(len(left)), np.arange(len(left)), np.zeros(left.shape, dtype=bool)
        chances = np.zeros((len(left), count))
        for probe in range(count):
            total = left.sum(axis=1, keepdims=True)
            law = np.divide(left, total, out=np.zeros_like(left), where=total > 0)
            overlap = np.minimum(target_probs, law).sum(axis=1, keepdims=True)
            chances[:, probe] = alive * overlap[:, 0]
            cumulative = law.cumsum(axis=1)
            token = (cumulative > rng.random((len(left), 1)) * cumulative[:, -1:]).argmax(axis=1)
            q, p = law[rows, token], target_probs[rows, token]
            alive *= np.where(q > p, 1 - np.divide(p, q, out=np.ones_like(p), where=q > 0), 0.0)
            rest = np.maximum(target_probs - law, 0)
            target_probs = np.divide(rest, 1 - overlap, out=np.zeros_like(rest), where=overlap < 1)
            left[rows, token] = 0
            drawn[rows, token] = True
        return chances, alive[:, None] * target_probs, drawn


def walked_nodes(trees: TreeBatch, walk: VerifyBatch, laws: list[Tensor]) -> WalkedNodes:
    """The nodes of one step; arguments as of ``Calibrator.observe``."""
    assert trees.law_rows is not None
    assert trees.masses is not None
    places = arange(trees.law_rows.shape[1], trees.law_rows.device)
    own = (trees.law_rows > 0) | (places == 0)
    masses, probs, requests = [], [], []
    for level, law in enumerate(laws):
        row = walk.rows[:, level]
        matches = (trees.law_rows == row[:, None]) & own & (row >= 0)[:, None]
        found = matches.any(dim=1).nonzero().flatten()
        index = matches[found].long().argmax(dim=1)
        ids = trees.probe_law_ids[found, index]
        masses.append(trees.masses[found, index])
        probs.append(law[found].gather(1, ids))
        requests.append(found)
    return WalkedNodes(*(torch.cat(parts).cpu().numpy() for parts in (requests, masses, probs)))


def _points(nodes: WalkedNodes, bands: NDArray[np.int64], branching: int) -> tuple[Points, Points, Points]:
    """For leads, probes and fills; ``bands`` [n] of the nodes' requests."""
    first = min(branching, nodes.masses.shape[1])

    def points(bands: NDArray[np.int64], masses: NDArray[np.float64], chances: NDArray[np.float64]) -> Points:
        return Points(np.broadcast_to(bands[:, None], masses.shape).ravel(), masses.ravel(), chances.ravel())

    leads = points(bands, nodes.masses[:, :first], nodes.target_probs[:, :first])
    sampled = bands > 0
    bands = bands[sampled]
    nodes = WalkedNodes(nodes.requests[sampled], nodes.masses[sampled], nodes.target_probs[sampled])
    probes, fills = [], []
    for m in range(min(MOST_LEADS + 1, first)):
        overlap, rest = nodes.probe(m)
        probes.append(points(bands, nodes.masses[:, m : m + 1], overlap[:, None]))
        fills.append(points(bands, nodes.masses[:, m:first], rest[:, : first - m]))
    return leads, _together(probes), _together(fills)


def _together(parts: Sequence[Points]) -> Points:
    return Points(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("bands", "masses", "chances")))


def save_weights(weights: Weights, path: Path, provenance: dict[str, str]) -> None:
    """Write weights as a small JSON file with where they come from."""
    bands = [
        {
            "up_to_temperature": str(bound),
            **{kind: list(map(float, getattr(band, kind).values)) for kind in KINDS},
            "further": list(map(float, band.further)),
        }
        for bound, band in zip(BANDS, weights.bands, strict=True)
    ]
    content = {"format": FORMAT, "source": weights.source, "provenance": provenance, "knots": KNOTS, "bands": bands}
    write_json(path, content)


def weights_file(path: Path | str) -> Path:
    """Where weights are: the path itself, or for "embedded" the file that comes with the embedded head."""
    return embedded_head_dir() / "weights.json" if str(path) == "embedded" else Path(path)


def load_weights(path: Path | str) -> Weights:
    """Read what ``save_weights`` wrote.

    Args:
        path: the file; "embedded" for the weights of the embedded pair.

    Raises:
        ValueError: no such file, of another format, or with curves that are none; the message names the file.
    """
    try:
        content = read_json(weights_file(path))
        if content["format"] != FORMAT or tuple(content["knots"]) != KNOTS:
            raise ValueError(f"it is of format {content['format']} with {len(content['knots'])} knots")
        bands = [
            Curves(**{kind: Curve(tuple(band[kind])) for kind in KINDS}, further=tuple(band["further"]))
            for band in content["bands"]
        ]
        return Weights(tuple(bands), f"{path}: {content['source']}")
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no calibrated weights ({error}); `rheo calibrate` writes such files") from error

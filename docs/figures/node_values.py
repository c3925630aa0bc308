"""The tables of docs/calibration.md: what a probe's chance may be read at, and what leads and probes are worth.

    python docs/figures/node_values.py data/*/question.jsonl

Decodes some questions with the embedded pair (float32) and prints, from the exact laws of all nodes where walks stood:
how much of the overlap's variance a curve over each feature explains (fitted on one half, read on the other), what the
curves say of further probes, and the sum of true chances less prices over the slots that are worth their place, by
leads, probes and the price of a place.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from optimized import RheoConfig, RheoDecoder, SamplingParams
from optimized.bench.questions import read_sets
from optimized.calibration import Calibrator, WalkedNodes, load_weights, walked_nodes
from reference.weights import MOST_LEADS, Curve, Curves, lead_count

QUESTIONS, TOKENS, TEMPERATURES = 7, 64, (1.0, 0.6)
PRICES = (0.01, 0.02, 0.04, 0.08, 0.15)
PROBE_TEMPERATURES = (0.5, 0.6, 0.8, 1.0, 1.25, 1.6)  # in the request's
PROBES = (1, 2, 3, 6)
BRANCHING = 10
Values = NDArray[np.float64]


class Collector(Calibrator):
    """Keeps the nodes and learns nothing."""

    def __init__(self) -> None:
        super().__init__(load_weights("embedded"))
        self.seen: list[WalkedNodes] = []

    def observe(self, trees, walk, laws, *_: object) -> None:  # type: ignore[no-untyped-def]
        if trees.law_rows is not None:
            self.seen.append(walked_nodes(trees, walk, laws))


def nodes_at(decoder: RheoDecoder, prompts: list[list[int]], temperature: float) -> WalkedNodes:
    """All nodes of some texts."""
    assert isinstance(decoder.calibrator, Collector)
    decoder.calibrator.seen.clear()
    for seed, prompt in enumerate(prompts):
        decoder.generate([prompt], SamplingParams(temperature=temperature, seed=seed, max_new_tokens=TOKENS))
    names = ("requests", "masses", "target_probs")
    return WalkedNodes(*(np.concatenate([getattr(part, name) for part in decoder.calibrator.seen]) for name in names))


def explained(nodes: WalkedNodes, half: NDArray[np.bool_]) -> None:
    """Print the variance explained per feature and m."""
    features = {
        "mass of the tail": lambda m: nodes.masses[:, m:].sum(axis=1),
        "its likeliest": lambda m: nodes.masses[:, m],
    }
    overlaps = [nodes.probe(m)[0] for m in range(MOST_LEADS)]
    for name, feature in features.items():
        read = np.concatenate([feature(m)[half] for m in range(MOST_LEADS)])
        order = np.argsort(read)
        curve = isotonic_regression(np.concatenate([overlap[half] for overlap in overlaps])[order]).x
        shares = []
        for m in range(4):
            error = overlaps[m][~half] - np.interp(feature(m)[~half], read[order], curve)
            shares.append(1 - (error**2).mean() / overlaps[m][~half].var())
        print(f"  {name}: " + ", ".join(f"{share:+.2f}" for share in shares) + " for m = 0 to 3")


def sharpened(nodes: WalkedNodes) -> None:
    """Print the overlap of probes that are drawn at another temperature than the request's."""
    for m in (1, 2, 3):
        overlaps = []
        for factor in PROBE_TEMPERATURES:
            law = nodes.masses[:, m:] ** (1 / factor)
            law /= law.sum(axis=1, keepdims=True).clip(min=1e-300)
            overlaps.append(f"{factor} T: {np.minimum(nodes.target_probs[:, m:], law).sum(axis=1).mean():.4f}")
        print(f"  overlap, m = {m}, probe at " + ", ".join(overlaps))


def further(nodes: WalkedNodes, curves: Curves) -> None:
    """Print true chances of a node's probes, and what the curves say of them, by the mass of their likeliest token."""
    for m in (0, 1, 2):
        chances, _, _ = nodes.probes(m, 4, np.random.default_rng(m))
        said = promised(curves, nodes, m, 4)
        for low, high in pairwise((0, 0.1, 0.2, 0.4, 0.6, 0.8, 1.01)):
            there = (nodes.masses[:, m] >= low) & (nodes.masses[:, m] < high)
            if there.sum() >= 50:
                each = zip(chances[there].mean(axis=0), said[there].mean(axis=0), strict=True)
                listed = ", ".join(f"{true:.3f} ({curve:.3f})" for true, curve in each)
                print(f"  m = {m}, likeliest {low} to {high}, {there.sum()} nodes: {listed}")


def promised(curves: Curves, nodes: WalkedNodes, m: int, count: int) -> Values:
    """[n, count] what the curves say of so many probes behind m leads."""
    return np.array([curves.probes(row) for row in nodes.masses[:, m : m + count].tolist()]).reshape(-1, count)


def worth(nodes: WalkedNodes, curves: Curves, price: float, probes: int) -> dict[str, Values]:
    """[n] per choice of m: true chances less prices of the slots that the curves think worth their place."""
    rng = np.random.default_rng(probes)
    leads = read_curve(curves.lead, nodes.masses[:, :BRANCHING])
    gain = (nodes.target_probs[:, :BRANCHING] - price) * (leads >= price)
    values = {}
    for m in range(MOST_LEADS + 1):
        count = min(probes, BRANCHING - m)
        chances, rest, drawn = nodes.probes(m, count, rng)
        weights = promised(curves, nodes, m, count)
        drawn, rest = drawn[:, : BRANCHING - m], rest[:, : BRANCHING - m]
        is_fill = ~drawn & ((~drawn).cumsum(axis=1) <= BRANCHING - m - count)
        fills = np.minimum(read_curve(curves.fill, nodes.masses[:, m:BRANCHING]), weights[:, -1:])
        behind = (rest - price) * (fills >= price) * is_fill
        values[f"m={m}"] = gain[:, :m].sum(axis=1) + ((chances - price) * (weights >= price)).sum(axis=1)
        values[f"m={m}"] += behind.sum(axis=1)
    values["none"] = gain.sum(axis=1)
    rows = nodes.masses[:, : 2 * BRANCHING].tolist()
    chosen = [lead_count(curves, [x for x in row if x > 0], BRANCHING, 1.0, price, None, probes) for row in rows]
    names = [f"m={m}" if m <= MOST_LEADS else "none" for m in chosen]
    values["auto"] = np.array([values[name][row] for row, name in enumerate(names)])
    return values


def read_curve(curve: Curve, masses: Values) -> Values:
    """The curve's chances at masses of any shape."""
    return np.vectorize(lambda mass: float(curve(float(mass))))(masses)


def main() -> None:
    sets = read_sets([Path(name) for name in sys.argv[1:]])
    shape = RheoConfig(branching=BRANCHING, depth=3, tree_size=16, weights=load_weights("embedded"))
    decoder = RheoDecoder.from_pretrained(config=shape, calibrator=Collector())
    prompts = [
        decoder.chat_prompt([{"role": "user", "content": question.turns[0]}])
        for one in sets
        for question in one.questions[:QUESTIONS]
    ]
    for temperature in TEMPERATURES:
        nodes = nodes_at(decoder, prompts, temperature)
        count = len(nodes.requests)
        print(f"T = {temperature}: {count} nodes")
        sharpened(nodes)
        explained(nodes, np.random.default_rng(0).random(count) < 0.5)
        curves = load_weights("embedded").at(temperature)
        further(nodes, curves)
        for price in PRICES:
            before = None
            for probes in PROBES:
                values = worth(nodes, curves, price, probes)
                before = values["m=1"] if before is None else before
                best = max((name for name in values if name != "auto"), key=lambda name: float(values[name].mean()))
                gains = [f"{name} {gain_of(values[name] - before)}" for name in ("m=1", best, "auto")]
                print(
                    f"  price {price}, {probes} probes: "
                    + ", ".join(f"{name} {value.mean():.4f}" for name, value in values.items())
                    + f"; over m=1 with one probe: {', '.join(gains)}"
                )


def gain_of(differences: Values) -> str:
    return f"{differences.mean():+.4f} +- {differences.std() / len(differences) ** 0.5:.4f}"


if __name__ == "__main__":
    main()

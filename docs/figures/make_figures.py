"""Draw the figures of the documentation from the reference: ``make figures``.

Everything shown is computed here; nothing is drawn by hand. Runs are deterministic, so a figure changes only when what
it shows does.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from optimized.calibration import load_weights
from reference import DraftLaw, GrowthNoise, RheoConfig, grow_tree
from reference.acceptance import optimal_transport, single_layer
from reference.exact import PrefixTree, prefix_trees, tree_output_law
from reference.tree import DraftTree
from reference.weights import KNOTS

HERE = Path(__file__).parent
LEAD, PROBE, FILL, PRUNED, INK = "#1f6f8b", "#d9622b", "#6b8f71", "#c9c9c9", "#222222"

plt.rcParams.update(
    {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": INK,
        "svg.hashsalt": "rheosampling",
        "savefig.facecolor": "white",
    }
)


def save(figure: Figure, name: str) -> None:
    """Write ``name``.svg beside this file, without the date that would make every run differ."""
    figure.savefig(HERE / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


# A tree and its class


def example_draft(path: tuple[int, ...]) -> DraftLaw:
    """A law over five tokens that is surer after token 0 and flatter after token 3."""
    sharpness = {0: 1.15, 1: 0.75, 2: 0.55, 3: 0.35}.get(path[-1] if path else 1, 0.6)
    shift = sum(path) % 5 if path and path[-1] != 0 else 0
    return DraftLaw.from_logits(sharpness * np.roll(np.array([2.0, 1.2, 0.7, 0.2, -0.6]), shift))


def tree_figure() -> None:
    """All nodes that growth offered, with those that the budget keeps and the probes that the class fixes."""
    shape = {"lead_tokens": 1, "branching": 3, "depth": 3, "beam": 2}
    noise = GrowthNoise(np.array([[0.72, 0.0], [0.15, 0.55], [0.9, 0.4]]))
    offered = grow_tree(RheoConfig(tree_size=1000, **shape), example_draft, noise)
    kept = grow_tree(RheoConfig(tree_size=8, **shape), example_draft, noise)
    kept_paths = {kept.path(row) for row in range(len(kept))}

    places = layout(offered)
    figure, axes = plt.subplots(figsize=(8.6, 4.6))
    for row in range(1, len(offered)):
        inside = offered.path(row) in kept_paths
        (x0, y0), (x1, y1) = places[offered.parents[row]], places[row]
        axes.plot([x0, x1], [y0, y1], color=INK if inside else PRUNED, lw=1.3 if inside else 0.9, zorder=1)
    for row, (x, y) in enumerate(places):
        draw_node(axes, offered, row, x, y, offered.path(row) in kept_paths)
    for level, text in enumerate(("root", "level 1", "level 2", "level 3")):
        axes.text(-1.1, -level, text, va="center", ha="right", color="#666666", fontsize=9)

    def dot(colour: str, label: str, edge: str = "white", face: str | None = None) -> Line2D:
        face = face or colour
        return Line2D([], [], marker="o", ls="", ms=10, mfc=face, mec=edge, label=label)

    handles = [dot(LEAD, "lead"), dot(PROBE, "probe, fixed by the class"), dot(FILL, "fill")]
    handles += [
        dot(PRUNED, "pruned", edge=PRUNED, face="white"),
        dot(PROBE, "pruned probe: any value, same class", edge=PROBE, face="white"),
    ]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncol=3, frameon=False)
    axes.set_ylim(-3.25, 0.25)
    axes.set_axis_off()
    save(figure, "tree")


def layout(tree: DraftTree) -> list[tuple[float, float]]:
    """Leaves side by side, every parent above the middle of its children."""
    x: dict[int, float] = {}

    def put(row: int, free: float) -> float:
        children = list(tree.children(row))
        if not children:
            x[row] = free
            return free + 1.0
        start = free
        for child in children:
            free = put(child, free)
        x[row] = (x[children[0]] + x[children[-1]]) / 2 if free > start else start
        return free

    put(0, 0.0)
    return [(x[row], -float(tree.depths[row])) for row in range(len(tree))]


def draw_node(axes: Axes, tree: DraftTree, row: int, x: float, y: float, kept: bool) -> None:
    """One node: its letter, its colour by kind, its path score beside it."""
    probe_row = tree.probe_child(tree.parents[row]) if row else None
    if row == 0:
        colour = INK
    elif tree.is_probe[row]:
        colour = PROBE
    else:
        colour = LEAD if probe_row is None or row < probe_row else FILL
    face = colour if kept else "white"
    edge = colour if kept or tree.is_probe[row] else PRUNED
    axes.scatter([x], [y], s=330, c=[face], edgecolors=[edge], linewidths=1.4, zorder=2)
    letter = "·" if row == 0 else "abcde"[tree.token_ids[row]]
    axes.text(x, y, letter, ha="center", va="center", color="white" if kept else "#999999", fontsize=10, zorder=3)
    if row:
        score = f"{float(tree.scores[row]):.2f}".removeprefix("0")
        axes.text(x + 0.27, y + 0.02, score, va="center", fontsize=7.5, color=INK if kept else "#aaaaaa", zorder=3)


# The martingale


def martingale_figure() -> None:
    """M_r along every branch of the growth, and its average."""
    q = [Fraction(n, 10) for n in (4, 3, 2, 1)]
    p = [Fraction(n, 10) for n in (2, 3, 4, 1)]
    text = (1, 2)
    config = RheoConfig(lead_tokens=1, branching=3, depth=2, tree_size=9, beam=3)
    values: dict[object, Fraction] = {}
    mean: dict[int, Fraction] = {}
    flow: dict[tuple[int, Fraction, Fraction, bool], Fraction] = {}  # (r, M_{r-1}, M_r, a probe?) -> probability

    figure, axes = plt.subplots(figsize=(7.6, 4.0))
    for prefix in prefix_trees(config, lambda path: DraftLaw(q, q)):
        tree, r = prefix.tree(), len(prefix.nodes)
        value = tree_output_law(tree, lambda path: p, horizon=len(text)).get(text, Fraction(0))
        values[branch(prefix, r)] = value
        mean[r] = mean.get(r, Fraction(0)) + prefix.probability * value
        if r:
            before = values[branch(prefix, r - 1)]
            step = (r, before, value, prefix.nodes[-1].is_probe)
            flow[step] = flow.get(step, Fraction(0)) + prefix.probability
    for (r, before, value, is_probe), probability in sorted(flow.items()):
        axes.plot(
            [r - 1, r],
            [float(before), float(value)],
            color=PROBE if is_probe else LEAD,
            lw=0.8 + 9 * float(probability),
            alpha=0.8,
            solid_capstyle="butt",
        )
    steps = sorted(mean)
    assert all(mean[r] == p[1] * p[2] for r in steps), "the average moved: Theorem 1 is broken"
    axes.plot(steps, [float(mean[r]) for r in steps], color=INK, lw=1.4, ls=(0, (5, 3)), zorder=5)
    axes.set_xlabel("r, nodes in the tree")
    axes.set_ylabel("P(text starts with “bc” | first r nodes)")
    axes.set_xticks(steps)
    axes.legend(
        handles=[
            Line2D([], [], color=PROBE, lw=3, label="a probe is revealed"),
            Line2D([], [], color=LEAD, lw=3, label="a lead or fill joins: nothing changes"),
            Line2D([], [], color=INK, lw=1.4, ls=(0, (5, 3)), label="average over all trees: the target's probability"),
        ],
        loc="upper left",
        frameon=False,
        fontsize=9,
    )
    save(figure, "martingale")


def branch(prefix: PrefixTree, length: int) -> object:
    """What names T_length on the way to this prefix."""
    return tuple((node.path, node.slot, node.is_probe) for node in prefix.nodes[:length])


# Acceptance of a single layer

VOCAB, PAIRS, BRANCHING = 24, 150, 4
RULES = (
    ("optimal transport", "bound", INK, (0, (4, 3))),
    ("Rheo", "rheo", PROBE, "-"),
    ("RRSw", "rrsw", LEAD, "-"),
    ("top-K", "topk", "#8a8a8a", "-"),
)


def random_pair(rng: np.random.Generator, error: float) -> tuple[np.ndarray, np.ndarray]:
    """A target law with random logits, and a draft that sees them through noise of standard deviation ``error``."""
    logits = rng.normal(0.0, 2.0, VOCAB)
    laws = [np.exp(values) / np.exp(values).sum() for values in (logits, logits + rng.normal(0.0, error, VOCAB))]
    return laws[0], laws[1]


def rate(name: str, p: np.ndarray, q: np.ndarray, lead_tokens: int) -> float:
    """Acceptance of one layer, or the bound."""
    if name == "bound":
        return float(optimal_transport(q, p, BRANCHING, lead_tokens))
    return float(single_layer(q, p, BRANCHING, lead_tokens, name))


def acceptance_figure() -> None:
    """Average rates over random pairs of laws: against the draft's quality at m = 1, and against m at one quality."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.8, 3.7), sharey=True)
    errors = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0)
    pairs = {error: paired_laws(error) for error in errors}
    distance = [np.mean([np.abs(p - q).sum() / 2 for p, q in pairs[error]]) for error in errors]
    for label, name, colour, style in RULES:
        curve = [np.mean([rate(name, p, q, 1) for p, q in pairs[error]]) for error in errors]
        left.plot(distance, curve, color=colour, ls=style, lw=1.8, label=label, zorder=4 if name == "bound" else 3)
    left.set_xlabel("total variation between draft and target")
    left.set_ylabel("acceptance of one level")
    left.set_title(f"one lead (m = 1), K = {BRANCHING}", fontsize=10)
    left.legend(frameon=False, loc="lower left")

    leads = range(BRANCHING + 1)
    for _, name, colour, style in RULES:
        curve = [np.mean([rate(name, p, q, m) for p, q in pairs[1.0]]) for m in leads]
        right.plot(leads, curve, color=colour, ls=style, lw=1.8, marker="o", ms=4, zorder=4 if name == "bound" else 3)
    right.set_xlabel("m, leads per node (m = K is top-K)")
    right.set_xticks(list(leads))
    right.set_title(f"the rheostat, at distance {distance[errors.index(1.0)]:.2f}", fontsize=10)
    figure.tight_layout()
    save(figure, "acceptance")


def paired_laws(error: float) -> Sequence[tuple[np.ndarray, np.ndarray]]:
    """The same targets for every error, so that curves differ by the draft only."""
    rng = np.random.default_rng(20260)
    return [random_pair(rng, error) for _ in range(PAIRS)]


# What a node is worth


def calibration_figure() -> None:
    """The curves that ``rheo calibrate`` learned for the embedded pair, at three ranges of temperature."""
    weights = load_weights("embedded")
    figure, panels = plt.subplots(1, 3, figsize=(9.5, 3.2), sharey=True, layout="constrained")
    masses = np.geomspace(KNOTS[0], 1, 200)
    for axes, (temperature, title) in zip(panels, ((1.0, "T = 1"), (0.6, "T = 0.6"), (0.0, "greedy")), strict=True):
        curves = weights.at(temperature)
        kinds = [("lead", LEAD), ("probe", PROBE), ("fill", FILL)] if temperature > 0 else [("lead", LEAD)]
        axes.plot(masses, masses, color=PRUNED, linewidth=1)
        for kind, colour in kinds:
            axes.plot(masses, [float(getattr(curves, kind)(float(m))) for m in masses], color=colour, label=kind)
        axes.set(xscale="log", title=title, xlabel="the draft's mass", xlim=(KNOTS[0], 1), ylim=(0, 1))
    panels[0].set_ylabel("chance of acceptance")
    panels[0].legend(frameon=False)
    save(figure, "calibration")


if __name__ == "__main__":
    tree_figure()
    martingale_figure()
    acceptance_figure()
    calibration_figure()

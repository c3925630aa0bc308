"""Pictures of a file of results. Matplotlib is imported when a picture is drawn, without a display."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimized.bench.aggregate import (
    AVERAGE,
    MEASURES,
    PHASES,
    Estimate,
    Results,
    Values,
    estimates,
    milliseconds_per_pass,
    pooled_levels,
)
from optimized.bench.methods import GENERATE, PLAIN, SETTING_NAMES, SETTINGS, Method
from optimized.bench.tables import TITLES, labels
from reference.api import RheoConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    "plain": "#9a9a9a", "generate": "#444444", "topk": "#1f6f8b", "rheo": "#d9622b", "rrsw": "#8a5a9e",
    "calibrated": "#a3242f", "auto-m": "#e3a008", "auto": "#5b4b9a", "chain": "#b8a13a", "static": "#6b8f71",
}  # fmt: skip
PHASE_COLORS = {"target": "#1f6f8b", "draft": "#6b8f71", "sampling": "#d9622b", "other": "#c9c9c9"}
SWEPT = {
    "lead_tokens": "m, leads before the probe",
    "temperature": "temperature",
    "tree_size": "tree size, nodes",
    "draft_support": "support, tokens",
}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "rheosampling",
    "savefig.facecolor": "white",
}


@dataclass(frozen=True)
class Main:
    """The temperature and the methods that a picture shows which does not vary them: those with most rows.

    Attributes:
        temperature: 1 if it was measured as often as any other.
        methods: one variant of each name.
    """

    temperature: float
    methods: tuple[Method, ...]

    @classmethod
    def of(cls, results: Results) -> Main:
        """Of each setting the value that most rows have; the library's default where several are as frequent."""
        temperature = _most(Counter(row.temperature for row in results.rows), 1.0)
        usual = {
            name: _most(Counter(value for row in results.rows if (value := getattr(row, name)) is not None), default)
            for name in SETTING_NAMES
            for default in [getattr(RheoConfig, name, None)]
        }
        methods = []
        for name in dict.fromkeys(method.name for method in results.methods):
            variants = [method for method in results.methods if method.name == name]
            fitting = [m for m in variants if all(value == usual[key] for key, value in m.settings.items())]
            methods.append((fitting or variants)[0])
        return cls(temperature, tuple(methods))

    def with_trees(self) -> list[Method]:
        """Its methods that draft."""
        return [method for method in self.methods if method.name not in (PLAIN, GENERATE)]


def tau_by_set(results: Results) -> Figure | str:
    """Expected and sampled acceptance length by set."""
    main = Main.of(results)
    measured = {name: by_method for name in ("expected_tau", "tau") if (by_method := _by_method(results, main, name))}
    if not measured:
        return "no method with trees has an acceptance length"
    figure, axes = _axes(len(measured), 4.2 + 0.9 * len(results.sets))
    for axis, (name, by_method) in zip(axes, measured.items(), strict=True):
        _bars(axis, by_method, [*results.sets, AVERAGE])
        axis.set_ylabel("tokens per target pass")
        axis.set_title(TITLES[name])
        axis.set_ylim(bottom=1.0)  # one token per pass is what plain decoding has
    axes[0].legend(frameon=False)
    figure.suptitle(f"T = {main.temperature:g}; {_shape(main)}", fontsize=9)
    return figure


def sweep(results: Results, setting: str) -> Figure | str:
    """Acceptance length and speed-up against one setting, the others at the values that most rows have.

    Args:
        results: of the file.
        setting: a key of ``SWEPT``.
    """
    main = Main.of(results)
    lines = {method.name: _line(results, main, method, setting) for method in main.with_trees()}
    if not any(len(line) > 1 for line in lines.values()):
        seen = sorted({x for line in lines.values() for x in line})
        values = ", ".join(f"{x:g}" for x in seen)
        return f"the rows have one value of it ({values})" if seen else "no method has it"
    measures: dict[str, Callable[[Method, float], Values]] = {}
    length = "expected_tau" if any(row.expected_tau is not None for row in results.rows) else "tau"
    if length == "expected_tau" or any(row.passes for row in results.rows):
        measures[length] = lambda method, temperature: results.values(MEASURES[length], method, temperature)
    baseline = results.baselines()
    if baseline:
        measures["speed_up"] = results.speed_ups
    if not measures:
        return "no row has an acceptance length or a speed-up"
    figure, axes = _axes(len(measures), 5.0)
    for axis, (name, values_of) in zip(axes, measures.items(), strict=True):
        for method in main.with_trees():
            color = COLORS[method.name]
            found = {
                x: estimate
                for x, (variant, temperature) in sorted(lines[method.name].items())
                if (estimate := estimates(values_of(variant, temperature), results.sets).get(AVERAGE))
            }
            if len(found) > 1:
                means = [estimate.mean for estimate in found.values()]
                errors = [_bar_of(estimate) for estimate in found.values()]
                axis.errorbar(list(found), means, errors, marker="o", capsize=3, color=color, label=method.name)
            elif not lines[method.name]:  # a method without the setting: the same everywhere
                flat = estimates(values_of(method, main.temperature), results.sets).get(AVERAGE)
                if flat:
                    axis.axhline(flat.mean, color=color, linestyle="--", label=method.name)
        if name == "speed_up":
            axis.axhline(1.0, color=COLORS[baseline[0]], linewidth=1, label=" or ".join(baseline))
        axis.set_xlabel(SWEPT[setting])
        axis.set_ylabel("tokens per target pass" if name != "speed_up" else f"over {' or '.join(baseline)}")
        axis.set_title(TITLES[name])
        ticks = sorted({x for line in lines.values() for x in line})
        if setting in ("tree_size", "draft_support"):
            axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axis.minorticks_off()
    axes[0].legend(frameon=False)
    fixed = _shape(main, without=setting)
    figure.suptitle(fixed if setting == "temperature" else f"T = {main.temperature:g}; {fixed}", fontsize=9)
    return figure


def acceptance_by_level(results: Results) -> Figure | str:
    """How deep the walks go."""
    main = Main.of(results)
    levels = {method: pooled_levels(results.of(method, main.temperature)) for method in main.with_trees()}
    levels = {method: shares for method, shares in levels.items() if shares}
    if not levels:
        return "no row has passes with a tree"
    figure, [axis] = _axes(1, 5.0)
    for method, shares in levels.items():
        axis.plot(range(1, len(shares) + 1), shares, marker="o", color=COLORS[method.name], label=method.name)
    axis.set_xlabel("level")
    axis.set_xticks(range(1, max(map(len, levels.values())) + 1))
    axis.set_ylabel("share of passes that accept a node there")
    axis.set_ylim(0, 1)
    axis.legend(frameon=False)
    axis.set_title(f"T = {main.temperature:g}; {_shape(main)}", fontsize=9)
    return figure


def step_time(results: Results) -> Figure | str:
    """Where a step's time goes."""
    main, names = Main.of(results), labels(results)
    spent = {
        method: found
        for method in main.methods
        if (found := milliseconds_per_pass(results.of(method, main.temperature))) is not None
    }
    if not spent:
        return "no row has timed passes"
    figure, [axis] = _axes(1, 3.0 + 1.2 * len(spent))
    base = [0.0] * len(spent)
    for phase in PHASES:
        heights = [found[phase] for found in spent.values()]
        axis.bar(range(len(spent)), heights, 0.6, bottom=base, color=PHASE_COLORS[phase], label=phase)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    axis.set_xticks(range(len(spent)), [names[method] for method in spent])
    axis.set_ylabel("milliseconds per target pass")
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    axis.set_title(f"T = {main.temperature:g}; {_shape(main)}", fontsize=9)
    return figure


PICTURES: dict[str, Callable[[Results], Any]] = {
    "tau_by_set": tau_by_set,
    **{f"against_{setting}": lambda results, s=setting: sweep(results, s) for setting in SWEPT},  # type: ignore[misc]
    "acceptance_by_level": acceptance_by_level,
    "step_time": step_time,
}
CAPTIONS = {
    "tau_by_set": "Acceptance length by set; bars are standard errors over questions.",
    "against_lead_tokens": "Against m, the number of leads.",
    "against_temperature": "Against the temperature.",
    "against_tree_size": "Against the size of the tree.",
    "against_draft_support": "Against the support of the draft's law.",
    "acceptance_by_level": "Share of passes whose walk gets to a level.",
    "step_time": "Where a step's time goes, the prompts' passes left out.",
}


def _line(results: Results, main: Main, method: Method, setting: str) -> dict[float, tuple[Method, float]]:
    """The variants of a method that differ from its main one in one setting alone, by that setting's value."""
    if setting == "temperature":
        return {t: (method, t) for t in results.temperatures if results.of(method, t)}
    if setting not in SETTINGS[method.name]:
        return {}

    def others(of: Method) -> dict[str, Any]:
        return {name: value for name, value in of.settings.items() if name != setting}

    return {
        getattr(other, setting): (other, main.temperature)
        for other in results.methods
        if other.name == method.name and others(other) == others(method) and results.of(other, main.temperature)
    }


def _by_method(results: Results, main: Main, measure: str) -> dict[Method, dict[str, Estimate]]:
    found = {
        method: estimates(results.values(MEASURES[measure], method, main.temperature), results.sets)
        for method in main.with_trees()
    }
    return {method: per_set for method, per_set in found.items() if per_set}


def _bars(axis: Axes, by_method: dict[Method, dict[str, Estimate]], groups: Sequence[str]) -> None:
    width = 0.8 / len(by_method)
    for index, (method, found) in enumerate(by_method.items()):
        shown = [(place, found[name]) for place, name in enumerate(groups) if name in found]
        axis.bar(
            [place + (index - (len(by_method) - 1) / 2) * width for place, _ in shown],
            [estimate.mean for _, estimate in shown],
            width,
            yerr=[_bar_of(estimate) for _, estimate in shown],
            color=COLORS[method.name],
            label=method.name,
            error_kw={"elinewidth": 1, "capsize": 2},
        )
    axis.set_xticks(range(len(groups)), groups, rotation=20)


def _bar_of(estimate: Estimate) -> float:
    return 0.0 if math.isnan(estimate.standard_error) else estimate.standard_error


def _axes(count: int, width: float) -> tuple[Figure, list[Axes]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(1, count, figsize=(width * count, 3.8), layout="constrained", squeeze=False)
    return figure, list(axes[0])


def _shape(main: Main, without: str = "") -> str:
    """The settings that the pictured methods share, in words."""
    found: dict[str, dict[Any, None]] = {}
    for method in main.with_trees():
        for name, value in method.settings.items():
            if name not in (without, "topology", "weights") and not (name == "probes" and value == RheoConfig.probes):
                found.setdefault(name, {})[value] = None
    words = {"lead_tokens": "m", "draft_support": "support"}
    return ", ".join(
        f"{words.get(name, name).replace('_', ' ')} {' or '.join(map(str, values))}" for name, values in found.items()
    )


def _most(counts: Counter[Any], default: Any) -> Any:
    if not counts:
        return None
    most = max(counts.values())
    frequent = [value for value, count in counts.items() if count == most]
    return default if default in frequent else frequent[0]

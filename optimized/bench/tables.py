"""Tables: as Markdown for people, as tidy CSV for programs."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from optimized.bench.aggregate import (
    AVERAGE,
    MEASURES,
    PHASES,
    Difference,
    Estimate,
    Results,
    bootstrap,
    coverage,
    estimates,
    milliseconds_per_pass,
)
from optimized.bench.methods import GENERATE, PLAIN, SETTING_NAMES, TOP_K, Method

TITLES = {
    "expected_tau": "Expected acceptance length, on common contexts",
    "tau": "Acceptance length, sampled",
    "speed_up": "Speed-up",
    "tokens_per_second": "Tokens per second",
}
DIGITS = {"expected_tau": 3, "tau": 3, "speed_up": 2, "tokens_per_second": 1}


@dataclass(frozen=True)
class Table:
    """A table in both forms.

    Attributes:
        name: of the CSV file, without its ending.
        title: the heading.
        note: what the reader must know, or "".
        columns, cells: as shown.
        tidy_columns, tidy: as written to the CSV file, numbers unrounded.
    """

    name: str
    title: str
    note: str
    columns: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    tidy_columns: tuple[str, ...]
    tidy: tuple[tuple[object, ...], ...]

    def markdown(self) -> str:
        """The heading, the note and the table."""
        lines = [f"## {self.title}", ""]
        if self.note:
            lines += [self.note, ""]
        lines.append(_markdown_row(self.columns))
        lines.append(_markdown_row(["---"] * 2 + ["---:"] * (len(self.columns) - 2)))
        return "\n".join([*lines, *map(_markdown_row, self.cells), ""])

    def csv(self) -> str:
        """The tidy form."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.tidy_columns)
        for row in self.tidy:
            writer.writerow(["" if isinstance(v, float) and math.isnan(v) else v for v in row])
        return buffer.getvalue()


def labels(results: Results) -> dict[Method, str]:
    """A name for every method that shows the settings in which its variants differ."""
    varying = [
        setting
        for setting in SETTING_NAMES
        if len({value for method in results.methods if (value := getattr(method, setting)) is not None}) > 1
    ]
    return {method: method.label(varying) for method in results.methods}


def by_set_table(results: Results, measure: str) -> Table | str:
    """Mean and standard error of a measure by set; or why there is none.

    Args:
        results: of the file.
        measure: a key of ``TITLES``.
    """
    names, columns = labels(results), [*results.sets, AVERAGE]
    if measure == "speed_up" and not results.baselines():
        return "there are no rows of generate or plain to compare with"
    cells, tidy = [], []
    for temperature in results.temperatures:
        for method in results.methods:
            if measure == "speed_up":
                if method == results.baseline(temperature):
                    continue
                values = results.speed_ups(method, temperature)
            else:
                values = results.values(MEASURES[measure], method, temperature)
            found = estimates(values, results.sets)
            if found and not (measure in ("tau", "expected_tau") and method.name in (PLAIN, GENERATE)):
                shown = [_estimate_cell(found.get(name), DIGITS[measure]) for name in columns]
                cells.append((f"{temperature:g}", names[method], str(len(values)), *shown))
                tidy += [
                    (temperature, *_method_cells(method), measure, name, e.mean, e.standard_error, e.questions)
                    for name, e in found.items()
                ]
    if not cells:
        return "no row has it"
    note = "Mean ± standard error over questions."
    if measure == "speed_up":
        note += f" Tokens per second over those of {' or '.join(results.baselines())}, question by question."
    return Table(
        measure, TITLES[measure], note, ("T", "method", "questions", *columns), tuple(cells),
        ("temperature", *_METHOD_COLUMNS, "measure", "set", "mean", "standard_error", "questions"), tuple(tidy),
    )  # fmt: skip


def differences_table(results: Results, measure: str, resamples: int, seed: int) -> tuple[Table | str, list[str]]:
    """Paired differences against top-K trees of the same shape; also what was left out and why.

    Args:
        results: of the file.
        measure: "tau" or "expected_tau".
        resamples, seed: see ``bootstrap``.
    """
    names, columns = labels(results), [*results.sets, AVERAGE]
    cells, tidy, left_out = [], [], []
    if not any(method.name == TOP_K for method in results.methods):
        return "there are no rows of topk", []
    for method in results.methods:
        if method.name in (PLAIN, GENERATE, TOP_K):
            continue
        other = results.partner(method, TOP_K)
        if isinstance(other, str):
            left_out.append(f"{names[method]} against topk: {other}")
            continue
        for temperature in results.temperatures:
            values = results.differences(MEASURES[measure], method, other, temperature)
            found = bootstrap(values, results.sets, resamples, seed)
            if found:
                shown = [_difference_cell(found.get(name)) for name in columns]
                pair = f"{names[method]} − {names[other]}"
                cells.append((f"{temperature:g}", pair, str(len(values)), *shown))
                tidy += [
                    (temperature, *_method_cells(method), f"{measure} minus topk's", name, d.estimate.mean,
                     d.estimate.standard_error, d.estimate.questions, d.low, d.high)
                    for name, d in found.items()
                ]  # fmt: skip
    if not cells:
        return "no two methods have rows at the same questions and seeds", left_out
    cells.sort(key=lambda row: float(row[0]))
    note = (
        "Mean difference and 95 % bootstrap interval, on the turns and seeds that both have: questions resampled "
        f"within sets, {resamples} times."
    )
    table = Table(
        f"{measure}_differences", f"{TITLES[measure]}: paired differences against top-K", note,
        ("T", "difference", "questions", *columns), tuple(cells),
        ("temperature", *_METHOD_COLUMNS, "measure", "set", "mean", "standard_error", "questions", "low", "high"),
        tuple(tidy),
    )  # fmt: skip
    return table, left_out


def steps_table(results: Results) -> Table | str:
    """Where a step's time goes, and how much of the draft's law its support holds."""
    names = labels(results)
    cells, tidy = [], []
    for temperature in results.temperatures:
        for method in results.methods:
            rows = results.of(method, temperature)
            spent = milliseconds_per_pass(rows)
            if spent is None:
                continue
            total = sum(spent.values())
            share = spent["sampling"] / total if total else math.nan
            probes = sum(row.probes_offered for row in rows)
            accepted = sum(row.probes_accepted for row in rows) / probes if probes else math.nan
            held = coverage(rows)
            cells.append(
                (f"{temperature:g}", names[method], *(f"{spent[phase]:.2f}" for phase in PHASES), f"{total:.2f}",
                 _percent(share), _percent(accepted), _number(held, 4))
            )  # fmt: skip
            tidy.append((temperature, *_method_cells(method), *spent.values(), total, share, accepted, held))
    if not cells:
        return "no row has a pass"
    titles = (*PHASES, "all", "sampling share", "probes accepted", "coverage")
    note = (
        "Milliseconds per target pass, all sets pooled. The target's passes over prompts are left out, the draft's are "
        "not. Coverage: mass of the draft's full law on its support."
    )
    return Table(
        "steps", "Where a step's time goes", note, ("T", "method", *titles), tuple(cells),
        ("temperature", *_METHOD_COLUMNS, *(f"{p}_ms" for p in (*PHASES, "all")), "sampling_share", "probes_accepted",
         "coverage"), tuple(tidy),
    )  # fmt: skip


_METHOD_COLUMNS = ("method", *SETTING_NAMES)


def _method_cells(method: Method) -> list[object]:
    return [method.name, *("" if (value := getattr(method, name)) is None else value for name in SETTING_NAMES)]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _number(value: float, digits: int) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f} %"


def _estimate_cell(estimate: Estimate | None, digits: int) -> str:
    if estimate is None:
        return "–"
    return f"{_number(estimate.mean, digits)} ± {_number(estimate.standard_error, digits)}"


def _difference_cell(difference: Difference | None) -> str:
    if difference is None:
        return "–"
    interval = "" if math.isnan(difference.low) else f" [{difference.low:+.3f}, {difference.high:+.3f}]"
    return f"{difference.estimate.mean:+.3f}{interval}"

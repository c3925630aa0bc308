"""What single layers gave: rows as CSV, and tables of acceptance and of coverage."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from optimized.bench.aggregate import AVERAGE, Estimate, Values, estimates
from optimized.bench.layer import CoverageRow, LayerRow, variants_of
from optimized.bench.tables import Table


def write_layers(
    layers: Sequence[LayerRow], coverage: Sequence[CoverageRow], folder: Path, heading: str
) -> list[Table]:
    """Write ``layers.csv``, ``coverage.csv`` (a row per context each), the tables' CSV files and ``layers.md``.

    Args:
        layers, coverage: what was measured.
        folder: is made; files of the same names are replaced.
        heading: what was measured where; it comes first in ``layers.md``.

    Raises:
        ValueError: nothing was measured.
    """
    if not layers:
        raise ValueError("no text had a context; allow more tokens")
    folder.mkdir(parents=True, exist_ok=True)
    _write_rows(folder / "layers.csv", layers)
    _write_rows(folder / "coverage.csv", coverage)
    tables = [acceptance_table(layers), coverage_table(coverage)]
    for table in tables:
        (folder / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
    (folder / "layers.md").write_text("\n".join([heading, *(t.markdown() for t in tables)]), encoding="utf-8")
    return tables


def acceptance_table(rows: Sequence[LayerRow]) -> Table:
    """Acceptance of one layer: measured, predicted, and at best, each a mean over sets."""
    sets = list(dict.fromkeys(row.set_name for row in rows))
    cells, tidy = [], []
    for temperature, rule, branching, leads in variants_of(rows):
        chosen = [
            row
            for row in rows
            if (row.temperature, row.rule, row.branching, row.lead_tokens) == (temperature, rule, branching, leads)
        ]
        found = {name: _average(chosen, name, sets) for name in ("measured", "predicted", "bound")}
        gap, error = difference_in_errors(chosen)
        shown = "–" if leads is None else str(leads)
        by_set = estimates(_values(chosen, lambda row: row.predicted), sets)
        cells.append(
            (f"{temperature:g}", rule, str(branching), shown, *(f"{found[name].mean:.4f}" for name in found),
             f"{gap:+.4f} ± {error:.4f}", *(f"{by_set[name].mean:.3f}" if name in by_set else "–" for name in sets))
        )  # fmt: skip
        tidy.append(
            (temperature, rule, branching, "" if leads is None else leads, *(found[name].mean for name in found),
             found["predicted"].standard_error, gap, error, found["predicted"].questions)
        )  # fmt: skip
    note = (
        "The share of walks that go down, all slots kept; means over sets. Gap: measured minus predicted, mean over "
        "all contexts, with the sampling error of the walks alone. The last columns are the predictions by set."
    )
    return Table(
        "layer_acceptance", "Acceptance of a single layer", note,
        ("T", "rule", "K", "m", "measured", "predicted", "bound", "gap", *sets), tuple(cells),
        ("temperature", "rule", "branching", "lead_tokens", "measured", "predicted", "bound",
         "predicted_standard_error", "gap", "gap_error", "questions"), tuple(tidy),
    )  # fmt: skip


def difference_in_errors(rows: Sequence[LayerRow]) -> tuple[float, float]:
    """Measured minus predicted, mean over contexts, and its standard error if the prediction is right."""
    gap = sum(row.measured - row.predicted for row in rows) / len(rows)
    variance = sum(row.predicted * max(1 - row.predicted, 0.0) / row.walks for row in rows)
    return gap, math.sqrt(variance) / len(rows)


def coverage_table(rows: Sequence[CoverageRow]) -> Table:
    """How much of both laws a support holds."""
    sets = list(dict.fromkeys(row.set_name for row in rows))
    cells, tidy = [], []
    for temperature, support in dict.fromkeys((row.temperature, row.support) for row in rows):
        chosen = [row for row in rows if (row.temperature, row.support) == (temperature, support)]
        draft, target = _average(chosen, "draft_mass", sets), _average(chosen, "target_mass", sets)
        by_set = estimates(_values(chosen, lambda row: row.draft_mass), sets)
        cells.append(
            (f"{temperature:g}", str(support), f"{draft.mean:.4f}", f"{target.mean:.4f}",
             *(f"{by_set[name].mean:.4f}" if name in by_set else "–" for name in sets))
        )  # fmt: skip
        tidy.append((temperature, support, draft.mean, draft.standard_error, target.mean, target.standard_error))
    return Table(
        "support_coverage", "Coverage of the support",
        "Mass of the draft's full law (at temperature 1) and of the target's law on the draft's largest logits; means "
        "over sets. The last columns are the draft's by set.",
        ("T", "support", "of the draft's law", "of the target's law", *sets), tuple(cells),
        ("temperature", "support", "draft_mass", "draft_standard_error", "target_mass", "target_standard_error"),
        tuple(tidy),
    )  # fmt: skip


def _average(rows: Sequence[Any], name: str, sets: Sequence[str]) -> Estimate:
    found = estimates(_values(rows, lambda row: getattr(row, name)), sets)
    return found.get(AVERAGE, Estimate(math.nan, math.nan, 0))


def _values(rows: Sequence[Any], value: Callable[[Any], float]) -> Values:
    parts: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        parts[row.set_name, row.question_id].append(value(row))
    return {question: sum(part) / len(part) for question, part in parts.items()}


def _write_rows(path: Path, rows: Sequence[LayerRow] | Sequence[CoverageRow]) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([item.name for item in fields(rows[0])])
    for row in rows:
        writer.writerow(["" if value is None else value for value in asdict(row).values()])
    path.write_text(buffer.getvalue(), encoding="utf-8")

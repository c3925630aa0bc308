"""``rheo report``: a folder of tables and pictures, and what is missing in it and why."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from optimized.bench.aggregate import Results
from optimized.bench.methods import SETTING_NAMES, setting_label
from optimized.bench.rows import Row, RunSettings
from optimized.bench.tables import TITLES, Table, by_set_table, differences_table, steps_table

RESAMPLES = 10_000
TABLES = (*TITLES, "expected_tau_differences", "tau_differences", "steps")


@dataclass
class Report:
    """What goes into the folder.

    Attributes:
        heading: what was measured where.
        tables: in their order.
        pictures: (name, caption) of those that were drawn.
        left_out: (what, why).
    """

    heading: str
    tables: list[Table] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def markdown(self) -> str:
        """``report.md``."""
        parts = [self.heading, *(table.markdown() for table in self.tables)]
        if self.pictures:
            parts.append("## Pictures\n")
            parts += [f"{caption}\n\n![{caption}]({name}.svg)\n" for name, caption in self.pictures]
        if self.left_out:
            parts.append("## Left out\n\n" + "".join(f"- {what}: {why}\n" for what, why in self.left_out))
        return "\n".join(parts)


def write_report(rows: Sequence[Row], folder: Path, resamples: int = RESAMPLES, seed: int = 0) -> Report:
    """Write ``report.md``, a CSV file per table, and a PNG and an SVG file per picture.

    Args:
        rows: of one file.
        folder: is made; files of the same names are replaced.
        resamples, seed: of the bootstrap.

    Raises:
        ValueError: no rows, or no resamples.
    """
    if not rows:
        raise ValueError("there are no rows to report on")
    if resamples < 1:
        raise ValueError(f"the bootstrap needs at least one resample, got {resamples}")
    results = Results(rows)
    report = Report(_heading(rows))

    def keep(title: str, table: Table | str) -> None:
        if isinstance(table, str):
            report.left_out.append((f"table “{title}”", table))
        else:
            report.tables.append(table)

    for measure in ("expected_tau", "tau"):
        keep(TITLES[measure], by_set_table(results, measure))
        table, missing = differences_table(results, measure, resamples, seed)
        keep(f"{TITLES[measure]}: paired differences", table)
        report.left_out += [(f"difference in {measure}", why) for why in missing]
    for measure in ("speed_up", "tokens_per_second"):
        keep(TITLES[measure], by_set_table(results, measure))
    keep("Where a step's time goes", steps_table(results))

    folder.mkdir(parents=True, exist_ok=True)
    for name in TABLES:  # none of an earlier report stays behind
        (folder / f"{name}.csv").unlink(missing_ok=True)
    for one in report.tables:
        (folder / f"{one.name}.csv").write_text(one.csv(), encoding="utf-8")
    _draw(results, folder, report)
    (folder / "report.md").write_text(report.markdown(), encoding="utf-8")
    return report


def _draw(results: Results, folder: Path, report: Report) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        report.left_out.append(("all pictures", "they need matplotlib: pip install matplotlib"))
        return
    from matplotlib import pyplot

    from optimized.bench.figures import CAPTIONS, PICTURES, STYLE

    for name, draw in PICTURES.items():
        figure = draw(results)
        if isinstance(figure, str):
            report.left_out.append((f"picture {name}", figure))
            continue
        with pyplot.rc_context(STYLE):
            figure.savefig(folder / f"{name}.png", dpi=160)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})  # the same rows, the same file
        pyplot.close(figure)
        report.pictures.append((name, CAPTIONS[name]))


def _heading(rows: Sequence[Row]) -> str:
    first = rows[0]
    facts = {item.name: getattr(first, item.name) for item in fields(RunSettings)}
    lines = ["# Results", ""]
    lines += [f"- {name.replace('_', ' ')}: {value}" for name, value in facts.items() if value != ""]
    versions = sorted({f"{row.version} {row.commit}".strip() for row in rows})
    lines.append(f"- backend: {', '.join(sorted({row.backend for row in rows} - {''})) or 'none of ours'}")
    lines.append(f"- version: {', '.join(filter(None, versions)) or 'unknown'}")
    for name in SETTING_NAMES:
        values = {value for row in rows if (value := getattr(row, name)) is not None}
        if values:
            shown = [setting_label(name, v) for v in sorted(values, key=_order)]
            lines.append(f"- {name.replace('_', ' ')}: {', '.join(shown)}")
    questions = {(row.set_name, row.question_id) for row in rows}
    seeds = {row.seed for row in rows}
    lines += [f"- rows: {len(rows)}; questions: {len(questions)}; seeds: {len(seeds)}", ""]
    return "\n".join(lines)


def _order(value: int | str) -> tuple[int, str]:
    return (value, "") if isinstance(value, int) else (0, value)

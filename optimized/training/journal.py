"""The log of a training run, and its plot."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from optimized.files import write_whole

Row = dict[str, float]


class Journal:
    """A CSV file that grows by rows, each with a ``step``; a resumed run drops the rows that it will write again.

    Args:
        path: the file; may exist.
        last_step: of the checkpoint; rows after it are dropped. 0: there is none, and no row is kept.
    """

    def __init__(self, path: Path, last_step: int = 0) -> None:
        self.path = path
        kept = [row for row in read_journal(path) if row["step"] <= last_step and last_step]
        self._columns: list[str] = list(kept[0]) if kept else []
        write_whole(path, lambda scratch: scratch.write_text(self._lines(kept, header=True), encoding="utf-8"))

    def write(self, row: Mapping[str, float]) -> None:
        """Append a row; all rows of a file have the same columns."""
        header = not self._columns
        self._columns = self._columns or list(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self._lines([dict(row)], header))

    def _lines(self, rows: list[Row], header: bool) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        if header and self._columns:
            writer.writeheader()
        writer.writerows({key: f"{value:.8g}" for key, value in row.items()} for row in rows)
        return text.getvalue()


def read_journal(path: Path) -> list[Row]:
    """The rows of a journal; none when there is no file. A last line that was cut off is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(whole)]


def check_plotting() -> None:
    """Say at once, and not after hours of training, that the plot cannot be drawn.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("the loss plot needs matplotlib: pip install matplotlib, or ask for no plot")


def plot_training(directory: Path) -> list[Path]:
    """Draw ``log.csv`` and ``held_out.csv`` of a run: the loss, and the overlap of every unrolled step.

    Returns:
        The files ``loss.svg`` and ``loss.png``.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    check_plotting()
    import matplotlib
    from matplotlib.figure import Figure  # no pyplot: it would choose a window system

    log, held_out = read_journal(directory / "log.csv"), read_journal(directory / "held_out.csv")
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([row["step"] for row in log], [row["loss"] for row in log], lw=0.8)
    left.set(xlabel="step", ylabel="loss", title="training")
    steps = [row["step"] for row in held_out]
    for name in (key for key in (held_out[0] if held_out else {}) if key.startswith("overlap_")):
        right.plot(steps, [row[name] for row in held_out], marker=".", label=f"unrolled step {name[8:]}")
    right.set(xlabel="step", ylabel="overlap 1 - TV(p, q)", title="held-out conversations", ylim=(0, None))
    if held_out:
        right.legend(frameon=False)

    def save(scratch: Path, kind: str) -> None:
        figure.savefig(scratch, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)

    files = [directory / f"loss.{kind}" for kind in ("svg", "png")]
    with matplotlib.rc_context({"svg.hashsalt": "rheo"}):
        for file in files:
            write_whole(file, partial(save, kind=file.suffix[1:]))
    return files

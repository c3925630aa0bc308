"""``rheo report``: tables and pictures of what ``rheo bench`` has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from optimized.cli.console import out
from optimized.cli.options import OUTPUT


def report(
    results: Annotated[
        Path, typer.Argument(help="The CSV file of rheo bench.", exists=True, dir_okay=False, show_default=False)
    ],
    folder: Annotated[Path, typer.Option("--out", help="Where to write.", file_okay=False, rich_help_panel=OUTPUT)],
    resamples: Annotated[int, typer.Option(help="Of the bootstrap intervals.", min=1, rich_help_panel=OUTPUT)] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.", min=0, rich_help_panel=OUTPUT)] = 0,
) -> None:
    """Turn results into tables (Markdown and CSV) and pictures (PNG and SVG)."""
    from optimized.bench.report import write_report
    from optimized.bench.rows import read_rows

    written = write_report(read_rows(results), folder, resamples, seed)
    for what, why in written.left_out:
        out.print(Text(f"left out: {what}: {why}", "dim"))
    out.print(f"wrote {len(written.tables)} tables and {len(written.pictures)} pictures to {folder}", markup=False)

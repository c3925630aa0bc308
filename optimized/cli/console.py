"""Where the command line writes: results to standard output, progress and complaints to standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

out = Console(highlight=False)
err = Console(highlight=False, stderr=True)


def complain(message: str) -> None:
    """One red line on standard error, however many lines the message had."""
    err.print(Text("error: ", style="bold red").append(" ".join(message.split()), style="red"), soft_wrap=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on standard error while something of unknown length runs; silent where that is no terminal."""
    with err.status(escape(what)):
        yield


def progress_bar(unit: str, remaining: bool = False) -> Progress:
    """A bar on standard error that goes away when done; silent where that is no terminal.

    Args:
        unit: what is counted.
        remaining: show an estimate of the time that is left, and not the time that has passed.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn() if remaining else TimeElapsedColumn(),
        console=err,
        transient=True,
        redirect_stdout=False,
        disable=not err.is_terminal,
    )

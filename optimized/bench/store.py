"""The file that a run appends to: rows that survive a crash, and a restart that knows which are there."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from types import TracebackType

from optimized.bench.rows import Key, Row, RunSettings, header_line, parse_rows

try:
    import fcntl
except ImportError:  # no such locks on this platform
    fcntl = None  # type: ignore[assignment]


class RowStore:
    """A CSV file of rows, opened to be continued.

    A row is one write, flushed to the disk before ``append`` returns, so what is in the file is whole but for a last
    line that the machine did not get to finish; that one is dropped at the next opening.

    Args:
        path: the file; it is made when it does not exist.
        settings: of this run.
        digests: of the sets of questions, by name.

    Attributes:
        done: keys of the rows in the file.
        commits, backends: where they come from.

    Raises:
        ValueError: the file is none of ours, was measured with other settings or on other questions, or is being
            written by another process.
    """

    def __init__(self, path: Path, settings: RunSettings, digests: dict[str, str]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            rows = parse_rows(self._whole_lines(), path)
            for number, row in enumerate(rows, 2):
                _check_same(row, settings, digests, f"{path}, line {number}")
        except BaseException:
            self.close()
            raise
        self.done: set[Key] = {row.key for row in rows}
        self.commits = {row.commit for row in rows}
        self.backends = {row.backend for row in rows} - {""}

    def append(self, row: Row) -> None:
        """Write a row; it is on the disk when this returns.

        Raises:
            ValueError: its key is there already.
        """
        if row.key in self.done:
            raise ValueError(f"{self.path} has this row already: {row.key}")
        self._write(row.as_line())
        self.done.add(row.key)

    def close(self) -> None:
        """Close the file and give up the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> RowStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{self.path} is being written by another rheo bench") from error

    def _whole_lines(self) -> str:
        """The file's text after cutting a torn last line; a new file gets its header."""
        content = b""
        while part := os.read(self._file, 1 << 20):
            content += part
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            if whole == 0 and not header_line().encode().startswith(content):
                raise ValueError(f"{self.path} is no file of rheo bench; give --out another name")
            os.ftruncate(self._file, whole)
            os.fsync(self._file)
        if whole == 0:
            self._write(header_line())
            return header_line()
        return content[:whole].decode("utf-8")

    def _write(self, line: str) -> None:
        data = line.encode("utf-8")
        written = os.write(self._file, data)
        if written < len(data):  # a full disk; what is torn is dropped at the next opening
            raise OSError(f"{self.path}: only {written} of {len(data)} bytes of a row could be written")
        os.fsync(self._file)


def _check_same(row: Row, settings: RunSettings, digests: dict[str, str], where: str) -> None:
    for item in fields(RunSettings):
        there, here = getattr(row, item.name), getattr(settings, item.name)
        if there != here:
            raise ValueError(
                f"{where}: measured with {item.name.replace('_', ' ')} {there!r}, this run has {here!r}; "
                "use the same, or another --out"
            )
    digest = digests.get(row.set_name, row.questions)
    if digest != row.questions:
        raise ValueError(f"{where}: the questions of {row.set_name} have changed since; use another --out")

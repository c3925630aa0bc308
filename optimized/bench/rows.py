"""One row of the table that a run writes: its columns, its key, and how it becomes text and is read again."""

from __future__ import annotations

import csv
import io
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from optimized.bench.methods import SETTING_NAMES, Method

Key = tuple[Any, ...]


@dataclass(frozen=True)
class RunSettings:
    """What must be the same in all rows of a file, because no column of the key tells it apart.

    Attributes:
        target, draft: the models' names and digests, "embedded#1f3a9c02"; "" without a draft.
        dtype, device: of the weights.
        threads: that torch uses.
        machine: the processor or accelerator.
        max_new_tokens: at most so many per turn.
        contexts: on how many positions of a text the expected acceptance length is taken.
        texts: "timed", or "none" when the methods wrote none and only their expected acceptance length was taken.
        batch_size: how many questions of a set were asked side by side.
        min_new_tokens: at least so many per turn.
    """

    target: str
    draft: str
    dtype: str
    device: str
    threads: int
    machine: str
    max_new_tokens: int
    contexts: int
    texts: str
    batch_size: int
    min_new_tokens: int


@dataclass(frozen=True)
class Row:
    """One turn of one question by one method at one temperature with one seed.

    Attributes:
        set_name: of the questions.
        question_id: within the set.
        turn: 1 for the first message.
        method: with ``lead_tokens`` to ``weights``, which settings of it (None where it has no use for one).
        temperature: the request's.
        seed: the run's; the request's own is made of it, the set, the question and the turn.
        category: of the question.
        prompt_tokens: of the conversation so far.
        tokens: generated, the end-of-sequence token included.
        passes: target passes behind the prompt's; None for ``generate``, where each token takes one.
        emitted: tokens that these passes emitted, also beyond the text's end.
        tau: emitted / passes, sampled; None without a pass.
        expected_tau: the expected acceptance length, averaged over the common contexts; None without any.
        contexts_used: how many contexts these were; a short text has fewer positions than were asked for.
        offered_per_level, accepted_per_level: as in ``Metrics``.
        probes_offered, probes_accepted: as in ``Metrics``.
        coverage: mass of the draft's full law on its support, averaged over the contexts; None without a draft.
        seconds: from the batch's begin to the request's own end, the prompt's pass included.
        tokens_per_second: tokens / seconds.
        prompt_seconds: until the first token was there.
        target_seconds, draft_seconds, sampling_seconds, other_seconds: where ``seconds`` went, for the whole batch; the
            prompt's pass is in the first; None for ``generate``.
        finish_reason: "eos", "stop" or "length".
        text_crc: CRC-32 of the generated token ids, to tell texts apart.
        place: when it ran among the methods of its turn, from 0.
        backend: that did its sampling side; "" for ``generate``.
        target ... min_new_tokens: see ``RunSettings``.
        questions: digest of the set's file.
        version, commit: of this software; commit is "" outside a checkout.
    """

    set_name: str
    question_id: str
    turn: int
    method: str
    lead_tokens: int | None
    probes: int | None
    branching: int | None
    depth: int | None
    tree_size: int | None
    draft_support: int | None
    topology: str | None
    weights: str | None
    temperature: float
    seed: int
    category: str
    prompt_tokens: int
    tokens: int
    passes: int | None
    emitted: int | None
    tau: float | None
    expected_tau: float | None
    contexts_used: int
    offered_per_level: tuple[int, ...]
    accepted_per_level: tuple[int, ...]
    probes_offered: int
    probes_accepted: int
    coverage: float | None
    seconds: float
    tokens_per_second: float
    prompt_seconds: float
    target_seconds: float | None
    draft_seconds: float | None
    sampling_seconds: float | None
    other_seconds: float | None
    finish_reason: str
    text_crc: str
    place: int
    backend: str
    target: str
    draft: str
    dtype: str
    device: str
    threads: int
    machine: str
    max_new_tokens: int
    contexts: int
    texts: str
    batch_size: int
    min_new_tokens: int
    questions: str
    version: str
    commit: str

    @property
    def key(self) -> Key:
        """What no two rows of a file share."""
        return tuple(getattr(self, name) for name in KEY)

    @property
    def run_settings(self) -> RunSettings:
        """What it shares with all rows of its file."""
        return RunSettings(**{item.name: getattr(self, item.name) for item in fields(RunSettings)})

    @property
    def of_method(self) -> Method:
        """The method with its settings."""
        return Method(self.method, **{name: getattr(self, name) for name in SETTING_NAMES})

    def as_line(self) -> str:
        """The row as a line of CSV, its end included; floats keep every digit."""
        return csv_line([_cell(value) for value in asdict(self).values()])


COLUMNS = tuple(item.name for item in fields(Row))
KEY = ("set_name", "question_id", "turn", "method", *SETTING_NAMES, "temperature", "seed")
_TYPES = {item.name: str(item.type) for item in fields(Row)}


def key_of(set_name: str, question_id: str, turn: int, method: Method, temperature: float, seed: int) -> Key:
    """The key of a row that is still to be measured."""
    return (set_name, question_id, turn, *asdict(method).values(), temperature, seed)


def csv_line(cells: Sequence[str]) -> str:
    """A line of CSV with its end."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def header_line() -> str:
    """The first line of a file."""
    return csv_line(COLUMNS)


def parse_rows(text: str, path: Path) -> list[Row]:
    """The rows of a file.

    Args:
        text: whole lines, the header first; or nothing at all.
        path: for messages.

    Raises:
        ValueError: another header, a line with too few or too many cells, a cell of another type, or a key that comes
            twice; the line is named.
    """
    lines = list(csv.reader(io.StringIO(text)))
    if not lines:
        return []
    if tuple(lines[0]) != COLUMNS:
        missing, strange = [c for c in COLUMNS if c not in lines[0]], [c for c in lines[0] if c not in COLUMNS]
        raise ValueError(
            f"{path}, line 1: these are not the columns of rheo bench (missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(strange[:8]) or 'none'}); give --out another name"
        )
    rows: list[Row] = []
    line_of: dict[Key, int] = {}
    for number, cells in enumerate(lines[1:], 2):
        if len(cells) != len(COLUMNS):
            raise ValueError(f"{path}, line {number}: {len(cells)} cells, {len(COLUMNS)} are wanted")
        row = Row(
            **{name: _value(cell, name, f"{path}, line {number}") for name, cell in zip(COLUMNS, cells, strict=True)}
        )
        if row.key in line_of:
            raise ValueError(f"{path}, line {number}: the same row as line {line_of[row.key]} ({describe(row.key)})")
        line_of[row.key] = number
        rows.append(row)
    return rows


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; a last line that was torn is not among them.

    Raises:
        ValueError: as ``parse_rows``, or there is no row.
    """
    text = path.read_text(encoding="utf-8")
    rows = parse_rows(text[: text.rfind("\n") + 1], path)
    if not rows:
        raise ValueError(f"{path} holds no rows; rheo bench writes them")
    return rows


def describe(key: Key) -> str:
    """A key in words."""
    return ", ".join(f"{name} {value}" for name, value in zip(KEY, key, strict=True) if value is not None)


def crc(token_ids: Sequence[int]) -> str:
    """CRC-32 of token ids, 8 hexadecimal digits."""
    return f"{zlib.crc32(' '.join(map(str, token_ids)).encode()):08x}"


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, tuple):
        return ";".join(map(str, value))
    return repr(value) if isinstance(value, float) else str(value)


def _value(cell: str, name: str, where: str) -> Any:
    kind = _TYPES[name]
    try:
        if kind.startswith("tuple"):
            return tuple(int(part) for part in cell.split(";")) if cell else ()
        if cell == "" and kind.endswith("None"):
            return None
        return {"int": int, "float": float, "str": str}[kind.split(" ")[0]](cell)
    except ValueError:
        raise ValueError(f"{where}: {name} is {cell!r}, which is no {kind.split(' ')[0]}") from None

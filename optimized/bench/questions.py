"""Sets of questions in EAGLE's ``question.jsonl`` format, and which of them a short run takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optimized.decoder import RheoDecoder

EXAMPLE = '{"question_id": 81, "category": "writing", "turns": ["first message", "second message"]}'


@dataclass(frozen=True)
class Question:
    """One conversation to hold.

    Attributes:
        set_name: the folder that the file is in (``mt_bench/question.jsonl`` -> "mt_bench"), else the file's own name.
        question_id: as text.
        category: as text; "" without one.
        turns: the user's messages, at least one; the next follows the model's answer.
    """

    set_name: str
    question_id: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class QuestionSet:
    """One file of questions.

    Attributes:
        name: see ``Question.set_name``.
        questions: in the order in which a run takes them: a first few are spread over the file, and are among a first
            few more.
        digest: of the file, 12 hexadecimal digits: rows measured on another text do not fit.
    """

    name: str
    questions: tuple[Question, ...]
    digest: str


def read_sets(paths: Sequence[Path]) -> list[QuestionSet]:
    """Read several files.

    Raises:
        ValueError: as ``read_set``, no file, or two sets of one name.
    """
    if not paths:
        raise ValueError("there is no file of questions")
    sets = [read_set(path) for path in paths]
    for index, one in enumerate(sets):
        for earlier, path in zip(sets[:index], paths, strict=False):
            if earlier.name == one.name:
                raise ValueError(
                    f"{path} and {paths[index]} are both the set {one.name!r}; a set is called as its folder is, "
                    "so put them into folders of different names"
                )
    return sets


def read_set(path: Path) -> QuestionSet:
    """Read one file: a JSON object per line with ``question_id``, ``category`` and ``turns``; blank lines are skipped.

    Args:
        path: the file, or the folder with a ``question.jsonl``.

    Raises:
        ValueError: a line is not of that form, or its ``question_id`` stood in the file before. The message names file
            and line, says what is wrong, and what would be right.
        FileNotFoundError: there is no such file.
    """
    path = path / "question.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of questions")
    name = path.resolve().parent.name if path.stem == "question" else path.stem
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: the file is not UTF-8 ({error.reason})") from error
    questions: dict[str, Question] = {}
    lines: dict[str, int] = {}
    for number, line_text in enumerate(text.split("\n"), 1):
        if not line_text.strip():
            continue
        question = _question(name, line_text, f"{path}, line {number}")
        if question.question_id in questions:
            raise ValueError(
                f"{path}, line {number}: question_id {question.question_id} stands in line "
                f"{lines[question.question_id]} already; ids are unique within a file"
            )
        questions[question.question_id], lines[question.question_id] = question, number
    if not questions:
        raise ValueError(f"{path} holds no questions; one line would be {EXAMPLE}")
    order = list(questions.values())
    return QuestionSet(
        name, tuple(order[place] for place in spread_order(len(order))), hashlib.sha256(content).hexdigest()[:12]
    )


def first_prompts(decoder: RheoDecoder, questions: Sequence[Question]) -> list[list[int]]:
    """The first turn of every question as a prompt, before any of them is asked.

    Raises:
        ValueError: there is no chat template, or one is too long for the target; set and question are named.
    """
    if not getattr(decoder.tokenizer, "chat_template", None):
        raise ValueError("questions are conversations; the target's tokenizer has no chat template")
    prompts = [decoder.chat_prompt([{"role": "user", "content": question.turns[0]}]) for question in questions]
    most = decoder.target.max_positions
    long = [
        f"set {question.set_name}, question {question.question_id}: {len(prompt)} tokens"
        for question, prompt in zip(questions, prompts, strict=True)
        if most is not None and len(prompt) > most
    ]
    if long:
        raise ValueError(f"the target reads at most {most} tokens; too long: {'; '.join(long)}")
    return prompts


def first_turns(path: Path) -> list[str]:
    """The first turn of every question of a file; errors are those of ``read_set``."""
    return [question.turns[0] for question in read_set(path).questions]


def spread_order(count: int) -> list[int]:
    """0 .. count-1 in an order whose every beginning is spread evenly: the binary digits read backwards.

    Files are often sorted by category, so that their first lines would be one category only.
    """
    bits = max(count - 1, 1).bit_length()
    return sorted(range(count), key=lambda place: f"{place:0{bits}b}"[::-1])


def _question(set_name: str, line: str, where: str) -> Question:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: this is no JSON ({error}); a line would be {EXAMPLE}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a JSON object is wanted, got {_short(record)}; a line would be {EXAMPLE}")
    question_id = record.get("question_id")
    if isinstance(question_id, bool) or not isinstance(question_id, int | str) or not str(question_id).strip():
        wrong = f"is {_short(question_id)}" if "question_id" in record else "is missing"
        raise ValueError(f'{where}: "question_id" {wrong}; a number or a text is wanted')
    category = record.get("category", "")
    if category is not None and not isinstance(category, str):
        raise ValueError(f'{where}: "category" is {_short(category)}; a text is wanted')
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns:
        wrong = f"is {_short(turns)}" if "turns" in record else "is missing"
        raise ValueError(f'{where}: "turns" {wrong}; a list of at least one text is wanted')
    for place, turn in enumerate(turns, 1):
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"{where}: turn {place} is {_short(turn)}; a text that is not empty is wanted")
    return Question(set_name, _one_line(str(question_id)), _one_line(category or ""), tuple(turns))


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _one_line(text: str) -> str:
    """White space collapsed: ids and categories become cells of a table."""
    return " ".join(text.split())

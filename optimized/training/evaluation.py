"""How well a head drafts: the mean overlap 1 - TV(p, q) of its law and the target's, per unrolled step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from optimized.decoder import RheoDecoder
from optimized.models.target import TargetModel
from optimized.sampling_params import SamplingParams
from optimized.training.corpus import Corpus
from optimized.training.lessons import read_lesson, score_steps
from optimized.training.student import Student


@dataclass(frozen=True)
class Text:
    """A text, and the tokens whose prediction counts.

    Attributes:
        tokens: [length] long.
        counted: [length] bool; the first two tokens are never predicted.
    """

    tokens: Tensor
    counted: Tensor


@dataclass(frozen=True)
class OverlapReport:
    """Mean overlap per unrolled step, over all counted tokens of all texts.

    Attributes:
        means: one per unrolled step, in [0, 1].
        standard_errors: of the means; texts are taken as independent, tokens of one text are not. NaN for one text.
        tokens: how many were counted at each step.
        texts: how many have any.
    """

    means: tuple[float, ...]
    standard_errors: tuple[float, ...]
    tokens: tuple[int, ...]
    texts: int

    def as_json(self) -> dict[str, Any]:
        """Plain lists and numbers; None where a number does not exist."""
        known = [None if math.isnan(error) else error for error in self.standard_errors]
        means = [None if math.isnan(mean) else mean for mean in self.means]
        return {"means": means, "standard_errors": known, "tokens": list(self.tokens), "texts": self.texts}


@torch.no_grad()
def measure_overlap(
    target: TargetModel,
    student: Student,
    texts: Sequence[Text],
    steps: int = 4,
    dtype: torch.dtype = torch.float32,
    report: Callable[[int], None] | None = None,
) -> OverlapReport:
    """Measure a head on texts, one at a time.

    Args:
        target: whose law counts, at temperature 1.
        student: the head, in float32.
        texts: any lengths, each at least two tokens.
        steps: of the unroll.
        dtype: of the head's matrix products.
        report: called with the number of texts done.

    Raises:
        ValueError: no text has a counted token that the head predicts.
    """
    sums = torch.zeros(len(texts), steps, dtype=torch.float64)
    counts = torch.zeros(len(texts), steps, dtype=torch.float64)
    for index, text in enumerate(texts):
        padded = torch.nn.functional.pad(text.tokens, (0, steps))[None]  # so that the last token is predicted, too
        counted = torch.nn.functional.pad(text.counted, (0, steps)).to(target.device)
        lesson = read_lesson(target, padded, student.vocab_map, student.feature_layers)
        for step, score in enumerate(score_steps(student.head, student.embedding, lesson, steps, dtype)):
            rows = counted[step + 2 :][: score.overlap.shape[1]]
            sums[index, step] = score.overlap[0, : len(rows)][rows].double().sum()
            counts[index, step] = rows.sum()
        if report:
            report(index + 1)
    if not any_counted(texts):
        raise ValueError("no text has a token to count: a head predicts from the third token on")
    return _summary(sums, counts)


def any_counted(texts: Sequence[Text]) -> bool:
    """Whether there is a token to count; an answer may be missing from conversations that were cut."""
    return any(bool(text.counted[2:].any()) for text in texts)


def _summary(sums: Tensor, counts: Tensor) -> OverlapReport:
    """Ratio of sums, and its standard error with the texts as clusters."""
    means = sums.sum(0) / counts.sum(0)
    used = (counts > 0).sum(0)
    spread = (sums - means * counts).square().sum(0)
    errors = (spread * used / (used - 1)).sqrt() / counts.sum(0)
    errors = torch.where(used > 1, errors, torch.nan)
    return OverlapReport(
        tuple(means.tolist()),
        tuple(errors.tolist()),
        tuple(int(count) for count in counts.sum(0).tolist()),
        int((counts[:, 0] > 0).sum()),
    )


def held_out_texts(corpus: Corpus, answers_only: bool = False, most: int | None = None) -> list[Text]:
    """The corpus's held-out conversations; every token counts, or those of answers alone."""
    chosen = corpus.held_out.nonzero()[:, 0].tolist()[:most]
    every = torch.ones(corpus.tokens.shape[1], dtype=torch.bool)
    return [Text(corpus.tokens[index], corpus.in_answer[index] if answers_only else every) for index in chosen]


def answered_questions(
    target: TargetModel, tokenizer: Any, questions: Sequence[str], params: SamplingParams, batch: int = 16
) -> list[Text]:
    """Let the target answer; the answers' tokens count.

    Args:
        target: answers alone, without a draft.
        tokenizer: of the target; questions are chat messages if it has a chat template.
        questions: see ``optimized.bench.questions.first_turns``.
        params: how answers are drawn; question i has the seed ``params.seed + i``.
        batch: how many are answered side by side.

    Raises:
        ValueError: a question is too long for the target.
    """
    decoder = RheoDecoder(target, None, tokenizer, max_batch_size=batch)
    if getattr(tokenizer, "chat_template", None):
        prompts = [decoder.chat_prompt([{"role": "user", "content": question}]) for question in questions]
    else:
        prompts = [list(tokenizer(question)["input_ids"]) for question in questions]
    each = [replace(params, seed=(params.seed or 0) + index) for index in range(len(prompts))]
    texts = []
    for prompt, result in zip(prompts, decoder.generate(prompts, each), strict=True):
        tokens = torch.tensor([*prompt, *result.token_ids])
        texts.append(Text(tokens, torch.arange(len(tokens)) >= len(prompt)))
    return texts

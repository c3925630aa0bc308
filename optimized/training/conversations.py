"""Conversations that the target writes alone: it is the user, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optimized.models.target import TargetModel
from optimized.training.settings import CorpusSettings
from reference.api import GREEDY_TEMPERATURE

_MARKS = ("FIRSTQUESTION", "FIRSTANSWER", "SECONDQUESTION")  # stand for the turns while the template is taken apart


@dataclass(frozen=True)
class ConversationFormat:
    """What stands between the turns.

    Attributes:
        opening: token ids before the first user turn, at least one.
        to_answer, to_user: token ids between a turn and the next, at least one each; the turn ends with the first.
        ends: token ids that end a turn when they are drawn.
    """

    opening: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_user: tuple[int, ...]
    ends: frozenset[int]


def conversation_format(tokenizer: Any, eos_token_ids: tuple[int, ...]) -> ConversationFormat:
    """Take a tokenizer's chat template apart; without a template, plain texts follow each other.

    Raises:
        ValueError: the template does not keep the turns as they are, or neither template nor special tokens exist.
    """
    if not getattr(tokenizer, "chat_template", None):
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if first is None or not eos_token_ids:
            raise ValueError("the tokenizer has no chat template, and no token that begins or ends a text")
        between = (eos_token_ids[0],) if first == eos_token_ids[0] else (eos_token_ids[0], first)
        return ConversationFormat((first,), between, between, frozenset(eos_token_ids))
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    pieces = []
    for mark in _MARKS:
        piece, found, text = text.partition(mark)
        if not found:
            raise ValueError("the chat template does not keep the turns of a conversation as they are, in their order")
        pieces.append(tuple(tokenizer(piece, add_special_tokens=False)["input_ids"]))
    opening, to_answer, to_user = pieces
    if not all(pieces):
        raise ValueError("the chat template puts nothing before the first turn or between two turns")
    return ConversationFormat(opening, to_answer, to_user, frozenset({to_answer[0], to_user[0], *eos_token_ids}))


def draw(logits: Tensor, temperatures: Tensor, top_k: int, uniforms: Tensor) -> Tensor:
    """One token per row, by inverse CDF among the ``top_k`` likeliest.

    Args:
        logits: [rows, vocab_size].
        temperatures: [rows] float; below ``GREEDY_TEMPERATURE`` the likeliest is taken.
        top_k: 0 keeps all.
        uniforms: [rows] float64 in [0, 1).

    Returns:
        [rows] long.
    """
    scores, ids = logits.float(), None
    if 0 < top_k < scores.shape[-1]:
        scores, ids = scores.topk(top_k, dim=-1)
    law = (scores / temperatures.clamp(min=GREEDY_TEMPERATURE)[:, None]).softmax(-1).double()
    cumulative = law.cumsum(-1)
    place = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    last = law.shape[-1] - 1 - (law > 0).flip(-1).int().argmax(-1, keepdim=True)  # where rounding leaves none
    place = torch.where(
        temperatures[:, None] < GREEDY_TEMPERATURE, scores.argmax(-1, keepdim=True), place.minimum(last)
    )
    return (place if ids is None else ids.gather(-1, place))[:, 0]


@torch.no_grad()
def write_conversations(
    target: TargetModel,
    layout: ConversationFormat,
    settings: CorpusSettings,
    shard: int,
    report: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write one shard; the draws depend on the seed and the shard's number alone.

    Args:
        target: writes; its features are not needed.
        layout: see ``conversation_format``.
        settings: how they are written.
        shard: 0, 1, ...; the last may be smaller.
        report: called with the tokens of each that are there.

    Returns:
        Tokens [batch, length] long, whether each belongs to an answer [batch, length] bool (its end included), and the
        answers' temperatures [batch] float32.

    Raises:
        ValueError: the opening alone fills a conversation, or the target reads no texts of that length.
    """
    batch = min(settings.batch, settings.conversations - shard * settings.batch)
    if len(layout.opening) >= settings.length:
        raise ValueError(f"length={settings.length} is filled by the opening, {len(layout.opening)} tokens")
    if target.max_positions is not None and settings.length > target.max_positions:
        raise ValueError(f"length={settings.length}, but the target reads at most {target.max_positions} tokens")
    random = np.random.default_rng([settings.seed, shard])
    temperatures = torch.tensor(random.choice(settings.answer_temperatures, batch), dtype=torch.float32)
    uniforms = torch.from_numpy(random.random((settings.length, batch)))

    writers = [_Writer(layout) for _ in range(batch)]
    target.feature_layers = ()
    logits, _ = target.prefill([layout.opening] * batch)
    ones = torch.ones(batch, 1, dtype=torch.long, device=target.device)
    for time in range(len(layout.opening), settings.length):
        answering = torch.tensor([writer.answering for writer in writers])
        warmth = torch.where(answering, temperatures, settings.user_temperature).to(logits.device)
        drawn = draw(logits, warmth, settings.top_k, uniforms[time].to(logits.device)).tolist()
        tokens = [writer.write(token) for writer, token in zip(writers, drawn, strict=True)]
        if report:
            report(time + 1)
        if time + 1 < settings.length:
            row = torch.tensor(tokens, device=target.device)[:, None]
            logits_, _ = target.forward_tree(row, 0 * ones, ones[:, :, None].bool())
            target.commit(0 * ones, ones[:, 0])
            logits = logits_[:, 0]
    tokens_ = torch.tensor([writer.tokens for writer in writers])
    return tokens_, torch.tensor([writer.in_answer for writer in writers]), temperatures


class _Writer:
    """One conversation as it grows: which turn it is in, and what the template still has to say."""

    def __init__(self, layout: ConversationFormat) -> None:
        self.layout = layout
        self.tokens: list[int] = list(layout.opening)
        self.in_answer: list[bool] = [False] * len(layout.opening)
        self.answering = False
        self._pending: list[int] = []

    def write(self, drawn: int) -> int:
        """Take the drawn token, unless the template speaks; returns the one that was written."""
        if self._pending:
            self._append(self._pending.pop(0), False)
        elif drawn in self.layout.ends:
            bridge = self.layout.to_user if self.answering else self.layout.to_answer
            self._append(bridge[0], self.answering)
            self._pending = list(bridge[1:])
            self.answering = not self.answering
        else:
            self._append(drawn, self.answering)
        return self.tokens[-1]

    def _append(self, token: int, in_answer: bool) -> None:
        self.tokens.append(token)
        self.in_answer.append(in_answer)

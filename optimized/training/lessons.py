"""What the target teaches about a text: its features, and its law after every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimized.models.eagle3 import Eagle3Head
from optimized.models.kv_cache import causal
from optimized.models.target import TargetModel
from optimized.training.unroll import unroll


@dataclass(frozen=True)
class Lesson:
    """Texts as the target reads them.

    Attributes:
        tokens: [batch, length] long.
        features: [batch, length, 3 * hidden], the target's.
        laws: [batch, length, draft_vocab_size] float32, its next-token law at temperature 1 over its whole vocabulary,
            of which the draft vocabulary's tokens are kept: what a row lacks to 1 lies outside.
    """

    tokens: Tensor
    features: Tensor
    laws: Tensor


@torch.no_grad()
def read_lesson(
    target: TargetModel, tokens: Tensor, vocab_map: Tensor | None, feature_layers: tuple[int, ...]
) -> Lesson:
    """Let the target read texts of equal length.

    Args:
        target: its feature layers are set, and a generation that it was in the middle of is lost.
        tokens: [batch, length] long, on any device.
        vocab_map: [draft_vocab_size] long, draft id -> target id; None: the same.
        feature_layers: three of its hidden states.
    """
    batch, length = tokens.shape
    tokens = tokens.to(target.device)
    target.feature_layers = feature_layers
    target.reset(batch)
    depths = torch.arange(length, device=target.device).expand(batch, -1)
    logits, features = target.forward_tree(tokens, depths, causal(batch, length, target.device))
    target.reset(0)  # its cache is not needed, and is large
    assert features is not None  # there are feature layers
    laws = []
    for row in logits:  # one text at a time: the whole vocabulary in float32 is large, too
        scores = row.float()
        kept = scores if vocab_map is None else scores[:, vocab_map.to(scores.device)]
        laws.append((kept - scores.logsumexp(-1, keepdim=True)).exp())
    return Lesson(tokens, features, torch.stack(laws))


@dataclass(frozen=True)
class StepScore:
    """One unrolled step against the target, row by row; row T is about the law after token T + j + 1.

    Attributes:
        cross_entropy: [batch, rows] float32, - sum p log q over the draft vocabulary.
        overlap: [batch, rows] float32, 1 - TV(p, q) = sum min(p, q) over the whole vocabulary; no gradient.
        outside: [batch, rows] float32, the target's mass outside the draft vocabulary.
    """

    cross_entropy: Tensor
    overlap: Tensor
    outside: Tensor


def score_steps(
    head: Eagle3Head, embedding: nn.Module, lesson: Lesson, steps: int, dtype: torch.dtype = torch.float32
) -> list[StepScore]:
    """Unroll the head over the lesson and compare every step's law with the target's.

    Args:
        head: in float32 when ``dtype`` is another one, which its products are then computed in.
        embedding: token ids -> [..., hidden].
        lesson: see ``read_lesson``.
        steps: of the unroll.
        dtype: of the head's matrix products.
    """
    scores = []
    with torch.autocast(lesson.tokens.device.type, dtype=dtype, enabled=dtype != head.fc.weight.dtype):
        for step, logits in enumerate(unroll(head, embedding, lesson.tokens, lesson.features, steps)):
            laws = lesson.laws[:, step + 1 : step + 1 + logits.shape[1]]
            log_draft = logits.float().log_softmax(-1)
            with torch.no_grad():
                overlap = torch.minimum(laws, log_draft.exp()).sum(-1)
            scores.append(StepScore(-(laws * log_draft).sum(-1), overlap, 1 - laws.sum(-1)))
    return scores

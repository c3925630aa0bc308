"""What the target teaches about a text: its features, and its law after every token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimized.models.eagle3 import Eagle3Head
from optimized.models.kv_cache import causal
from optimized.models.target import TargetModel
from optimized.training.settings import Objective
from optimized.training.unroll import unroll

HYBRID_DECAY = 3.0


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
        overlap: [batch, rows] float32, 1 - TV(p, q) = sum min(p, q) over the whole vocabulary; has a gradient only if
            that was asked for.
        outside: [batch, rows] float32, the target's mass outside the draft vocabulary.
    """

    cross_entropy: Tensor
    overlap: Tensor
    outside: Tensor


def score_steps(
    head: Eagle3Head,
    embedding: nn.Module,
    lesson: Lesson,
    steps: int,
    dtype: torch.dtype = torch.float32,
    overlap_gradient: bool = False,
) -> list[StepScore]:
    """Unroll the head over the lesson and compare every step's law with the target's.

    Args:
        head: in float32 when ``dtype`` is another one, which its products are then computed in.
        embedding: token ids -> [..., hidden].
        lesson: see ``read_lesson``.
        steps: of the unroll.
        dtype: of the head's matrix products.
        overlap_gradient: let the overlap have one; it takes some memory and time.
    """
    scores = []
    with torch.autocast(lesson.tokens.device.type, dtype=dtype, enabled=dtype != head.fc.weight.dtype):
        for step, logits in enumerate(unroll(head, embedding, lesson.tokens, lesson.features, steps)):
            laws = lesson.laws[:, step + 1 : step + 1 + logits.shape[1]]
            log_draft = logits.float().log_softmax(-1)
            with torch.set_grad_enabled(overlap_gradient and torch.is_grad_enabled()):
                overlap = torch.minimum(laws, log_draft.exp()).sum(-1)
            scores.append(StepScore(-(laws * log_draft).sum(-1), overlap, 1 - laws.sum(-1)))
    return scores


def step_loss(score: StepScore, objective: Objective) -> Tensor:
    """The loss of one unrolled step, the mean over its rows.

    "cross-entropy" is that of the target's law. A head that is too small to become its target lowers it by covering
    tokens that it will not be accepted for; the overlap alpha is the chance of acceptance itself. "acceptance" is
    -log(alpha): the logarithm keeps a gradient where the overlap is small. "hybrid" is w * cross-entropy + (1 - w) *
    (1 - alpha), w = exp(-3 * mean alpha), so that it goes over from the one to the other as the head becomes better.
    Both are the LK losses of Samarin et al., arXiv 2602.23881.
    """
    if objective == "cross-entropy":
        return score.cross_entropy.mean()
    if objective == "acceptance":
        return -score.overlap.clamp(min=torch.finfo(score.overlap.dtype).tiny).log().mean()
    weight = math.exp(-HYBRID_DECAY * float(score.overlap.detach().mean()))
    return weight * score.cross_entropy.mean() + (1 - weight) * (1 - score.overlap.mean())

"""The draft vocabulary: the tokens that the corpus uses most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftVocabulary:
    """Which target tokens a head speaks of.

    Attributes:
        ids: [draft_vocab_size] long, draft id -> target id, increasing.
        vocab_size: of the target.
        coverage: share of the counted tokens that are in it.
    """

    ids: Tensor
    vocab_size: int
    coverage: float


def choose_vocabulary(tokens: Tensor, vocab_size: int, size: int, always: Iterable[int] = ()) -> DraftVocabulary:
    """The ``size`` most frequent tokens, the lower id first among equals.

    Args:
        tokens: [texts, length] long, in [0, ``vocab_size``): the corpus.
        vocab_size: of the target.
        size: draft tokens wanted, 1 to ``vocab_size``.
        always: token ids that are in whatever their count, in the place of the rarest: those that end a text.

    Raises:
        ValueError: ``size`` out of its range, or fewer than ``always`` needs.
    """
    always = sorted(set(always))
    if not max(1, len(always)) <= size <= vocab_size:
        raise ValueError(
            f"a draft vocabulary of {size} tokens: {max(1, len(always))} to {vocab_size} are possible with this target"
        )
    counts = torch.bincount(tokens.flatten(), minlength=vocab_size)
    ranking = counts.clone()
    ranking[always] = counts.max() + 1
    ids = torch.sort(ranking, descending=True, stable=True).indices[:size].sort().values
    return DraftVocabulary(ids, vocab_size, float(counts[ids].sum() / counts.sum()))


def offsets(ids: Tensor) -> Tensor:
    """``d2t`` of the checkpoint layout: [draft_vocab_size] long, target id minus draft id."""
    return ids - torch.arange(len(ids))


def membership(ids: Tensor, vocab_size: int) -> Tensor:
    """``t2d`` of the checkpoint layout: [vocab_size] bool, whether a target token has a draft id."""
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[ids] = True
    return marked

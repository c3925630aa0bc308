"""What the decoder asks of a draft model, and the bookkeeping that the drafters share."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from optimized.trees import LevelNodes


class Drafter(Protocol):
    """A cheap proposer that drafts a tree level by level.

    Attributes:
        vocab_map: [vocab_size] long, draft id -> target id, increasing; None when they are the same.
        vocab_size: width of the logits.
        feature_layers: which of the target's hidden states make the features; empty when none are needed.
        max_positions: the longest sequence that the draft was made for; None without a limit. A request whose text
            outgrows it is decoded without a draft.
        owner: the generation that uses the caches now; whoever starts one sets it.
    """

    vocab_map: Tensor | None
    vocab_size: int
    feature_layers: tuple[int, ...]
    max_positions: int | None
    owner: object

    def reset(self, first_tokens: Tensor) -> None:
        """Begin a new batch; first_tokens [batch] long is the token at position 0 of every request."""

    def advance(self, token_ids: Tensor, counts: Tensor, features: Tensor | None) -> Tensor:
        """Commit tokens, and forget the tree drafted since the last commit.

        Args:
            token_ids: [batch, n] long; the first ``counts[b]`` follow what was committed before, the rest is padding.
            counts: [batch] long, at least 1.
            features: [batch, n, F]; entry i is the target's feature at the position *before* token i. None when
                ``feature_layers`` is empty.

        Returns:
            [batch, vocab_size] logits after the last committed token: those that offer level 1.
        """

    def expand(self, level: LevelNodes) -> Tensor:
        """[batch, beam, vocab_size] logits after each node of a level; levels come in order after an ``advance``."""

    def select(self, keep: Tensor) -> None:
        """Keep only the requests ``keep`` ([kept] indices into the batch); the others are finished."""


class TreeMask:
    """Which pending rows each node of the newest level sees: its ancestors, level by level, and itself."""

    def __init__(self) -> None:
        self._visible: Tensor | None = None

    def clear(self) -> None:
        """Forget the tree."""
        self._visible = None

    def descend(self, level: LevelNodes) -> Tensor:
        """Append a level; returns [batch, beam, all rows so far] bool for ``TreeCache.extend``.

        Raises:
            ValueError: levels out of order.
        """
        batch, beam = level.token_ids.shape
        own = torch.eye(beam, dtype=torch.bool, device=level.token_ids.device).expand(batch, -1, -1)
        if (level.depth == 1) != (self._visible is None):
            raise ValueError(f"level {level.depth} is out of order: levels are expanded 1, 2, ... after each advance")
        if self._visible is None:
            self._visible = own
        else:
            above = self._visible.gather(1, level.parents[:, :, None].expand(-1, -1, self._visible.shape[2]))
            self._visible = torch.cat([above, own], dim=2)
        return self._visible

    def select(self, keep: Tensor) -> None:
        """Keep only these requests."""
        if self._visible is not None:
            self._visible = self._visible[keep]


def tree_positions(lengths: Tensor, level: LevelNodes) -> Tensor:
    """[batch, beam] positions of a level's nodes; ``lengths`` [batch] counts what is cached, the root last."""
    return (lengths + level.depth - 1)[:, None].expand(level.token_ids.shape)

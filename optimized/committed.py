"""What a step added to the texts of a batch: the hand-over from verification to the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.ranges import arange
from optimized.request import Request
from optimized.verification import VerifyBatch


@dataclass(frozen=True, eq=False)
class Committed:
    """What a step added to every text, as the drafter wants it.

    Attributes:
        token_ids: [batch, n] long, right padded.
        counts: [batch] long, at least 1.
        features: [batch, n, F] the target's feature at the position before each token, or None.
    """

    token_ids: Tensor
    counts: Tensor
    features: Tensor | None

    @property
    def last(self) -> Tensor:
        """[batch, 1] the last committed token: the next tree's root."""
        return self.token_ids.gather(1, self.counts.unsqueeze(1) - 1)

    def select(self, keep: Tensor) -> Committed:
        """Only these requests, [kept] long."""
        features = None if self.features is None else self.features[keep]
        return Committed(self.token_ids[keep], self.counts[keep], features)

    def first(self, columns: int | None) -> Committed:
        """Without the columns from ``columns`` on, which must be padding; None leaves all."""
        features = None if self.features is None else self.features[:, :columns]
        return Committed(self.token_ids[:, :columns], self.counts, features)


def joined(parts: Sequence[Committed]) -> Committed:
    """What several steps added to the same texts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    token_ids = torch.cat([part.token_ids for part in parts], dim=1)
    padding = torch.cat(
        [arange(part.token_ids.shape[1], token_ids.device) >= part.counts[:, None] for part in parts], 1
    )
    order = padding.sort(dim=1, stable=True).indices
    features = None
    if parts[0].features is not None:
        together = torch.cat([part.features for part in parts if part.features is not None], dim=1)
        features = together.take_along_dim(order.unsqueeze(2), dim=1)
    return Committed(token_ids.gather(1, order), torch.stack([part.counts for part in parts]).sum(dim=0), features)


def whole_texts(live: Sequence[Request], features: Tensor | None, device: torch.device) -> Committed:
    """Every text from its second token on; ``features`` [batch, at least as many, F] of all positions but the last."""
    texts = [request.tokens[1:] for request in live]
    counts = torch.tensor([len(text) for text in texts])
    token_ids = torch.zeros(len(live), int(counts.max()), dtype=torch.long)
    for row, text in zip(token_ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.long)
    if features is not None:
        features = features[:, : token_ids.shape[1]]
    return Committed(token_ids.to(device), counts.to(device), features)


def after_walk(walk: VerifyBatch, features: Tensor | None) -> Committed:
    """The accepted tokens and the bonus token, each with the feature of the row it was emitted at.

    Args:
        walk: of the step's trees.
        features: [batch, rows, F] the target's, of these trees' rows; or None.
    """
    if features is not None:
        features = features.take_along_dim(walk.rows.clamp(min=0).unsqueeze(2), dim=1)
    return Committed(walk.token_ids.clamp(min=0), walk.counts, features)

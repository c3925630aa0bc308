"""What a step added to the texts of a batch: the hand-over from verification to the drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
        """Only these requests."""
        features = None if self.features is None else self.features[keep]
        return Committed(self.token_ids[keep], self.counts[keep], features)

    def first(self, columns: int | None) -> Committed:
        """Without the columns from ``columns`` on, which must be padding; None leaves all."""
        features = None if self.features is None else self.features[:, :columns]
        return Committed(self.token_ids[:, :columns], self.counts, features)


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
    """The accepted tokens and the bonus token, each with the feature of the row it was emitted at."""
    if features is not None:
        features = features.take_along_dim(walk.rows.clamp(min=0).unsqueeze(2), dim=1)
    return Committed(walk.token_ids.clamp(min=0), walk.counts, features)

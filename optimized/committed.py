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


def after_prompts(live: Sequence[Request], walk: VerifyBatch, features: Tensor | None) -> Committed:
    """The prompts without their first token, then the first token of the output."""
    counts = torch.tensor([len(request.prompt) for request in live])
    token_ids = torch.zeros(len(live), int(counts.max()), dtype=torch.long)
    for row, request in zip(token_ids, live, strict=True):
        row[: len(request.prompt) - 1] = torch.tensor(request.prompt[1:], dtype=torch.long)
    token_ids, counts = token_ids.to(walk.token_ids.device), counts.to(walk.token_ids.device)
    return Committed(token_ids.scatter(1, counts.unsqueeze(1) - 1, walk.token_ids[:, :1]), counts, features)


def after_walk(walk: VerifyBatch, features: Tensor | None) -> Committed:
    """The accepted tokens and the bonus token, each with the feature of the row it was emitted at."""
    if features is not None:
        features = features.take_along_dim(walk.rows.clamp(min=0).unsqueeze(2), dim=1)
    return Committed(walk.token_ids.clamp(min=0), walk.counts, features)

"""The test-time unroll: the head run over whole texts as the drafter runs it along a chain, with gradients.

Row T of step 0 stands at the text's position T: it reads the target's feature there, and token T + 1. Row T of step j
stands at position T + j: it reads the output of row T of step j - 1, and token T + j + 1. Its logits are for token
T + j + 2. It sees the rows 0..T of step 0, that is the true features up to position T, and row T of every later step up
to its own: what the drafter has in its cache after ``advance`` to T and j times ``expand`` along one path.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from optimized.models.eagle3 import Eagle3Head
from optimized.models.kv_cache import TreeCache, causal


class UnrollCache(TreeCache):
    """A ``TreeCache`` whose rows all stay pending, and whose buffers are never written into: gradients pass."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new rows; see ``TreeCache.update``."""
        earlier = self._buffers.get(layer_idx, [key_states[:, :, :0], value_states[:, :, :0]])
        both = zip(earlier, (key_states, value_states), strict=True)
        self._buffers[layer_idx] = [torch.cat(pair, dim=2) for pair in both]
        return self._buffers[layer_idx][0], self._buffers[layer_idx][1]


def rows_of(length: int, steps: int) -> int:
    """How many rows an unroll over texts of ``length`` tokens has: those whose every step predicts a token or the end.

    Raises:
        ValueError: the texts have no more than ``steps`` tokens.
    """
    if length <= steps:
        raise ValueError(f"{steps} unrolled steps need texts of at least {steps + 1} tokens, got {length}")
    return length - steps


def unroll(head: Eagle3Head, embedding: nn.Module, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
    """Run the head along the texts, one step after another.

    Args:
        head: the head.
        embedding: token ids -> [..., hidden].
        tokens: [batch, length] long.
        features: [batch, length, 3 * hidden], the target's.
        steps: how many.

    Yields:
        For step j: [batch, rows, draft_vocab_size] logits; row T is for token T + j + 2. See ``rows_of``.

    Raises:
        ValueError: the texts have no more than ``steps`` tokens.
    """
    batch, length = tokens.shape
    rows = rows_of(length, steps)
    device = tokens.device
    cache = UnrollCache(batch, device)
    visible = causal(1, rows, device)
    own = torch.eye(rows, dtype=torch.bool, device=device)[None]
    embeddings = embedding(tokens)
    hidden = head.fc(features[:, :rows].to(head.fc.weight.dtype))
    for step in range(steps):
        if step:
            visible = torch.cat([visible, own], dim=2)
        read = embeddings[:, step + 1 : step + 1 + rows].to(hidden)
        positions = torch.arange(step, step + rows, device=device).expand(batch, -1)
        hidden = head(read, hidden, positions, visible.expand(batch, -1, -1), cache)
        yield head.logits(hidden)

"""A small causal language model with the target's tokenizer as the draft."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimized.models.drafter import TreeMask, tree_positions
from optimized.models.hf_model import CachedModel
from optimized.models.kv_cache import read_texts
from optimized.models.ragged_rows import first_rows
from optimized.trees import LevelNodes


class CausalDrafter:
    """Any Hugging Face causal language model as a ``Drafter``.

    Both models must share a tokenizer (see ``check_same_tokenizer``); their vocabularies may be padded differently.
    Tokens that only the draft knows are cut from its logits; tokens that only the target knows are never proposed.

    Args:
        model: the draft; the same restrictions as for ``TargetModel``.
        target_vocab_size: width of the target's logits.

    Raises:
        ValueError: the model cannot run tree attention.
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: Any, target_vocab_size: int) -> None:
        self._runner = CachedModel(model)
        self.model = model
        self.vocab_size = min(self._runner.vocab_size, target_vocab_size)
        self.vocab_map: Tensor | None = None
        self.max_positions = self._runner.max_positions
        self.owner: object = None
        self._tree = TreeMask()
        self._unread: Tensor | None = None  # [batch, 1] the first tokens, until the first advance

    def reset(self, first_tokens: Tensor) -> None:
        """Begin a new batch; see ``Drafter.reset``."""
        self._runner.reset(len(first_tokens))
        self._tree.clear()
        self._unread = first_tokens[:, None]

    @torch.no_grad()
    def advance(self, token_ids: Tensor, counts: Tensor, features: Tensor | None = None) -> Tensor:
        """Commit tokens; see ``Drafter.advance``. Features are not needed and not read."""
        cache = self._runner.cache
        cache.drop_pending()
        self._tree.clear()
        if self._unread is not None:
            token_ids, counts = torch.cat([self._unread, token_ids], dim=1), counts + 1
            self._unread = None
        known = self._known(token_ids)

        def forward(part: slice, positions: Tensor, visible: Tensor, read: Tensor) -> Tensor:
            in_use = first_rows(read, visible.shape[1])
            return self._runner.forward(known[:, part], positions, visible, in_use, last=True)[0]

        return read_texts(cache, known.shape[1], counts, forward)[:, 0, : self.vocab_size]

    @torch.no_grad()
    def expand(self, level: LevelNodes) -> Tensor:
        """Draft the next level; see ``Drafter.expand``."""
        visible = self._tree.descend(level)
        positions = tree_positions(self._runner.cache.device_lengths, level)
        logits, _ = self._runner.forward(self._known(level.token_ids), positions, visible, level.valid)
        return logits[..., : self.vocab_size]

    def _known(self, token_ids: Tensor) -> Tensor:
        # The target may emit a token that the draft has no embedding for. What stands in for it only matters for how
        # good the next proposals are, never for what is accepted.
        return token_ids.clamp(max=self._runner.vocab_size - 1)

    def select(self, keep: Tensor) -> None:
        """Keep only these requests; see ``Drafter.select``."""
        self._runner.cache.select(keep)
        self._tree.select(keep)
        if self._unread is not None:
            self._unread = self._unread[keep]


def check_same_tokenizer(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Check that two tokenizers give every token the same id.

    Raises:
        ValueError: saying how many tokens differ, and one of them.
    """
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    different = sorted(token for token in target.keys() | draft.keys() if target.get(token) != draft.get(token))
    if different:
        token = different[0]
        raise ValueError(
            f"target and draft need one tokenizer, but {len(different)} tokens differ: {token!r} is "
            f"{target.get(token, 'unknown')} for the target and {draft.get(token, 'unknown')} for the draft"
        )

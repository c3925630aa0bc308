"""The target model: the one whose distribution must be kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optimized.models.hf_model import CachedModel
from optimized.models.kv_cache import read_texts
from optimized.models.ragged_rows import first_rows


class TargetModel:
    """A Hugging Face causal language model that scores a whole draft tree in one forward pass.

    Args:
        model: any causal language model with full attention, positions given by ``position_ids`` and "eager" or "sdpa"
            attention. Its own forward runs; this class only prepares mask, positions and cache.
        feature_layers: indices i of ``output_hidden_states[i]`` (the hidden states *entering* layer i) whose
            concatenation is the feature that a drafter reads; empty for none.

    Raises:
        ValueError: the model cannot run tree attention (sliding window, recurrent, encoder-decoder, ...), or a feature
            layer does not exist.
    """

    def __init__(self, model: Any, feature_layers: Sequence[int] = ()) -> None:
        self._runner = CachedModel(model)
        self.model = model
        self.owner: object = None  # the generation that uses cache and features now; set by whoever starts one
        self.eos_token_ids: tuple[int, ...] = _eos_token_ids(model)
        self.feature_layers = tuple(feature_layers)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Which hidden states make a feature; may be set, to fit a drafter."""
        return self._feature_layers

    @feature_layers.setter
    def feature_layers(self, layers: Sequence[int]) -> None:
        strange = [layer for layer in layers if not 0 <= layer < self.num_layers]
        if strange:
            raise ValueError(f"feature layers {strange} do not exist; the target has layers 0..{self.num_layers - 1}")
        self._feature_layers = tuple(layers)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._runner.vocab_size

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self._runner.num_layers

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.model.config.get_text_config(decoder=True).hidden_size

    @property
    def max_positions(self) -> int | None:
        """Longest sequence, prompt included; None when the model sets no limit."""
        return self._runner.max_positions

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self._runner.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, logits and features."""
        return self._runner.dtype

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed positions of each request: all its tokens but the last, which is the next tree's root."""
        return tuple(self._runner.cache.lengths)

    def reset(self, batch: int) -> None:
        """Forget everything and begin a batch of this many requests."""
        self._runner.reset(batch)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Begin a batch: read the prompts, a limited number of tokens at a time, and commit them.

        Args:
            prompts: token ids of each request, at least one each; lengths may differ.

        Returns:
            Logits [batch, vocab_size] after each prompt's last token, and the features [batch, longest prompt, F] of
            all prompt positions (right padded), or None without feature layers.

        Raises:
            ValueError: a prompt is empty, too long, or has a token outside the vocabulary; the prompt is named.
        """
        for index, prompt in enumerate(prompts):
            self.check_prompt(index, prompt)
        self.reset(len(prompts))
        longest = max((len(prompt) for prompt in prompts), default=0)
        if longest == 0:
            raise ValueError("there is no prompt")
        token_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in zip(token_ids, prompts, strict=True):
            row[: len(prompt)] = torch.as_tensor(prompt, dtype=torch.long)
        counts = torch.tensor([len(prompt) for prompt in prompts])
        self._runner.cache.reserve(longest)
        features = []

        def forward(part: slice, positions: Tensor, visible: Tensor, read: Tensor) -> Tensor:
            chunk, in_use = token_ids[:, part].to(self.device), first_rows(read, visible.shape[1])
            logits, hidden = self._runner.forward(chunk, positions, visible, in_use, True, self.feature_layers)
            of_chunk = self._features(hidden)
            if of_chunk is not None:
                features.append(of_chunk)
            return logits

        logits = read_texts(self._runner.cache, longest, counts, forward)
        return logits[:, 0], torch.cat(features, dim=1) if features else None

    def check_prompt(self, index: int, prompt: Sequence[int]) -> None:
        """Check one prompt; ``index`` is how the message names it.

        Raises:
            ValueError: it is empty, too long, or has a token outside the vocabulary.
        """
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty; it needs at least one token")
        if self.max_positions is not None and len(prompt) > self.max_positions:
            raise ValueError(f"prompt {index} has {len(prompt)} tokens; the target reads at most {self.max_positions}")
        strange = next((int(token) for token in prompt if not 0 <= token < self.vocab_size), None)
        if strange is not None:
            raise ValueError(f"prompt {index} has token {strange}; the vocabulary is 0..{self.vocab_size - 1}")

    @torch.no_grad()
    def forward_tree(
        self,
        token_ids: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        counts: Tensor | None = None,
        contain_nan: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Score a tree for every request. Nothing is committed; a previous tree that was not committed is dropped.

        Args:
            token_ids: [batch, rows] long. Row 0 is the root: the last committed token, not yet in the cache. Padding
                rows may hold any token of the vocabulary.
            depths: [batch, rows] long, 0 for the root; the position is the committed length plus this.
            ancestors: [batch, rows, rows] bool; whether row i sees row j: j is i itself or one of its ancestors.
            counts: [batch] rows in use of each request, the first ones; what is returned for the others means nothing.
                None: all.
            contain_nan: keep a node whose hidden states are NaN from spoiling rows that do not see it: a weight of 0
                times NaN is NaN. The node's own logits stay NaN; those below it then mean nothing.

        Returns:
            Logits [batch, rows, vocab_size] after each row, and its features [batch, rows, F] or None.
        """
        cache = self._runner.cache
        cache.drop_pending()
        positions = cache.device_lengths[:, None] + depths
        cache.contain_nan = contain_nan
        in_use = None if counts is None else first_rows(counts, token_ids.shape[1])
        logits, hidden = self._runner.forward(
            token_ids, positions, ancestors, in_use, hidden_layers=self.feature_layers
        )
        cache.contain_nan = False
        return logits, self._features(hidden)

    def _features(self, hidden: tuple[Tensor, ...]) -> Tensor | None:
        return torch.cat(hidden, dim=-1) if hidden else None

    @torch.no_grad()
    def commit(self, rows: Tensor, counts: Tensor) -> None:
        """Keep rows of the last tree in the cache.

        Args:
            rows: [batch, longest] long; the root first, then the accepted nodes, root to leaf; right padding is
                ignored.
            counts: [batch] how many of them count for each request.
        """
        self._runner.cache.commit(counts, rows)

    @torch.no_grad()
    def select(self, keep: Tensor) -> None:
        """Keep only the requests ``keep`` ([kept] indices into the batch); the others are finished."""
        self._runner.cache.select(keep)


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """Tokens that end a text, from the generation config, else from the model's config."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True)):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    return ()

"""EAGLE-3 draft head (Li et al., "EAGLE-3", 2025): one decoder layer on the target's own features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from optimized.models import grouped_attention
from optimized.models.drafter import TreeMask, tree_positions
from optimized.models.kv_cache import TreeCache, read_texts
from optimized.models.ragged_rows import RowsInUse, first_rows, pack, unpack
from optimized.trees import LevelNodes

MOST_TO_PASS = 16  # of longer texts only the last token passes through the whole head

_LLAMA_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
)


def llama_config(raw: dict[str, Any]) -> LlamaConfig:
    """The head's layer as a Llama config; ``raw`` is its config.json, with RoPE settings in either layout."""
    known = {key: raw[key] for key in _LLAMA_KEYS if raw.get(key) is not None}
    config = LlamaConfig(num_hidden_layers=1, **known)
    config._attn_implementation = grouped_attention.NAME
    return config


class Eagle3Attention(LlamaAttention):
    """Llama attention whose queries, keys and values read the embedding and the feature side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self, name)
            wide = nn.Linear(2 * config.hidden_size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self, name, wide)

    def remember(self, inputs: Tensor, rotation: tuple[Tensor, Tensor], cache: TreeCache) -> None:
        """Keys and values only: [batch, rows, 2 * hidden] to the cache."""
        shape = (*inputs.shape[:-1], -1, self.head_dim)
        keys, values = (project(inputs).view(shape).transpose(1, 2) for project in (self.k_proj, self.v_proj))
        keys, _ = apply_rotary_pos_emb(keys, keys, *rotation)
        cache.update(keys, values, self.layer_idx)


class Eagle3Layer(nn.Module):
    """The decoder layer ``midlayer`` of the checkpoint."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = Eagle3Attention(config)
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, embeddings: Tensor, features: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, cache: TreeCache
    ) -> Tensor:
        """[batch, rows, hidden] embeddings and features -> [batch, rows, hidden]."""
        both, normed = self._inputs(embeddings, features)
        attended, _ = self.self_attn(both, position_embeddings=rotation, attention_mask=mask, cache=cache)
        hidden = (normed if self.norm_before_residual else features) + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def remember(self, embeddings: Tensor, features: Tensor, rotation: tuple[Tensor, Tensor], cache: TreeCache) -> None:
        """What ``forward`` leaves in the cache, and nothing else."""
        self.self_attn.remember(self._inputs(embeddings, features)[0], rotation, cache)

    def _inputs(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the normed features, which are a part of it."""
        normed = self.hidden_norm(features)
        return torch.cat([self.input_layernorm(embeddings), normed], dim=-1), normed


class Eagle3Head(nn.Module):
    """The head's weights and one pass through them; parameter names are those of the official checkpoints.

    Args:
        config: see ``llama_config``.
        draft_vocab_size: rows of ``lm_head``.
        own_embedding: whether the checkpoint brings ``embed_tokens``; otherwise the target's embedding is used.
        norm_before_residual: whether the residual stream is the feature after ``hidden_norm``; in the official heads it
            is the feature before it.
    """

    def __init__(
        self,
        config: LlamaConfig,
        draft_vocab_size: int,
        own_embedding: bool = False,
        norm_before_residual: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config, norm_before_residual)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        position_ids: Tensor,
        visible: Tensor,
        cache: TreeCache,
        ragged: RowsInUse | None = None,
    ) -> Tensor:
        """One pass over new rows, which stay pending in the cache.

        Args:
            embeddings: [batch, rows, hidden] of the token *after* each row's position.
            features: [batch, rows, hidden] of each row's position: ``fc`` of the target's, or an output of this method.
            position_ids: [batch, rows] long.
            visible: see ``TreeCache.extend``.
            cache: of this head.
            ragged: the rows in use, if all but ``visible`` is packed (see ``pack``).

        Returns:
            [batch, rows, hidden] before ``norm``: the next rows' features, and what ``logits`` reads.
        """
        mask = cache.extend(visible, features.dtype, ragged)
        return self.midlayer(embeddings, features, self.rotary_emb(features, position_ids), mask, cache)

    def remember(self, embeddings: Tensor, features: Tensor, position_ids: Tensor, cache: TreeCache) -> None:
        """What ``forward`` leaves in the cache, whose rows are announced, for rows whose output nobody reads."""
        self.midlayer.remember(embeddings, features, self.rotary_emb(features, position_ids), cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft_vocab_size]."""
        return self.lm_head(self.norm(hidden))


class Eagle3Drafter:
    """An EAGLE-3 head as a ``Drafter``.

    The head's index t holds the feature of position t, the embedding of token t + 1, and RoPE position t; its logits
    are for token t + 2. The root is the newest committed token, so it is the token of the newest committed index.

    Args:
        head: the head, in the device and dtype it runs in.
        embed_tokens: the target's embedding; read only when the head has none of its own.
        vocab_map: [draft_vocab_size] long, draft id -> target id, increasing; None when they are the same.
        feature_layers: the target's hidden states that make a feature, three of them.

    Raises:
        ValueError: no embedding, or not three feature layers.
    """

    def __init__(
        self,
        head: Eagle3Head,
        embed_tokens: nn.Module | None,
        vocab_map: Tensor | None,
        feature_layers: tuple[int, ...],
    ) -> None:
        embedding = head.embed_tokens if head.embed_tokens is not None else embed_tokens
        if embedding is None:
            raise ValueError("the EAGLE-3 head has no embedding of its own; give the target's")
        if len(feature_layers) != 3:
            raise ValueError(f"an EAGLE-3 head reads three feature layers, got {feature_layers}")
        self.head = head.eval()
        self._embedding = embedding
        self.vocab_size = int(head.lm_head.out_features)
        self.vocab_map = None if vocab_map is None else vocab_map.to(self.device)
        self.feature_layers: tuple[int, ...] = feature_layers
        self.max_positions: int | None = head.config.max_position_embeddings
        self.owner: object = None
        self._tree = TreeMask()
        self._cache = TreeCache(0, self.device)
        self._hidden = torch.empty(
            0
        )  # [batch, newest rows, hidden]: the head's output for the parents of the next level

    @property
    def device(self) -> torch.device:
        """Where the head lives."""
        return self.head.norm.weight.device

    def reset(self, first_tokens: Tensor) -> None:
        """Begin a new batch; see ``Drafter.reset``. The head never reads the token at position 0."""
        self._cache = TreeCache(len(first_tokens), self.device)
        self._tree.clear()
        self._hidden = torch.zeros(len(first_tokens), 1, self.head.config.hidden_size, device=self.device)

    @torch.no_grad()
    def advance(self, token_ids: Tensor, counts: Tensor, features: Tensor | None) -> Tensor:
        """Commit tokens; see ``Drafter.advance``.

        Raises:
            ValueError: no features, or features of another width.
        """
        width = self.head.fc.in_features
        if features is None or features.shape[-1] != width:
            given = "none" if features is None else f"{features.shape[-1]} numbers"
            raise ValueError(f"the EAGLE-3 head needs features of {width} numbers per position, got {given}")
        self._cache.drop_pending()
        self._tree.clear()
        if token_ids.shape[1] > MOST_TO_PASS:
            token_ids, counts, features = self._remember(token_ids, counts, features)
        known = features  # and not None

        def forward(part: slice, positions: Tensor, visible: Tensor, read: Tensor) -> Tensor:
            in_use = RowsInUse.of(first_rows(read, visible.shape[1]), self.device)
            fused = self._fused(known[:, part], in_use)
            hidden = unpack(self._run(token_ids[:, part], fused, positions, visible, in_use), in_use)
            last = (read.to(self.device) - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
            return hidden.gather(1, last)

        self._hidden = read_texts(self._cache, token_ids.shape[1], counts, forward)
        return self.head.logits(self._hidden[:, 0])

    def _remember(self, token_ids: Tensor, counts: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Commit all tokens but each text's last: of what was read before, the head reads keys and values only.

        Returns:
            The last tokens, as ``advance`` is given them.
        """
        cache = self._cache

        def forward(part: slice, positions: Tensor, visible: Tensor, read: Tensor) -> Tensor:
            in_use = RowsInUse.of(first_rows(read, visible.shape[1]), self.device)
            cache.announce(visible.shape[1], in_use)
            fused = self._fused(features[:, part], in_use)
            embeddings = self._embedding(pack(token_ids[:, part], in_use)).to(fused)
            self.head.remember(embeddings, fused, pack(positions, in_use), cache)
            return counts.unsqueeze(1)  # of which nothing is read

        read_texts(cache, token_ids.shape[1] - 1, counts - 1, forward)
        last = (counts - 1).to(self.device).unsqueeze(1)
        kept = features.take_along_dim(last.to(features.device).unsqueeze(2), dim=1)
        return token_ids.gather(1, last.to(token_ids.device)), torch.ones_like(counts), kept

    def _fused(self, features: Tensor, in_use: RowsInUse | None) -> Tensor:
        return self.head.fc(pack(features, in_use).to(self.device, self.head.norm.weight.dtype))

    @torch.no_grad()
    def expand(self, level: LevelNodes) -> Tensor:
        """Draft the next level; see ``Drafter.expand``."""
        visible = self._tree.descend(level)
        features = self._hidden.gather(1, level.parents[:, :, None].expand(-1, -1, self._hidden.shape[2]))
        positions = tree_positions(self._cache.device_lengths, level)
        in_use = RowsInUse.of(level.valid, self.device)
        hidden = self._run(level.token_ids, pack(features, in_use), positions, visible, in_use)
        self._hidden = unpack(hidden, in_use)
        return unpack(self.head.logits(hidden), in_use)

    def _run(
        self, token_ids: Tensor, features: Tensor, positions: Tensor, visible: Tensor, in_use: RowsInUse | None
    ) -> Tensor:
        """The head's output, packed as the features are."""
        embeddings = self._embedding(pack(token_ids, in_use)).to(features)
        return self.head(embeddings, features, pack(positions, in_use), visible, self._cache, in_use)

    def select(self, keep: Tensor) -> None:
        """Keep only these requests; see ``Drafter.select``."""
        self._cache.select(keep)
        self._tree.select(keep)
        self._hidden = self._hidden[keep]

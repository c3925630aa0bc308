"""Attention of a few rows where several query heads share a key head, without a copy of the cache in every pass.

With a mask, transformers' SDPA repeats all keys and values for the heads that share them. Behind a long text that copy
is a quarter of a tree's pass (docs/decoder.md). The heads of a group may as well stand side by side as more rows of one
head: same sums, and what is repeated is the mask of a few rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from optimized.models.ragged_rows import pack, unpack

NAME = "rheo_grouped"  # as an attention implementation


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As transformers' ``sdpa_attention_forward``, which does what is not a tree's pass over grouped heads.

    Args:
        module: the layer's attention; its ``num_key_value_groups`` query heads share a key head.
        query: [batch, heads, rows, head_dim]; packed, [1, heads, used, head_dim], where the mask says so.
        key, value: [batch, key heads, width, head_dim].
        attention_mask: [batch, 1, rows, width] additive, or None. Its attribute ``in_use``: see ``TreeCache.extend``.
        dropout, scaling: of the scores.
        options: whatever else a model gives.

    Returns:
        [batch, rows, heads, head_dim], packed as the query is, and None for the weights.
    """
    in_use = getattr(attention_mask, "in_use", None)
    if in_use is not None:
        query = unpack(query.transpose(1, 2), in_use).transpose(1, 2)
    groups = getattr(module, "num_key_value_groups", 1)
    special = any(options.get(name) is not None for name in ("position_bias", "softcap"))
    if attention_mask is None or attention_mask.shape[1] != 1 or special or not _pays(groups, query, key):
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return pack(attended, in_use), None
    batch, heads, rows, head_dim = query.shape
    mask = getattr(attention_mask, "grouped", None)
    if mask is None:  # the same for all layers of a pass, so it stays with what it was made of
        mask = attention_mask.repeat(1, 1, groups, 1)
        attention_mask.grouped = mask  # type: ignore[attr-defined]
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, heads // groups, groups * rows, head_dim),
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
    )
    return pack(attended.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous(), in_use), None


def _pays(groups: int, query: Tensor, key: Tensor) -> bool:
    """Whether heads are shared, and the rows' masks are smaller than the keys that would be copied."""
    rows, shared = query.shape[2], query.shape[1] == groups * key.shape[1]
    return groups > 1 and shared and 1 < rows <= key.shape[1] * key.shape[3]


AttentionInterface.register(NAME, grouped_attention)


def can_group(model: Any) -> bool:
    """Whether all attention of a model runs by transformers' own SDPA, which ``grouped_attention`` can stand for."""
    config = model.config.get_text_config(decoder=True)
    files = {type(module).__module__ for module in model.modules() if hasattr(module, "num_key_value_groups")}
    interfaces = [getattr(sys.modules.get(name), "ALL_ATTENTION_FUNCTIONS", {}) for name in files]
    stock = all(interface.get("sdpa") is sdpa_attention_forward for interface in interfaces)
    return bool(files) and stock and getattr(config, "_attn_implementation", None) == "sdpa"


@contextmanager
def grouped(model: Any) -> Iterator[None]:
    """Let a model that ``can_group`` do so; afterwards it is as before, for whoever else uses it."""
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before

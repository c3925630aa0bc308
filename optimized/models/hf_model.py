"""What target and causal draft have in common: one Hugging Face causal language model run with a ``TreeCache``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from optimized.models.grouped_attention import can_group, grouped
from optimized.models.kv_cache import TreeCache
from optimized.models.ragged_rows import RowsInUse, pack, unpack
from optimized.ranges import arange

SUPPORTED_ATTENTION = ("eager", "sdpa")


def check_supported(model: Any) -> None:
    """Refuse models whose attention cannot follow a tree.

    Raises:
        ValueError: naming the model and the reason.
    """
    reason = _unsupported_reason(model)
    if reason:
        raise ValueError(f"{type(model).__name__} cannot run tree attention: {reason}")


def _unsupported_reason(model: Any) -> str | None:
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; a causal language model is needed"
    if getattr(model, "_is_stateful", False):
        return "its layers carry a recurrent state (SSM, linear attention or hybrid), which cannot branch into a tree"
    layer_types = getattr(config, "layer_types", None) or []
    strange = sorted(set(layer_types) - {"full_attention"})
    if strange:
        return f"its layers include {', '.join(strange)}; only full attention is supported"
    if not layer_types:
        for name in ("sliding_window", "attention_chunk_size"):
            if getattr(config, name, None) is not None:
                return f"it uses {name}={getattr(config, name)}; only full attention is supported"
    if "local" in (getattr(config, "attention_layers", None) or []):
        return "its layers include local attention; only full attention is supported"
    if getattr(config, "alibi", False):
        return "it uses ALiBi, whose positions are those in the cache, not those in the tree"
    parameters = inspect.signature(model.forward).parameters
    missing = [name for name in ("attention_mask", "position_ids", "cache", "logits_to_keep") if name not in parameters]
    if missing:
        return f"its forward takes no {', '.join(missing)}"
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in SUPPORTED_ATTENTION:
        return (
            f"attention implementation {implementation!r} takes no additive 4D mask; "
            f"load it with attn_implementation in {SUPPORTED_ATTENTION}"
        )
    # Encoders that can be decoders too take an encoder's states. Their config may leave them encoders; some of them
    # count positions from elsewhere.
    return _odd_decoder(model) if "encoder_hidden_states" in parameters else None


@torch.no_grad()
def _odd_decoder(model: Any) -> str | None:
    """Try two tokens: does the first one's answer depend on the second, are positions 0, 1 what it takes by itself?"""
    token_ids = torch.tensor([[1, 2], [1, 3]], device=model.device)
    positions = torch.arange(2, device=model.device).expand(2, -1)
    by_itself = model.eval()(input_ids=token_ids).logits.float()
    told = model(input_ids=token_ids, position_ids=positions).logits.float()
    rounding = 1e-2 * float(by_itself.std())
    if not torch.allclose(by_itself[0, 0], by_itself[1, 0], atol=rounding, rtol=0):
        return "its attention looks ahead: it is an encoder (is_decoder=True in its config makes it a decoder)"
    if not torch.allclose(by_itself, told, atol=rounding, rtol=0):
        return "it does not count positions from 0"
    return None


def max_positions(config: Any) -> int | None:
    """How many positions a text config allows; None when it sets no limit."""
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and rope.get("original_max_position_embeddings"):
        # Past this point the rotation of *every* position changes with the longest one of the batch: cached keys no
        # longer fit, and a request would depend on its mates.
        limit = min(limit or rope["original_max_position_embeddings"], rope["original_max_position_embeddings"])
    return limit


class CachedModel:
    """A frozen causal language model, its cache and its limits; runs the model's own forward, nothing of its own.

    Raises:
        ValueError: the model cannot run tree attention; see ``check_supported``.
    """

    def __init__(self, model: Any) -> None:
        check_supported(model)
        self.model = model.eval()
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.num_layers: int = config.num_hidden_layers
        self.max_positions = max_positions(config)
        self.cache = TreeCache(0, self.device)
        self._attention: Callable[[Any], AbstractContextManager[None]] = grouped if can_group(model) else nullcontext

    @property
    def device(self) -> torch.device:
        """Where tokens go in and logits come out."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the logits."""
        return self.model.dtype

    def reset(self, batch: int) -> None:
        """Forget everything and begin a batch of this many requests."""
        self.cache = TreeCache(batch, self.device)

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        visible: Tensor,
        in_use: Tensor | None = None,
        last: bool = False,
        hidden_layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One forward pass over new rows, which stay pending.

        Args:
            token_ids: [batch, rows] long.
            position_ids: [batch, rows] long; clamped into the model's positions, because rows of a tree may reach
                beyond the context's end (nothing that deep is ever emitted).
            visible: [batch, rows, pending + rows] bool, see ``TreeCache.extend``.
            in_use: [batch, rows] bool, which rows are not padding, at least one of each request; what is returned for
                padding means nothing. None: all.
            last: only the logits of each request's last row in use.
            hidden_layers: indices into ``output_hidden_states``.

        Returns:
            Logits [batch, rows or 1, vocab_size], and a [batch, rows, hidden] tensor for each of ``hidden_layers``.
        """
        if self.max_positions is not None:
            position_ids = position_ids.clamp(max=self.max_positions - 1)
        ragged = RowsInUse.of(in_use, self.device) if self._attention is grouped else None
        mask = self.cache.extend(visible, self.dtype, ragged)
        options = {"output_hidden_states": sorted(set(hidden_layers))} if hidden_layers else {}
        with self._attention(self.model):
            output = self.model(
                input_ids=pack(token_ids, ragged),
                attention_mask=mask,
                position_ids=pack(position_ids, ragged),
                cache=self.cache,
                use_cache=True,
                logits_to_keep=_last_rows(in_use, ragged).to(self.device) if last else 0,
                **options,
            )
        if not last:
            logits = unpack(output.logits, ragged)
        else:
            logits = output.logits if ragged is None else output.logits.transpose(0, 1)
        return logits, tuple(unpack(output.hidden_states[layer], ragged) for layer in hidden_layers)


def _last_rows(in_use: Tensor | None, ragged: RowsInUse | None) -> Tensor:
    """``logits_to_keep`` for each request's last row in use: one number if it is the same for all."""
    if in_use is None:
        return torch.tensor([-1])
    last = (in_use * arange(in_use.shape[1], in_use.device)).amax(dim=1, keepdim=True)
    if ragged is not None:
        return ragged.places.gather(1, last).squeeze(1)
    return last[0] if len(set(last.flatten().tolist())) == 1 else last

"""What the launchers share: sizes of tiles and the words of their errors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

FLOATS = ("float16", "bfloat16", "float32", "float64")


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << max(count - 1, 0).bit_length()


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes a tensor's device the one that Triton launches on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check_tile(tile: int | None, default: int, vocab: int) -> int:
    """The tile's width: the default or what was asked for, never wider than the vocabulary needs.

    Raises:
        ValueError: not a power of two from 16 up.
    """
    if tile is None:
        tile = default
    elif tile < 16 or tile != power_of_two(tile):
        raise ValueError(f"tile must be a power of two, at least 16; got {tile}")
    return min(tile, max(16, power_of_two(vocab)))


def check_logits(logits: Tensor, middle: str) -> Tensor:
    """``logits`` with a last dimension that is contiguous.

    Raises:
        ValueError: not three-dimensional, no entries, or not of a float type.
    """
    if logits.ndim != 3 or 0 in logits.shape:
        raise ValueError(f"logits must be [batch, {middle}, vocab] with no dimension empty, got {list(logits.shape)}")
    if str(logits.dtype).removeprefix("torch.") not in FLOATS:
        raise ValueError(f"logits must be of one of the types {', '.join(FLOATS)}; got {logits.dtype}")
    return logits if logits.stride(2) == 1 else logits.contiguous()


def check_shape(name: str, values: Tensor, *shape: int) -> Tensor:
    """``values``, contiguous.

    Raises:
        ValueError: another shape than the one given.
    """
    if values.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(values.shape)}")
    return values.contiguous()

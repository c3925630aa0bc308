"""Tensors that depend on a step's shapes and settings alone, made once: a step asks for dozens of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")
MOST = 256


def kept(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Keep what was made. What a CUDA graph's capture makes is not kept: it holds nothing until the replay. What it is
    handed, its replays read: that is never let go.
    """
    made_before: dict[object, Tensor] = {}
    captured: dict[object, Tensor] = {}

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        found = made_before.get(args)
        if found is None:
            found = captured.get(args)
        if found is None:
            found = make(*args, **kwargs)
            if not _capturing(found):
                if len(made_before) >= MOST:
                    made_before.clear()
                made_before[args] = found
        elif _capturing(found):
            captured[args] = found
        return found

    return made


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@kept
def arange(count: int, device: torch.device) -> Tensor:
    """[count] long, 0 .. count - 1. Shared: never write into it."""
    return torch.arange(count, device=device)


def between(first: int | Tensor, end: int | Tensor, count: int, device: torch.device) -> Tensor:
    """[..., count] bool, whether ``first <= place < end``. Shared: never write into it."""
    if isinstance(first, int) and isinstance(end, int):
        return _between(first, end, count, device)
    places = arange(count, device)
    return (places >= first) & (places < end)


@kept
def _between(first: int, end: int, count: int, device: torch.device) -> Tensor:
    places = torch.arange(count, device=device)
    return (places >= first) & (places < end)


@kept
def offers_of(widths: tuple[int, ...], branching: int, device: torch.device) -> Tensor:
    """[3, all offered nodes + 2] long: the level of each, its slot, and its parent's place among all expanded nodes.

    Args:
        widths: how many nodes were expanded to offer each level.
        branching: how many slots each of them has.
        device: where the numbers are used.

    Returns:
        The numbers, with two columns of 0 at the end. Shared: never write into it.
    """
    levels = torch.cat([torch.full((w * branching,), level, device=device) for level, w in enumerate(widths, start=1)])
    places = torch.arange(len(levels), device=device)
    return torch.nn.functional.pad(torch.stack([levels, places % branching, places // branching]), (0, 2))


@kept
def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """[count] of ``dtype``, these numbers. Shared: never write into it."""
    return torch.tensor(values, dtype=dtype, device=device)

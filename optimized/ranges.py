"""Index tensors that depend on shapes alone, made once: a step asks for dozens of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")
MOST = 256


def _kept(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Keep what was made. What a CUDA graph's capture makes is not kept: it holds nothing until the replay."""
    kept: dict[object, Tensor] = {}

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        found = kept.get(args)
        if found is None:
            found = make(*args, **kwargs)
            if not (found.is_cuda and torch.cuda.is_current_stream_capturing()):
                if len(kept) >= MOST:
                    kept.clear()
                kept[args] = found
        return found

    return made


@_kept
def arange(count: int, device: torch.device) -> Tensor:
    """[count] long, 0 .. count - 1. Shared: never write into it."""
    return torch.arange(count, device=device)


@_kept
def levels_of(widths: tuple[int, ...], branching: int, device: torch.device) -> Tensor:
    """[all offered nodes] long, the level of each, from how many nodes were expanded to offer each level."""
    return torch.cat([torch.full((w * branching,), level, device=device) for level, w in enumerate(widths, start=1)])


@_kept
def constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """[count] long, these numbers. Shared: never write into it."""
    return torch.tensor(values, dtype=torch.long, device=device)

"""Index tensors that depend on shapes alone, made once: a step asks for dozens of them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def arange(count: int, device: torch.device) -> Tensor:
    """[count] long, 0 .. count - 1. Shared: never write into it."""
    return torch.arange(count, device=device)


@lru_cache(maxsize=256)
def levels_of(widths: tuple[int, ...], branching: int, device: torch.device) -> Tensor:
    """[all offered nodes] long, the level of each, from how many nodes were expanded to offer each level."""
    return torch.cat([torch.full((w * branching,), level, device=device) for level, w in enumerate(widths, start=1)])


@lru_cache(maxsize=256)
def constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """[count] long, these numbers. Shared: never write into it."""
    return torch.tensor(values, dtype=torch.long, device=device)

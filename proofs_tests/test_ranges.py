"""Tensors that are kept: made once, let go when there are many, but never those that a captured graph reads."""

from __future__ import annotations

import weakref

import pytest
import torch

from optimized import ranges


def test_what_a_graph_has_read_outlives_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = False
    monkeypatch.setattr(ranges, "_capturing", lambda tensor: capturing)
    made: list[weakref.ref[torch.Tensor]] = []

    @ranges.kept
    def numbers(count: int) -> torch.Tensor:
        tensor = torch.arange(count)
        made.append(weakref.ref(tensor))
        return tensor

    assert numbers(3) is numbers(3)
    numbers(5)
    capturing = True
    in_graph = numbers(3).data_ptr()
    numbers(4)  # made inside a capture: holds nothing yet, so the next one asks anew
    assert len(made) == 3
    assert made[2]() is None
    capturing = False
    for count in range(10, 10 + 2 * ranges.MOST):
        numbers(count)
    assert made[0]() is not None
    assert made[1]() is None
    assert numbers(3).data_ptr() == in_graph

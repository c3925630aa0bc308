"""For every test: Triton's interpreter where there is no GPU, and NaN in memory that nobody has written.

A kernel that leaves part of its output unwritten then gives NaN (or the largest integer) instead of numbers that happen
to be right.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from optimized.backends import Backend, choose_backend
from reference.api import RheoConfig

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, so before any test module is

# Torch fills new tensors in this mode only; where an operation has no deterministic version it warns.
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(params=["torch", "numba"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend that a CPU has."""
    return choose_backend(request.param, torch.device("cpu"), RheoConfig())


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads cost more than they give on models as small as the tests'."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

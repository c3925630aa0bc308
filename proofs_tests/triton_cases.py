"""What the tests of the Triton kernels share: where they run, poisoned memory, logits of many families.

Without a CUDA device the kernels run in Triton's interpreter (see conftest.py), with one the same tests run there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TEMPERATURES = (1e-6, 1e-4, 0.05, 0.3, 1.0, 2.0)  # the first is greedy
FAMILIES = ("normal", "tied", "uniform", "pairs", "zeros", "masked", "one-hot", "peaked", "flat")


def make_the_interpreter_quicker() -> None:
    """The interpreter looks through all of Triton's language at every call of a device function; once a launch will do.

    Most of its time otherwise; no kernel is interpreted any differently.
    """
    from triton.runtime import interpreter

    look_through = interpreter._patch_lang
    if look_through.__name__ == "once":
        return
    seen: set[int] = set()

    def once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in seen:
            return interpreter._LangPatchScope()
        scope = look_through(fn)
        restore = scope.restore

        def restore_and_forget() -> None:
            restore()
            seen.discard(module)

        seen.add(module)
        scope.restore = restore_and_forget
        return scope

    launch = interpreter.GridExecutor.__call__

    def launch_afresh(self: Any, *arguments: Any, **options: Any) -> Any:
        seen.clear()  # a launch that raised has not restored what it had patched
        return launch(self, *arguments, **options)

    interpreter._patch_lang = once
    interpreter.GridExecutor.__call__ = launch_afresh


if INTERPRETED:
    make_the_interpreter_quicker()


@contextmanager
def poisoned() -> Iterator[None]:
    """``torch.empty`` gives NaN, the largest integer, True: an output that a kernel leaves unwritten shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        with np.errstate(all="ignore"):  # the interpreter computes masked lanes as well
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def random_row(rng: np.random.Generator, vocab: int, family: str) -> NDArray[np.float32]:
    """Logits of one family, to be rounded to the case's type.

    * ``normal``. * ``tied``: four values. * ``uniform``: one value. * ``pairs``: every value twice. * ``zeros``: 0.0
      and -0.0. * ``masked``: some or nearly all at -inf. * ``one-hot``: one finite logit. * ``peaked``: most weights
      underflow. * ``flat``: nearly uniform.
    """
    values = rng.normal(scale=2.0, size=vocab)
    if family == "tied":
        values = rng.integers(-2, 2, size=vocab) * rng.uniform(0.3, 1.2)
    elif family == "uniform":
        values = np.full(vocab, rng.normal())
    elif family == "pairs":
        values = -(rng.permutation(vocab) // 2) / 8.0
    elif family == "zeros":
        values = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    elif family == "masked":
        values[rng.permutation(vocab)[rng.integers(1, vocab + 1) :]] = -np.inf
    elif family == "one-hot":
        values = np.where(np.arange(vocab) == rng.integers(vocab), values, -np.inf)
    elif family == "peaked":
        values *= 60
    elif family == "flat":
        values *= 1e-3
    return values.astype(np.float32)


def widened(logits: Tensor) -> NDArray[np.float64]:
    """The logits that a kernel sees, as float64 for the reference."""
    return logits.float().double().cpu().numpy()

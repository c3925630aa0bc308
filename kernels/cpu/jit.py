"""How the CPU kernels are compiled: by Numba, once on a machine, and kept on disk where that can be done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba import njit, types

INTEGER, NUMBER, FLAG = types.int64, types.float64, types.boolean
SINGLE = types.float32


def array(of: Any, dimensions: int) -> Any:
    """The type of an array whose numbers lie row after row."""
    return types.Array(of, dimensions, "C")


def jit(*arguments: Any, reassociate: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that compiles a function of arrays and numbers; it holds no lock while it runs.

    Args:
        arguments: their types: it is compiled for these when its module is imported, and takes no others. Without any,
            it is compiled with what calls it.
        reassociate: whether sums may be taken in another order, which lets them run several numbers at a time. Nothing
            else may ever be changed: ties are exact.
    """
    allowed = {"reassoc"} if reassociate else False
    signatures: Sequence[Any] = [arguments] if arguments else []

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(*signatures, cache=True, nogil=True, fastmath=allowed)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            # Nowhere to keep it: neither beside the source nor in the user's cache folder.
            return njit(*signatures, nogil=True, fastmath=allowed)(function)

    return compiled

"""Launchers of the CUDA kernels for the tree: the beam of a level, the pruned tree, the verification walk.

One block per request, one launch per call, on Torch's current stream, nothing read back: whatever is computed here can
be captured in a CUDA graph. Torch allocates every output; CuPy compiles ``cuda/tree.cu`` once per process and sees the
tensors through DLPack without a copy. The order of nodes, and which of them a tree keeps, are those of
docs/algorithm.md, "Growth".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# What the tables of cuda/tree.cu hold.
MAX_OFFERED = 8192
MAX_BEAM = 1024
MAX_ROWS = 1024
MAX_DEPTH = 64
MAX_THREADS = 1024

SOURCE = Path(__file__).parent / "cuda" / "tree.cu"
OPTIONS = ("-std=c++17",)

# (kernel, blocks, threads per block, arguments in the kernel's order)
Launch = Callable[[str, int, int, Sequence[Tensor | np.generic]], None]


class BeamNodes(NamedTuple):
    """The best offered nodes of a level, best first.

    Attributes:
        best: [batch, beam] int64, index among the level's offered nodes.
        best_scores: [batch, beam], in the dtype of the offered scores.
        token_ids: [batch, beam] int64; 0 where not valid.
        parents: [batch, beam] int64, the parent's rank in the beam one level up; 0 where not valid.
        valid: [batch, beam] bool, whether the score is above -inf (and not NaN).
    """

    best: Tensor
    best_scores: Tensor
    token_ids: Tensor
    parents: Tensor
    valid: Tensor


class PrunedTree(NamedTuple):
    """Draft trees; row 0 is the root, the kept nodes follow level by level, padding stands at the end.

    Attributes:
        token_ids: [batch, rows] int64; -1 for the root, 0 for padding.
        parents: [batch, rows] int64, row of the parent; -1 for the root and for padding.
        depths: [batch, rows] int64; 0 for the root and for padding.
        slots: [batch, rows] int64, place among the parent's slots.
        is_probe: [batch, rows] bool.
        log_scores: [batch, rows] float64; 0 for the root, -inf for padding.
        num_nodes: [batch] int64, rows in use, root included.
        law_index: [batch, rows] int64, which expanded node drew the row's probe; -1 where no probe is in the tree.
        ancestors: [batch, rows, ceil(rows / 64)] int64: bit j % 64 of word j // 64 says that row j is the row itself or
            its ancestor. The words are unsigned, int64 is what Torch can shift. Padding sees itself and the root.
        probe_row: [batch, rows] int64, the row of the row's probe; 0 where none is in the tree.
        draft_failed: [batch] bool, whether the draft failed at a node that was really expanded.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    slots: Tensor
    is_probe: Tensor
    log_scores: Tensor
    num_nodes: Tensor
    law_index: Tensor
    ancestors: Tensor
    probe_row: Tensor
    draft_failed: Tensor


class Walk(NamedTuple):
    """What the walks emitted.

    Attributes:
        token_ids: [batch, depth + 1] int64, accepted tokens and then the bonus token; -1 behind it.
        rows: [batch, depth + 1] int64, the rows walked through, the root first; -1 behind the last.
        counts: [batch] int64, emitted tokens; also the number of ``rows`` in use.
        probes_offered: [batch, depth + 1] bool, whether the probe stood in the tree at the i-th row of the walk.
        probes_accepted: [batch, depth + 1] bool, whether the walk went on through that probe.
    """

    token_ids: Tensor
    rows: Tensor
    counts: Tensor
    probes_offered: Tensor
    probes_accepted: Tensor


def expanded_widths(depth: int, beam: int, branching: int) -> list[int]:
    """How many nodes are expanded to offer each level: 1 (the root), then up to ``beam``."""
    widths = [1]
    while len(widths) < depth:
        widths.append(min(beam, widths[-1] * branching))
    return widths


def select_beam(
    scores: Tensor,
    token_ids: Tensor,
    *,
    beam: int,
    branching: int,
    best: Tensor | None = None,
    launch: Launch | None = None,
) -> BeamNodes:
    """The best ``beam`` of a level's offered nodes: score descending, ties by index.

    Args:
        scores: [batch, offered] float32 or float64 path scores in the order (parent's rank, slot), -inf where nothing
            is offered. May be columns of a wider tensor.
        token_ids: [batch, offered] int64, likewise.
        beam: how many to take; the width of the result is min(beam, offered).
        branching: slots per parent.
        best: [batch, width] int64, written in place of a new tensor; may be columns of a wider one.
        launch: runs the kernel; the current device by default.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or sizes beyond the kernel's tables.
        RuntimeError: CuPy or a CUDA device is missing.
    """
    _check("scores", scores, (-1, -1), (torch.float32, torch.float64), rows_only=True)
    batch, offered = scores.shape
    _check("token_ids", token_ids, (batch, offered), (torch.int64,), scores, rows_only=True)
    _check_range("beam", beam, 1, None)
    _check_range("branching", branching, 1, None)
    _check_range("the number of offered nodes of a level", offered, 1, MAX_OFFERED)
    width = min(beam, offered)
    _check_range("min(beam, offered nodes)", width, 1, MAX_BEAM)
    if best is None:
        best = torch.empty(batch, width, dtype=torch.int64, device=scores.device)
    _check("best", best, (batch, width), (torch.int64,), scores, rows_only=True)

    nodes = BeamNodes(
        best=best,
        best_scores=torch.empty(batch, width, dtype=scores.dtype, device=scores.device),
        token_ids=torch.empty(batch, width, dtype=torch.int64, device=scores.device),
        parents=torch.empty(batch, width, dtype=torch.int64, device=scores.device),
        valid=torch.empty(batch, width, dtype=torch.bool, device=scores.device),
    )
    if batch:
        (launch or launch_on_device)(
            f"select_beam_{_suffix(scores)}",
            batch,
            _threads(offered),
            [
                *(scores, np.int64(scores.stride(0)), token_ids, np.int64(token_ids.stride(0))),
                *(np.int32(offered), np.int32(width), np.int32(branching)),
                *(nodes.best, np.int64(best.stride(0))),
                *(nodes.best_scores, nodes.token_ids, nodes.parents, nodes.valid),
            ],
        )
    return nodes


def prune_tree(
    token_ids: Tensor,
    log_scores: Tensor,
    is_probe: Tensor,
    expanded_offers: Tensor,
    failed: Tensor,
    *,
    branching: int,
    beam: int,
    depth: int,
    tree_size: int,
    launch: Launch | None = None,
) -> PrunedTree:
    """Keep the best ``tree_size`` of all offered nodes, score descending, ties by index, and number them level-major.

    With ``expanded`` = sum of ``expanded_widths(depth, beam, branching)``:

    Args:
        token_ids: [batch, expanded * branching] int64, offered tokens in the order (level, parent's rank, slot).
        log_scores: [batch, expanded * branching] float32 or float64, path scores, never above the parent's; -inf where
            nothing is offered.
        is_probe: [batch, expanded * branching] bool, at most one per parent.
        expanded_offers: [batch, expanded - 1] int64, ``BeamNodes.best`` of all levels side by side.
        failed: [batch, expanded] bool, whether the draft's logits were unusable at an expanded node.
        branching: slots per expanded node.
        beam: how many nodes of a level are expanded.
        depth: how many levels were drafted.
        tree_size: the budget; the tree has min(tree_size, expanded * branching) + 1 rows.
        launch: runs the kernel; the current device by default.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or sizes beyond the kernel's tables.
        RuntimeError: CuPy or a CUDA device is missing.
    """
    _check_range("depth", depth, 1, MAX_DEPTH)
    for name, value in (("beam", beam), ("branching", branching), ("tree_size", tree_size)):
        _check_range(name, value, 1, None)
    expanded = sum(expanded_widths(depth, beam, branching))
    offered = expanded * branching
    _check_range("the number of offered nodes", offered, 1, MAX_OFFERED)
    size = min(tree_size, offered)
    _check_range("min(tree_size, offered nodes)", size, 1, MAX_ROWS - 1)
    _check("token_ids", token_ids, (-1, offered), (torch.int64,))
    batch, rows, device = token_ids.shape[0], size + 1, token_ids.device
    _check("log_scores", log_scores, (batch, offered), (torch.float32, torch.float64), token_ids)
    _check("is_probe", is_probe, (batch, offered), (torch.bool,), token_ids)
    _check("expanded_offers", expanded_offers, (batch, expanded - 1), (torch.int64,), token_ids)
    _check("failed", failed, (batch, expanded), (torch.bool,), token_ids)

    def table(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device=device)

    tree = PrunedTree(
        token_ids=table(torch.int64, rows),
        parents=table(torch.int64, rows),
        depths=table(torch.int64, rows),
        slots=table(torch.int64, rows),
        is_probe=table(torch.bool, rows),
        log_scores=table(torch.float64, rows),
        num_nodes=table(torch.int64),
        law_index=table(torch.int64, rows),
        ancestors=table(torch.int64, rows, (rows + 63) // 64),
        probe_row=table(torch.int64, rows),
        draft_failed=table(torch.bool),
    )
    if batch:
        (launch or launch_on_device)(
            f"prune_tree_{_suffix(log_scores)}",
            batch,
            _threads(max(offered, rows)),
            [
                *(token_ids, log_scores, is_probe, expanded_offers, failed),
                *(np.int32(offered), np.int32(size), np.int32(beam), np.int32(branching)),
                *tree,
            ],
        )
    return tree


def walk(
    token_ids: Tensor,
    parents: Tensor,
    probe_row: Tensor,
    accepts: Tensor,
    drawn: Tensor,
    lead_drawn: Tensor,
    *,
    depth: int,
    rule: str,
    launch: Launch | None = None,
) -> Walk:
    """Walk every tree, given what would happen at each of its rows.

    Args:
        token_ids: [batch, rows] int64, the tree's tokens; siblings hold distinct ones.
        parents: [batch, rows] int64, -1 for the root and for padding.
        probe_row: [batch, rows] int64, the row of the row's probe, 0 where none is in the tree.
        accepts: [batch, rows] bool, whether the probe is accepted at the row, given that the walk did not leave
            through a lead; ignored where there is no probe.
        drawn: [batch, rows] int64, the token drawn from the residual or the target's law.
        lead_drawn: [batch, rows] int64, for "rrsw" the token drawn before the probe is tested; read only where a probe
            is in the tree.
        depth: a bound on the depth of the trees, 0 for roots alone; the result is depth + 1 wide.
        rule: "rheo" or "rrsw".
        launch: runs the kernel; the current device by default.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, sizes beyond the kernel's tables, or an unknown
            rule.
        RuntimeError: CuPy or a CUDA device is missing.
    """
    if rule not in ("rheo", "rrsw"):
        raise ValueError(f"rule must be 'rheo' or 'rrsw', got {rule!r}")
    _check_range("depth", depth, 0, MAX_DEPTH)
    _check("token_ids", token_ids, (-1, -1), (torch.int64,))
    batch, rows = token_ids.shape
    _check_range("the number of rows", rows, 1, MAX_ROWS)
    for name, values in (
        ("parents", parents),
        ("probe_row", probe_row),
        ("drawn", drawn),
        ("lead_drawn", lead_drawn),
    ):
        _check(name, values, (batch, rows), (torch.int64,), token_ids)
    _check("accepts", accepts, (batch, rows), (torch.bool,), token_ids)

    width = depth + 1
    device = token_ids.device
    result = Walk(
        token_ids=torch.empty(batch, width, dtype=torch.int64, device=device),
        rows=torch.empty(batch, width, dtype=torch.int64, device=device),
        counts=torch.empty(batch, dtype=torch.int64, device=device),
        probes_offered=torch.empty(batch, width, dtype=torch.bool, device=device),
        probes_accepted=torch.empty(batch, width, dtype=torch.bool, device=device),
    )
    if batch:
        (launch or launch_on_device)(
            "walk",
            batch,
            _threads(rows),
            [
                *(token_ids, parents, probe_row, accepts, drawn, lead_drawn),
                *(np.int32(rows), np.int32(width), np.int32(rule == "rrsw")),
                *result,
            ],
        )
    return result


@lru_cache(maxsize=1)
def missing() -> str | None:
    """What keeps the launchers from running here, in words; None when nothing does."""
    try:
        import cupy
    except ImportError as error:
        return (
            f"the package cupy is missing ({error}): pip install cupy-cuda13x (or cupy-cuda12x, as the driver has it)"
        )
    if not torch.cuda.is_available():
        build = "has no CUDA" if torch.version.cuda is None else "finds no CUDA device"
        return f"no CUDA device: torch {torch.__version__} {build}"
    if not cupy.cuda.is_available():
        return f"no CUDA device: cupy {cupy.__version__} finds none, though torch does"
    return None


def launch_on_device(kernel: str, blocks: int, threads: int, arguments: Sequence[Tensor | np.generic]) -> None:
    """Launch a kernel of ``cuda/tree.cu`` on Torch's current stream.

    The first launch of a process compiles the kernels, so it must not be one that a graph captures.

    Raises:
        RuntimeError: CuPy or a CUDA device is missing, or the tensors are not on one.
    """
    lack = missing()
    if lack is not None:
        raise RuntimeError(f"{kernel} cannot run: {lack}")
    import cupy

    device = next(value.device for value in arguments if isinstance(value, Tensor))
    if device.type != "cuda":
        raise RuntimeError(f"{kernel} runs on a CUDA device, its tensors are on {device}")
    # Torch hands out tensors of its current device only, and keeps its own record of which that is.
    with torch.cuda.device(device), cupy.cuda.Device(device.index), _cupy_stream(device):
        _function(kernel)((blocks,), (threads,), tuple(_argument(value) for value in arguments))


@lru_cache(maxsize=16)
def _function(kernel: str) -> Any:
    return _module().get_function(kernel)


@lru_cache(maxsize=1)
def _module() -> Any:
    import cupy

    return cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS)


def _cupy_stream(device: torch.device) -> Any:
    import cupy

    stream = torch.cuda.current_stream(device)
    # ExternalStream is deprecated from CuPy 14 on, from_external unknown before.
    if hasattr(cupy.cuda.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
        return cupy.cuda.Stream.from_external(stream)
    return cupy.cuda.ExternalStream(stream.cuda_stream, device.index)


class _OnOneStream:
    """A tensor for DLPack with no event to wait for: both sides use one stream, and it may be capturing."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        options["stream"] = -1
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def _argument(value: Tensor | np.generic) -> Any:
    import cupy

    if not isinstance(value, Tensor):
        return value
    if value.numel() == 0:
        return np.uintp(0)  # a pointer nobody reads
    value = value.detach()
    return cupy.from_dlpack(_OnOneStream(value.view(torch.uint8) if value.dtype == torch.bool else value))


def _suffix(scores: Tensor) -> str:
    return "f32" if scores.dtype == torch.float32 else "f64"


def _threads(items: int) -> int:
    """Whole warps, a thread per item as far as a block goes."""
    return min(MAX_THREADS, (items + 31) // 32 * 32)


def _check(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    beside: Tensor | None = None,
    rows_only: bool = False,
) -> None:
    """Shape (-1: any), dtype, device and layout of an argument; ``rows_only``: only each row need be contiguous."""
    if tensor.ndim != len(shape) or any(want not in (-1, have) for want, have in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(str(dtype) for dtype in dtypes)}, got {tensor.dtype}")
    if beside is not None and tensor.device != beside.device:
        raise ValueError(f"{name} is on {tensor.device}, the other tensors are on {beside.device}")
    if rows_only:
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous within each row, got strides {list(tensor.stride())}")
    elif not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}; call .contiguous()")


def _check_range(name: str, value: int, least: int, most: int | None) -> None:
    if value < least or (most is not None and value > most):
        bound = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"{name} must be {bound}, got {value}")

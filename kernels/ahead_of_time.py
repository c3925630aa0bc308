"""Compile the Triton kernels to machine code without a GPU, and say what they use of one.

    python -m optimized.kernels.ahead_of_time [--brief] [--json]

Registers, stack and shared memory come from ``cuobjdump -res-usage``; a stack is where spilled registers go. Not for a
process in which Triton interprets its kernels (``TRITON_INTERPRET=1``): there is nothing to compile there.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from optimized.kernels import philox, rows, slots
from optimized.kernels.launching import power_of_two

ARCHITECTURES = (80, 90, 100)
LOGITS = {"bf16": 16, "fp16": 13, "fp32": 0}  # the types, and the bits of their keys that say nothing
# As at a launch: tensors are aligned, and so are the rows of a vocabulary that 16 divides.
ALIGNED = [["tt.divisibility", 16]]
MULTIPLES_OF_16 = ("stride_batch", "stride_node", "stride_row", "vocab", "num_candidates")


class Variant(NamedTuple):
    """A kernel with the types and constants of one use."""

    label: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, int | float | bool]
    num_warps: int


class Usage(NamedTuple):
    """What one program of a compiled kernel takes: registers and stack bytes per thread, bytes of shared memory."""

    kernel: str
    architecture: int
    num_warps: int
    registers: int
    stack: int
    shared: int


def variants(brief: bool = False) -> Iterator[Variant]:
    """Every kernel, as it is launched.

    Args:
        brief: for bfloat16 logits, 128k tokens and a support of 128 only; otherwise for every type, and for the
            vocabularies and supports that need other constants.
    """
    step = {"keys": "*i64", "steps": "*i64", **dict.fromkeys(("probe", "accept", "residual", "lead"), "*fp64")}
    yield Variant("step_uniforms", philox._step_uniforms, step, {"BLOCK": philox.BLOCK}, 4)
    for dtype in ("bf16",) if brief else LOGITS:
        yield slot_tiles(dtype, 128)
        yield slot_row(dtype, 128, vocab=131072)
        yield row_tiles(dtype)
        yield row_outcome(dtype, "rheo")
    yield row_outcome("bf16", "rrsw")
    if not brief:
        yield slot_row("bf16", 128, vocab=4096)
        yield slot_row("bf16", 128, vocab=262144, mapped=True)
        yield slot_tiles("bf16", 1024)
        yield slot_row("bf16", 1024, vocab=262144)
        yield row_outcome("bf16", "rheo", vocab=262144)


def slot_tiles(dtype: str, support: int) -> Variant:
    """The first kernel of ``slots.level_slots``."""
    tile = slots.tile_for(support)
    types = {"logits": f"*{dtype}", "candidates": "*i64"}
    constants = {"TILE": tile, "KEPT": support, "SHIFT": LOGITS[dtype]}
    return Variant(
        f"tile_candidates {dtype} support {support}",
        slots._tile_candidates,
        types,
        constants,
        slots.tile_warps(tile),
    )


def slot_row(dtype: str, support: int, vocab: int, mapped: bool = False) -> Variant:
    """The second kernel of ``slots.level_slots``."""
    tile = slots.tile_for(support)
    one_tile = vocab <= tile
    count = vocab if one_tile else vocab // tile * support
    types = {
        "logits": f"*{dtype}",
        **dict.fromkeys(("parent_scores", "log_scores", "law"), "*fp32"),
        **dict.fromkeys(("temperatures", "uniforms"), "*fp64"),
        **dict.fromkeys(("candidates", "kept", "vocab_map", "token_ids", "law_ids"), "*i64"),
        **dict.fromkeys(("is_probe", "failed"), "*i1"),
    }
    constants = {
        "COUNT": count,
        "KEPT": support,
        "SLOTS": 16,
        "BLOCK": slots.rank_block(support),
        "SHIFT": LOGITS[dtype],
        "ONE_TILE": one_tile,
        "MAPPED": mapped,
        "GREEDY_BELOW": 1e-5,
    }
    label = f"row_slots {dtype} support {support} vocabulary {vocab // 1024}k"
    return Variant(label, slots._row_slots, types, constants, slots.row_warps(count))


def row_tiles(dtype: str) -> Variant:
    """The first kernel of ``rows.row_outcomes``."""
    types = {
        "logits": f"*{dtype}",
        "temperatures": "*fp64",
        "num_nodes": "*i64",
        "tops": "*fp32",
        "sums": "*fp32",
        "bests": "*i32",
    }
    constants = {"TILE": rows.TILE, "GREEDY_BELOW": 1e-5}
    return Variant(f"tile_sums {dtype}", rows._tile_sums, types, constants, rows.tile_warps(rows.TILE))


def row_outcome(dtype: str, rule: str, vocab: int = 131072) -> Variant:
    """The second kernel of ``rows.row_outcomes``."""
    types = {
        "logits": f"*{dtype}",
        **dict.fromkeys(("token_ids", "parents", "num_nodes", "probe_rows", "law_index", "law_ids"), "*i64"),
        **dict.fromkeys(("accept_uniforms", "residual_uniforms", "lead_uniforms", "temperatures"), "*fp64"),
        **dict.fromkeys(("law", "tops", "sums"), "*fp32"),
        "law_amounts": "*fp64",
        "bests": "*i32",
        **dict.fromkeys(("drawn", "drawn_lead"), "*i64"),
        **dict.fromkeys(("accepts", "failed"), "*i1"),
    }
    constants = {
        "TILE": rows.TILE,
        "TILES": power_of_two(vocab // rows.TILE),
        "RUN": rows.run_for(rows.TILE),
        "BLOCK": rows.BLOCK,
        "RRSW": rule == "rrsw",
        "GREEDY_BELOW": 1e-5,
    }
    label = f"row_outcome {dtype} {rule} vocabulary {vocab // 1024}k"
    return Variant(label, rows._row_outcome, types, constants, rows.row_warps(rows.TILE))


def compile_variant(variant: Variant, architecture: int) -> tuple[bytes, int]:
    """The cubin of a variant, and the bytes of shared memory that its launch asks for.

    Raises:
        RuntimeError: Triton interprets its kernels in this process.
    """
    kernel = variant.kernel
    if not hasattr(kernel, "cache_key"):
        raise RuntimeError("TRITON_INTERPRET is set: Triton interprets its kernels in this process, it cannot compile")
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
            continue
        signature[name] = variant.types.get(name, "i32")
        # As at a launch: tensors are aligned, and so are the rows of a vocabulary that 16 divides.
        if signature[name].startswith("*") or name in (
            "stride_batch",
            "stride_node",
            "stride_row",
            "vocab",
            "num_candidates",
        ):
            attributes[(place,)] = ALIGNED
    source = ASTSource(kernel, signature, constexprs=variant.constants, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": variant.num_warps})
    return compiled.asm["cubin"], compiled.metadata.shared


def resource_usage(cubin: bytes) -> dict[str, int]:
    """What ``cuobjdump -res-usage`` says of the one kernel in a cubin: REG, STACK, SHARED, LOCAL, ..."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}


def usage(variant: Variant, architecture: int) -> Usage:
    """Compile a variant and measure it."""
    cubin, shared = compile_variant(variant, architecture)
    found = resource_usage(cubin)
    stack = found["STACK"] + found.get("LOCAL", 0)
    return Usage(variant.label, architecture, variant.num_warps, found["REG"], stack, shared)


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    parser.add_argument("--brief", action="store_true", help="bfloat16 logits, 128k tokens, a support of 128 only")
    arguments = parser.parse_args()
    found = [usage(variant, architecture) for variant in variants(arguments.brief) for architecture in ARCHITECTURES]
    if arguments.json:
        print(json.dumps([item._asdict() for item in found], indent=1))
        return
    print("| kernel | architecture | warps | registers | stack bytes | shared bytes |")
    print("|---|---|---|---|---|---|")
    for item in found:
        print(f"| {item.kernel} | sm_{item.architecture} | {' | '.join(map(str, item[2:]))} |")


if __name__ == "__main__":
    main()

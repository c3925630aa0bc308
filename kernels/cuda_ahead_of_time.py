"""Compiles the CUDA kernels to machine code without a GPU and says what they use.

NVRTC, the compiler that CuPy calls, makes a cubin for each architecture; ``cuobjdump`` (Triton brings one along) reads
its figures. ``python -m optimized.kernels.cuda_ahead_of_time`` prints them as a table.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from optimized.kernels.tree import OPTIONS, SOURCE

CUPYS_OPTIONS = ("-ftz=true",)  # what CuPy adds by itself
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


class Resources(NamedTuple):
    """What one kernel needs.

    Attributes:
        kernel: its name.
        architecture: for example "sm_90".
        registers: per thread; a block of 1024 threads has 64 for each.
        shared_bytes: static shared memory per block.
        stack_bytes: per thread, spilled registers included.
        local_bytes: per thread, likewise.
    """

    kernel: str
    architecture: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    local_bytes: int


def compile_cubin(source: Path = SOURCE, architecture: str = "sm_90", options: Sequence[str] = OPTIONS) -> bytes:
    """Compile a ``.cu`` file with the options that CuPy is given.

    Raises:
        RuntimeError: NVRTC or its bindings are missing, or the compiler refuses the source; its log is quoted.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise RuntimeError(
            f"NVRTC's bindings are missing ({error}): pip install cuda-bindings cuda-pathfinder"
        ) from error

    try:
        created = nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], [])
    except RuntimeError as error:  # the bindings look for the library when it is first used
        raise RuntimeError(f"NVRTC is missing ({error}): pip install nvidia-cuda-nvrtc") from error
    program = created[-1]

    def check(result: tuple[Any, ...], what: str) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            text = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
            nvrtc.nvrtcGetProgramLog(program, text)
            log = text.rstrip(b"\0 ").decode()
            raise RuntimeError(f"{what} {source.name} for {architecture} failed: {result[0].name}\n{log}")
        return result[1] if len(result) > 1 else None

    check(created, "reading")
    flags = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in (*options, *CUPYS_OPTIONS))]
    check(nvrtc.nvrtcCompileProgram(program, len(flags), flags), "compiling")
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program), "measuring the machine code of")
    check(nvrtc.nvrtcGetCUBIN(program, cubin), "fetching the machine code of")
    check(nvrtc.nvrtcDestroyProgram(program), "closing")
    return cubin


def resources(cubin: bytes, architecture: str) -> list[Resources]:
    """The figures of every kernel in a cubin, by name.

    Raises:
        RuntimeError: there is no ``cuobjdump``, or it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([str(_cuobjdump()), "-res-usage", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cuobjdump failed: {done.stderr}")
    found = []
    for name, figures in re.findall(r"Function (\w+):\s*\n\s*(.*)", done.stdout):
        values = dict(re.findall(r"(\w+):(\d+)", figures))
        found.append(Resources(name, architecture, *(int(values[key]) for key in ("REG", "SHARED", "STACK", "LOCAL"))))
    return sorted(found)


def _cuobjdump() -> Path:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise RuntimeError("cuobjdump is missing: pip install triton, which brings it along")
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not path.exists():
        raise RuntimeError(f"cuobjdump is missing: Triton has none at {path}")
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what every kernel uses on every architecture, as a Markdown table."""
    parser = argparse.ArgumentParser(description="Compile the CUDA kernels and print what they use.")
    parser.add_argument(
        "architectures", nargs="*", default=ARCHITECTURES, help=f"for example sm_90; default: {' '.join(ARCHITECTURES)}"
    )
    architectures = parser.parse_args(arguments).architectures
    rows = [row for name in architectures for row in resources(compile_cubin(SOURCE, name), name)]
    print("| kernel | architecture | registers | shared bytes | stack bytes | local bytes |")
    print("|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: row.kernel):
        print("| " + " | ".join(str(value) for value in row) + " |")


if __name__ == "__main__":
    main()

"""Runs the CUDA kernels on the CPU: compiled with g++ behind a shim, called as the launchers of ``kernels.tree`` do."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from optimized.kernels.tree import MAX_THREADS, SOURCE

HERE = Path(__file__).parent
INSTALL = "install the compiler (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++ libtsan libasan libubsan)"


def compile_kernels(folder: Path, name: str, *options: str, source: str | None = None) -> Path:
    """Compile ``cuda/tree.cu``, or a changed text of it, behind the shim.

    Args:
        folder: where to write.
        name: the file to make; ``.so`` makes a library, anything else a program.
        options: for g++.
        source: the kernels' text instead of the file's.

    Fails the test, saying what to install, where g++ or a library it links is missing.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.fail(f"g++ is missing, the CUDA kernels cannot be run on the CPU: {INSTALL}")
    kernels = SOURCE
    if source is not None:
        kernels = folder / f"{name}.cu"
        kernels.write_text(source)
    target = folder / name
    library = ["-shared", "-fPIC"] if target.suffix == ".so" else []
    # A fortified longjmp takes the jump to another fiber's stack for an attack.
    command = [compiler, "-std=c++20", "-pthread", "-U_FORTIFY_SOURCE", "-Werror=return-type", *library, *options]
    command += [f'-DKERNELS="{kernels}"', str(HERE / "cuda_shim.cpp"), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sanitizers = [option for option in options if option.startswith("-fsanitize") and "cannot find" in done.stderr]
        hint = f"\nThe runtime of {sanitizers[0]} is missing: {INSTALL}" if sanitizers else ""
        pytest.fail(f"{' '.join(command)}\n{done.stderr}{hint}")
    return target


class Shim:
    """Launches kernels as fibers; an argument for ``launch`` of the functions in ``kernels.tree``.

    Args:
        library: made by ``compile_kernels``.
        schedule: 0 runs the threads forwards, 1 backwards, anything else seeds a shuffle at every barrier.
        fewer_threads: divide the size of the blocks by up to 8, so that a thread has several nodes.
    """

    def __init__(self, library: Path, schedule: int = 0, fewer_threads: int = 1) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.shim_signature.restype = ctypes.c_char_p
        self.schedule, self.fewer_threads = schedule, fewer_threads
        self.launches = 0

    def __call__(self, kernel: str, blocks: int, threads: int, arguments: Sequence[Tensor | np.generic]) -> None:
        check_arguments(self.library, kernel, arguments)
        # Kept in lists until the call returns: the kernel sees addresses only.
        values = [np.array([a.data_ptr() if isinstance(a, Tensor) else a]) for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        threads = fewer(threads, self.fewer_threads)
        self.library.shim_launch(kernel.encode(), blocks, threads, self.schedule, pointers)
        self.launches += 1


def fewer(threads: int, divisor: int) -> int:
    """Whole warps of ``threads`` / ``divisor``; a full block stays, its threads may have eight nodes each already."""
    return threads if threads == MAX_THREADS else max(32, -(-threads // divisor // 32) * 32)


def check_arguments(library: ctypes.CDLL, kernel: str, arguments: Sequence[Tensor | np.generic]) -> None:
    """That number, kinds and sizes are those of the kernel's parameters, which nothing checks on a device."""
    signature = library.shim_signature(kernel.encode())
    assert signature is not None, f"no kernel {kernel}"
    given = [f"p{a.element_size()}" if isinstance(a, Tensor) else f"v{np.asarray(a).dtype.itemsize}" for a in arguments]
    assert given == signature.decode().split(), f"{kernel} takes {signature.decode()}, got {' '.join(given)}"


class SanitizedShim:
    """Launches each kernel in a program of its own under a sanitizer, threads as host threads.

    Args:
        program: made by ``compile_kernels`` with ``-DSHIM_HOST_THREADS`` and ``-fsanitize=thread`` or another.
        skipped_line: leave out the ``__syncthreads()`` in this line of the source; 0 for none.
        fewer_threads: as of ``Shim``.

    Attributes:
        reports: what ThreadSanitizer had to say, one text per launch, empty where nothing.
    """

    def __init__(self, program: Path, skipped_line: int = 0, fewer_threads: int = 1) -> None:
        self.program, self.skipped_line, self.fewer_threads = program, skipped_line, fewer_threads
        self.reports: list[str] = []

    def __call__(self, kernel: str, blocks: int, threads: int, arguments: Sequence[Tensor | np.generic]) -> None:
        arrays = [_memory(a).numpy() if isinstance(a, Tensor) else np.asarray(a) for a in arguments]
        kinds = [
            f"{'p' if isinstance(a, Tensor) else 'v'} {array.nbytes}"
            for a, array in zip(arguments, arrays, strict=True)
        ]
        threads = fewer(threads, self.fewer_threads)
        header = f"{kernel} {blocks} {threads} {self.skipped_line} {len(arrays)} {' '.join(kinds)}\n"
        launch = header.encode() + b"".join(array.tobytes() for array in arrays)
        done = self._run([str(self.program)], launch)
        if b"unexpected memory mapping" in done.stderr and shutil.which("setarch"):
            done = self._run(["setarch", "-R", str(self.program)], launch)  # addresses spread wider than it can follow
        report = done.stderr.decode()
        if done.returncode and "WARNING: ThreadSanitizer" not in report:
            pytest.fail(f"{self.program} ended with {done.returncode}, and not because of a data race:\n{report}")
        self.reports.append(report)
        if len(done.stdout) < sum(
            array.nbytes for a, array in zip(arguments, arrays, strict=True) if isinstance(a, Tensor)
        ):
            return  # a race has led it astray and it did not come to its end; the report says so
        position = 0
        for argument, array in zip(arguments, arrays, strict=True):
            if isinstance(argument, Tensor):
                array[:] = np.frombuffer(done.stdout, array.dtype, array.size, position)
                position += array.nbytes

    @staticmethod
    def _run(command: list[str], launch: bytes) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(command, input=launch, capture_output=True, timeout=120)


def _memory(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first to its last element, as one flat tensor that shares it."""
    if tensor.numel() == 0:
        return tensor.flatten()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,))

"""The CUDA kernels compile for every architecture without a GPU, and fit a block of 1024 threads without spilling."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
from pathlib import Path

import pytest

from optimized.kernels import cuda_ahead_of_time
from optimized.kernels.cuda_ahead_of_time import ARCHITECTURES, compile_cubin, resources
from optimized.kernels.tree import MAX_THREADS, SOURCE

KERNELS = ["prune_tree_f32", "prune_tree_f64", "select_beam_f32", "select_beam_f64", "walk"]

# Of sm_80, sm_90 and sm_100 alike: registers of one multiprocessor, and static shared memory of a block.
REGISTERS = 65536
SHARED_BYTES = 48 * 1024


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_fits_and_nothing_spills(architecture: str) -> None:
    found = resources(compile_cubin(SOURCE, architecture), architecture)
    assert [row.kernel for row in found] == KERNELS
    for row in found:
        assert 0 < row.registers <= REGISTERS // MAX_THREADS, row
        assert 0 < row.shared_bytes <= SHARED_BYTES, row
        assert (row.stack_bytes, row.local_bytes) == (0, 0), row


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    cuda_ahead_of_time.main(["sm_90"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| kernel | architecture | registers | shared bytes | stack bytes | local bytes |"
    assert [re.match(r"\| (\w+) \| sm_90 \| \d+ \|", line)[1] for line in lines[2:]] == KERNELS  # type: ignore[index]


def test_the_module_runs_from_the_command_line() -> None:
    command = [sys.executable, "-m", "optimized.kernels.cuda_ahead_of_time", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "architecture" in done.stdout


def test_what_the_compiler_says_is_passed_on(tmp_path: Path) -> None:
    broken = tmp_path / "broken.cu"
    broken.write_text(SOURCE.read_text().replace("__syncthreads();", "__syncthread();", 1))
    with pytest.raises(RuntimeError, match=r"compiling broken.cu for sm_90 failed[\s\S]*__syncthread"):
        compile_cubin(broken, "sm_90")


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *rest: object) -> object:
        if name.startswith("cuda"):
            raise ImportError(f"No module named {name!r}")
        return real_import(name, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", refuse)
        with pytest.raises(RuntimeError, match=r"NVRTC.s bindings are missing .* pip install cuda-bindings"):
            compile_cubin()
    monkeypatch.setattr(cuda_ahead_of_time.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="cuobjdump is missing: pip install triton"):
        resources(b"", "sm_90")

"""Every Triton kernel compiles to machine code for Ampere, Hopper and Blackwell, without a GPU.

In a process of its own: in this one Triton interprets its kernels where there is no CUDA device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

ARCHITECTURES = {80, 90, 100}
SHARED_PER_BLOCK = 48 * 1024  # what a block gets on any of them without asking for more


def compile_all(*options: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "optimized.kernels.ahead_of_time", "--json", *options]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_kernels_compile_and_do_not_spill_on_hopper() -> None:
    found = compile_all("--brief")
    kernels = {item["kernel"].split()[0] for item in found}
    assert kernels == {"step_uniforms", "tile_candidates", "row_slots", "tile_sums", "row_outcome"}
    for kernel in {item["kernel"] for item in found}:
        assert {item["architecture"] for item in found if item["kernel"] == kernel} == ARCHITECTURES
    for item in found:
        print(item)
        assert item["shared"] <= SHARED_PER_BLOCK
        assert item["stack"] <= (0 if item["architecture"] == 90 else 64), item  # registers spill to the stack


@pytest.mark.deep
def test_every_variant_compiles() -> None:
    for item in compile_all():
        print(item)
        if "support 1024" not in item["kernel"]:
            assert item["stack"] <= (0 if item["architecture"] == 90 else 64), item


def test_an_interpreting_process_is_told_why_it_cannot_compile() -> None:
    command = [sys.executable, "-m", "optimized.kernels.ahead_of_time", "--brief"]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert run.returncode != 0
    assert "TRITON_INTERPRET is set" in run.stderr

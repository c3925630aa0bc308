"""Which code does the sampling side of a step: Torch anywhere, Triton and CUDA kernels where they can run.

| backend | random numbers, slots of a level, verification rows | beam, pruning, walk | runs on |
|---|---|---|---|
| torch | Torch | Torch | anything |
| numba | Numba, but for random numbers and the target's laws | Numba | CPUs |
| triton | Triton | Torch | CUDA; the CPU under TRITON_INTERPRET=1, to test |
| cupy | Triton | CUDA C++ through CuPy | CUDA |

All take the same noise and follow the same rules (docs/kernels.md).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from optimized.growth import TORCH_STEPS, GrowthSteps
from optimized.randomness import UniformsKernel
from optimized.target_laws import TargetLaws
from optimized.trees import TreeBatch
from optimized.verification import VerifyBatch, WalkNoise, verify_trees
from reference.api import RheoConfig, Verification

# What the kernels' tables hold; a test compares these with the kernels' own, which cannot be imported everywhere.
MAX_SUPPORT, MAX_DEPTH, MAX_BEAM, MAX_OFFERED, MAX_NODES = 1024, 64, 1024, 8192, 1023

BackendName = Literal["auto", "torch", "numba", "triton", "cupy"]
Verify = Callable[[TreeBatch, TargetLaws, WalkNoise, Verification], VerifyBatch]


@dataclass(frozen=True)
class Backend:
    """One way to do the sampling side.

    Attributes:
        name: "torch", "numba", "triton" or "cupy".
        growth: the steps of ``grow_trees``.
        verify: the walk of a batch, from trees, target laws, noise and rule.
        uniforms: a generator of its own for ``StepRandomness``; None for Torch's.
    """

    name: str
    growth: GrowthSteps
    verify: Verify
    uniforms: UniformsKernel | None = None


TORCH = Backend("torch", TORCH_STEPS, verify_trees)


def missing(name: str, device: torch.device) -> list[str]:
    """What a backend lacks to run on a device; empty when it can."""
    lacks = []
    if name == "numba":
        if importlib.util.find_spec("numba") is None:
            lacks.append("numba is not installed (pip install numba)")
        if device.type != "cpu":
            lacks.append(f"it runs on CPUs and the models are on {device}")
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if name in ("triton", "cupy"):
        if importlib.util.find_spec("triton") is None:
            lacks.append("triton is not installed (pip install triton)")
        if name == "cupy" and importlib.util.find_spec("cupy") is None:
            lacks.append("cupy is not installed (pip install cupy-cuda13x, or cupy-cuda12x for CUDA 12)")
        if torch.version.cuda is None and not interpreted:
            lacks.append("torch is built without CUDA")
        elif device.type != "cuda" and not interpreted:
            found = "there is no CUDA device" if not torch.cuda.is_available() else f"the models are on {device}"
            lacks.append(f"it needs a CUDA device and {found}")
    return lacks


def unsupported(name: str, config: RheoConfig) -> str | None:
    """Why a backend has no kernels for a configuration; None when it has."""
    beyond = {"static trees": config.proposal == "static"}
    if name in ("triton", "cupy"):
        beyond |= {
            f"{config.probes} probes per node": config.probes > 1,
            "calibrated weights": config.weights is not None,
            "thresholds": config.may_stop,
            "trees of automatic size": config.tree_size == "auto",
            f"a draft_support of {config.draft_support}, more than {MAX_SUPPORT}": config.draft_support > MAX_SUPPORT,
        }
    if name == "cupy":
        offered = config.branching * (1 + (config.depth - 1) * config.beam_width)  # at most
        beyond |= {
            f"a depth of {config.depth}, more than {MAX_DEPTH}": config.depth > MAX_DEPTH,
            f"a beam of {config.beam_width}, more than {MAX_BEAM}": config.beam_width > MAX_BEAM,
            f"{offered} offered nodes, more than {MAX_OFFERED}": offered > MAX_OFFERED,
            f"a tree of {config.budget} nodes, more than {MAX_NODES}": min(config.budget, offered) > MAX_NODES,
        }
    lacking = [what for what, asked in beyond.items() if asked]
    return f"has no kernels for {lacking[0]}" if lacking and name != "torch" else None


def choose_backend(name: BackendName, device: torch.device, config: RheoConfig) -> Backend:
    """The backend of a name.

    Args:
        name: "auto" takes the first of cupy, triton, numba and torch that can run the configuration on the device; a
            name means that one or an error.
        device: where the models run.
        config: how trees are grown and verified.

    Raises:
        ValueError: an unknown name, a backend that cannot run here (the message names everything that is missing), or
            one that has no kernels for the configuration.
    """
    if name not in get_args(BackendName):
        raise ValueError(f"backend must be one of {get_args(BackendName)}, got {name!r}")
    if name == "auto":
        kernels = {"cuda": ("cupy", "triton"), "cpu": ("numba",)}.get(device.type, ())
        for candidate in kernels:
            if not missing(candidate, device) and unsupported(candidate, config) is None:
                return _kernels(candidate)
        return TORCH
    if name == "torch":
        return TORCH
    lacks = missing(name, device)
    if lacks:
        raise ValueError(f"backend={name!r} cannot run here: {'; '.join(lacks)}. backend='torch' runs anywhere")
    reason = unsupported(name, config)
    if reason is not None:
        raise ValueError(f"backend={name!r} {reason}; backend='torch' can do it")
    return _kernels(name)


def _kernels(name: str) -> Backend:
    if name == "numba":
        from optimized.numba_backend import NUMBA  # takes a second to import

        return NUMBA
    from optimized import kernel_backends  # imports triton, which need not be there

    return kernel_backends.CUPY if name == "cupy" else kernel_backends.TRITON

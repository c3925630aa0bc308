"""Which backend runs where, and what is said when one cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from optimized import backends
from optimized.backends import TORCH, choose_backend, missing, unsupported
from optimized.calibration import prior_weights
from optimized.decoder import RheoDecoder
from optimized.sampling_params import SamplingParams
from proofs_tests.toy import random_logits
from proofs_tests.toy_models import PathDrafter, PathTarget
from proofs_tests.triton_cases import DEVICE
from reference.api import RheoConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="CuPy launches on a CUDA device only")


def test_auto_takes_numba_on_a_cpu_and_torch_where_that_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend("auto", CPU, RheoConfig()).name == "numba"
    assert choose_backend("auto", CPU, RheoConfig(probes=3, tree_size="auto", weights=prior_weights())).name == "numba"
    static = RheoConfig.static([(0,), (0, 0)])
    assert choose_backend("auto", CPU, static) is TORCH
    with pytest.raises(ValueError, match="backend='numba' has no kernels for static trees; backend='torch' can do it"):
        choose_backend("numba", CPU, static)
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    assert choose_backend("auto", CPU, RheoConfig()) is TORCH
    with pytest.raises(ValueError, match=r"numba is not installed \(pip install numba\)"):
        choose_backend("numba", CPU, RheoConfig())
    assert missing("numba", CUDA)[-1] == "it runs on CPUs and the models are on cuda"


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"backend must be one of .*'cupy'.*, got 'cuda'"):
        choose_backend("cuda", CPU, RheoConfig())  # type: ignore[arg-type]


def test_a_backend_that_cannot_run_names_everything_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match="cannot run here") as caught:
        choose_backend("cupy", CPU, RheoConfig())
    for part in ("backend='cupy'", "triton is not installed", "cupy is not installed", "without CUDA", "'torch' runs"):
        assert part in str(caught.value)


def test_models_on_a_cpu_beside_a_device_are_told_apart_from_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert missing("triton", CPU) == ["it needs a CUDA device and the models are on cpu"]
    assert missing("cupy", CUDA) == missing("triton", CUDA) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert missing("triton", CPU) == ["it needs a CUDA device and there is no CUDA device"]


def test_importing_the_package_needs_neither_triton_nor_cupy_nor_numba() -> None:
    """A finder that refuses them, in a fresh process; the interpreter's variable does not matter."""
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "cupy", "numba"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import optimized, optimized.cli, optimized.decoder, optimized.backends
assert not {"triton", "cupy", "numba"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_benchmark_measures_parts_that_run() -> None:
    """What ``kernels/bench.py`` times on a GPU, run once here on the Torch path."""
    from optimized.kernels import bench

    problem = bench.Problem(2, 300, CPU)
    done = {part: run() for part, run, _ in problem.parts(TORCH)}
    assert list(done) == ["level", "prune", "verify", "step"]
    assert torch.equal(done["verify"].token_ids, done["step"][1].token_ids)  # type: ignore[attr-defined,index]


def test_auto_leaves_what_the_kernels_cannot_hold_to_torch() -> None:
    from optimized.kernels import slots, tree

    assert (backends.MAX_SUPPORT, backends.MAX_DEPTH, backends.MAX_BEAM) == (
        slots.MAX_SUPPORT,
        tree.MAX_DEPTH,
        tree.MAX_BEAM,
    )
    assert (backends.MAX_OFFERED, backends.MAX_NODES) == (tree.MAX_OFFERED, tree.MAX_ROWS - 1)
    assert unsupported("cupy", RheoConfig()) is None
    assert "draft_support of 2000" in str(unsupported("triton", RheoConfig(draft_support=2000)))
    for change in ({"depth": 65}, {"beam": 1025}, {"tree_size": 2000, "branching": 30}, {"branching": 40}):
        assert unsupported("cupy", RheoConfig(**change)) is not None, change  # type: ignore[arg-type]
        assert unsupported("triton", RheoConfig(**change)) is None, change  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["numba", "triton", pytest.param("cupy", marks=NEEDS_CUDA)])
def test_a_whole_decode_is_the_same_on_every_backend(name: str) -> None:
    """Batches of mixed requests, roots alone at the prompts, some finished before others: the same tokens."""
    params = [SamplingParams(seed=b, temperature=(0.0, 0.7, 1.0)[b % 3], max_new_tokens=4 + b) for b in range(4)]
    texts = []
    for backend in ("torch", name):
        target = PathTarget(12, random_logits(3, 12, "normal"), device=DEVICE)
        shape = RheoConfig(branching=3, depth=2, tree_size=4)
        decoder = RheoDecoder(target, PathDrafter(12), None, shape, backend=backend)  # type: ignore[arg-type]
        assert decoder.backend.name == backend
        texts.append([result.token_ids for result in decoder.generate([[1], [2, 3], [4], [5]], params)])
    assert texts[0] == texts[1]

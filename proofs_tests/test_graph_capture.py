"""Growth and verification of a whole batch in one CUDA graph: captured once, replayed on other inputs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from optimized.backends import choose_backend
from optimized.kernels import bench
from reference.api import RheoConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a CUDA device")


@pytest.fixture
def as_in_production() -> Iterator[None]:
    """Without the tests' deterministic mode, in which Torch's scatter copies from the host."""
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("name", ["torch", "triton", "cupy"])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_step_is_captured_and_replayed_on_new_inputs(name: str, batch: int) -> None:
    """The replay of a graph equals an eager step on the same inputs, also after all of them were overwritten."""
    device = torch.device("cuda")
    problem = bench.Problem(batch, 4099, device)
    backend = choose_backend(name, device, RheoConfig(tree_size=bench.TREE_SIZE))  # type: ignore[arg-type]
    parts = {part: run for part, run, _ in problem.parts(backend)}
    results = []
    with torch.inference_mode():
        replay = bench.captured(lambda: results.append(parts["step"]()))
        for _ in range(3):
            replay()
            (ancestors, captured), (expected, eager) = results[-1], parts["step"]()
            assert torch.equal(ancestors, expected)
            for field in ("token_ids", "rows", "counts", "probes_offered", "probes_accepted"):
                assert torch.equal(getattr(captured, field), getattr(eager, field)), field
            assert (captured.counts > 0).all()
            for logits in (problem.root_logits, *problem.level_logits, problem.target_logits):
                logits.normal_(0, 3)

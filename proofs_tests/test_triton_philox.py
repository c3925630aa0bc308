"""The Triton Philox against the reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optimized.kernels import philox
from optimized.kernels.philox import step_uniforms
from proofs_tests.triton_cases import DEVICE, poisoned
from reference.philox import Purpose, growth_noise, verify_noise


def check(seeds: list[int], steps: list[int], depth: int, beam: int, rows: int) -> int:
    keys = torch.tensor([[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds], device=DEVICE)
    with poisoned():
        actual = step_uniforms(keys, torch.tensor(steps, device=DEVICE), depth, beam, rows)
    for b, (seed, step) in enumerate(zip(seeds, steps, strict=True)):
        noise = verify_noise(seed, step, rows)
        np.testing.assert_array_equal(actual.probe[b].cpu(), growth_noise(seed, step, depth, beam).probe_uniforms)
        np.testing.assert_array_equal(actual.accept[b].cpu(), noise.accept_uniforms)
        np.testing.assert_array_equal(actual.residual[b].cpu(), noise.residual_uniforms)
        np.testing.assert_array_equal(actual.lead[b].cpu(), noise.lead_uniforms)
    return len(seeds) * (depth * beam + 3 * rows)


def test_known_answer_and_purposes() -> None:
    """All-zero key and counter give word 0 = 6627e8d5 (Salmon et al., known-answer tests)."""
    keys, steps = torch.zeros(1, 2, dtype=torch.long, device=DEVICE), torch.zeros(1, dtype=torch.long, device=DEVICE)
    assert float(step_uniforms(keys, steps, 1, 1, 1).probe[0, 0, 0]) == (0x6627E8D5 >> 8) * 2.0**-24
    purposes = (philox.PROBE, philox.ACCEPT, philox.RESIDUAL, philox.LEAD)
    assert [purpose.value for purpose in purposes] == list(Purpose)


@pytest.mark.parametrize(("depth", "beam", "rows"), [(1, 1, 1), (8, 10, 61), (3, 7, 65), (1, 255, 86), (16, 16, 257)])
def test_bits_equal_the_reference(depth: int, beam: int, rows: int) -> None:
    """More than 20,000 numbers: extreme seeds and steps, sizes around the edge of a block."""
    rng = np.random.default_rng(depth)
    seeds = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, *map(int, rng.integers(0, 2**63, size=14))]
    steps = [0, 2**32 - 1, 2**31, 7, *rng.integers(0, 2**32, size=16).tolist()]
    assert check(seeds, steps, depth, beam, rows) == 20 * (depth * beam + 3 * rows)


@pytest.mark.parametrize(
    ("keys", "steps", "rows", "message"),
    [((2, 3), (2,), 1, "keys must be"), ((2, 2), (2, 1), 1, "steps must be"), ((2, 2), (2,), 0, "at least 1")],
)
def test_wrong_sizes_are_named(keys: tuple[int, ...], steps: tuple[int, ...], rows: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_uniforms(torch.zeros(keys, dtype=torch.long), torch.zeros(steps, dtype=torch.long), 1, 1, rows)

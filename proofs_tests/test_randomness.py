"""Philox4x32-10: the published vectors, equal bits in NumPy and Torch, and no bit used twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optimized.randomness import StepRandomness
from optimized.randomness import philox4x32 as torch_philox
from reference.philox import Purpose, growth_noise, philox4x32, uniforms24, uniforms53, verify_noise

# The known-answer vectors of the authors' Random123 distribution: counter, key, words.
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    assert philox4x32(counter, key).tolist() == words
    actual = torch_philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert [int(word) for word in actual] == words


def test_step_noise_has_the_bits_of_the_reference() -> None:
    seeds, steps = [0, 1, 2**32, 2**64 - 1, 0xDEADBEEF12345678], [0, 1, 2, 1000, 2**31]
    noise = StepRandomness(seeds, depth=3, beam=5, rows=17).at(torch.tensor(steps))
    for b, (seed, step) in enumerate(zip(seeds, steps, strict=True)):
        expected = verify_noise(seed, step, 17)
        assert (noise.probe_uniforms[b].numpy() == growth_noise(seed, step, 3, 5).probe_uniforms).all()
        assert (noise.accept_uniforms[b].numpy() == expected.accept_uniforms).all()
        assert (noise.residual_uniforms[b].numpy() == expected.residual_uniforms).all()
        assert (noise.lead_uniforms[b].numpy() == expected.lead_uniforms).all()


@pytest.mark.parametrize("probes", [2, 5])
def test_step_noise_of_several_probes_has_the_bits_of_the_reference(probes: int) -> None:
    """The first probe's numbers are those of one probe; the others count up in the last word of the counter."""
    seeds, steps = [0, 2**32, 2**64 - 1], [0, 2, 2**31]
    noise = StepRandomness(seeds, depth=3, beam=4, rows=7, probes=probes).at(torch.tensor(steps))
    single = StepRandomness(seeds, depth=3, beam=4, rows=7).at(torch.tensor(steps))
    assert torch.equal(noise.probe_uniforms[..., 0], single.probe_uniforms)
    assert torch.equal(noise.accept_uniforms[..., 0], single.accept_uniforms)
    for b, (seed, step) in enumerate(zip(seeds, steps, strict=True)):
        expected = verify_noise(seed, step, 7, probes)
        assert (noise.probe_uniforms[b].numpy() == growth_noise(seed, step, 3, 4, probes).probe_uniforms).all()
        assert (noise.accept_uniforms[b].numpy() == expected.accept_uniforms).all()
        assert (noise.residual_uniforms[b].numpy() == expected.residual_uniforms).all()
        assert (noise.lead_uniforms[b].numpy() == expected.lead_uniforms).all()
        word = int(philox4x32([5, step, int(Purpose.ACCEPT), probes - 1], [seed & 0xFFFFFFFF, seed >> 32])[0])
        assert float(noise.accept_uniforms[b, 5, probes - 1]) == (word >> 8) * 2.0**-24


def test_select_keeps_each_requests_stream() -> None:
    randomness = StepRandomness([3, 4, 5], depth=2, beam=2, rows=5)
    before = randomness.at(torch.tensor([7, 8, 9]))
    randomness.select(torch.tensor([2, 0]))
    after = randomness.at(torch.tensor([9, 7]))
    assert torch.equal(after.residual_uniforms, before.residual_uniforms[[2, 0]])
    assert torch.equal(after.probe_uniforms, before.probe_uniforms[[2, 0]])


def test_purposes_steps_nodes_and_seeds_never_share_bits() -> None:
    """All words of 4 purposes x 8 steps x 64 nodes x 4 seeds are distinct streams: no repeated 53-bit value."""
    drawn = [
        uniforms53(seed, step, purpose, 64) for seed in (0, 1, 2**32, 2**63) for step in range(8) for purpose in Purpose
    ]
    values = np.concatenate(drawn)
    assert np.unique(values).size == values.size == 4 * 8 * 4 * 64


def test_uniforms_stay_below_one_and_have_their_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest word gives 1 - 2**-24 and 1 - 2**-53, never 1."""
    import reference.philox as module

    ones = np.full((3, 4), 0xFFFFFFFF, dtype=np.uint32)
    monkeypatch.setattr(module, "_words", lambda *_: ones)
    assert (uniforms24(0, 0, Purpose.PROBE, 3) == 1 - 2.0**-24).all()
    assert (uniforms53(0, 0, Purpose.LEAD, 3) == 1 - 2.0**-53).all()


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, None])
def test_seeds_outside_64_bits_are_refused(seed: object) -> None:
    with pytest.raises(ValueError, match="seed must be an integer in"):
        uniforms24(seed, 0, Purpose.PROBE, 1)  # type: ignore[arg-type]


def test_a_backends_generator_gives_the_same_steps() -> None:
    from optimized.kernel_backends import TRITON

    seeds, steps = [5, 2**40 + 9, 2**64 - 1], torch.tensor([0, 7, 2**31])
    plain, kernel = (StepRandomness(seeds, 3, 2, 11, kernel=made) for made in (None, TRITON.uniforms))
    for ours, theirs in zip(plain.ahead(steps, 3), kernel.ahead(steps, 3), strict=True):
        for name in ("probe_uniforms", "accept_uniforms", "residual_uniforms", "lead_uniforms"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name

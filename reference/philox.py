"""Philox4x32-10, the counter-based generator that all implementations share bit for bit.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A request's random numbers
are a pure function of its seed and of where they are used:

    key = (seed low word, seed high word)        counter = (node, step, purpose, draw)

``step`` counts the request's own steps, step 0 being the token drawn from the prompt. ``node`` is
``(level - 1) * beam + rank`` in growth and the tree row in verification. ``draw`` counts a node's probes, the first
being 0, and is 0 wherever there is one number per node. Probe and accept uniforms have 24 bits, so that a float32 holds
them exactly; draws over the whole vocabulary have 53.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reference.api import GrowthNoise, VerifyNoise

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = np.uint64(0xFFFFFFFF)


class Purpose(IntEnum):
    """What a random number is for; no two uses share a purpose, so no two decisions share bits."""

    PROBE = 0
    ACCEPT = 1
    RESIDUAL = 2
    LEAD = 3


def philox4x32(counter: ArrayLike, key: ArrayLike) -> NDArray[np.uint32]:
    """Ten rounds of Philox4x32.

    Args:
        counter: [..., 4] words, each below 2**32.
        key: [..., 2] words, broadcast against ``counter``.

    Returns:
        [..., 4] uint32 random words.
    """
    counter = np.asarray(counter, dtype=np.uint64)
    key = np.asarray(key, dtype=np.uint64)
    c0, c1, c2, c3 = (counter[..., i] for i in range(4))
    k0, k1 = key[..., 0], key[..., 1]
    for _ in range(ROUNDS):
        product0, product1 = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ k0,
            product1 & WORD,
            (product0 >> np.uint64(32)) ^ c3 ^ k1,
            product0 & WORD,
        )
        k0, k1 = (k0 + np.uint64(KEY_STEPS[0])) & WORD, (k1 + np.uint64(KEY_STEPS[1])) & WORD
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def check_seed(seed: int) -> tuple[int, int]:
    """Split a 64-bit seed into its low and high words.

    Raises:
        ValueError: not an integer in [0, 2**64).
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an integer in [0, 2**64), got {seed!r}")
    return int(seed) & 0xFFFFFFFF, int(seed) >> 32


def _words(seed: int, step: int, purpose: Purpose, nodes: int, draw: int = 0) -> NDArray[np.uint32]:
    counter = np.zeros((nodes, 4), dtype=np.uint64)
    counter[:, 0] = np.arange(nodes)
    counter[:, 1] = step
    counter[:, 2] = int(purpose)
    counter[:, 3] = draw
    return philox4x32(counter, check_seed(seed))


def uniforms24(seed: int, step: int, purpose: Purpose, nodes: int, draw: int = 0) -> NDArray[np.float64]:
    """[nodes] uniforms in [0, 1), multiples of 2**-24: ``(word0 >> 8) * 2**-24``."""
    return (_words(seed, step, purpose, nodes, draw)[:, 0] >> np.uint32(8)).astype(np.float64) * 2.0**-24


def uniforms53(seed: int, step: int, purpose: Purpose, nodes: int) -> NDArray[np.float64]:
    """[nodes] uniforms in [0, 1), multiples of 2**-53: the top 53 bits of word 0 (high) and word 1 (low)."""
    words = _words(seed, step, purpose, nodes).astype(np.uint64)
    return (((words[:, 0] << np.uint64(32)) | words[:, 1]) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def growth_noise(seed: int, step: int, depth: int, beam: int, probes: int = 1) -> GrowthNoise:
    """The probe uniforms of one request at one step; shape [depth, beam], or [depth, beam, probes] for several."""
    uniforms = _per_probe(seed, step, Purpose.PROBE, depth * beam, probes)
    return GrowthNoise(uniforms.reshape(depth, beam, *uniforms.shape[1:]))


def verify_noise(seed: int, step: int, rows: int, probes: int = 1) -> VerifyNoise:
    """The verification uniforms of one request at one step, for a tree of ``rows`` rows (root included)."""
    return VerifyNoise(
        accept_uniforms=_per_probe(seed, step, Purpose.ACCEPT, rows, probes),
        residual_uniforms=uniforms53(seed, step, Purpose.RESIDUAL, rows),
        lead_uniforms=uniforms53(seed, step, Purpose.LEAD, rows),
    )


def _per_probe(seed: int, step: int, purpose: Purpose, nodes: int, probes: int) -> NDArray[np.float64]:
    """[nodes], or [nodes, probes] for several probes."""
    columns = [uniforms24(seed, step, purpose, nodes, draw) for draw in range(probes)]
    return columns[0] if probes == 1 else np.stack(columns, axis=1)

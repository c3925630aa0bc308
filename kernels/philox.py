"""Philox4x32-10 in Triton: the uniforms of one step of a whole batch in one launch, bit for bit those of NumPy.

counter = (node, step, purpose, 0), key = (seed low word, seed high word). Probe and accept uniforms are multiples of
2**-24, residual and lead uniforms of 2**-53.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels.launching import check_shape, device_of

BLOCK = 256
# What a number is for, the counter's third word.
PROBE = tl.constexpr(0)
ACCEPT = tl.constexpr(1)
RESIDUAL = tl.constexpr(2)
LEAD = tl.constexpr(3)


class StepUniforms(NamedTuple):
    """Uniforms in [0, 1) of one step: probe [batch, depth, beam], the others [batch, rows]; float64."""

    probe: Tensor
    accept: Tensor
    residual: Tensor
    lead: Tensor


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds on uint32 tensors that broadcast; returns four uint32 tensors. Sums and products wrap."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), tl.mul(c0, 0xD2511F53, sanitize_overflow=False)
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit(do_not_specialize=["nodes", "rows"])
def _step_uniforms(keys, steps, probe, accept, residual, lead, nodes, rows, BLOCK: tl.constexpr):
    """One program per (request, block): first the probes' ``nodes`` numbers, then three times ``rows``."""
    request = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    behind = tl.maximum(index - nodes, 0)
    purpose = tl.where(index < nodes, PROBE, ACCEPT + behind // rows)
    node = tl.where(index < nodes, index, behind % rows)

    zero = tl.zeros([BLOCK], dtype=tl.uint32)
    step = tl.load(steps + request).to(tl.uint32) + zero
    low = tl.load(keys + 2 * request).to(tl.uint32) + zero
    high = tl.load(keys + 2 * request + 1).to(tl.uint32) + zero
    word0, word1, _, _ = philox4x32(node.to(tl.uint32), step, purpose.to(tl.uint32), zero, low, high)
    coarse = (word0 >> 8).to(tl.float64) * (1.0 / (1 << 24))
    fine = ((word0.to(tl.uint64) << 21) | (word1 >> 11).to(tl.uint64)).to(tl.int64).to(tl.float64) * (1.0 / (1 << 53))

    tl.store(probe + request * nodes + node, coarse, mask=purpose == PROBE)
    row = request * rows + node
    tl.store(accept + row, coarse, mask=purpose == ACCEPT)
    tl.store(residual + row, fine, mask=purpose == RESIDUAL)
    tl.store(lead + row, fine, mask=purpose == LEAD)


def step_uniforms(keys: Tensor, steps: Tensor, depth: int, beam: int, rows: int) -> StepUniforms:
    """The uniforms of each request's own step.

    Args:
        keys: [batch, 2] int64, low and high word of each seed.
        steps: [batch] int64, how many steps each request has made; the low 32 bits count.
        depth: levels drafted.
        beam: nodes expanded per level.
        rows: tree rows, root included.

    Raises:
        ValueError: shapes that do not fit together, or a size below one.
    """
    batch = steps.shape[0]
    if min(depth, beam, rows) < 1:
        raise ValueError(f"depth, beam and rows must be at least 1, got {depth}, {beam} and {rows}")
    keys, steps = check_shape("keys", keys, batch, 2), check_shape("steps", steps, batch)

    def empty(*shape: int) -> Tensor:
        return torch.empty(batch, *shape, dtype=torch.float64, device=keys.device)

    out = StepUniforms(empty(depth, beam), empty(rows), empty(rows), empty(rows))
    nodes = depth * beam
    with device_of(keys):
        _step_uniforms[(batch, triton.cdiv(nodes + 3 * rows, BLOCK))](keys, steps, *out, nodes, rows, BLOCK=BLOCK)
    return out

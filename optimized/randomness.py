"""Philox4x32-10 on tensors: the bits of ``reference.philox`` for a batch of requests at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from reference.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, Purpose, check_seed
from reference.philox import philox4x32 as reference_philox

WORD = 0xFFFFFFFF
UniformsKernel = Callable[[Tensor, Tensor, int, int, int], tuple[Tensor, ...]]


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32 on broadcastable int64 tensors that hold 32-bit words; returns four such tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The product wraps modulo 2**64; its high word survives the arithmetic shift once masked.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & WORD) ^ c1 ^ k0,
            product1 & WORD,
            ((product0 >> 32) & WORD) ^ c3 ^ k1,
            product0 & WORD,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def fresh_seed(seed: int, number: int) -> int:
    """Another seed, a function of both that shares no random number with its like: words that no step uses.

    Args:
        seed: in [0, 2**64).
        number: in [0, 2**64), say how many requests came before.
    """
    words = reference_philox([number & WORD, number >> 32, WORD, 0], check_seed(seed))
    return int(words[0]) | int(words[1]) << 32


@dataclass(frozen=True, eq=False)
class StepNoise:
    """Uniforms of one step of a batch; the fields are those of ``GrowthNoise`` and ``VerifyNoise`` with a batch axis.

    Attributes:
        probe_uniforms: [batch, depth, beam] float64; [batch, depth, beam, probes] for several probes per node.
        accept_uniforms: [batch, rows] float64; [batch, rows, probes] for several probes per node.
        residual_uniforms, lead_uniforms: [batch, rows] float64.
    """

    probe_uniforms: Tensor
    accept_uniforms: Tensor
    residual_uniforms: Tensor
    lead_uniforms: Tensor

    def select(self, keep: Tensor) -> StepNoise:
        """Only these requests, [kept] long, of the batch."""
        return StepNoise(*(getattr(self, item.name)[keep] for item in fields(self)))


class StepRandomness:
    """The random numbers of a batch of requests, a pure function of each one's seed and own step count.

    Args:
        seeds: one per request, in [0, 2**64).
        depth: levels drafted.
        beam: nodes expanded per level.
        rows: tree rows, root included.
        device: where the numbers are used.
        probes: probes per node.
        kernel: a backend's own generator, the same bits in one launch, for one probe per node: (keys [batch, 2], steps
            [batch], depth, beam, rows) -> probe, accept, residual and lead uniforms.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        depth: int,
        beam: int,
        rows: int,
        device: torch.device | str = "cpu",
        probes: int = 1,
        kernel: UniformsKernel | None = None,
    ) -> None:
        self.kernel = kernel
        self.depth, self.beam, self.rows, self.probes = depth, beam, rows, probes
        self._keys = torch.tensor([check_seed(seed) for seed in seeds], dtype=torch.long, device=device).view(-1, 2)
        nodes = {Purpose.PROBE: depth * beam, Purpose.ACCEPT: rows, Purpose.RESIDUAL: rows, Purpose.LEAD: rows}
        draws = {Purpose.PROBE: probes, Purpose.ACCEPT: probes, Purpose.RESIDUAL: 1, Purpose.LEAD: 1}
        self._sizes = [count * draws[purpose] for purpose, count in nodes.items()]
        self._nodes = torch.cat(
            [torch.arange(count, device=device).repeat_interleave(draws[purpose]) for purpose, count in nodes.items()]
        )
        self._draws = torch.cat(
            [torch.arange(draws[purpose], device=device).repeat(count) for purpose, count in nodes.items()]
        )
        self._purposes = torch.cat(
            [torch.full((size,), int(purpose), device=device) for purpose, size in zip(nodes, self._sizes, strict=True)]
        )

    def select(self, keep: Tensor) -> None:
        """Keep only these requests, [kept] long, of the batch."""
        self._keys = self._keys[keep]

    def at(self, steps: Tensor) -> StepNoise:
        """The uniforms of each request's own step.

        Args:
            steps: [batch] long, how many steps each request has made.
        """
        return self.ahead(steps, 1)[0]

    def ahead(self, steps: Tensor, count: int) -> list[StepNoise]:
        """The uniforms of ``count`` steps, the first being ``steps``; together they cost hardly more than one.

        Args:
            steps: [batch] long.
            count: how many steps.
        """
        each = steps.view(-1, 1, 1) + torch.arange(count, device=steps.device).unsqueeze(1)
        if self.kernel is not None:
            keys = self._keys.repeat_interleave(count, dim=0)
            made = self.kernel(keys, each.flatten(), self.depth, self.beam, self.rows)
            return [StepNoise(*(values[step::count] for values in made)) for step in range(count)]
        counter = (self._nodes, each, self._purposes, self._draws)
        word0, word1, _, _ = philox4x32(counter, (self._keys[:, 0].view(-1, 1, 1), self._keys[:, 1].view(-1, 1, 1)))
        coarse = (word0 >> 8).double() * 2.0**-24
        fine = ((word0 << 21) | (word1 >> 11)).double() * 2.0**-53
        probe, accept, _, _ = coarse.split(self._sizes, dim=2)
        _, _, residual, lead = fine.split(self._sizes, dim=2)
        several = (self.probes,) if self.probes > 1 else ()
        each_probe, each_row = (-1, self.depth, self.beam, *several), (-1, self.rows, *several)
        return [
            StepNoise(probe[:, i].reshape(each_probe), accept[:, i].reshape(each_row), residual[:, i], lead[:, i])
            for i in range(count)
        ]

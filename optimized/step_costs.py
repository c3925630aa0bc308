"""What the steps of a decoder cost on this machine, measured by taking some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from optimized.backends import Backend
from optimized.calibration import Calibrator
from optimized.clock import PhaseClock
from optimized.loop import BatchLoop
from optimized.models import Drafter, TargetModel
from optimized.request import Request
from optimized.sampling_params import SamplingParams
from optimized.sizing import StepCosts
from optimized.trees import TreeBatch
from optimized.verification import VerifyBatch
from reference.api import RheoConfig
from reference.numbers import Vector

ROUNDS = 7  # of all shapes; the first only warms up
PROMPT_TOKENS, LEAST_ROOM = 64, 16
MOST_ROWS = 256  # of all requests together: larger passes say nothing new and take long
SHORTEST = 1e-6  # seconds; what a measurement finds to cost less costs so much


class CostTable:
    """Step costs by the number of requests: measured for one and for the most there were, linear in between.

    Args:
        measure: the costs of a step of so many requests.
    """

    def __init__(self, measure: Callable[[int], StepCosts]) -> None:
        self._measure = measure
        self._measured: dict[int, StepCosts] = {}

    def cover(self, batch: int) -> None:
        """Measure what is needed to know the costs of up to so many requests.

        Raises:
            ValueError: as ``measure_costs``, at the first measurement.
        """
        for size in sorted({1, batch}):
            largest = max(self._measured, default=0)
            if size > largest:
                try:
                    self._measured[size] = self._measure(size)
                except Exception:  # out of memory, say: decoding will halve such a batch
                    if not self._measured:
                        raise
                    self._measured[size] = self._measured[largest]

    def __call__(self, batch: int) -> StepCosts:
        """The costs of a step of so many requests, which are covered."""
        sizes = sorted(self._measured)
        costs = [vars(self._measured[size]) for size in sizes]
        return StepCosts(**{name: float(np.interp(batch, sizes, [one[name] for one in costs])) for name in costs[0]})


def measure_costs(
    target: TargetModel,
    drafter: Drafter,
    config: RheoConfig,
    backend: Backend,
    batch: int,
    calibrator: Calibrator | None = None,
) -> StepCosts:
    """Decode some steps with trees of given shapes and without a draft, and fit what they took.

    Args:
        target, drafter: whoever has their caches loses them.
        config: how trees are grown and verified, but for their size.
        backend: does the sampling side.
        batch: how many requests.
        calibrator: learns in the decoder whose costs these are; it learns nothing here.

    Raises:
        ValueError: no step could be taken, say because the target's logits are NaN; or the context is too short.
    """
    clock = PhaseClock(target.device)
    stopwatch = _Stopwatch(_shapes(config, batch), clock)
    limits = [most for most in (target.max_positions, drafter.max_positions) if most is not None]
    room = min(limits) - config.depth if limits else None  # further on nobody would be drafted for
    if room is not None and room < LEAST_ROOM:
        raise ValueError(
            f'tree_size="auto" measures steps, and in a context of {min(limits)} tokens trees of {config.depth} levels '
            "leave no room for them; give a number of nodes"
        )
    length = PROMPT_TOKENS if room is None else min(PROMPT_TOKENS, room // 2)
    prompt = [7919 * place % target.vocab_size for place in range(1, length + 1)]
    params = SamplingParams(temperature=1.0, seed=0, max_new_tokens=10**6)
    learner = None if calibrator is None else Calibrator(calibrator.prior)
    while not stopwatch.done:
        turn = stopwatch.turn
        requests = [Request(index, prompt, params, None, (), room) for index in range(batch)]
        for request in requests:
            request.begin()
        loop = BatchLoop(target, drafter, config, backend, learner, clock, stopwatch)
        for _ in loop.run(requests):
            if stopwatch.done:
                break
        if stopwatch.turn == turn:
            reason = next((one.failure for one in requests if one.failure is not None), f"a context of {room} tokens")
            raise ValueError(f'tree_size="auto" goes by what steps cost, and no step could be measured: {reason}')
    return stopwatch.costs()


def _shapes(config: RheoConfig, batch: int) -> list[RheoConfig | None]:
    """No draft; one level with few nodes and with many; more levels; many nodes."""
    most = max(min(config.budget, MOST_ROWS // batch - 1), 2)
    few = max(min(config.branching // 4, most // 2), 1)
    wide, deep = config.branching, min(config.depth, 4)
    sizes = ((few, 1), (wide, 1), (few, deep), (min(most, wide * (1 + (deep - 1) * config.beam_width)), deep))
    fixed = replace(config, score_threshold=0.0, level_threshold=0.0)  # every tree is as large as it is said to be
    shapes = ((min(size, most), depth) for size, depth in sizes)
    # No more nodes are expanded than are kept, as where thresholds decide.
    return [
        None,
        *(replace(fixed, tree_size=size, depth=depth, beam=min(size, fixed.beam_width)) for size, depth in shapes),
    ]


class _Stopwatch:
    """A ``Sizing`` that goes round some shapes and keeps what steps take: the target's pass, and all else."""

    def __init__(self, shapes: list[RheoConfig | None], clock: PhaseClock) -> None:
        self._shapes, self._clock = shapes, clock
        self._spent = np.zeros(2)
        self._seconds: list[list[Vector]] = [[] for _ in shapes]
        self._dims = [(0, 0)] * len(shapes)
        self.turn = 0

    @property
    def done(self) -> bool:
        return self.turn >= ROUNDS * len(self._shapes)

    def shape(self, config: RheoConfig, batch: int) -> RheoConfig | None:
        return self._shapes[self.turn % len(self._shapes)]

    def observe(self, shape: RheoConfig | None, trees: TreeBatch, walk: VerifyBatch, seconds: float | None) -> None:
        which = self.turn % len(self._shapes)
        target = self._clock.seconds["target"]
        before, self._spent = self._spent, np.array([target, sum(self._clock.seconds.values()) - target])
        if shape is not None and trees.depth == 0:
            return  # nobody was drafted for
        if seconds is None:
            return
        self._dims[which] = (trees.rows - 1, trees.depth - 1)
        if self.turn >= len(self._shapes):  # the first round only warms up
            self._seconds[which].append(self._spent - before)
        self.turn += 1

    def costs(self) -> StepCosts:
        """Levels are told from what the target's pass does not take: that moves by more than a level costs."""
        target, other = np.array([np.median(times, axis=0) for times in self._seconds]).T
        dims = np.array([(1, *dims) for dims in self._dims], dtype=float)
        row, node = _fit(dims[:, :2], target)
        base, draft_node, level = _fit(dims[1:], other[1:])
        plain = float(target[0] + other[0])
        return StepCosts(plain, max(row + base, plain), max(node + draft_node, SHORTEST), max(level, SHORTEST))


def _fit(dims: Vector, seconds: Vector) -> list[float]:
    """What each of the dimensions [shapes, dimensions] costs, never less than nothing; relative errors count."""
    return [float(cost) for cost in nnls(dims / seconds[:, None], np.ones(len(seconds)))[0]]

"""Trees that pay: which nodes, which levels, and whether to draft at all (docs/calibration.md).

With calibrated weights a path score is the chance that the walk comes through a node: the tokens it is expected to
add. A node costs a row of the target's pass, a level a pass of the draft; what a second is worth is what decoding
emits in one. So a node pays from a certain score on, and so does the best node of a level, below which another level is
drafted. Both thresholds follow from earlier steps only, before a step's probes are drawn: the text keeps its law.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from optimized.trees import TreeBatch
from optimized.verification import VerifyBatch
from reference.api import RheoConfig

MEMORY = 32.0  # steps: what was seen so long ago counts for 1/e
TRIAL = 8  # drafted steps before speculation may be turned off
SHORTEST_PAUSE, LONGEST_PAUSE = 16, 1024  # steps without a draft
PRIOR_STEPS = 8.0  # what the assumptions below count for
PRIOR_GAIN = 0.5  # of a level: the chances it adds up to, over that of the best node above it


class Sizing(Protocol):
    """Decides before every step how its trees may grow."""

    def shape(self, config: RheoConfig, batch: int) -> RheoConfig | None:
        """The shape of the next step's trees for so many requests; None drafts for nobody."""

    def observe(self, trees: TreeBatch, walk: VerifyBatch) -> None:
        """What became of that step."""


@dataclass(frozen=True)
class StepCosts:
    """What a step of a batch takes, in seconds.

    Attributes:
        plain: without a draft, one row per request.
        base: with a draft that offers one level, no node of which is kept.
        node: one more node in every request's tree.
        level: one more level.
    """

    plain: float
    base: float
    node: float
    level: float

    def seconds(self, nodes: float, levels: float) -> float:
        """A step with trees of so many nodes, behind so many levels but the first."""
        return self.base + self.node * nodes + self.level * levels


class TreeSizer:
    """Sets the two thresholds, and turns drafting off for a while where it does not pay.

    Args:
        costs: of a step, by the number of requests.

    Attributes:
        requests: that have been decoded with it; see ``RheoDecoder``.
    """

    def __init__(self, costs: Callable[[int], StepCosts]) -> None:
        self.costs = costs
        self.requests = 0
        self._steps = self._nodes = self._levels = 0.0  # sums over steps, older ones counting less
        self._promised = self._accepted = 0.0  # tokens per request, by the scores and by the walks
        self._gains = self._bests = 0.0  # of levels
        self._drafted = 0  # steps since speculation was turned on
        self._batch = 0
        self._threshold = 0.0  # of a level, in the last step
        self._left, self._pause = 0, SHORTEST_PAUSE  # steps

    def shape(self, config: RheoConfig, batch: int) -> RheoConfig | None:
        """The configuration with its thresholds; None while drafting does not pay."""
        costs = self.costs(batch)
        if batch < self._batch:  # the next batch mates' absence makes trees cheaper: try again
            self._left, self._pause, self._drafted = 0, SHORTEST_PAUSE, 0
        self._batch = batch
        if self._left > 0:
            self._left -= 1
            return None
        speed = self._speed(costs)
        if self._drafted >= TRIAL:
            if speed < 1 / costs.plain:
                self._left, self._drafted = self._pause - 1, 0
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
                return None
            self._pause = SHORTEST_PAUSE
        worth = max(speed, 1 / costs.plain) / self._honesty()  # of a second, in scores
        self._threshold = min(worth * costs.level / self._gain(), 1.0)
        return replace(config, score_threshold=min(worth * costs.node, 1.0), level_threshold=self._threshold)

    def observe(self, trees: TreeBatch, walk: VerifyBatch) -> None:
        """Learn from a step; one without a draft teaches nothing."""
        if trees.rows == 1 and trees.depth == 0:
            return
        chances = trees.log_scores.exp().nan_to_num(0.0)
        by_level = torch.zeros(trees.batch_size, trees.depth + 1, dtype=chances.dtype, device=chances.device)
        sums = by_level.scatter_add(1, trees.depths, chances.where(trees.parents >= 0, 0.0))
        bests = by_level.scatter_reduce(1, trees.depths, chances.where(trees.parents >= 0, 0.0), "amax")
        went_on = bests[:, 1:-1] >= self._threshold  # and was above another level
        seen = [sums[:, 1:].sum(), (walk.counts - 1).sum(), sums[:, 2:].sum(), bests[:, 1:-1].where(went_on, 0.0).sum()]
        promised, accepted, gains, best = torch.stack(seen).tolist()
        keep = 1 - 1 / MEMORY
        for name, value in (
            ("_steps", 1.0),
            ("_nodes", trees.rows - 1),
            ("_levels", trees.depth - 1),
            ("_promised", promised / trees.batch_size),
            ("_accepted", accepted / trees.batch_size),
            ("_gains", gains / trees.batch_size),
            ("_bests", best / trees.batch_size),
        ):
            setattr(self, name, keep * getattr(self, name) + value)
        self._drafted += 1

    def _speed(self, costs: StepCosts) -> float:
        """Tokens per second and request with the trees of late; what plain decoding does before there are any."""
        if self._steps == 0:
            return 1 / costs.plain
        emitted = 1 + self._honesty() * self._promised / self._steps
        return emitted / costs.seconds(self._nodes / self._steps, self._levels / self._steps)

    def _honesty(self) -> float:
        """What is accepted of what the scores promise."""
        return (PRIOR_STEPS + self._accepted) / (PRIOR_STEPS + self._promised)

    def _gain(self) -> float:
        """What a level adds up to, in chances of the best node above it."""
        return (PRIOR_GAIN * PRIOR_STEPS + self._gains) / (PRIOR_STEPS + self._bests)

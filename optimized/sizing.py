"""Trees that pay: which nodes, which levels, and whether to draft at all (docs/calibration.md).

With calibrated weights a path score is the chance that the walk comes through a node: the tokens it is expected to
add. A node costs a row of the target's pass, a level a pass of the draft; what a second is worth is what decoding
emits in one. So a node pays from a certain score on, and so does the best node of a level, below which another level is
drafted. Both thresholds follow from earlier steps only, before a step's probes are drawn: the text keeps its law.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from optimized.trees import TreeBatch
from optimized.verification import VerifyBatch
from reference.api import RheoConfig

MEMORY = 32.0  # steps: of times and trees, what was seen so long ago counts for 1/e
LONG_MEMORY = 256.0  # of what the walks made of promises, since one step says little
TRIAL = 12  # trees that are drafted before speculation may be turned off: of a batch, few steps say as much as of one
SHORTEST_PAUSE, LONGEST_PAUSE = 32, 1024  # steps without a draft
CLEAR = 0.94  # of plain decoding's speed; pauses grow where drafting is slower: nearer to it a trial costs little
COMPARING = 0.005  # of the speed: so much is given for steps without a draft, to see what they take
COMPARED, SEEN = 8, 4  # such a step comes at the soonest behind so many with a draft; at first so many do
PRIOR_STEPS = 4.0  # what assumptions count for at first: costs as measured, scores that keep their promise, and
PRIOR_GAIN = 0.4  # what a level is worth beyond what its nodes cost, over the chance of the best node above it
LONGEST_STEP = 1.3  # in what steps take of late; what takes longer was disturbed, and counts as so much


class Sizing(Protocol):
    """Decides before every step how its trees may grow."""

    def shape(self, config: RheoConfig, batch: int) -> RheoConfig | None:
        """The shape of the next step's trees for so many requests; None drafts for nobody."""

    def observe(self, shape: RheoConfig | None, trees: TreeBatch, walk: VerifyBatch, seconds: float | None) -> None:
        """What became of a step of that shape, and what it took; None where the models had more to read than usual."""


@dataclass(frozen=True)
class StepCosts:
    """What a step of a batch takes, in seconds.

    Attributes:
        plain: without a draft, one row per request.
        base: with a draft that offers one level, no node of which is kept.
        node: one more node per request, on the average of the batch.
        level: one more level.
    """

    plain: float
    base: float
    node: float
    level: float

    def seconds(self, nodes: float, levels: float) -> float:
        """A step with trees of so many nodes, behind so many levels but the first."""
        return self.base + self.node * nodes + self.level * levels


class _Ratio:
    """What was seen over what was expected, of late; at first ``assumed``, as if seen in ``PRIOR_STEPS``."""

    def __init__(self, assumed: float, memory: float) -> None:
        self._seen, self._expected, self._memory = assumed * PRIOR_STEPS, PRIOR_STEPS, memory

    def add(self, seen: float, expected: float) -> None:
        keep = 1 - 1 / self._memory
        self._seen, self._expected = keep * self._seen + seen, keep * self._expected + expected

    @property
    def value(self) -> float:
        """The ratio."""
        return self._seen / self._expected


@dataclass
class _Pace:
    """How the steps of one batch size went: sums over drafted steps, older ones counting less, and what follows.

    Attributes:
        steps, nodes, levels, promised: one, the rows and the further levels of the trees, tokens per request.
        tried: trees since speculation was turned on.
        drafted: steps with a draft since one without.
        plain: timed steps without one.
        left: steps without a draft that are still to come.
        pause: how many there will be the next time.
    """

    steps: float = 0.0
    nodes: float = 0.0
    levels: float = 0.0
    promised: float = 0.0
    tried: int = 0
    drafted: int = 0
    plain: int = 0
    left: int = 0
    pause: int = SHORTEST_PAUSE

    def add(self, nodes: float, levels: float, promised: float) -> None:
        keep = 1 - 1 / MEMORY
        self.steps = keep * self.steps + 1
        self.nodes = keep * self.nodes + nodes
        self.levels = keep * self.levels + levels
        self.promised = keep * self.promised + promised


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
        self._paces: dict[int, _Pace] = {}  # by the number of requests
        self._honesty = _Ratio(1.0, LONG_MEMORY)  # accepted of what the scores promise
        self._gain = _Ratio(PRIOR_GAIN, LONG_MEMORY)  # of a level
        self._bests: deque[float] = deque(maxlen=int(LONG_MEMORY))  # scores of the best nodes of first levels
        self._drift = _Ratio(1.0, MEMORY)  # of all steps alike: a machine's moods, texts that grow
        self._slowness = {True: _Ratio(1.0, LONG_MEMORY), False: _Ratio(1.0, LONG_MEMORY)}  # with and without a draft

    def shape(self, config: RheoConfig, batch: int) -> RheoConfig | None:
        """The configuration with its thresholds; None while drafting does not pay."""
        pace, costs = self._pace(batch), self._costs(batch)
        speed = self._speed(pace, costs)
        if pace.left == 0 and pace.tried >= TRIAL:
            lead = speed * costs.plain  # over plain decoding
            if lead < 1:
                pace.left, pace.tried = pace.pause, 0
                pace.pause = min(2 * pace.pause, LONGEST_PAUSE) if lead < CLEAR else SHORTEST_PAUSE
            else:
                pace.pause = SHORTEST_PAUSE
                apart = (1 - 1 / lead) / COMPARING if pace.plain >= SEEN else 0.0
                if pace.drafted >= max(COMPARED, apart):
                    pace.left = 1
        if pace.left > 0:
            pace.left -= 1
            pace.drafted = 0
            return None
        pace.tried += batch
        pace.drafted += 1
        worth = max(speed, 1 / costs.plain) / self._honesty.value  # of a second, in scores
        return replace(
            config,
            score_threshold=max(min(worth * costs.node, 1.0), config.score_threshold),
            level_threshold=max(self._level_threshold(worth * costs.level, batch), config.level_threshold),
        )

    def observe(self, shape: RheoConfig | None, trees: TreeBatch, walk: VerifyBatch, seconds: float | None) -> None:
        """Learn from a step; see ``Sizing.observe``."""
        costs, pace = self.costs(trees.batch_size), self._pace(trees.batch_size)
        nodes = self._learn(shape, trees, walk, pace) if shape is not None and trees.depth > 0 else None
        drafted = nodes is not None
        expected = costs.plain if nodes is None else costs.seconds(nodes, trees.depth - 1)
        if seconds is not None:
            drift, slowness = self._drift.value, self._slowness[drafted].value
            seen = min(seconds / expected, LONGEST_STEP * drift * slowness)
            self._drift.add(seen, slowness)
            self._slowness[drafted].add(seen, drift)
            pace.plain += not drafted

    def _learn(self, shape: RheoConfig, trees: TreeBatch, walk: VerifyBatch, pace: _Pace) -> float:
        """Learn what trees promise and keep; returns their nodes per request, without padding, which costs little."""
        chances = trees.log_scores.exp().nan_to_num(0.0).where(trees.parents >= 0, 0.0)
        by_level = torch.zeros(trees.batch_size, trees.depth + 1, dtype=chances.dtype, device=chances.device)
        bests = by_level.scatter_reduce(1, trees.depths, chances, "amax")
        went_on = bests[:, 1:-1] >= float(shape.level_threshold)  # and was above another level
        further = (chances - float(shape.score_threshold)).clamp(min=0).where(trees.depths > 1, 0.0)
        sums = [
            (trees.num_nodes - 1).sum(),
            chances[:, 1:].sum(),
            (walk.counts - 1).sum(),
            further.sum(),
            bests[:, 1:-1].where(went_on, 0.0).sum(),
        ]
        means = torch.stack(sums) / trees.batch_size
        nodes, promised, accepted, gains, best, *firsts = torch.cat([means, bests[:, 1]]).tolist()  # one transfer
        pace.add(nodes, trees.depth - 1, promised)
        self._bests.extend(firsts)
        # What is not tried drifts back to what is assumed, until it is.
        self._honesty.add(*((accepted, promised) if promised > 0 else (1 / LONG_MEMORY, 1 / LONG_MEMORY)))
        self._gain.add(*((gains, best) if best > 0 else (PRIOR_GAIN / LONG_MEMORY, 1 / LONG_MEMORY)))
        return nodes

    def _level_threshold(self, price: float, batch: int) -> float:
        """From which best node on a request goes to the next level, whose pass costs the batch ``price`` per request.

        The pass is there for all of them: who goes on alone pays for the whole batch, whoever joins pays nothing. So it
        is paid for by the chance that no other request goes on. How many do is what would have earned most of late.
        """
        gain, bests = self._gain.value, np.sort(self._bests)[::-1]
        known = max(len(bests), 1)
        share = np.arange(1, len(bests) + 1) / known
        earned = gain * np.cumsum(bests) / known - price * (1 - (1 - share) ** batch)
        going = float(share[earned.argmax()]) if (earned > 0).any() else 0.0
        return min(batch * price * (1 - going) ** (batch - 1) / gain, 1.0)

    def _pace(self, batch: int) -> _Pace:
        """A batch size that is new goes by what was seen of the nearest one, at its own costs."""
        if batch not in self._paces:
            nearest = min(self._paces, key=lambda known: abs(known - batch), default=None)
            self._paces[batch] = (
                _Pace()
                if nearest is None
                else replace(self._paces[nearest], left=0, tried=TRIAL, drafted=0, plain=0, pause=SHORTEST_PAUSE)
            )
        return self._paces[batch]

    def _costs(self, batch: int) -> StepCosts:
        """As measured, times what steps of late took longer: all of them, and each of the two kinds."""
        costs, drift = self.costs(batch), self._drift.value
        plain, drafted = (drift * self._slowness[kind].value for kind in (False, True))
        return StepCosts(costs.plain * plain, costs.base * drafted, costs.node * drafted, costs.level * drafted)

    def _speed(self, pace: _Pace, costs: StepCosts) -> float:
        """Tokens per second and request with the trees of late; what plain decoding does before there are any."""
        if pace.steps == 0:
            return 1 / costs.plain
        emitted = 1 + self._honesty.value * pace.promised / pace.steps
        return emitted / costs.seconds(pace.nodes / pace.steps, pace.levels / pace.steps)

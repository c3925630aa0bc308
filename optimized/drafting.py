"""Who of a batch is drafted for, and their trees: a drafter never reads a text longer than it was made for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from optimized.clock import PhaseClock
from optimized.committed import Committed, joined
from optimized.growth import GrowthSteps, grow_trees
from optimized.models import Drafter
from optimized.randomness import StepNoise
from optimized.request import Request
from optimized.trees import LevelNodes, TreeBatch
from reference.api import RheoConfig
from reference.tree import root_only

MOST_UNREAD = 64  # steps whose tokens and features are kept for a drafter that is not asked


class Drafting:
    """The trees of a batch. A request whose text outgrows the draft's context goes on with trees that are a root only.

    Who is drafted for depends on a request's own length alone, never on its batch mates; whether a step has a draft at
    all is the caller's choice.

    Args:
        drafter: None drafts for nobody.
        depth: levels of its trees.
        growth: the backend's steps.
        clock: of the batch.
    """

    def __init__(self, drafter: Drafter | None, depth: int, growth: GrowthSteps, clock: PhaseClock) -> None:
        self._drafter, self._depth, self._growth, self._clock = drafter, depth, growth, clock
        self._places: list[int] = []  # of the requests that the drafter holds, in their order
        self._longest: int | None = None  # how much of whole texts it has to read; None once it has
        self._unread: list[Committed] = []  # of steps without a draft

    @property
    def behind(self) -> bool:
        """Whether the drafter has more to read than the last step's tokens: whole texts, or steps without a draft."""
        return bool(self._places) and (self._longest is not None or bool(self._unread))

    def reset(self, live: Sequence[Request], device: torch.device) -> None:
        """Begin with texts of which the drafter has read nothing."""
        self._places = [place for place, request in enumerate(live) if self._fits(request)]
        self._longest = max((live[place].length - 1 for place in self._places), default=0)
        self._unread = []
        if self._drafter is not None and self._places:
            self._drafter.reset(torch.tensor([live[place].prompt[0] for place in self._places], device=device))

    def select(self, keep: Sequence[int], live: Sequence[Request], device: torch.device) -> None:
        """A step later: ``live`` are the requests that go on, ``keep`` their places until now."""
        new_place = {old: new for new, old in enumerate(keep)}
        staying = [row for row, old in enumerate(self._places) if old in new_place and self._fits(live[new_place[old]])]
        if self._drafter is not None and staying and len(staying) < len(self._places):
            self._drafter.select(torch.tensor(staying, device=device))
        self._places = [new_place[self._places[row]] for row in staying]
        if self._longest is not None:
            self._longest = max((live[place].length - 1 for place in self._places), default=0)
        if not self._places:  # and nobody will be drafted for any more
            self._unread = []
        if self._unread and len(keep) < len(self._unread[0].counts):
            index = torch.tensor(keep, device=device)
            self._unread = [part.select(index) for part in self._unread]

    @property
    def full(self) -> bool:
        """Whether what the drafter has not read has become too much to keep: the next ``skip`` lets it read."""
        return len(self._unread) == MOST_UNREAD

    def skip(self, committed: Committed) -> TreeBatch:
        """No draft in this step: roots only. The drafter reads what was committed when it is asked again."""
        if self._drafter is not None and self.full:
            self._clock.enter("draft")
            self._read(self._drafter, committed)
        elif self._places:
            self._unread.append(committed)
        return _roots(len(committed.counts), committed.counts.device)

    def trees(self, config: RheoConfig, committed: Committed, temperatures: Tensor, noise: StepNoise) -> TreeBatch:
        """One tree of this shape per request.

        Raises:
            ValueError: the drafter's logits are not as many as it said.
        """
        drafter, clock, batch, device = self._drafter, self._clock, len(temperatures), temperatures.device
        if drafter is None or not self._places:
            return _roots(batch, device)
        index = self._index(batch, device)

        def spread(logits: Tensor) -> Tensor:
            """Logits that are all -inf offer nothing: the tree stays a root."""
            clock.enter("sampling")
            if logits.shape[-1] != drafter.vocab_size:
                raise ValueError(f"the draft gave {logits.shape[-1]} logits; its vocab_size is {drafter.vocab_size}")
            if index is None:
                return logits
            return logits.new_full((batch, *logits.shape[1:]), -torch.inf).index_copy_(0, index, logits)

        def expand(nodes: LevelNodes) -> Tensor:
            clock.enter("draft")
            if index is not None:
                nodes = LevelNodes(nodes.token_ids[index], nodes.parents[index], nodes.valid[index], nodes.depth)
            return spread(drafter.expand(nodes))

        clock.enter("draft")
        root_logits = spread(self._read(drafter, committed))
        trees = grow_trees(
            config, root_logits, expand, temperatures, noise.probe_uniforms, drafter.vocab_map, self._growth
        )
        if index is None:
            return trees
        asked = torch.zeros(batch, dtype=torch.bool, device=device).index_fill_(0, index, True)
        return replace(trees, draft_failed=trees.draft_failed & asked)

    def _index(self, batch: int, device: torch.device) -> Tensor | None:
        """Which requests the drafter holds; None: all."""
        return None if len(self._places) == batch else torch.tensor(self._places, device=device)

    def _read(self, drafter: Drafter, committed: Committed) -> Tensor:
        """Let the drafter read what it has not read yet; its logits behind that."""
        index = self._index(len(committed.counts), committed.counts.device)
        committed, self._unread = joined([*self._unread, committed]), []
        mine = (committed if index is None else committed.select(index)).first(self._longest)
        self._longest = None
        return drafter.advance(mine.token_ids, mine.counts, mine.features)

    def _fits(self, request: Request) -> bool:
        """Whether the text and the deepest node of a tree below it lie within what the drafter was made for."""
        limit = getattr(self._drafter, "max_positions", None)
        fits = limit is None or request.length + self._depth <= limit
        if not fits and request.drafted:
            request.drafted = False  # and it stays so: texts only grow
            warnings.warn(
                f"request {request.index}: its text has {request.length} tokens and the draft's context is {limit}; "
                "it goes on without a draft, one token per pass",
                stacklevel=2,
            )
        return fits


def _roots(batch: int, device: torch.device) -> TreeBatch:
    return TreeBatch.from_trees([root_only()] * batch, device)

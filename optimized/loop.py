"""The loop of a batch: draft, grow, target, verify, commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optimized.backends import Backend
from optimized.calibration import Calibrator
from optimized.clock import PhaseClock
from optimized.committed import Committed, after_walk, whole_texts
from optimized.drafting import Drafting
from optimized.models import Drafter, TargetModel
from optimized.outputs import StreamEvent
from optimized.randomness import StepNoise, StepRandomness
from optimized.request import Request
from optimized.sizing import Sizing
from optimized.target_laws import SamplingBatch, TargetLaws
from optimized.trees import TreeBatch
from optimized.verification import VerifyBatch
from reference.api import RheoConfig
from reference.tree import root_only

STEPS_AHEAD = 16  # random numbers are made for so many steps at once
TARGET_FAILED = 4  # its place in what the host reads of a walk
CALIBRATION_STEPS = 8  # weights that are learned stay the same for so many steps


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """What a step gave to its requests.

    Attributes:
        events: at most one per request.
        trees, walk: the trees and the walks; None where a model raised and a request failed by it.
    """

    events: list[StreamEvent]
    trees: TreeBatch | None = None
    walk: VerifyBatch | None = None


class BatchLoop:
    """One batch of requests, from where they are to their end.

    Args:
        target, drafter: hold the caches of one loop at a time, whose name is then on them; another loop may take them,
            and this one reads its texts again when it goes on.
        config: how trees are grown and verified.
        backend: does the sampling side.
        calibrator: learns weights for later steps; None learns nothing.
        clock: where the time goes.
        sizing: decides how far trees grow; None leaves that to the configuration.
        repeated: the shape of a step that broke off and is taken again, in a tuple: were it another one now, what
            raised might have chosen it, and that may be the probes.

    Attributes:
        unfinished: the shape of the step that is being taken, in a tuple; None between steps.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        config: RheoConfig,
        backend: Backend,
        calibrator: Calibrator | None,
        clock: PhaseClock,
        sizing: Sizing | None = None,
        repeated: tuple[RheoConfig | None] | None = None,
    ) -> None:
        self.target, self.drafter, self.config = target, drafter, config
        self.backend, self.calibrator, self.clock, self.sizing = backend, calibrator, clock, sizing
        self.unfinished = repeated

    @torch.inference_mode()
    def run(self, live: list[Request]) -> Iterator[StepOutcome]:
        """Step after step until all requests are done.

        Step 0 verifies an empty tree behind the prompts. A loop begins where the requests are: at their prompts, or
        behind the last step of a loop that broke off.
        """
        config, clock, device = self.config, self.clock, self.target.device
        step = live[0].steps
        sampling = SamplingBatch.from_params(
            [request.params for request in live],
            [request.tokens for request in live],
            self.target.vocab_size,
            self.target.eos_token_ids,
            device,
        )
        sampling.generated += torch.tensor([request.generated for request in live], device=device)
        randomness = StepRandomness(
            [request.noise_seed for request in live],
            config.depth,
            config.beam_width,
            config.budget + 1,
            device,
            config.probes,
            self.backend.uniforms,
        )
        drafting = Drafting(self.drafter, config.depth, self.backend.growth, clock)
        weighted: RheoConfig | None = None  # with the weights learned so far
        noises: list[StepNoise] = []
        spent = sum(clock.seconds.values())
        committed: Committed | None = None  # None: the caches do not hold the texts
        while True:
            clock.enter("sampling")
            if not noises or step % STEPS_AHEAD == 0:
                begin = torch.full((len(live),), step - step % STEPS_AHEAD, device=device)
                noises = randomness.ahead(begin, STEPS_AHEAD)
            noise = noises[step % STEPS_AHEAD]
            clock.enter("target")
            if step == 0:
                logits, features = self._read([request.prompt for request in live])
                logits = logits.unsqueeze(1)
                trees = TreeBatch.from_trees([root_only()] * len(live), device)
            else:
                usual = committed is not None
                if committed is None:
                    _, features = self._read([request.tokens[:-1] for request in live])
                    committed = whole_texts(live, features, device)
                    drafting.reset(live, device)
                # Before the step's probes are drawn, and from earlier steps only: that keeps the text's law.
                if self.calibrator is not None and (weighted is None or step % CALIBRATION_STEPS == 1):
                    weighted = replace(config, weights=self.calibrator.weights())
                shape: RheoConfig | None = weighted or config
                if self.unfinished is not None:
                    [shape] = self.unfinished
                elif self.sizing is not None:
                    shape = self.sizing.shape(weighted or config, len(live))
                self.unfinished = (shape,)
                usual = usual and not (drafting.full if shape is None else drafting.behind)
                if shape is None:
                    trees = drafting.skip(committed)
                else:
                    trees = drafting.trees(shape, committed, sampling.temperatures, noise)
                clock.enter("target")
                token_ids = torch.cat([committed.last, trees.token_ids[:, 1:]], dim=1)
                rows = token_ids, trees.depths, trees.ancestors(), trees.num_nodes
                logits, features = self.target.forward_tree(*rows)
            clock.enter("sampling")
            laws = TargetLaws(logits, sampling, trees)
            walk, read = self._verify(trees, laws, noise)
            if step > 0 and any(values[TARGET_FAILED] for values in read):
                # Perhaps only a node that the walk does not need is NaN, and has spoiled the rows beside it.
                clock.enter("target")
                logits, features = self.target.forward_tree(*rows, contain_nan=True)
                clock.enter("sampling")
                laws = TargetLaws(logits, sampling, trees)
                walk, read = self._verify(trees, laws, noise)
            events = self._hand_out(step, live, laws, walk, read)
            self.unfinished = None
            yield StepOutcome(events, trees, walk)
            sampling.observe(walk.token_ids, walk.counts)
            # Last, behind what may raise: a step that is repeated must not have taught anybody anything.
            if self.calibrator is not None:
                failed = laws.bad | trees.draft_failed
                self.calibrator.observe(trees, walk, laws.kept or [], config.branching, sampling.temperatures, failed)
            before, spent = spent, sum(clock.seconds.values())
            if self.sizing is not None and step > 0:
                self.sizing.observe(shape, trees, walk, spent - before if usual else None)
            keep = [b for b, request in enumerate(live) if not request.done]
            if not keep:
                return

            clock.enter("target")
            step += 1
            evicted = not self._holds_caches()
            if step > 1 and not evicted:
                self.target.commit(walk.rows, walk.counts)
                committed = after_walk(walk, features)
            if len(keep) < len(live):
                index = torch.tensor(keep, device=device)
                live = [live[b] for b in keep]
                sampling.select(keep)
                randomness.select(index)
                noises = [noise.select(index) for noise in noises]
                if not evicted:
                    self.target.select(index)
                    features = None if features is None else features[index]
                    committed = None if committed is None else committed.select(index)
            if evicted:
                committed = None
            elif step == 1:
                committed = whole_texts(live, features, device)
                drafting.reset(live, device)
            else:
                drafting.select(keep, live, device)

    def _read(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Take the caches, whoever has them, and read texts from their beginning; see ``TargetModel.prefill``."""
        self.target.owner = self
        if self.drafter is not None:
            self.drafter.owner = self
        self.target.feature_layers = () if self.drafter is None else self.drafter.feature_layers
        return self.target.prefill(texts)

    def _holds_caches(self) -> bool:
        return self.target.owner is self and (self.drafter is None or self.drafter.owner is self)

    def _verify(self, trees: TreeBatch, laws: TargetLaws, noise: StepNoise) -> tuple[VerifyBatch, list[list[int]]]:
        """The walks, and of each what the host has to know; here it waits for the step's results."""
        laws.kept = None if self.calibrator is None else []
        walk = self.backend.verify(trees, laws, noise, self.config.verification)
        self.clock.enter(None)
        summary = [
            walk.counts,
            trees.depths.amax(dim=1),
            walk.probes_offered.sum(dim=1),
            walk.probes_accepted.sum(dim=1),
            laws.bad.long(),
            trees.draft_failed.long(),
        ]
        read = torch.cat([torch.stack(summary, dim=1), walk.token_ids], dim=1)
        return walk, read.tolist()  # one transfer from the device

    def _hand_out(
        self,
        step: int,
        live: list[Request],
        laws: TargetLaws,
        walk: VerifyBatch,
        read: list[list[int]],
    ) -> list[StreamEvent]:
        """Give every request what the step emitted for it."""
        wanted = [request.params.logprobs for request in live if request.params.logprobs is not None]
        logprobs = None
        if wanted:
            rows, token_ids = walk.rows.clamp(min=0), walk.token_ids.clamp(min=0)
            logprobs = [part.tolist() for part in laws.logprobs(rows, token_ids, max(wanted))]
        self.clock.settle()
        events = []
        for b, (request, values) in enumerate(zip(live, read, strict=True)):
            count, levels, offered, accepted, target_failed, draft_failed, *emitted = values
            if draft_failed:
                events.append(request.fail("the draft's logits were NaN, +inf or all -inf"))
            elif target_failed:
                reason = "the target's logits were NaN or +inf, or no token was left after processing"
                events.append(request.fail(reason))
            else:
                if step > 0:  # the prompt's pass is in no count
                    request.metrics.record_pass(count - 1, levels, offered, accepted)
                entry = None if logprobs is None else [part[b] for part in logprobs]
                try:
                    events.append(request.push(emitted[:count], entry, self.clock.seconds))
                except Exception as error:  # say, a tokenizer that cannot decode what this one says
                    events.append(request.fail(f"{type(error).__name__}: {error}", error))
        return events

"""``RheoDecoder``: speculative decoding of a batch of requests, one loop - draft, grow, target, verify, commit."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optimized.backends import BackendName, choose_backend
from optimized.calibration import Calibrator
from optimized.clock import PhaseClock
from optimized.loop import BatchLoop, StepOutcome
from optimized.models import CausalDrafter, Drafter, TargetModel, check_same_tokenizer
from optimized.models.loading import load_drafter, load_target, load_tokenizer
from optimized.outputs import GenerationError, GenerationResult, StreamEvent, TracedStep
from optimized.randomness import fresh_seed
from optimized.request import Request
from optimized.sampling_params import SamplingParams
from optimized.sizing import StepCosts, TreeSizer
from optimized.step_costs import CostTable, measure_costs
from reference.api import RheoConfig, VerifyResult

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor


class RheoDecoder:
    """Lossless speculative decoding: every text has exactly the distribution that the target model gives it.

    Given equal logits, a request's text depends on its prompt, its seed, its parameters and ``config`` alone, never on
    its batch mates (except with a calibrator or ``tree_size="auto"``, see below). A decoder has one set of caches, and
    is not thread-safe.

    Args:
        target: the model whose distribution is kept.
        drafter: the proposer; None decodes without speculation, in the same loop and with the same random numbers.
        tokenizer: of the target; needed for text prompts, for text in the results and for stop strings.
        config: how trees are grown and verified.
        max_batch_size: how many requests run side by side; longer lists are worked off in groups of this size.
        backend: who does the sampling side, "torch", "numba", "triton" or "cupy"; "auto" takes the best that can run
            here. The attribute ``backend.name`` says which it is.
        calibrator: learns the path scores' weights while decoding; its weights take the place of ``config.weights`` and
            are renewed every eight steps, shared by all requests. Texts keep their law, but what a seed gives then
            depends on what was decoded before: weights must not meet the random numbers again that shaped them, so
            every request has its own, a function of its seed and of how many came before.
            ``calibrator.weights().source`` says where the weights come from.

    With ``RheoConfig(tree_size="auto")`` a decoder measures what its steps cost, which takes some seconds before the
    first texts and before a batch that is larger than any so far, and grows trees as far as they pay. What a seed gives
    then depends on the machine, on its batch mates and on what was decoded before; the texts' law does not.

    Raises:
        ValueError: the drafter speaks of tokens that the target does not have, or reads features it does not give, or
            ``max_batch_size`` is below 1, or the backend cannot run here (the message names what is missing) or has no
            kernels for ``config``.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        tokenizer: Any = None,
        config: RheoConfig | None = None,
        max_batch_size: int = 32,
        backend: BackendName = "auto",
        calibrator: Calibrator | None = None,
    ) -> None:
        self.config = _checked(config, max_batch_size)
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.max_batch_size = max_batch_size
        self.calibrator = calibrator
        if calibrator is not None:
            self.config = replace(self.config, weights=calibrator.weights())
        self.backend_name: BackendName = backend
        self.backend = choose_backend(backend, torch.device(target.device), self.config)
        self._costs = CostTable(self._measure)
        self.sizer = TreeSizer(self._costs) if self.config.tree_size == "auto" and drafter is not None else None
        if drafter is not None:
            _check_attributes(drafter)
            _check_vocab_map(drafter)
            highest = drafter.vocab_size - 1 if drafter.vocab_map is None else int(drafter.vocab_map.max())
            if highest >= target.vocab_size:
                raise ValueError(
                    f"the draft speaks of token {highest}; the target's vocabulary is 0..{target.vocab_size - 1}"
                )
            in_use = target.feature_layers  # perhaps by a generation that goes on
            target.feature_layers = drafter.feature_layers  # refuses layers that do not exist
            target.feature_layers = in_use

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path = "embedded",
        draft: str | Path | None = "auto",
        config: RheoConfig | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        max_batch_size: int = 32,
        backend: BackendName = "auto",
        calibrator: Calibrator | None = None,
    ) -> RheoDecoder:
        """Load a target, a drafter and the target's tokenizer.

        Args:
            target: a directory, a name Hugging Face knows, or "embedded": SmolLM2-135M-Instruct.
            draft: likewise: an EAGLE-3 head or a causal language model with the target's tokenizer; None for plain
                decoding; "embedded": the head for SmolLM2-135M-Instruct; "auto": that one, for the target "embedded".
            config: how trees are grown and verified.
            dtype: of the weights of both; None keeps the target checkpoint's.
            device: where both run.
            max_batch_size: how many requests run side by side.
            backend: who does the sampling side; see the class.
            calibrator: learns the path scores' weights; see the class.

        Raises:
            ValueError: a checkpoint is damaged, target and draft do not fit together, the backend cannot run here, or
                ``draft`` is left out and the target is not the embedded one.
            OSError: no such directory, and Hugging Face knows no such name.
            ModuleNotFoundError: the embedded target is not installed.
        """
        if draft == "auto":
            if target != "embedded":
                raise ValueError(f"which draft goes with {target}? Name one, or give draft=None for plain decoding")
            draft = "embedded"
        choose_backend(backend, torch.device(device), _checked(config, max_batch_size))  # before anything is loaded
        model = load_target(target, dtype=dtype, device=device)
        tokenizer = load_tokenizer(target)
        drafter = None
        if draft is not None:
            drafter = load_drafter(draft, model)
            if isinstance(drafter, CausalDrafter):
                check_same_tokenizer(tokenizer, load_tokenizer(draft))
        return cls(model, drafter, tokenizer, config, max_batch_size, backend, calibrator)

    def generate(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationResult]:
        """Generate to the end.

        Args:
            prompts: one prompt or several, as text or as token ids; lists may be ragged.
            params: for all, or one per prompt; None for the defaults.

        Returns:
            One result per prompt, in their order.

        Raises:
            ValueError: an empty or too long prompt, a token outside the vocabulary or no integer, or not one ``params``
                per prompt.
            GenerationError: some requests failed (the target's logits were NaN, a model raised); it carries the others'
                results. Where a model raised, its exception is the error's cause.
        """
        finished = (event.result for event in self.stream(prompts, params) if event.result is not None)
        return sorted(finished, key=lambda result: result.index)

    def stream(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[StreamEvent]:
        """Generate step by step; an event holds what one step added to one request.

        Arguments and errors are those of ``generate``; bad arguments raise at once. Another generation may start on the
        same models before this one has ended: it takes the caches, and this one reads its texts again when it goes on,
        which is slow where two take turns at every step.
        """
        return self._stream(self._requests(prompts, params))

    def trace(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, steps: int = 1
    ) -> list[TracedStep]:
        """The first trees of one request and what the walk made of each, to look at.

        Steps without a draft are left out.

        Args:
            prompt: as text or as token ids.
            params: the request's; None for the defaults.
            steps: how many trees; fewer come back if the text ends before.

        Raises:
            ValueError: as ``generate``, or the decoder has no draft.
            GenerationError: the request failed.
        """
        if self.drafter is None:
            raise ValueError("this decoder has no draft, so there are no trees to trace")
        seen: list[TracedStep] = []
        [request] = self._requests(prompt, params)
        if self.sizer is not None:
            self._costs.cover(1)
        root = request.prompt[-1]
        for outcome in self._steps([request]):
            trees, walk = outcome.trees, outcome.walk
            if request.failure is None and trees is not None and walk is not None and trees.rows > 1:
                count = int(walk.counts[0])
                emitted, rows = walk.token_ids[0, :count].tolist(), walk.rows[0, 1:count].tolist()
                seen.append(TracedStep(trees.to_tree(0), VerifyResult(tuple(emitted), tuple(rows)), root))
            if len(seen) == steps:
                break
            root = request.tokens[-1]
        self._raise_failures([request])
        return seen

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the tokenizer's chat format, ready for the assistant's answer.

        Raises:
            ValueError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("a conversation needs a tokenizer, and this decoder has none")
        encoded = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return [int(token) for token in encoded]

    def _stream(self, requests: list[Request]) -> Iterator[StreamEvent]:
        if self.sizer is not None:
            self._costs.cover(min(len(requests), self.max_batch_size))
        for first in range(0, len(requests), self.max_batch_size):
            for outcome in self._steps(requests[first : first + self.max_batch_size]):
                yield from outcome.events
        self._raise_failures(requests)

    def _measure(self, batch: int) -> StepCosts:
        assert self.drafter is not None  # or there would be no sizer
        return measure_costs(self.target, self.drafter, self.config, self.backend, batch, self.calibrator)

    @staticmethod
    def _raise_failures(requests: Sequence[Request]) -> None:
        failures = {request.index: request.failure for request in requests if request.failure is not None}
        if failures:
            cause = next((request.cause for request in requests if request.cause is not None), None)
            raise GenerationError(failures, [request.result for request in requests]) from cause

    def _steps(self, requests: list[Request]) -> Iterator[StepOutcome]:
        """A batch to its end.

        Where a model raises, the halves of the batch go on one after the other, and so on down to single requests: a
        request fails only if a model raises twice for it alone at the same step. Random numbers go on where they were,
        and a step is repeated with trees of the same shape, so texts stay the same.
        """
        clock = PhaseClock(self.target.device)
        for request in requests:
            request.begin()
        waiting: list[tuple[list[Request], tuple[RheoConfig | None] | None]] = [(requests, None)]
        while waiting:
            batch, repeated = waiting.pop()
            models = (self.target, self.drafter, self.config, self.backend, self.calibrator)
            loop = BatchLoop(*models, clock, self.sizer, repeated)
            try:
                yield from loop.run(batch)
            except Exception as error:  # whatever a model may raise: out of memory, a bug in a drafter of one's own
                traceback.clear_frames(error.__traceback__)  # they hold what filled the memory
                clock.enter(None)
                left = [request for request in batch if not request.done]
                if not left:
                    raise
                if len(left) == 1 and not left[0].try_again():
                    yield StepOutcome([left[0].fail(f"{type(error).__name__}: {error}", error)])
                else:
                    half = len(left) // 2
                    waiting += [(part, loop.unfinished) for part in (left[half:], left[:half]) if part]

    def _requests(self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None) -> list[Request]:
        """Check everything that can be checked before any work is done."""
        token_lists = self._token_lists(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(token_lists)
        else:
            each = list(params)
        strange = next((type(item).__name__ for item in each if not isinstance(item, SamplingParams)), None)
        if strange is not None:
            raise ValueError(f"params must be SamplingParams, one for all or a list of them, got {strange}")
        if len(each) != len(token_lists):
            raise ValueError(
                f"there are {len(token_lists)} prompts and {len(each)} params; give one for each, or one for all"
            )
        for index, prompt in enumerate(token_lists):
            self.target.check_prompt(index, prompt)
            each[index].check_vocab(self.target.vocab_size)
        requests = [
            Request(index, prompt, request, self.tokenizer, self.target.eos_token_ids, self.target.max_positions)
            for index, (prompt, request) in enumerate(zip(token_lists, each, strict=True))
        ]
        learner = self.calibrator or self.sizer
        if learner is not None:
            for request in requests:
                request.noise_seed = fresh_seed(request.seed, learner.requests)
                learner.requests += 1
        return requests

    def _token_lists(self, prompts: Prompts) -> list[list[int]]:
        if isinstance(prompts, Tensor | np.ndarray):
            prompts = prompts.tolist()
        if not isinstance(prompts, str | Sequence):
            raise ValueError(f"prompts must be text or token ids, one prompt or a list of them, got {prompts!r}")
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | float | np.number))
        several: Sequence[Any] = [prompts] if one else prompts
        if len(several) == 0:
            raise ValueError("there is no prompt")
        return [
            self._tokens(prompt) if isinstance(prompt, str) else _integers(index, prompt)
            for index, prompt in enumerate(several)
        ]

    def _tokens(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("text prompts need a tokenizer, and this decoder has none; pass token ids")
        return [int(token) for token in self.tokenizer(text)["input_ids"]]


def _integers(index: int, prompt: Any) -> list[int]:
    """Token ids as integers; a number with a fraction is no token, and a rounded one is another token."""
    try:
        return [operator.index(token) for token in (prompt.tolist() if isinstance(prompt, Tensor) else prompt)]
    except TypeError as error:
        raise ValueError(f"prompt {index} must be text or a list of integers: {error}") from error


def _checked(config: RheoConfig | None, max_batch_size: int) -> RheoConfig:
    """The configuration, the default one for None."""
    if config is not None and not isinstance(config, RheoConfig):
        raise ValueError(f"config must be a RheoConfig or None, got {type(config).__name__}")
    if isinstance(max_batch_size, bool) or not isinstance(max_batch_size, int | np.integer) or max_batch_size < 1:
        raise ValueError(f"max_batch_size must be an integer of at least 1, got {max_batch_size!r}")
    return RheoConfig() if config is None else config


def _check_attributes(drafter: Drafter) -> None:
    """A drafter of one's own may lack what the loop will ask for much later."""
    given_by_the_decoder = {"owner"}
    missing = [
        name for name in Drafter.__annotations__ if not hasattr(drafter, name) and name not in given_by_the_decoder
    ]
    if missing:
        raise ValueError(
            f"the drafter {type(drafter).__name__} has no {', '.join(missing)}; see optimized.models.Drafter"
        )


def _check_vocab_map(drafter: Drafter) -> None:
    """A map that names a token twice would count its probability twice, and ties go by its order."""
    vocab_map = drafter.vocab_map
    if vocab_map is None:
        return
    if vocab_map.shape != (drafter.vocab_size,):
        raise ValueError(
            f"the draft's vocab_map has shape {list(vocab_map.shape)}, its vocab_size is {drafter.vocab_size}"
        )
    if int(vocab_map.min()) < 0 or bool((vocab_map[1:] <= vocab_map[:-1]).any()):
        raise ValueError("the draft's vocab_map must increase from 0 or more: each draft id is a target id of its own")

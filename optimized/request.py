"""One request on its way through the decoder: its text, its measurements, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from optimized.outputs import GenerationResult, Metrics, StreamEvent, TokenLogprobs
from optimized.sampling_params import SamplingParams
from optimized.stopping import TextStream


class Request:
    """One prompt with its parameters, and everything that was generated for it.

    Args:
        index: the request's place in the call.
        prompt: token ids.
        params: how it samples and stops.
        tokenizer: the target's; None: no text is made.
        eos_token_ids: the target's.
        max_positions: how many tokens prompt and output may have together; None for no limit.

    Raises:
        ValueError: stop strings without a tokenizer, or a prompt that leaves no room for a token.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        max_positions: int | None,
    ) -> None:
        self.index = index
        self.prompt = tuple(prompt)
        self.params = params
        self.seed = params.resolved_seed()
        self.noise_seed = self.seed  # what its random numbers are made of
        self.metrics = Metrics()
        self.result: GenerationResult | None = None
        self.failure: str | None = None
        self.cause: Exception | None = None  # what was raised, where the failure is an exception
        self.drafted = True  # False once its text has outgrown the draft's context
        self.steps = 0  # walks taken so far, the prompt's included: where its random numbers go on
        ends = () if params.ignore_eos else eos_token_ids
        self._text = TextStream(tokenizer, params, ends, len(prompt), max_positions)
        self._logprobs: list[TokenLogprobs] = []
        self._began = 0.0
        self._raised_at = -1  # the step at which a model last raised for this request alone

    @property
    def done(self) -> bool:
        """Whether it has its result or has failed."""
        return self.result is not None or self.failure is not None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The text so far: prompt and output."""
        return (*self.prompt, *self._text.token_ids)

    @property
    def length(self) -> int:
        """How many tokens prompt and output have so far."""
        return len(self.prompt) + len(self._text.token_ids)

    @property
    def generated(self) -> int:
        """How many tokens of the output there are so far."""
        return len(self._text.token_ids)

    def begin(self) -> None:
        """Start the request's clock."""
        self._began = time.perf_counter()

    def fail(self, reason: str, cause: Exception | None = None) -> StreamEvent:
        """End the request without a result; returns its last event."""
        self.failure, self.cause = reason, cause
        return StreamEvent(self.index, "", (), finished=True, failure=reason)

    def try_again(self) -> bool:
        """Whether to repeat a step at which a model raised for this request alone: once."""
        again = self._raised_at != self.steps
        self._raised_at = self.steps
        return again

    def push(self, emitted: Sequence[int], logprobs: Sequence[Any] | None, seconds: Mapping[str, float]) -> StreamEvent:
        """Take what a step emitted.

        Args:
            emitted: tokens in the order of the text; those beyond the text's end are dropped.
            logprobs: (chosen [n], alternatives' ids [n][k], alternatives [n][k]), at least one entry per token.
            seconds: what the batch has spent in each phase so far.
        """
        self.steps += 1
        text = self._text.push(emitted)
        kept = emitted[: self._text.kept]
        if logprobs is not None and self.params.logprobs is not None:
            for place, token_id in enumerate(kept):
                chosen, top_ids, top = (part[place] for part in logprobs)
                alternatives = tuple(zip(top_ids, top, strict=True))[: self.params.logprobs]
                self._logprobs.append(TokenLogprobs(token_id, chosen, alternatives))
        if self._text.finish_reason is not None:
            self._finish(seconds)
        return StreamEvent(self.index, text, tuple(kept), self.done, self.result)

    def _finish(self, seconds: Mapping[str, float]) -> None:
        self.metrics.generated_tokens = len(self._text.token_ids)
        self.metrics.draft_seconds = seconds["draft"]
        self.metrics.target_seconds = seconds["target"]
        self.metrics.sampling_seconds = seconds["sampling"]
        self.metrics.total_seconds = time.perf_counter() - self._began
        assert self._text.finish_reason is not None
        self.result = GenerationResult(
            index=self.index,
            prompt_token_ids=self.prompt,
            token_ids=tuple(self._text.token_ids),
            text=self._text.text,
            finish_reason=self._text.finish_reason,
            logprobs=None if self.params.logprobs is None else tuple(self._logprobs),
            seed=self.seed,
            metrics=self.metrics,
        )

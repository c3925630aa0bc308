"""One request by one method, timed; and what disturbs timings held still."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from optimized.bench.methods import GENERATE, PLAIN, Method
from optimized.decoder import RheoDecoder
from optimized.outputs import Metrics
from optimized.sampling_params import SamplingParams


@dataclass(frozen=True)
class Answer:
    """One text and what it took.

    Attributes:
        token_ids: generated, the end-of-sequence token included.
        text: "" without a tokenizer.
        finish_reason: "eos", "stop" or "length".
        seconds: from the call to its return, the prompt's pass included.
        prompt_seconds: from the call until the first token was there.
        metrics: None for ``generate``.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    seconds: float
    prompt_seconds: float
    metrics: Metrics | None


class MethodRunner:
    """Runs requests by any method on the same two models.

    Args:
        decoder: holds target, drafter and tokenizer.
        batch_size: how many requests run side by side, at most.
    """

    def __init__(self, decoder: RheoDecoder, batch_size: int = 1) -> None:
        self.decoder, self.batch_size = decoder, batch_size
        self._decoders: dict[Method, RheoDecoder] = {}

    def run(self, method: Method, prompt: Sequence[int], params: SamplingParams) -> Answer:
        """One request.

        Args:
            method: see ``optimized.bench.methods``.
            prompt: token ids.
            params: with a seed; ``generate`` takes temperature, seed and length from it.
        """
        return self.run_batch(method, [prompt], [params])[0]

    def run_batch(
        self, method: Method, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Answer]:
        """Several requests side by side; the seconds of each are until its own end.

        Raises:
            ValueError: several requests by ``generate``, which knows no ragged batches.
        """
        if method.name == GENERATE:
            if len(prompts) > 1:
                raise ValueError("generate takes one request at a time; plain is the same without a draft")
            return [hf_generate(self.decoder, prompts[0], params[0])]
        decoder = self._decoder(method)
        _wait(self.decoder.target.device)
        start = time.perf_counter()
        first: dict[int, float] = {}
        answers: dict[int, Answer] = {}
        for event in decoder.stream([list(prompt) for prompt in prompts], params):
            seconds = time.perf_counter() - start
            began = first.setdefault(event.index, seconds)
            if (result := event.result) is not None:
                how = (result.token_ids, result.text, result.finish_reason)
                answers[event.index] = Answer(*how, seconds, began, result.metrics)
        return [answers[index] for index in range(len(prompts))]

    def backend_of(self, method: Method) -> str:
        """What does a method's sampling side; "" for ``generate``, which has none of ours."""
        return "" if method.name == GENERATE else self._decoder(method).backend.name

    def _decoder(self, method: Method) -> RheoDecoder:
        if method not in self._decoders:
            drafter = None if method.name == PLAIN else self.decoder.drafter
            if drafter is None and method.name != PLAIN:
                raise ValueError(f"method {method.name} needs a draft, and there is none")
            self._decoders[method] = RheoDecoder(
                self.decoder.target,
                drafter,
                self.decoder.tokenizer,
                method.config(),
                max_batch_size=self.batch_size,
                backend=self.decoder.backend_name,
            )
        return self._decoders[method]


def hf_generate(decoder: RheoDecoder, prompt: Sequence[int], params: SamplingParams) -> Answer:
    """One request by the target's own ``generate``, sampling from the same law; torch's generator gets the seed.

    Args:
        decoder: holds target and tokenizer.
        prompt: token ids.
        params: temperature, seed, lengths and ``ignore_eos`` are taken from it.
    """
    target, tokenizer = decoder.target, decoder.tokenizer
    how: dict[str, Any] = {"do_sample": False}
    if not params.greedy:
        how = {"do_sample": True, "temperature": params.temperature, "top_p": 1.0, "top_k": 0}
    eos = [] if params.ignore_eos else list(target.eos_token_ids)
    config = GenerationConfig(
        **how,
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.min_new_tokens or None,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else None,
    )
    inputs = torch.tensor([list(prompt)], device=target.device)
    stamps = _Stamps()
    torch.manual_seed(params.resolved_seed())
    _wait(target.device)
    start = time.perf_counter()
    with torch.inference_mode(), _no_defaults(target.model):
        output = target.model.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=config, streamer=stamps
        )
    token_ids = tuple(output[0, len(prompt) :].tolist())
    seconds = time.perf_counter() - start
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    reason = "eos" if token_ids and token_ids[-1] in eos else "length"
    return Answer(token_ids, text, reason, seconds, (stamps.first or time.perf_counter()) - start, None)


@contextmanager
def _no_defaults(model: Any) -> Iterator[None]:
    """Without the checkpoint's generation config: ``generate`` takes from it whatever the given one leaves open, and
    its penalties and filters would make another law.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Stamps:
    """A streamer that only notes when the first token came; the prompt is handed to it before."""

    def __init__(self) -> None:
        self.first: float | None = None
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        if self._prompt_seen and self.first is None:
            self.first = time.perf_counter()
        self._prompt_seen = True

    def end(self) -> None:
        pass


@contextmanager
def with_threads(threads: int | None) -> Iterator[None]:
    """Let torch use so many threads, and as many as before afterwards; None changes nothing."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's garbage collector out of what is timed: it runs when ``gc.collect`` is called."""
    collecting = gc.isenabled()
    gc.collect()
    gc.freeze()  # what is there stays, so that collecting between measurements looks at little
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()

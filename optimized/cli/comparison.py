"""One prompt decoded in three ways on the same weights: plainly, with top-K trees and with the decoder's own trees."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from optimized.bench.running import hf_generate
from optimized.decoder import RheoDecoder
from optimized.sampling_params import SamplingParams
from reference.api import RheoConfig

BASELINE, TOP_K = "model.generate", "top-K tree (EAGLE-3)"
OWN = {"rheo": "RheoSampling", "static": "static tree"}  # by the configuration's proposal


@dataclass(frozen=True)
class Sample:
    """One text and what it took.

    Attributes:
        method: BASELINE, TOP_K or one of OWN.
        prompt, text: as strings.
        token_ids: generated, EOS included.
        seconds: from the call to its return, the prompt's pass included.
        emitted_tokens, target_passes: as in ``Metrics``; their ratio is tau.
    """

    method: str
    prompt: str
    text: str
    token_ids: tuple[int, ...]
    seconds: float
    emitted_tokens: int
    target_passes: int

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return len(self.token_ids) / self.seconds


Method = Callable[[str, list[int], SamplingParams], Sample]  # prompt, its token ids, the request


def decoding_methods(decoder: RheoDecoder) -> dict[str, Method]:
    """The three ways, by name; the second has trees of the third's size, as EAGLE-3 grows them."""
    own = decoder.config
    config = RheoConfig(
        branching=own.branching,
        depth=own.depth,
        tree_size=own.budget,
        beam=own.beam,
        draft_support=own.draft_support,
        proposal="topk",
    )
    top_k = RheoDecoder(decoder.target, decoder.drafter, decoder.tokenizer, config, backend=decoder.backend_name)
    name = OWN[own.proposal]
    return {BASELINE: _plain(decoder), TOP_K: _speculative(TOP_K, top_k), name: _speculative(name, decoder)}


def _speculative(name: str, decoder: RheoDecoder) -> Method:
    def sample(prompt: str, ids: list[int], params: SamplingParams) -> Sample:
        start = time.perf_counter()
        result = decoder.generate([ids], params)[0]
        seconds = time.perf_counter() - start
        counted = result.metrics
        return Sample(
            name, prompt, result.text, result.token_ids, seconds, counted.emitted_tokens, counted.target_passes
        )

    return sample


def _plain(decoder: RheoDecoder) -> Method:
    def sample(prompt: str, ids: list[int], params: SamplingParams) -> Sample:
        answer = hf_generate(decoder, ids, params)
        tokens = len(answer.token_ids)
        return Sample(BASELINE, prompt, answer.text, answer.token_ids, answer.seconds, tokens, tokens)

    return sample


def summary(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Per method, over all its texts: tokens, seconds, tokens per second, tau, speed-up over ``model.generate``."""
    rows: list[dict[str, Any]] = []
    for method in dict.fromkeys(sample.method for sample in samples):
        own = [sample for sample in samples if sample.method == method]
        tokens, seconds = sum(len(sample.token_ids) for sample in own), sum(sample.seconds for sample in own)
        passes = sum(sample.target_passes for sample in own)
        rows.append(
            {
                "method": method,
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "tau": sum(sample.emitted_tokens for sample in own) / passes if passes else None,
            }
        )
    for row in rows:
        row["speed_up"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    return rows


def same_tokens(samples: Sequence[Sample]) -> bool:
    """Whether all methods gave the same tokens to every prompt, as they must at temperature 0 up to rounding."""
    by_prompt: dict[str, set[tuple[int, ...]]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt, set()).add(sample.token_ids)
    return all(len(texts) == 1 for texts in by_prompt.values())

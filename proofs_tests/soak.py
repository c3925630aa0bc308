"""A soak: thousands of mixed requests through one decoder, with cancellations and failures put in on purpose.

    python -m proofs_tests.soak [--requests 2000] [--draft causal|eagle|both] [--seed 0]

Target and draft are small random transformers models in float64, so that a batch's rounding changes no decision.
Every text is compared with the one that a second, healthy decoder gives for the same request alone; every failure must
be that of a request that was poisoned; memory must not grow. Exits with 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optimized import GenerationError, GenerationResult, Metrics, RheoConfig, RheoDecoder, SamplingParams
from optimized.models import CausalDrafter, TargetModel
from optimized.models.eagle3 import Eagle3Drafter
from optimized.trees import LevelNodes
from proofs_tests.tiny_pairs import CONTEXT, DRAFT_VOCAB, EOS, FEATURE_LAYERS, VOCAB, eagle_head, llama, near_copy

CONFIG = RheoConfig(lead_tokens=1, branching=3, depth=4, tree_size=10)
POISONS = ("target raises", "target NaN", "draft raises", "draft NaN")
POISONED, TRANSIENT, CANCELLED = 0.06, 0.15, 0.12  # shares: of requests, of batches, of batches
ALLOWED_GROWTH = 24 * 2**20  # bytes of resident memory from a quarter of the way to the end; the allocator's own noise


class Symbols:
    """A tokenizer that spells token i as the i-th printable character; the end of text shows nothing."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(33 + i) for i in ids if i != EOS)


@dataclass
class Plan:
    """What is to go wrong: by prompt, from so many generated tokens on; and once, at a random call."""

    poisoned: dict[tuple[int, ...], tuple[str, int]] = field(default_factory=dict)
    calls_until_raise: int = -1
    raised_once: int = 0

    def of(self, texts: Sequence[Sequence[int]], who: str) -> list[str | None]:
        """The poison that acts on each text now."""
        acting: list[str | None] = []
        for text in texts:
            kind, after = self.poisoned.get(tuple(text[:4]), ("", 0))
            acting.append(kind if kind.startswith(who) and len(text) >= 4 + after else None)
        return acting

    def meet(self, texts: Sequence[Sequence[int]], logits: Tensor, who: str) -> Tensor:
        """Raise, or put NaN into the poisoned rows' logits."""
        self.calls_until_raise -= 1
        if self.calls_until_raise == 0:
            self.raised_once += 1
            raise RuntimeError("once")
        acting = self.of(texts, who)
        if f"{who} raises" in acting:
            raise RuntimeError(f"the {who} was told to raise")
        rows = [row for row, kind in enumerate(acting) if kind == f"{who} NaN"]
        return logits.index_fill(0, torch.tensor(rows), math.nan) if rows else logits


class FaultyTarget(TargetModel):
    """A target that follows a plan. Texts are told by their first four tokens, which no two requests share."""

    def __init__(self, model: Any, plan: Plan) -> None:
        super().__init__(model)
        self.plan = plan
        self._texts: list[list[int]] = []

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        self._texts = [list(prompt) for prompt in prompts]
        logits, features = super().prefill(prompts)
        return self.plan.meet(self._texts, logits, "target"), features

    def forward_tree(self, token_ids: Tensor, *tree: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        logits, features = super().forward_tree(token_ids, *tree, **options)
        self._tree = token_ids
        return self.plan.meet(self._texts, logits, "target"), features

    def commit(self, rows: Tensor, counts: Tensor) -> None:
        super().commit(rows, counts)
        for b, (text, count) in enumerate(zip(self._texts, counts.tolist(), strict=True)):
            text += self._tree[b, rows[b, :count]].tolist()

    def select(self, keep: Tensor) -> None:
        super().select(keep)
        self._texts = [self._texts[b] for b in keep.tolist()]


class FaultyDrafter:
    """A drafter that follows a plan."""

    def __init__(self, drafter: Any, plan: Plan) -> None:
        self._drafter, self.plan = drafter, plan
        self._texts: list[list[int]] = []
        for name in ("vocab_size", "vocab_map", "feature_layers", "max_positions"):
            setattr(self, name, getattr(drafter, name))

    def reset(self, first_tokens: Tensor) -> None:
        self._drafter.reset(first_tokens)
        self._texts = [[token] for token in first_tokens.tolist()]

    def advance(self, token_ids: Tensor, counts: Tensor, features: Tensor | None) -> Tensor:
        logits = self._drafter.advance(token_ids, counts, features)
        for text, tokens, count in zip(self._texts, token_ids.tolist(), counts.tolist(), strict=True):
            text += tokens[:count]
        return self.plan.meet(self._texts, logits, "draft")

    def expand(self, level: LevelNodes) -> Tensor:
        return self.plan.meet(self._texts, self._drafter.expand(level), "draft")

    def select(self, keep: Tensor) -> None:
        self._drafter.select(keep)
        self._texts = [self._texts[b] for b in keep.tolist()]


def make_drafter(kind: str, model: Any) -> Any:
    """An EAGLE-3 head, or a causal draft whose context is shorter than the longest texts."""
    if kind == "eagle":
        vocab_map = torch.arange(DRAFT_VOCAB) * 2 + 3
        return Eagle3Drafter(eagle_head().double(), model.get_input_embeddings(), vocab_map, FEATURE_LAYERS)
    draft = near_copy(model)
    draft.config = copy.deepcopy(draft.config)
    draft.config.max_position_embeddings = CONTEXT // 2
    return CausalDrafter(draft, VOCAB)


def random_request(rng: np.random.Generator, number: int) -> tuple[list[int], SamplingParams]:
    """A prompt of its own, its length and everything asked for at random."""
    own = [3 + number // 90**place % 90 for place in (0, 1)]  # with two random tokens: no two prompts begin alike
    length = int(rng.integers(0, 30)) if rng.random() < 0.95 else int(rng.integers(100, 150))
    prompt = [*own, *rng.integers(3, VOCAB, size=2 + length).tolist()]

    def maybe(value: Any, off: Any, chance: float) -> Any:
        return value if rng.random() < chance else off

    stops = ["".join(chr(33 + int(i)) for i in rng.integers(3, VOCAB, size=size)) for size in (1, 1, 2)]
    most = int(rng.integers(1, 40))
    return prompt, SamplingParams(
        temperature=maybe(0.0, float(rng.choice([0.3, 0.7, 1.0, 1.5])), 0.2),
        top_k=maybe(int(rng.integers(1, 40)), 0, 0.2),
        top_p=maybe(float(rng.uniform(0.3, 1)), 1.0, 0.3),
        min_p=maybe(float(rng.uniform(0, 0.2)), 0.0, 0.2),
        repetition_penalty=maybe(float(rng.uniform(0.8, 1.5)), 1.0, 0.2),
        logit_bias=maybe({int(rng.integers(3, VOCAB)): float(rng.uniform(-3, 3))}, None, 0.2),
        seed=int(rng.integers(0, 2**63)),
        max_new_tokens=most,
        min_new_tokens=maybe(int(rng.integers(0, most + 1)), 0, 0.3),
        stop=maybe(stops, (), 0.3),
        stop_token_ids=maybe(rng.integers(3, VOCAB, size=2).tolist(), (), 0.3),
        logprobs=maybe(int(rng.integers(0, 4)), None, 0.2),
    )


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_tensors() -> int:
    """Tensors that Python can reach."""
    gc.collect()
    return sum(isinstance(item, Tensor) for item in gc.get_objects())


def same(result: GenerationResult, alone: GenerationResult) -> bool:
    """Whether two results are the same text for the same reason, with the same log-probabilities up to rounding."""
    if (result.token_ids, result.text, result.finish_reason) != (alone.token_ids, alone.text, alone.finish_reason):
        return False
    pairs = zip(result.logprobs or (), alone.logprobs or (), strict=True)
    return all(abs(a.logprob - b.logprob) < 1e-5 for a, b in pairs)


@dataclass
class Soak:
    """One decoder, the plan of its failures, a healthy decoder beside it, and what was counted."""

    kind: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = llama().double()
        self.plan = Plan()
        faulty = FaultyDrafter(make_drafter(self.kind, model), self.plan)
        self.decoder = RheoDecoder(FaultyTarget(model, self.plan), faulty, Symbols(), CONFIG)  # type: ignore[arg-type]
        self.healthy = RheoDecoder(TargetModel(model), make_drafter(self.kind, model), Symbols(), CONFIG)
        self.rng = np.random.default_rng(self.seed)
        self.asked = 0

    def batch(self, size: int) -> None:
        """Ask for so many texts at once, and compare what comes."""
        rng, plan = self.rng, self.plan
        requests = [random_request(rng, self.asked + i) for i in range(size)]
        self.asked += size
        poisons = [str(rng.choice(POISONS)) if rng.random() < POISONED else None for _ in requests]
        plan.poisoned = {
            tuple(prompt[:4]): (kind, len(prompt) - 4 + int(rng.integers(0, 12)))
            for (prompt, _), kind in zip(requests, poisons, strict=True)
            if kind is not None
        }
        plan.calls_until_raise = int(rng.integers(1, 40)) if rng.random() < TRANSIENT else -1
        cancel_after = int(rng.integers(1, 60)) if rng.random() < CANCELLED else -1
        self.counts["batches"] += 1
        self.counts["batches cancelled"] += cancel_after > 0

        texts: list[list[int]] = [[] for _ in requests]
        results: list[GenerationResult | None] = [None] * size
        failures: dict[int, str] = {}
        cancelled = False
        prompts, params = [prompt for prompt, _ in requests], [asked for _, asked in requests]
        stream = self.decoder.stream(prompts, params)
        try:
            for count, event in enumerate(stream, start=1):
                texts[event.index] += event.token_ids
                results[event.index] = event.result
                if count == cancel_after:
                    cancelled = True
                    break
        except GenerationError as error:
            failures = error.failures
            if any(mine is not theirs for mine, theirs in zip(results, error.results, strict=True)):
                self.problems.append(f"batch {self.counts['batches']}: the error does not carry the results streamed")
        stream.close()  # type: ignore[attr-defined]
        plan.poisoned, plan.calls_until_raise = {}, -1
        self._compare(requests, poisons, texts, results, failures, cancelled)

    def _compare(
        self,
        requests: list[tuple[list[int], SamplingParams]],
        poisons: list[str | None],
        texts: list[list[int]],
        results: list[GenerationResult | None],
        failures: dict[int, str],
        cancelled: bool,
    ) -> None:
        for index, (prompt, params) in enumerate(requests):
            [alone] = self.healthy.generate([prompt], params)
            name, poison, result = f"request {self.asked - len(requests) + index}", poisons[index], results[index]
            if tuple(texts[index]) != alone.token_ids[: len(texts[index])]:
                self.problems.append(f"{name}: its tokens are not the beginning of its text alone")
            if index in failures:
                self.counts[f"failed: {poison}"] += 1
                told = {"raises": "RuntimeError: the", "NaN": "logits were NaN"}
                if poison is None or told[poison.split()[1]] not in failures[index]:
                    self.problems.append(f"{name}, poison {poison}: {failures[index]}")
            elif result is not None:
                self.counts["finished"] += 1
                self.counts["finished, though poisoned for later"] += poison is not None
                self.counts["tokens"] += len(result.token_ids)
                self.counts[f"ended by {result.finish_reason}"] += 1
                self.metrics.append(result.metrics)
                if not same(result, alone):
                    self.problems.append(f"{name}: another text than alone, {params}")
            elif cancelled:
                self.counts["cancelled"] += 1
            else:
                self.problems.append(f"{name}: neither finished nor failed")

    def run(self, total: int) -> bool:
        """All requests; prints the figures. Returns whether everything held."""
        began, quarters, memory = time.perf_counter(), 0, []
        while self.asked < total:
            self.batch(min(int(self.rng.integers(1, 9)), total - self.asked))
            if self.asked * 4 >= total * (quarters + 1):
                quarters += 1
                memory.append((resident_bytes(), live_tensors()))
                figures = f"{memory[-1][0] / 2**20:.0f} MiB, {memory[-1][1]} tensors"
                print(f"{self.asked:>6} requests, {time.perf_counter() - began:.0f} s: {figures}", flush=True)
        (before, tensors_before), (after, tensors_after) = memory[0], memory[-1]
        if after - before > ALLOWED_GROWTH:
            self.problems.append(f"memory grew from {before} to {after} bytes")
        if tensors_after > tensors_before + 200:
            self.problems.append(f"there were {tensors_before} tensors, and {tensors_after} at the end")
        self.counts["passes that raised once"] = self.plan.raised_once
        merged = Metrics.merge(self.metrics)
        print(f"draft: {self.kind}; requests: {self.asked}; tau of the finished: {merged.tau:.2f}")
        for name, count in sorted(self.counts.items()):
            print(f"  {name}: {count}")
        for problem in self.problems[:20]:
            print(f"PROBLEM {problem}")
        print("all held" if not self.problems else f"{len(self.problems)} problems")
        return not self.problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; 0 when everything held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--draft", choices=("causal", "eagle", "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    kinds = ("causal", "eagle") if options.draft == "both" else (options.draft,)
    return 0 if all([Soak(kind, options.seed).run(options.requests) for kind in kinds]) else 1


if __name__ == "__main__":
    sys.exit(main())

"""What the decoder returns: results, the numbers measured on the way, and the error that keeps finished results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from optimized.stopping import FinishReason
from reference.api import VerifyResult
from reference.tree import DraftTree


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one generated token, natural logarithms, of the target's raw logits at temperature 1.

    Attributes:
        token_id: the generated token.
        logprob: its log-probability.
        top: the most likely tokens with theirs, best first; empty when none were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Metrics:
    """Counts and times of one request, or of several merged.

    A *pass* is one target forward over a tree. The prompt's pass and the token drawn from it are in none of the counts
    of passes. *Emitted* is before truncation: what the walks emitted, also beyond a stop. So always

        ``sum(accepted_per_level) + target_passes == emitted_tokens``

    Attributes:
        requests: how many requests these are.
        target_passes: passes.
        emitted_tokens: accepted tokens plus one token of the target's own for each pass.
        generated_tokens: tokens in the results: the prompt pass's token included, those beyond a stop excluded.
        offered_per_level: [depth] passes whose tree had a node at level l (entry l - 1).
        accepted_per_level: [depth] passes that accepted a node at level l.
        probe_offered: how often a walk stood at a node whose probe was in the tree.
        probe_accepted: how often that probe was accepted.
        draft_seconds: wall-clock seconds in the draft model.
        target_seconds: in the target model, the prompt's pass included.
        sampling_seconds: in random numbers, growing trees, making target laws and walking trees.
        total_seconds: from the request's start to its end, the rest included.

    A request's seconds are those of its batch while it was part of it: its batch mates have the same ones.
    """

    requests: int = 1
    target_passes: int = 0
    emitted_tokens: int = 0
    generated_tokens: int = 0
    offered_per_level: list[int] = field(default_factory=list)
    accepted_per_level: list[int] = field(default_factory=list)
    probe_offered: int = 0
    probe_accepted: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    sampling_seconds: float = 0.0
    total_seconds: float = 0.0

    def record_pass(self, accepted: int, offered: int, probe_offered: int = 0, probe_accepted: int = 0) -> None:
        """Count one pass.

        Args:
            accepted: tokens accepted: the walk's depth.
            offered: levels of the tree: its deepest node's depth.
            probe_offered: nodes of the walk whose probe was in the tree.
            probe_accepted: how many of those probes were accepted.

        Raises:
            ValueError: more accepted than offered.
        """
        if not 0 <= accepted <= offered or not 0 <= probe_accepted <= min(probe_offered, accepted):
            raise ValueError(
                f"a pass cannot accept {accepted} of {offered} levels and {probe_accepted} of {probe_offered} probes"
            )
        missing = offered - len(self.offered_per_level)
        self.offered_per_level.extend([0] * missing)
        self.accepted_per_level.extend([0] * missing)
        for level in range(offered):
            self.offered_per_level[level] += 1
            self.accepted_per_level[level] += level < accepted
        self.target_passes += 1
        self.emitted_tokens += accepted + 1
        self.probe_offered += probe_offered
        self.probe_accepted += probe_accepted

    @property
    def tau(self) -> float:
        """Acceptance length: emitted tokens per target pass; NaN before the first pass."""
        return _ratio(self.emitted_tokens, self.target_passes)

    @property
    def acceptance_rates(self) -> list[float]:
        """[depth] how often level l was accepted, of the passes that offered it; NaN where none did."""
        return [_ratio(a, o) for a, o in zip(self.accepted_per_level, self.offered_per_level, strict=True)]

    @property
    def probe_acceptance_rate(self) -> float:
        """Accepted probes per node on a walk whose probe was in the tree; NaN when there was none."""
        return _ratio(self.probe_accepted, self.probe_offered)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of ``total_seconds``; NaN when no time was measured."""
        return _ratio(self.generated_tokens, self.total_seconds)

    @classmethod
    def merge(cls, items: Iterable[Metrics], concurrent: bool = False) -> Metrics:
        """Several as one.

        Args:
            items: of different requests.
            concurrent: whether they ran in one batch: then seconds are the longest request's, else their sum.
        """
        parts = list(items)
        depth = max((len(part.offered_per_level) for part in parts), default=0)

        def seconds(values: Iterable[float]) -> float:
            return max(values, default=0.0) if concurrent else sum(values)

        def by_level(lists: Iterable[list[int]]) -> list[int]:
            padded = [counts + [0] * (depth - len(counts)) for counts in lists]
            return [sum(column) for column in zip(*padded, strict=True)]

        return cls(
            requests=sum(part.requests for part in parts),
            target_passes=sum(part.target_passes for part in parts),
            emitted_tokens=sum(part.emitted_tokens for part in parts),
            generated_tokens=sum(part.generated_tokens for part in parts),
            offered_per_level=by_level(part.offered_per_level for part in parts),
            accepted_per_level=by_level(part.accepted_per_level for part in parts),
            probe_offered=sum(part.probe_offered for part in parts),
            probe_accepted=sum(part.probe_accepted for part in parts),
            draft_seconds=seconds(part.draft_seconds for part in parts),
            target_seconds=seconds(part.target_seconds for part in parts),
            sampling_seconds=seconds(part.sampling_seconds for part in parts),
            total_seconds=seconds(part.total_seconds for part in parts),
        )

    def __str__(self) -> str:
        """A table of what was measured."""
        lines = [
            ("requests", f"{self.requests}"),
            ("generated tokens", f"{self.generated_tokens}"),
            ("target passes", f"{self.target_passes}"),
            ("tokens per pass (tau)", f"{self.tau:.3f}"),
            ("probes accepted", _share(self.probe_accepted, self.probe_offered)),
            ("tokens per second", f"{self.tokens_per_second:.1f}"),
            ("seconds", f"{self.total_seconds:.3f}"),
        ]
        for name in ("draft", "target", "sampling"):
            lines.append((f"  {name}", f"{getattr(self, f'{name}_seconds'):.3f}"))
        for level, (accepted, offered) in enumerate(
            zip(self.accepted_per_level, self.offered_per_level, strict=True), 1
        ):
            lines.append((f"level {level} accepted", _share(accepted, offered)))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


@dataclass(frozen=True)
class GenerationResult:
    """One request's output; the three views of it agree (see ``optimized.stopping``).

    Attributes:
        index: the request's place in the call.
        prompt_token_ids: the prompt.
        token_ids: the generated tokens; EOS or a stop token included, tokens beyond the end not.
        text: without special tokens, without a stop token's text, cut before a stop string; "" without a tokenizer.
        finish_reason: "eos", "stop" or "length".
        logprobs: one for each of ``token_ids``; None when not asked for.
        seed: given or drawn; it makes this text again, but where trees depend on what was decoded before
            (``RheoDecoder``: a calibrator, ``tree_size="auto"``).
        metrics: this request's.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    seed: int
    metrics: Metrics

    def __post_init__(self) -> None:
        if self.logprobs is not None and tuple(entry.token_id for entry in self.logprobs) != self.token_ids:
            raise ValueError("logprobs must hold one entry for each of token_ids, in their order")


@dataclass(frozen=True)
class StreamEvent:
    """What one step added to one request.

    Attributes:
        index: the request's place in the call.
        text: newly decided text, possibly empty; all events' texts joined are the result's.
        token_ids: newly kept tokens; all events' joined are the result's.
        finished: whether this is the request's last event.
        result: the whole result with the last event, else None.
        failure: with the last event of a request that failed, what went wrong; it has no result then.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finished: bool = False
    result: GenerationResult | None = None
    failure: str | None = None


class TracedStep(NamedTuple):
    """One step of a request that had a draft.

    Attributes:
        tree: the draft tree.
        walk: what verification made of it.
        root_token: the newest token before the step, which stands at the tree's root.
    """

    tree: DraftTree
    walk: VerifyResult
    root_token: int


class GenerationError(RuntimeError):
    """Some requests failed; the others' results are not lost.

    Attributes:
        results: one per request, None for those that failed or never finished.
        failures: what went wrong, by the request's place in the call.
    """

    def __init__(self, failures: Mapping[int, str], results: Sequence[GenerationResult | None]) -> None:
        self.failures: dict[int, str] = dict(sorted(failures.items()))
        self.results: list[GenerationResult | None] = list(results)
        reasons = "; ".join(f"request {index}: {reason}" for index, reason in self.failures.items())
        finished = sum(result is not None for result in self.results)
        super().__init__(
            f"{len(self.failures)} of {len(self.results)} requests failed ({reasons}); "
            f"the {finished} finished results are in .results"
        )

    def __reduce__(self) -> tuple[type[GenerationError], tuple[dict[int, str], list[GenerationResult | None]]]:
        return type(self), (self.failures, self.results)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.0f} %)" if whole else "none offered"

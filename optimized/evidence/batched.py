"""The parts that the decoder runs, on toy models: the joint law of three tokens against the target's exact law."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimized.calibration import prior_weights
from optimized.evidence.exact import RULES, Rule
from optimized.evidence.judgement import Judgement, check_alpha, judge
from optimized.evidence.markov import BLOCK, MarkovModel, block_counts, block_law, sample_blocks
from optimized.sampling_params import SamplingParams
from optimized.verification import VerifyBatch
from reference.api import Proposal, RheoConfig, Verification
from reference.statistics import holm
from reference.topology import Topology

CHUNK = 12_000  # requests per batch
SEEDS_PER_CASE = 2**40
LEAST_DRAWS = 100  # for each case and parameters

PLAIN = SamplingParams()


@dataclass(frozen=True)
class StaticTree:
    """A case's shape: paths of child ranks."""

    topology: Topology


@dataclass(frozen=True)
class MarkovCase:
    """One batch after the other of the same mixture of requests.

    Attributes:
        name: what makes the draft hard to be lossless with.
        draft: how its logits follow from the target's, see ``draft_logits``.
        shape: (m, K, R, beam), every tree three levels deep; or a static tree, the same under every rule.
        params: the requests' parameters, in turn.
        vocab_size, order, scale: of the target; its logits are normal with this standard deviation.
        config: anything else that is not the default.
    """

    name: str
    draft: str
    shape: tuple[int, int, int, int] | StaticTree
    params: tuple[SamplingParams, ...]
    vocab_size: int = 8
    order: int = 1
    scale: float = 1.5
    config: dict[str, Any] = field(default_factory=dict)

    def model(self) -> MarkovModel:
        """The case's models, a function of its name."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        shape = (self.vocab_size**self.order, self.vocab_size)
        target = torch.randn(shape, generator=generator) * self.scale
        vocab_map = None
        if self.draft == "small vocabulary":
            vocab_map = torch.arange(1, self.vocab_size, 2)
        draft = draft_logits(self.draft, target, torch.randn(shape, generator=generator), vocab_map)
        return MarkovModel(target, draft, self.order, vocab_map)

    def rheo_config(self, rule: Rule) -> RheoConfig:
        """The trees' shape under one of ``RULES``."""
        verification: Verification = "rrsw" if rule == "rrsw" else "rheo"
        if isinstance(self.shape, StaticTree):
            return RheoConfig.static(self.shape.topology, verification=verification, **self.config)
        m, branching, size, beam = self.shape
        proposal: Proposal = "topk" if rule == "topk" else "rheo"
        shape = RheoConfig(m, branching, BLOCK, size, beam, proposal=proposal, verification=verification)
        return replace(shape, **self.config)


def draft_logits(kind: str, target: Tensor, noise: Tensor, vocab_map: Tensor | None) -> Tensor:
    """Draft logits [contexts, draft vocab] for the target's [contexts, vocab]; "disjoint" changes the target's too."""
    match kind:
        case "same":
            return target.clone()
        case "opposite":
            return -target
        case "noisy":
            return target + noise
        case "noisy bf16":
            return (target + noise).bfloat16()
        case "unrelated":
            return 3 * noise
        case "ties":
            return (target + noise).round().clamp(-1, 1)
        case "disjoint":  # each believes in its own half of the vocabulary; nothing is quite impossible
            odd = torch.arange(target.shape[1]) % 2 == 1
            target += torch.where(odd, 0.0, 3.0)
            return noise + torch.where(odd, 3.0, 0.0)
        case "constant":  # after every token; a fill that entered before its probe shows here
            return torch.tensor([6.0, 4.0, 2.0, *[0.1] * (target.shape[1] - 3)]).log().repeat(len(target), 1)
        case "small vocabulary":
            return (target + noise)[:, vocab_map]
    raise ValueError(kind)


COOL, COLD, HOT = (SamplingParams(temperature=temperature) for temperature in (0.7, 0.3, 1.5))
GREEDY = SamplingParams(temperature=0.0)
TOP_K, TOP_P, MIN_P = SamplingParams(top_k=3), SamplingParams(top_p=0.8), SamplingParams(min_p=0.15)
ALL_FILTERS = SamplingParams(temperature=1.5, top_k=6, top_p=0.95, min_p=0.05)
STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))

CASES = (
    MarkovCase("opposite rankings, m = 0", "opposite", (0, 2, 4, 2), (PLAIN, COOL, COLD)),
    MarkovCase("opposite rankings, m = K-1", "opposite", (2, 3, 6, 1), (PLAIN, TOP_K)),
    MarkovCase("nearly disjoint supports", "disjoint", (1, 3, 6, 1), (PLAIN, HOT)),
    MarkovCase("many ties", "ties", (1, 3, 5, 2), (PLAIN, GREEDY)),
    MarkovCase("bfloat16 draft", "noisy bf16", (1, 2, 4, 2), (COOL, ALL_FILTERS)),
    MarkovCase("small draft vocabulary", "small vocabulary", (0, 3, 5, 1), (PLAIN, TOP_P)),
    MarkovCase("two tokens of memory", "noisy", (1, 3, 6, 2), (PLAIN, MIN_P), order=2),
    MarkovCase("cut support of 5 in 17", "noisy", (1, 3, 6, 1), (COOL, COLD), 17, 1, 2.5, {"draft_support": 5}),
    MarkovCase("two probes per node", "opposite", (1, 4, 6, 1), (PLAIN, COOL), config={"probes": 2}),
    MarkovCase(
        "calibrated weights",
        "opposite",
        (1, 4, 6, 1),
        (PLAIN, COOL),
        config={"weights": prior_weights(), "lead_tokens": "auto", "score_threshold": 0.02, "level_threshold": 0.1},
    ),
    MarkovCase("static tree", "opposite", STATIC, (PLAIN, COOL, GREEDY)),
)


@dataclass(frozen=True)
class BatchedCheck:
    """One rule on one case, all of its requests in one test; or one rule on all cases.

    Attributes:
        rule: one of ``RULES``.
        case: the case's name, or ``EVERYTHING``.
        draws: blocks of three tokens.
        accepted: draft tokens accepted per step, on average.
        judgement: of the test.
        rejected: whether Holm's procedure rejects the law, together with the other checks.
    """

    rule: Rule
    case: str
    draws: int
    accepted: float
    judgement: Judgement
    rejected: bool

    @property
    def agrees(self) -> bool:
        """Whether the law is not rejected, and was tested: something drafted was accepted."""
        return not self.rejected and self.accepted > 0


EVERYTHING = "all of these"


def check_batched(
    draws: int, seed: int, alpha: float, progress: Callable[[int], None], cases: Sequence[MarkovCase] = CASES
) -> list[BatchedCheck]:
    """Sample every case under every rule and compare.

    Args:
        draws: blocks of three tokens per rule, shared equally by the cases.
        seed: the first request's; a check's verdict is a function of it.
        alpha: the probability of any false alarm, of all checks together.
        progress: told how many blocks were drawn since it was last told.
        cases: what to sample.

    Raises:
        ValueError: as ``check_draws``, or ``alpha`` out of its range.
    """
    check_alpha(alpha)
    check_draws(draws, cases)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads cost more than they give on models this small
    try:
        return _check_all(draws // len(cases), seed, alpha, progress, cases)
    finally:
        torch.set_num_threads(threads)


def _check_all(
    draws: int, seed: int, alpha: float, progress: Callable[[int], None], cases: Sequence[MarkovCase]
) -> list[BatchedCheck]:
    """``check_batched`` with ``draws`` blocks per rule and case."""
    level = alpha / (len(RULES) * (len(cases) + 1))  # the least that Holm's procedure gives any check
    found: list[tuple[Rule, str, int, float, Judgement]] = []
    for rule_index, rule in enumerate(RULES):
        everything = []
        walks = _Walks()
        for index, case in enumerate(cases):
            own = _Walks()
            first_seed = seed + (rule_index * len(cases) + index) * SEEDS_PER_CASE
            samples = sampled_counts(case, rule, draws, first_seed, own, progress)
            found.append((rule, case.name, draws, own.mean_accepted, judge(samples, level)))
            everything += samples
            walks.add(own)
        found.append((rule, EVERYTHING, draws * len(cases), walks.mean_accepted, judge(everything, level)))
    rejected = holm({f"{rule}, {case}": judgement.p_value for rule, case, _, _, judgement in found}, alpha)
    return [BatchedCheck(*check, rejected=f"{check[0]}, {check[1]}" in rejected) for check in found]


def check_draws(draws: int, cases: Sequence[MarkovCase] = CASES) -> None:
    """Refuse a sample that is too small to be shared.

    Raises:
        ValueError: fewer than ``LEAST_DRAWS`` blocks for some case's parameters.
    """
    least = LEAST_DRAWS * len(cases) * max(len(case.params) for case in cases)
    if draws < least:
        raise ValueError(f"draws must be at least {least} (they are shared by {len(cases)} cases), got {draws}")


@dataclass
class _Walks:
    """How many draft tokens how many walks accepted."""

    walks: int = 0
    accepted: int = 0

    def __call__(self, walks: VerifyBatch) -> None:
        self.walks += len(walks.counts)
        self.accepted += int((walks.counts - 1).sum())

    def add(self, other: _Walks) -> None:
        self.walks += other.walks
        self.accepted += other.accepted

    @property
    def mean_accepted(self) -> float:
        return self.accepted / self.walks if self.walks else 0.0


def sampled_counts(
    case: MarkovCase,
    rule: Rule,
    draws: int,
    first_seed: int,
    on_walks: Callable[[VerifyBatch], None],
    progress: Callable[[int], None],
) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Counts and law, [vocab_size ** BLOCK] each, of each of the case's groups of parameters."""
    model, config = case.model(), case.rheo_config(rule)
    counts = [np.zeros(model.vocab_size**BLOCK, dtype=np.int64) for _ in case.params]
    for start in range(first_seed, first_seed + draws, CHUNK):
        seeds = range(start, min(start + CHUNK, first_seed + draws))
        blocks = sample_blocks(model, config, case.params, seeds, on_walks=on_walks)
        for group, count in enumerate(counts):
            count += block_counts(blocks[group :: len(counts)], model.vocab_size)
        progress(len(seeds))
    return [(count, block_law(model, params)) for count, params in zip(counts, case.params, strict=True)]

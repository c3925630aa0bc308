"""Losslessness of the batched path, by frequencies: joint law of three tokens against the exact law of the target.

Everything here is sampled by the parts that the decoder runs: ``grow_trees``, ``TargetLaws``, ``verify_trees`` and the
Philox uniforms of ``StepRandomness``, step after step until three tokens are there. A batch mixes requests with
different parameters; each group of equal parameters is a sample of its own. ``proofs_tests.statistics`` says what such
a test can see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from optimized.backends import TORCH, Backend, unsupported
from optimized.calibration import prior_weights
from optimized.evidence.batched import STATIC, MarkovCase, StaticTree
from optimized.evidence.markov import BLOCK, block_counts, block_law, sample_blocks, target_law
from optimized.growth import grow_trees
from optimized.randomness import StepNoise
from optimized.sampling_params import SamplingParams
from optimized.trees import TreeBatch
from proofs_tests.statistics import Family
from reference.api import DraftLaw, GrowthNoise, RheoConfig, VerifyNoise
from reference.growth import grow_tree
from reference.statistics import Comparison
from reference.verification import verify

CHUNK = 12_000  # requests per batch
RULES = ("rheo", "rrsw", "topk")
SEEDS_PER_CASE = 2**40

PLAIN = SamplingParams()
COOL = SamplingParams(temperature=0.7)
COLD = SamplingParams(temperature=0.3)
HOT = SamplingParams(temperature=1.5)
GREEDY = SamplingParams(temperature=0.0)
TOP_K = SamplingParams(top_k=3)
TOP_P = SamplingParams(top_p=0.8)
MIN_P = SamplingParams(min_p=0.15)
COOL_TOP_K = SamplingParams(temperature=0.7, top_k=5)
HOT_TOP_P = SamplingParams(temperature=1.5, top_p=0.9)
COLD_MIN_P = SamplingParams(temperature=0.3, min_p=0.05)
ALL_FILTERS = SamplingParams(temperature=1.5, top_k=6, top_p=0.95, min_p=0.05)


@dataclass(frozen=True)
class SizedCase(MarkovCase):
    """A toy case with its sample size: ``draws`` requests in all."""

    draws: int = 84_000


CASES = [
    SizedCase("draft equal to the target", "same", (1, 2, 4, 1), (PLAIN, COOL, TOP_P)),
    SizedCase("opposite rankings, m = 0", "opposite", (0, 2, 4, 2), (PLAIN, COOL, COLD)),
    SizedCase("opposite rankings, m = K-1", "opposite", (2, 3, 6, 1), (PLAIN, TOP_K, HOT_TOP_P)),
    SizedCase("nearly disjoint supports", "disjoint", (1, 3, 6, 1), (PLAIN, HOT)),
    SizedCase("many ties", "ties", (1, 3, 5, 2), (PLAIN, COOL_TOP_K, GREEDY)),
    SizedCase("many ties, m = 0", "ties", (0, 4, 6, 1), (PLAIN, COLD, MIN_P)),
    SizedCase("bfloat16 draft", "noisy bf16", (1, 2, 4, 2), (PLAIN, COOL, HOT, ALL_FILTERS)),
    SizedCase("small draft vocabulary", "small vocabulary", (0, 3, 5, 1), (PLAIN, COOL, TOP_P, GREEDY)),
    SizedCase("small draft vocabulary, m = K-1", "small vocabulary", (1, 2, 4, 2), (HOT, MIN_P), draws=36_000),
    SizedCase("draft that never changes", "constant", (0, 3, 3, 1), (PLAIN, HOT), draws=60_000),
    SizedCase("no probe, m = K", "noisy", (2, 2, 4, 2), (PLAIN, TOP_K), draws=36_000),
    SizedCase("overconfident draft", "unrelated", (2, 4, 7, 1), (COOL, HOT, ALL_FILTERS), draws=54_000),
    SizedCase("two tokens of memory", "noisy", (1, 3, 6, 2), (PLAIN, COOL_TOP_K), order=2, draws=48_000),
    SizedCase("cut support of 5 in 17", "noisy", (1, 3, 6, 1), (COOL, COLD, COOL_TOP_K), 17, 1, 2.5,
              {"draft_support": 5}, 48_000),
    SizedCase("opposite in 17", "opposite", (3, 4, 6, 1), (COOL, COLD_MIN_P), 17, 1, 2.5, draws=24_000),
    SizedCase("64 tokens", "noisy", (1, 4, 8, 1), (COLD, COOL_TOP_K), 64, 1, 2.5, draws=24_000),
    SizedCase("two probes of four slots", "opposite", (1, 4, 6, 1), (PLAIN, COOL, GREEDY), config={"probes": 2},
              draws=54_000),
    SizedCase("three probes of three slots", "ties", (0, 3, 6, 1), (PLAIN, HOT_TOP_P), config={"probes": 3},
              draws=36_000),
    SizedCase("calibrated weights, m per node, thresholds", "opposite", (1, 4, 6, 1), (PLAIN, COOL, GREEDY),
              config={"weights": prior_weights(), "lead_tokens": "auto", "score_threshold": 0.02,
                      "level_threshold": 0.1}, draws=54_000),
    SizedCase("calibrated weights, m = 2, two probes", "noisy", (2, 4, 6, 2), (PLAIN, HOT), config={
        "weights": prior_weights(), "probes": 2}, draws=36_000),
    SizedCase("static tree", "opposite", STATIC, (PLAIN, COOL, TOP_P, GREEDY), draws=72_000),
    SizedCase("static fan, small draft vocabulary", "small vocabulary",
              StaticTree(((0,), (1,), (2,), (1, 0), (1, 0, 0))), (PLAIN, COLD), draws=36_000),
    SizedCase("chain, plain speculative sampling", "unrelated",
              StaticTree(((0,), (0, 0), (0, 0, 0))), (PLAIN, HOT), draws=36_000),
]  # fmt: skip
DRAWS_PER_RULE = 1_000_000
# What each single test, and the tests of everything at once, must be able to see, in total variation between cells.
SINGLE_TV = {1: 0.07, 10: 0.03}  # by how many times ``DRAWS_PER_RULE`` are drawn
EVERYTHING_TV = {1: {1: 0.008, 2: 0.012, 3: 0.017}, 10: {1: 0.003, 2: 0.004, 3: 0.007}}  # and by the first tokens


def sampled_counts(
    case: SizedCase, rule: str, draws: int, first_seed: int, backend: Backend
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Counts and law of each of the case's groups of parameters."""
    model, config = case.model(), case.rheo_config(rule)
    name = backend.name if unsupported(backend.name, config) is None else "torch"
    counts = [np.zeros(model.vocab_size**BLOCK, dtype=np.int64) for _ in case.params]
    for start in range(first_seed, first_seed + draws, CHUNK):
        seeds = range(start, min(start + CHUNK, first_seed + draws))
        blocks = sample_blocks(model, config, case.params, seeds, backend=name)
        for group, count in enumerate(counts):
            count += block_counts(blocks[group :: len(counts)], model.vocab_size)
    return [(count, block_law(model, params)) for count, params in zip(counts, case.params, strict=True)]


def first_tokens(values: np.ndarray, vocab_size: int, tokens: int) -> np.ndarray:
    """Counts or law of the first tokens of each block."""
    return values.reshape(vocab_size**tokens, -1).sum(axis=1)


def check_rule(family: Family, rule: str, scale: int, seed: int, backend: Backend) -> list[tuple[str, Comparison]]:
    """Every case under one rule; ``scale`` multiplies the draws. Each group, then all of them together."""
    groups: list[tuple[int, np.ndarray, np.ndarray]] = []
    report = []
    for index, case in enumerate(cases_of(rule)):
        sampled = sampled_counts(case, rule, case.draws * scale, seed + index * SEEDS_PER_CASE, backend)
        for params, (counts, law) in zip(case.params, sampled, strict=True):
            label = f"{rule}, {case.name}, {asked(params)}"
            report.append((label, family.compare(label, counts, law, min_detectable_tv=SINGLE_TV[scale])))
            groups.append((case.vocab_size, counts, law))
    for tokens, tv in EVERYTHING_TV[scale].items():
        samples = [
            (first_tokens(counts, vocab, tokens), first_tokens(law, vocab, tokens)) for vocab, counts, law in groups
        ]
        label = f"{rule}, everything, first {tokens} tokens"
        report.append((label, family.compare_together(label, samples, min_detectable_tv=tv)))
    return report


def asked(params: SamplingParams) -> str:
    """The parameters that are not the default, in words."""
    changed = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return ", ".join(f"{k} {v}" for k, v in changed.items() if v != getattr(PLAIN, k)) or "temperature 1"


def cases_of(rule: str) -> list[SizedCase]:
    """Several probes and static trees are of no interest where there are no probes."""
    return [case for case in CASES if rule != "topk" or case.rheo_config("rheo").probes == 1]


def number_of_tests(*rules: str) -> int:
    return sum(sum(len(case.params) for case in cases_of(rule)) + BLOCK for rule in rules)


def test_cases_cover_what_they_should():
    assert all(sum(case.draws for case in cases_of(rule)) >= DRAWS_PER_RULE for rule in RULES)
    shapes = [case.rheo_config("rheo") for case in CASES]
    assert {shape.probes for shape in shapes} == {1, 2, 3}
    found = {(shape.lead_tokens, shape.branching) for shape in shapes}
    assert "auto" in {shape.lead_tokens for shape in shapes}
    assert found >= {(0, 2), (1, 2), (2, 2), (0, 3), (1, 3), (2, 3), (0, 4), (2, 4), (3, 4)}
    assert {case.vocab_size for case in CASES} == {8, 17, 64}
    asked_for = [params for case in CASES for params in case.params]
    assert {params.temperature for params in asked_for} == {0.0, 0.3, 0.7, 1.0, 1.5}
    assert all(
        any(getattr(params, name) != getattr(PLAIN, name) for params in asked_for)
        for name in ("top_k", "top_p", "min_p")
    )


def check_target_law(rule: str, backend: Backend, record_property: Callable[[str, object], None]) -> None:
    """A million blocks of three tokens."""
    with Family(f"chi square {backend.name} {rule}", number_of_tests(rule)) as family:
        report = check_rule(family, rule, 1, 1 + RULES.index(rule) * 2**60, backend)
    record_property("comparisons", [f"{label}: {comparison}" for label, comparison in report])


@pytest.mark.lossless
@pytest.mark.parametrize("rule", RULES)
def test_the_torch_path_emits_the_target_law(rule, record_property):
    check_target_law(rule, TORCH, record_property)


@pytest.mark.lossless
@pytest.mark.deep
def test_batched_path_emits_the_target_law_ten_times_as_long(backend):
    with Family(f"chi square {backend.name} deep", number_of_tests(*RULES)) as family:
        for index, rule in enumerate(RULES):
            check_rule(family, rule, 10, 3 * 2**62 + index * 2**58, backend)


def test_tree_contexts_are_those_of_the_paths():
    case = next(case for case in CASES if case.order == 2)
    model, config = case.model(), case.rheo_config("rheo")
    roots = torch.tensor([3, 60])
    noise = torch.rand(2, config.depth, config.beam_width, generator=torch.Generator().manual_seed(1))
    trees = grow_trees(config, model.draft_logits[roots], model.drafter(roots), torch.ones(2), noise.double())
    contexts = model.tree_contexts(trees, roots)
    for b, root in enumerate(roots.tolist()):
        tree = trees.to_tree(b)
        for row in range(len(tree)):
            last = ([root // 8, root % 8, *tree.path(row)])[-2:]
            assert contexts[b, row] == last[0] * 8 + last[1]


def test_target_law_by_hand():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert np.allclose(target_law(logits, replace(PLAIN, top_k=2)), [0.625, 0.375, 0, 0])
    assert np.allclose(target_law(logits, replace(PLAIN, top_p=0.75)), [0.625, 0.375, 0, 0])
    assert np.allclose(target_law(logits, replace(PLAIN, min_p=0.29)), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0])
    assert np.allclose(target_law(logits, replace(PLAIN, temperature=0.5)), np.square([10, 6, 3, 1]) / 146)
    assert target_law(np.array([1.0, 2.0, 2.0]), GREEDY).tolist() == [0, 1, 0]


@pytest.mark.lossless
@pytest.mark.parametrize("probes", [1, 2])
@pytest.mark.parametrize("rule", ["rheo", "rrsw"])
def test_uniform_of_zero_accepts_and_draws_nothing_impossible(rule, probes, backend):
    """Uniforms of exactly 0 come up once in 2**24; with ``<=`` for ``<`` they would emit tokens of probability 0."""
    config = RheoConfig(lead_tokens=1, branching=3, depth=1, tree_size=3, probes=probes)
    draft = DraftLaw(np.array([0.5, 0.25, 0.125, 0.125]), np.array([0.5, 0.25, 0.125, 0.125]))
    zeros = np.zeros(4)
    for u in (0.0, 0.6):  # the first probe is token 1, or token 2; the second the other one
        tree = grow_tree(config, lambda path: draft, GrowthNoise(np.full((1, 3, probes), u)))
        assert len(tree.probe_children(0)) == probes
        laws = np.zeros((4, 4))
        laws[:, 3] = 1.0
        assert all(laws[0, token] == 0 for token in tree.token_ids[1:])
        result = verify(tree, laws, VerifyNoise(np.zeros((4, probes)), zeros, zeros), rule)
        assert result.token_ids == (3,)
        batch = TreeBatch.from_trees([tree])
        none = torch.zeros(1, 4, dtype=torch.float64)
        accept = torch.zeros(1, 4, probes, dtype=torch.float64)
        noise = StepNoise(torch.zeros(1, 1, 3, probes, dtype=torch.float64), accept, none, none)
        walk = backend.verify(batch, torch.from_numpy(laws)[None], noise, rule)
        assert walk.token_ids[0].tolist() == [3, -1]
        assert not walk.probes_accepted.any()

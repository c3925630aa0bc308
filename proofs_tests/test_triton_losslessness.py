"""Losslessness of the Triton path by frequencies, on a toy model: the first step's tokens, then the target's own.

The interpreter takes about 0.1 s for a request's step, so the sample is small, and what it can see is asserted. The
shape has a lead, a probe and a fill at the root and below, and a draft that ranks against the target.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from optimized.evidence.batched import MarkovCase
from optimized.evidence.markov import target_law
from optimized.growth import grow_trees
from optimized.randomness import StepRandomness
from optimized.sampling_params import SamplingParams
from optimized.target_laws import SamplingBatch, TargetLaws
from proofs_tests.statistics import Family
from proofs_tests.triton_cases import DEVICE
from reference.api import Verification

PARAMS = (SamplingParams(), SamplingParams(temperature=0.7, top_k=4))
CASE = MarkovCase("lead, probe and fill", "opposite", (1, 3, 4, 1), PARAMS, vocab_size=6)


def first_two_tokens(rule: Verification, seeds: range) -> list[NDArray[np.int64]]:
    """Counts of the first two tokens, [vocab ** 2], of each of ``PARAMS``; request b has ``PARAMS[b % 2]``."""
    from optimized.kernel_backends import TRITON

    model, config, batch = CASE.model(), CASE.rheo_config("rrsw" if rule == "rrsw" else "rheo"), len(seeds)
    model = replace(
        model, target_logits=model.target_logits.to(DEVICE), draft_logits=model.draft_logits.to(DEVICE)
    )  # without a vocabulary map
    asked = [PARAMS[b % len(PARAMS)] for b in range(batch)]
    sampling = SamplingBatch.from_params(asked, [()] * batch, model.vocab_size, device=DEVICE)
    noise = StepRandomness(list(seeds), config.depth, config.beam_width, config.tree_size + 1, DEVICE).at(
        torch.ones(batch, dtype=torch.long, device=DEVICE)
    )
    roots = torch.full((batch,), model.root_context, device=DEVICE)
    trees = grow_trees(
        config,
        model.draft_logits[roots],
        model.drafter(roots),
        sampling.temperatures,
        noise.probe_uniforms,
        model.vocab_map,
        TRITON.growth,
    )
    laws = TargetLaws(model.target_logits[model.tree_contexts(trees, roots)], sampling, trees)
    walks = TRITON.verify(trees, laws, noise, config.verification)
    assert not laws.bad.any()
    assert (walks.counts > 1).any()
    assert walks.probes_accepted.any()
    rng = np.random.default_rng([seeds.start, 1])
    counts = [np.zeros(model.vocab_size**2, dtype=np.int64) for _ in PARAMS]
    for b, params in enumerate(asked):
        first, second = walks.token_ids[b, :2].tolist()
        if second < 0:  # the step emitted one token; the rest of a text is the target's, whoever samples it
            context = int(model.follow(roots[b : b + 1], torch.tensor([first], device=DEVICE))[0])
            law = target_law(model.target_logits[context].double().cpu().numpy(), params)
            second = int(rng.choice(model.vocab_size, p=law))
        counts[b % len(PARAMS)][first * model.vocab_size + second] += 1
    return counts


def two_token_law(params: SamplingParams) -> NDArray[np.float64]:
    """[vocab ** 2] the target's."""
    model = CASE.model()
    root = target_law(model.target_logits[model.root_context].double().numpy(), params)
    rows = []
    for token in range(model.vocab_size):
        context = int(model.follow(torch.tensor([model.root_context]), torch.tensor([token]))[0])
        rows.append(root[token] * target_law(model.target_logits[context].double().numpy(), params))
    return np.concatenate(rows)


def check_rules(family: Family, requests: int, tv: float) -> None:
    for rule in get_args(Verification):
        counts = first_two_tokens(rule, range(7 * 2**40, 7 * 2**40 + requests))
        samples = [(count, two_token_law(params)) for count, params in zip(counts, PARAMS, strict=True)]
        family.compare_together(f"triton {rule}", samples, min_detectable_tv=tv)


@pytest.mark.lossless
def test_the_triton_path_emits_the_target_law() -> None:
    with Family("chi square triton", 2) as family:
        check_rules(family, 160, 0.4)


@pytest.mark.lossless
@pytest.mark.deep
def test_the_triton_path_emits_the_target_law_at_length() -> None:
    with Family("chi square triton deep", 2) as family:
        check_rules(family, 4000, 0.09)

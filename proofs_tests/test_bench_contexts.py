"""Common contexts: where they lie, that they are the decoder's own, and what is expected there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from optimized.bench.contexts import CommonContexts, all_laws, choose_positions, support_mass
from optimized.decoder import RheoDecoder
from optimized.models import CausalDrafter, TargetModel
from optimized.models.drafter import Drafter
from optimized.models.eagle3 import Eagle3Drafter
from optimized.randomness import StepNoise
from optimized.sampling_params import SamplingParams
from optimized.trees import TreeBatch
from optimized.verification import verify_trees
from proofs_tests.test_eagle3 import DRAFT_VOCAB, RAW, VOCAB, random_head
from proofs_tests.tiny_models import spread
from reference.api import RheoConfig

ATOL = 2e-4  # float32 rounding; a wrong position or feature moves logits by more than 1e-2
PROMPT, TEXT = (5, 17, 80, 3, 41), (9, 33, 2, 60, 71, 12, 8)
CONFIG = RheoConfig(branching=3, depth=3, tree_size=9, draft_support=20)


def llama(seed: int, layers: int, vocab: int = VOCAB) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return spread(LlamaForCausalLM(config))


def pair(kind: str) -> tuple[TargetModel, Drafter]:
    target = TargetModel(llama(1, 7))
    if kind == "causal":
        return target, CausalDrafter(llama(2, 1), VOCAB)
    vocab_map = torch.arange(0, 2 * DRAFT_VOCAB, 2)
    return target, Eagle3Drafter(random_head(RAW), target.model.get_input_embeddings(), vocab_map, (2, 3, 4))


@pytest.mark.parametrize("length", [0, 1, 2, 5, 64])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_positions_are_spread_and_have_a_token_behind_them(length: int, count: int) -> None:
    for seed in (0, 2**63, 2**64 - 1):
        places = choose_positions(length, count, seed)
        assert len(places) == max(0, min(count, length - 1))
        assert places == sorted(set(places))
        assert all(1 <= place <= length - 1 for place in places)
        for part, place in enumerate(places):  # one in each part
            width = (length - 1) / len(places)
            assert math.floor(part * width) <= place - 1 <= (part + 1) * width


@pytest.mark.parametrize("kind", ["causal", "eagle3"])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]])
def test_contexts_are_those_of_a_text_read_alone(kind: str, prompt: tuple[int, ...]) -> None:
    target, drafter = pair(kind)
    positions = [1, 3, 7]
    contexts = CommonContexts(target, prompt, TEXT, positions, 0.7, drafter.feature_layers)
    trees, logits = contexts.draft(drafter, CONFIG, seed=4)
    again = contexts.draft_logits(drafter)
    laws = all_laws(contexts.laws(trees), trees)

    alone, its_drafter = pair(kind)
    alone.feature_layers = its_drafter.feature_layers
    for context, place in enumerate(positions):
        committed = [*prompt, *TEXT[: place - 1]]
        root = TEXT[place - 1]
        _, features = alone.prefill([committed])
        its_drafter.reset(torch.tensor(committed[:1]))
        following = torch.tensor([[*committed[1:], root]])
        expected = its_drafter.advance(following, torch.tensor([following.shape[1]]), features)
        torch.testing.assert_close(logits[context], expected[0], atol=ATOL, rtol=0)
        torch.testing.assert_close(again[context], logits[context], atol=ATOL, rtol=0)
        tree = trees.to_tree(context)
        for row in range(len(tree)):
            last, _ = alone.prefill([[*committed, root, *tree.path(row)]])
            law = (last[0].double() / 0.7).softmax(-1)
            torch.testing.assert_close(laws[row][context], law, atol=ATOL, rtol=0)


def test_probes_follow_from_seed_and_position_alone() -> None:
    target, drafter = pair("causal")

    def trees(positions: list[int], seed: int, config: RheoConfig = CONFIG) -> TreeBatch:
        return CommonContexts(target, PROMPT, TEXT, positions, 1.0).draft(drafter, config, seed)[0]

    together, alone = trees([2, 5], 3), trees([5], 3)
    assert together.to_tree(1).key == alone.to_tree(0).key
    different = [trees([5], seed).to_tree(0).key for seed in range(8)]
    assert len(set(different)) > 1
    assert not trees([5], 3, RheoConfig(3, 3, 3, 9, draft_support=20, proposal="topk")).is_probe.any()


SHAPE: dict[str, Any] = {"branching": 3, "depth": 3, "tree_size": 9, "draft_support": 20}
CONFIGS = {
    "rheo": RheoConfig(**SHAPE),
    "rrsw": RheoConfig(**SHAPE, verification="rrsw"),
    "topk": RheoConfig(**SHAPE, proposal="topk"),
    "two probes": RheoConfig(**SHAPE, probes=2),
    "static": RheoConfig.static([[0], [1], [2], [0, 0], [0, 1], [1, 0]], draft_support=20),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_expected_length_is_the_mean_of_sampled_walks(name: str, temperature: float) -> None:
    """Walks on many trees: what is measured on a tree is the mean of all, not of this one."""
    target, drafter = pair("eagle3")
    config = CONFIGS[name]
    contexts = CommonContexts(target, PROMPT, TEXT, [2, 6], temperature, drafter.feature_layers)
    seeds, walks, rng = 120, 16, np.random.default_rng(5)
    differences = np.zeros((seeds, 2))
    for seed in range(seeds):
        expected = contexts.measure(drafter, config, seed).expected_lengths
        trees, _ = contexts.draft(drafter, config, seed)
        laws = torch.stack(all_laws(contexts.laws(trees), trees))  # [rows, contexts, vocab]
        for context in range(2):
            many = TreeBatch.from_trees([trees.to_tree(context)] * walks)
            accept = torch.from_numpy(rng.random((walks, many.rows, config.probes))).squeeze(2)
            residual, lead = (torch.from_numpy(rng.random((walks, many.rows))) for _ in range(2))
            noise = StepNoise(torch.zeros(walks, 1, 1), accept, residual, lead)
            table = laws[:, context]
            counts = verify_trees(many, lambda rows, t=table: t[rows], noise, config.verification).counts
            differences[seed, context] = counts.double().mean() - expected[context]
            assert 1 <= expected[context] <= 4
    error = differences.std(axis=0) / math.sqrt(seeds)
    assert (np.abs(differences.mean(axis=0)) <= 5 * error + 1e-9).all()  # 1 in 2 million


def test_expected_length_of_a_draft_that_is_the_target() -> None:
    target = TargetModel(llama(1, 2))
    drafter = CausalDrafter(llama(1, 2), VOCAB)
    contexts = CommonContexts(target, PROMPT, TEXT, [1, 4], 1.0)
    chain = RheoConfig(lead_tokens=0, branching=1, beam=1, depth=3, tree_size=3, draft_support=VOCAB)
    for length in contexts.measure(drafter, chain, seed=0).expected_lengths:
        assert length == pytest.approx(4, abs=1e-3)
    greedy = CommonContexts(target, PROMPT, TEXT, [1, 4], 0.0)
    for length in greedy.measure(drafter, chain, seed=0).expected_lengths:
        assert length == 4


def test_contexts_are_those_of_the_request_that_writes_the_text() -> None:
    """Before the least length no end of text is drawn, and where the draft's context is full nothing is drafted."""
    target, drafter = pair("causal")
    target.eos_token_ids = (33,)
    contexts = CommonContexts(target, PROMPT, TEXT, [1, 5], 1.0, min_new_tokens=3)
    trees = contexts.draft(drafter, RheoConfig.static([[0], [0, 0]], draft_support=20), seed=4)[0]
    for row, law in enumerate(all_laws(contexts.laws(trees), trees)):
        generated = torch.tensor([1, 5]) + trees.depths[:, row]
        assert ((law[:, 33] == 0) == (generated < 3)).all()
    whole = contexts.measure(drafter, CONFIG, seed=4).expected_lengths
    drafter.max_positions = len(PROMPT) + 4 + CONFIG.depth
    assert contexts.measure(drafter, CONFIG, seed=4).expected_lengths == (whole[0], 1.0)
    assert min(whole) > 1


def test_a_generation_in_between_is_noticed() -> None:
    target, drafter = pair("causal")
    contexts = CommonContexts(target, PROMPT, TEXT, [2], 1.0)
    trees, _ = contexts.draft(drafter, CONFIG, seed=0)
    RheoDecoder(target, None).generate([list(PROMPT)], SamplingParams(seed=0, max_new_tokens=2))
    with pytest.raises(RuntimeError, match="another generation"):
        contexts.laws(trees)
    for bad in ([], [0], [8]):
        with pytest.raises(ValueError, match=r"positions must lie in 1\.\.7"):
            CommonContexts(target, PROMPT, TEXT, bad, 1.0)


def test_support_mass() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -torch.inf], [0.0, 0.0, 0.0, 0.0]])
    law = logits.double().softmax(-1)
    assert torch.equal(support_mass(logits, 4), torch.ones(2, dtype=torch.float64))
    assert torch.equal(support_mass(logits, 9), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(support_mass(logits, 2), torch.stack([law[0, 1:3].sum(), law[1, :2].sum()]))

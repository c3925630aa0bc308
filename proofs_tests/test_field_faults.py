"""Faults that users of speculative decoding met elsewhere, tried here: numerics, distribution, seeds.

Each test is named after the symptom and says which value is right and why. Numbers name the report that a scenario
comes from. docs/reliability.md lists all of them; the other groups are in ``test_field_faults_*.py``.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from optimized import GenerationError, RheoConfig, RheoDecoder, SamplingParams, grow_trees, verify_trees
from optimized import randomness as randomness_module
from optimized.randomness import StepNoise, StepRandomness
from optimized.slots import level_slots
from optimized.target_laws import SamplingBatch, TargetLaws
from optimized.trees import TreeBatch
from proofs_tests.tiny_pairs import MAKERS, causal_decoder, llama, near_copy
from proofs_tests.toy import random_logits
from proofs_tests.toy_models import PathDrafter, PathTarget
from reference import exact, philox
from reference.api import GREEDY_TEMPERATURE, DraftLaw, VerifyNoise
from reference.numbers import inverse_cdf
from reference.tree import DraftTree
from reference.verification import residual, verify

VOCAB = 13  # no power of two
CONFIG = RheoConfig(lead_tokens=1, branching=3, depth=3, tree_size=8)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 0], [3, 1, 4, 1, 5], [9, 2], [6], [5, 3, 5]]
PLAIN = SamplingParams(seed=3, max_new_tokens=24, min_new_tokens=24)


def toy_decoder(**options: Any) -> RheoDecoder:
    """Draft and target are functions of the whole text; the draft's logits are the target's plus noise."""
    target_logits, noise = random_logits(1, VOCAB, "normal"), random_logits(2, VOCAB, "normal")
    drafter = PathDrafter(VOCAB, lambda path: target_logits(path) + np.float32(0.4) * noise(path))
    return RheoDecoder(PathTarget(VOCAB, target_logits), drafter, config=CONFIG, **options)  # type: ignore[arg-type]


def midpoints(cells: int) -> np.ndarray:
    """The middles of equal cells of [0, 1): a law whose thresholds are multiples of 1 / cells is integrated exactly."""
    return (np.arange(cells) + 0.5) / cells


def first_token_counts(
    config: RheoConfig, draft_logits: Tensor, target_law: list[float], temperature: float, cells: tuple[int, int, int]
) -> list[int]:
    """Grow and verify one level for every cell of (probe, accept, residual) uniforms: first tokens, counted."""
    grid = torch.tensor(list(itertools.product(*(midpoints(n) for n in cells))))
    batch = len(grid)
    uniforms = grid[:, :1, None].expand(-1, config.depth, config.beam_width)
    logits = draft_logits.expand(batch, -1)
    trees = grow_trees(
        config,
        logits,
        lambda nodes: logits.unsqueeze(1).expand(-1, nodes.token_ids.shape[1], -1),
        torch.full((batch,), temperature, dtype=torch.float64),
        uniforms,
    )
    noise = StepNoise(uniforms, *(grid[:, i : i + 1].expand(-1, trees.rows) for i in (1, 2, 2)))
    law = torch.tensor(target_law, dtype=torch.float64).expand(batch, trees.rows, -1)
    first = verify_trees(trees, law, noise).token_ids[:, 0]
    return torch.bincount(first, minlength=len(target_law)).tolist()


# Numerics


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 4, "top_p": 0.9}], ids=str)
def test_01_a_nan_row_yields_a_token_id_equal_to_the_vocabulary_size(value: float, params: dict[str, Any]) -> None:
    """vllm#53029. Right: an error that names request 2, and the others' texts as if it were not there."""
    asked = replace(PLAIN, **params)
    healthy = toy_decoder().generate(PROMPTS, asked)
    one = toy_decoder()
    good = one.target.logits  # type: ignore[attr-defined]

    def logits(path: tuple[int, ...]) -> np.ndarray:
        row = good(path).copy()
        if path[:7] == tuple(PROMPTS[2]) and len(path) > 9:
            row[4] = value  # a single entry
        return row

    one.target.logits = logits  # type: ignore[attr-defined]
    with pytest.raises(GenerationError, match=r"request 2: the target's logits were NaN or \+inf") as caught:
        one.generate(PROMPTS, asked)
    assert list(caught.value.failures) == [2]
    for index, result in enumerate(caught.value.results):
        assert (result is None) == (index == 2)
        assert result is None or result.token_ids == healthy[index].token_ids
        assert result is None or all(0 <= token < VOCAB for token in result.token_ids)


@pytest.mark.parametrize("small", [1e-4, 1e-5, 9.9e-6, 1e-6, 1e-8])
@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_02_a_tiny_temperature_or_top_p_overflows(name: str, small: float) -> None:
    """vllm#1623. Right: the argmax (token 1), at logits up to 6e4 in float16, where neighbours are 32 apart."""
    logits = torch.tensor([59968.0, 60000.0, -60000.0, 0.0, 59936.0], dtype=torch.float16)
    params = SamplingParams(**{name: small})
    batch = SamplingBatch.from_params([params], [[0]], 5)
    laws = TargetLaws(logits.view(1, 1, 5), batch)
    assert laws(torch.tensor([0])).tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0]]
    assert not laws.bad.any()
    config = RheoConfig(lead_tokens=1, branching=3)
    slots = level_slots(config, logits.view(1, 1, 5), torch.zeros(1, 1), batch.temperatures, torch.full((1, 1), 0.99))
    assert slots.token_ids[0, 0, 0] == 1
    assert not slots.failed.any()
    assert slots.law.isfinite().all()


def test_02_draft_and_verification_use_different_greedy_cut_offs() -> None:
    """vllm#1623. Right: at and above 1e-5 both sample (a probe is drawn, p is no argmax), below it neither does."""
    for temperature, sampled in ((GREEDY_TEMPERATURE, True), (float(np.nextafter(GREEDY_TEMPERATURE, 0)), False)):
        batch = SamplingBatch.from_params([SamplingParams(temperature=temperature)], [[0]], 4)
        logits = torch.tensor([[[0.0, 1.0, 1.0, 0.5]]])
        slots = level_slots(RheoConfig(branching=3), logits, torch.zeros(1, 1), batch.temperatures, torch.zeros(1, 1))
        law = TargetLaws(logits, batch)(torch.tensor([0]))
        assert bool(slots.is_probe.any()) is sampled
        assert law.tolist() == ([[0.0, 0.5, 0.5, 0.0]] if sampled else [[0.0, 1.0, 0.0, 0.0]])
        assert (DraftLaw.from_logits(logits[0, 0].numpy(), temperature).sampling is not None) is sampled


def test_03_the_residual_loses_precision_where_q_is_a_billionth_of_p() -> None:
    """vllm#46665. Right: the residual of exact rationals; every threshold of the draw lies within 4e-15 of its own."""
    p = np.array([0.05, 0.2, 0.15, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    q = p * 1e-9
    q[[0, 4]] = 0, 0
    q[4] = 1 - q.sum()  # the probe, which is turned down: q is near 1 there, p is 0.1
    ids = tuple(range(1, 9))
    tree = DraftTree(
        (-1, 0, 4), (-1, 0, 0), (0, 1, 1), (0, 0, 1), (False, False, True), (1.0, 0.5, 0.25), {0: (ids, q[1:])}
    )
    rest = [max(Fraction(float(a)) - Fraction(float(b)), Fraction(0)) for a, b in zip(p, q, strict=True)]
    thresholds = [float(sum(rest[: k + 1]) / sum(rest)) for k in range(8)]
    assert max(abs(thresholds[k] - (p - p * (np.arange(9) == 4)).cumsum()[k] / 0.9) for k in range(8)) > 1e-11
    for k, threshold in enumerate(thresholds):
        if k == 4:
            continue  # no mass: the threshold is token 3's
        after = 5 if k == 3 else k + 1
        for u, token in ((threshold - 4e-15, k), (threshold + 4e-15, after)):
            assert verify(tree, np.tile(p, (3, 1)), VerifyNoise([0.999] * 3, [u] * 3, [0.5] * 3)).token_ids[0] == token
            flat = torch.full((1, 3), u, dtype=torch.float64)
            noise = StepNoise(flat, torch.full_like(flat, 0.999), flat, flat)
            walk = verify_trees(TreeBatch.from_trees([tree]), torch.tensor(p).expand(1, 3, -1), noise)
            assert walk.token_ids[0, 0] == token


def test_04_the_draft_draws_in_bfloat16_and_is_verified_with_another_law() -> None:
    """DeepSpec#31. Right: the law kept for verification is the one of the rounded logits and the one that draws.

    The share of uniforms that give a token is its probability up to one cell, the law equals float64's softmax of the
    very bfloat16 logits, and growth hands verification those bits. The law of the unrounded logits is 1e-3 away.
    """
    torch.manual_seed(4)
    fine = torch.randn(40) * 2
    logits = fine.bfloat16()
    config = RheoConfig(lead_tokens=2, branching=4, depth=1, tree_size=4, draft_support=16)
    cells, temperature = 8192, 0.7
    uniforms = torch.tensor(midpoints(cells)).view(-1, 1, 1).expand(-1, 1, 4)
    temperatures = torch.full((cells,), temperature, dtype=torch.float64)
    trees = grow_trees(config, logits.expand(cells, -1), lambda _: logits, temperatures, uniforms)
    slots = level_slots(config, logits.view(1, 1, -1), torch.zeros(1, 1), temperatures[:1], uniforms[:1, :, 0])
    law_ids, law = slots.law_ids[0, 0], slots.law[0, 0]
    assert torch.equal(trees.probe_laws[0, 0], law)
    drawn = trees.token_ids[trees.is_probe]
    assert len(drawn) == cells
    shares = torch.bincount(drawn, minlength=40)[law_ids] / cells
    assert float((shares - law).abs().max()) <= 1 / cells

    def tail_law(values: Tensor) -> Tensor:
        tempered = values.double()[law_ids[2:]] / temperature
        return torch.cat([torch.zeros(2, dtype=torch.float64), tempered.softmax(0)])

    torch.testing.assert_close(law, tail_law(logits), atol=1e-15, rtol=0)
    assert float((law - tail_law(fine)).abs().max()) > 1e-3


@pytest.mark.parametrize("who", ["target", "draft"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_05_an_overflow_in_float16_makes_all_logits_nan(who: str, temperature: float) -> None:
    """EAGLE#162. Right: the request with token 90, whose residual stream overflows, fails by name; the others go on."""
    params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=12, min_new_tokens=12)
    model = llama()
    model.model.layers[0].mlp.down_proj.weight.mul_(40)
    model = model.to(torch.float16)
    draft = near_copy(model)
    healthy = causal_decoder(model=model, draft=draft).generate([[11, 12], [7, 8, 9]], params)
    broken = {"target": model, "draft": draft}[who]
    broken.model.embed_tokens.weight[90] = 65504  # the largest float16: 16 more are infinity, and then NaN
    with pytest.raises(GenerationError, match=f"the {who}'s logits were NaN") as caught:
        causal_decoder(model=model, draft=draft).generate([[11, 12], [90, 8, 9], [7, 8, 9]], params)
    assert list(caught.value.failures) == [1]
    assert [r and r.token_ids for r in caught.value.results] == [healthy[0].token_ids, None, healthy[1].token_ids]


# Distribution


def test_06_top_k_children_are_treated_as_draws_of_certainty() -> None:
    """EAGLE#20, #183, #221, #329. Right: p itself, with two fixed children and a sampled one over four tokens.

    q = (8, 4, 2, 2) / 16, so q~ is 1/2 on either of tokens 2 and 3 and every threshold a multiple of 1/16.
    """
    config = RheoConfig(lead_tokens=2, branching=3, depth=1, tree_size=3)
    logits = torch.tensor([8.0, 4.0, 2.0, 2.0]).log()
    counts = first_token_counts(config, logits, [1 / 16, 2 / 16, 9 / 16, 4 / 16], 1.0, (4, 4, 16))
    assert counts == [16, 32, 144, 64]
    q, p = ([Fraction(n, 16) for n in values] for values in ((8, 4, 2, 2), (1, 2, 9, 4)))
    for rule in ("rheo", "rrsw"):
        for depth in (1, 2):
            both = replace(config, depth=depth, tree_size=4 * depth, verification=rule)  # type: ignore[arg-type]
            law = exact.output_law(both, lambda _: DraftLaw(q, q), lambda _: p, depth + 1)
            assert exact.total_variation(law, exact.target_law(lambda _: p, depth + 1)) == 0


def test_07_the_draft_samples_from_processed_logits_but_reports_raw_ones() -> None:
    """transformers#47932. Right: p, at T = 0.5 and with a draft cut to its three best tokens.

    Weights (8, sqrt 3, 1) and 1/2 cut off: behind the lead q~ is (3/4, 1/4) at T = 0.5, and not (0.63, 0.37).
    """
    config = RheoConfig(lead_tokens=1, branching=2, depth=1, tree_size=2, draft_support=3)
    logits = torch.tensor([8.0, 3**0.5, 1.0, 0.5]).log()
    counts = first_token_counts(config, logits, [2 / 16, 6 / 16, 6 / 16, 2 / 16], 0.5, (4, 2, 12))
    assert counts == [12, 36, 36, 12]


@pytest.mark.parametrize("rule", ["rheo", "rrsw"])
def test_08_verification_reads_the_wrong_row_of_the_tree(rule: Any) -> None:
    """TensorRT-LLM#15098. Right: every row's p is one-hot at the next token of one path, so that path comes out."""
    parents, tokens = (-1, 0, 0, 0, 1, 1, 2, 4, 6), (-1, 10, 11, 12, 13, 14, 10, 15, 16)
    depths = (0, 1, 1, 1, 2, 2, 2, 3, 3)
    slots = (0, 0, 1, 2, 0, 1, 0, 0, 0)
    q = np.array([0.5, 0.5])
    tree = DraftTree(
        tokens, parents, depths, slots, tuple(row == 2 for row in range(9)), (1.0,) * 9, {0: ((11, 12), q)}
    )
    paths = {row: [row] for row in range(9)}
    for row in range(1, 9):
        paths[row] = [*paths[parents[row]], row]
    for leaf, path in paths.items():
        after = {row: tokens[child] for row, child in itertools.pairwise(path)} | {leaf: 30 + leaf}
        law = np.zeros((9, 64))
        for row in range(9):
            law[row, after.get(row, 50 + row)] = 1  # off the path: a token that would tell which row was read
        expected = [tokens[row] for row in path[1:]] + [30 + leaf]
        noise = [np.full(9, 0.3), np.full(9, 0.7), np.full(9, 0.2)]
        assert list(verify(tree, law, VerifyNoise(*noise), rule).token_ids) == expected
        batched = StepNoise(torch.empty(0), *(torch.tensor(values)[None] for values in noise))
        walk = verify_trees(TreeBatch.from_trees([tree]), torch.tensor(law)[None], batched, rule)
        assert walk.token_ids[0, : walk.counts[0]].tolist() == expected


def test_09_candidates_that_share_a_first_token_count_once_each() -> None:
    """fms-extras#12. Right: the tree holds ab, ac, ad and ef, p(a) = p(e) = 1/2: a half of the time each."""
    a, b, c, d, e, f = range(6)
    tree = DraftTree(
        (-1, a, e, b, c, d, f), (-1, 0, 0, 1, 1, 1, 2), (0, 1, 1, 2, 2, 2, 2), (0, 0, 1, 0, 1, 2, 0), (False,) * 7,
        (1.0, 0.9, 0.1, 0.5, 0.25, 0.125, 0.1),
    )  # fmt: skip
    law = np.full((7, 6), 1 / 6)
    law[0] = [0.5, 0, 0, 0, 0.5, 0]
    law[1] = [0, 0.5, 0.25, 0.125, 0, 0.125]
    grid = torch.tensor(list(itertools.product(midpoints(8), midpoints(8))))
    uniforms = grid[:, [0, 1, 1, 0, 0, 0, 0]]  # the root's and its children's rows
    trees = TreeBatch.from_trees([tree] * len(grid))
    walk = verify_trees(trees, torch.tensor(law).expand(64, -1, -1), StepNoise(torch.empty(0), *[uniforms] * 3))
    assert torch.bincount(walk.token_ids[:, 0], minlength=6).tolist() == [32, 0, 0, 0, 32, 0]
    second = walk.token_ids[walk.token_ids[:, 0] == a, 1]
    assert torch.bincount(second, minlength=6).tolist() == [0, 16, 8, 4, 0, 4]


def test_10_a_pruned_candidate_counts_as_a_draw() -> None:
    """ml-recurrent-drafter#6. Right: p, although the probe is drawn and then pruned away (its proxy ranks below)."""
    logits = torch.tensor([8.0, 4.0, 2.0, 2.0]).log()
    config = RheoConfig(lead_tokens=2, branching=3, depth=1, tree_size=2)
    assert first_token_counts(config, logits, [1 / 16, 2 / 16, 9 / 16, 4 / 16], 1.0, (4, 4, 16)) == [16, 32, 144, 64]
    uniforms = torch.tensor(midpoints(16)).view(-1, 1, 1).expand(-1, 1, 3)
    trees = grow_trees(config, logits.expand(16, -1), lambda _: logits, torch.ones(16), uniforms)
    assert not trees.is_probe.any()
    assert (trees.law_index == -1).all()
    q, p = ([Fraction(n, 16) for n in values] for values in ((8, 4, 2, 2), (1, 2, 9, 4)))
    for size in range(1, 9):
        law = exact.output_law(RheoConfig(1, 2, 2, size), lambda _: DraftLaw(q, q), lambda _: p, 3)
        assert exact.total_variation(law, exact.target_law(lambda _: p, 3)) == 0


# Seeds


def test_11_a_uniform_rounds_up_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang#30822. Right: 1 - 2^-24 and 1 - 2^-53 at the most, below one in float32 too, and tokens that have mass."""
    ones = 0xFFFFFFFF

    def all_ones(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        shape = torch.broadcast_shapes(*(word.shape for word in (*counter, *key)))
        return (torch.full(shape, ones),) * 4

    monkeypatch.setattr(randomness_module, "philox4x32", all_ones)
    noise = StepRandomness([0], 2, 3, 5).at(torch.zeros(1, dtype=torch.long))
    assert float(noise.probe_uniforms.max()) == float(noise.accept_uniforms.max()) == 1 - 2**-24
    assert float(noise.residual_uniforms.max()) == float(noise.lead_uniforms.max()) == 1 - 2**-53
    assert float(noise.probe_uniforms.float().max()) < 1
    monkeypatch.setattr(philox, "philox4x32", lambda counter, key: np.full(np.shape(counter), ones, dtype=np.uint32))
    assert philox.uniforms24(0, 0, philox.Purpose.PROBE, 3).max() == 1 - 2**-24
    assert philox.uniforms53(0, 0, philox.Purpose.LEAD, 3).max() == 1 - 2**-53

    for law in ([0.5, 0.5, 0.0, 0.0], [0.1] * 3 + [0.7 - 2e-7, 0.0], [1 / 3, 1 / 3, 1 / 3]):  # last with mass: 1, 3, 2
        last = max(token for token, mass in enumerate(law) if mass > 0)
        assert inverse_cdf(np.array(law), 1 - 2**-53)[0] == last
        uniforms = noise.residual_uniforms[:, :1]
        tree = TreeBatch.from_trees([DraftTree((-1,), (-1,), (0,), (0,), (False,), (1.0,))])
        walk = verify_trees(tree, torch.tensor([[law]]), StepNoise(uniforms, *[uniforms] * 3))
        assert walk.token_ids.tolist() == [[last]]
    logits = torch.tensor([[[5.0, 2.0, 1.0, -700.0, -torch.inf]]])  # the tail's last token with mass is 3
    slots = level_slots(
        RheoConfig(branching=2), logits, torch.zeros(1, 1), torch.ones(1), torch.full((1, 1), 1 - 2**-24)
    )
    assert slots.token_ids[0, 0].tolist() == [0, 2]
    params = SamplingParams(temperature=0.7, top_k=4, max_new_tokens=12)
    [result] = toy_decoder().generate([[1]], params)
    assert all(0 <= token < VOCAB for token in result.token_ids)


def test_12_the_proposals_are_not_seeded_and_texts_change_with_the_batch_size() -> None:
    """sglang#33395. Right: one text and one number of accepted tokens per request, at every batch size and order."""
    params = [replace(PLAIN, seed=seed, temperature=0.8) for seed in range(8)]
    alone = [toy_decoder().generate([p], one)[0] for p, one in zip(PROMPTS, params, strict=True)]
    for size in range(1, 9):
        for order in (range(8), range(7, -1, -1)):
            results = toy_decoder(max_batch_size=size).generate([PROMPTS[i] for i in order], [params[i] for i in order])
            for i, result in zip(order, results, strict=True):
                assert result.token_ids == alone[i].token_ids
                assert result.metrics.accepted_per_level == alone[i].metrics.accepted_per_level


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("how", ["evicted", "raised"])
def test_13_an_evicted_request_resumes_with_another_text(kind: str, how: str) -> None:
    """vllm#52522. Right: the uninterrupted text. After 20 tokens another generation takes the caches, or a pass raises.

    Random numbers go on at the step where they were, penalties and minimum lengths with the tokens that there are.
    """
    params = [
        SamplingParams(seed=seed, max_new_tokens=48, min_new_tokens=40, repetition_penalty=1.2) for seed in range(3)
    ]
    prompts = [[5, 6, 7], [9] * 10, [3]]
    whole = MAKERS[kind]().generate(prompts, params)
    one = MAKERS[kind]()
    forward_tree = one.target.forward_tree
    texts: list[list[int]] = [[], [], []]
    interrupted = 0
    for event in one.stream(prompts, params):
        texts[event.index] += event.token_ids
        if interrupted == 0 and len(texts[0]) >= 20:
            interrupted += 1
            if how == "evicted":
                one.generate([[1, 2, 3, 4]], SamplingParams(seed=9, max_new_tokens=5))
            else:

                def fail_once(*args: Any) -> Any:
                    one.target.forward_tree = forward_tree  # type: ignore[method-assign]
                    raise RuntimeError("out of memory")

                one.target.forward_tree = fail_once  # type: ignore[method-assign]
    assert interrupted
    assert [tuple(text) for text in texts] == [result.token_ids for result in whole]


def test_residual_of_the_reference_is_the_one_used_above() -> None:
    """The helper of scenario 3: float64 and rational residuals agree to the last bits."""
    p, q = np.array([0.25, 0.5, 0.25]), np.array([0.75, 0.25])
    assert residual(p, ((0, 1), q)).tolist() == [0, 0.5, 0.5]

"""Faults of the kinds met elsewhere that nobody has reported, looked for by attack: three or more of each group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel, RobertaConfig, RobertaForCausalLM

from optimized import GenerationError, RheoConfig, RheoDecoder, SamplingParams
from optimized.models import CausalDrafter, TargetModel
from optimized.models.checkpoints import load_head, read_tensors
from optimized.models.eagle3 import Eagle3Drafter
from optimized.slots import level_slots
from optimized.target_laws import SamplingBatch, TargetLaws
from proofs_tests.test_field_faults_use import HIDDEN, RAW, TARGET_VOCAB, Letters, head_tensors, toy_decoder, write
from proofs_tests.tiny_models import spread
from proofs_tests.tiny_pairs import CONFIG, MAKERS, VOCAB, causal_decoder, eagle_decoder, eagle_head, llama, near_copy
from proofs_tests.toy import random_logits
from proofs_tests.toy_models import PathDrafter, PathTarget
from reference.philox import verify_noise
from reference.verification import verify

PROMPTS = [[5, 6, 7], [9] * 10, [3], [1, 2]]
PARAMS = [SamplingParams(seed=s, max_new_tokens=n, min_new_tokens=n) for s, n in ((1, 16), (2, 24), (3, 9), (4, 20))]


def texts(results: Sequence[Any]) -> list[Any]:
    return [result and result.token_ids for result in results]


# Numerics


def test_a_rejected_node_that_is_nan_spoils_the_rows_beside_it() -> None:
    """Right: the text of the healthy model. The draft offers token 90, whose hidden states are NaN, in every tree; the
    target never says it. A masked key counts 0 times NaN, which is NaN, unless the pass is repeated with NaN contained.
    """
    model = llama()
    params = SamplingParams(seed=3, logit_bias={90: -np.inf}, max_new_tokens=20, min_new_tokens=20)
    draft = near_copy(model)
    draft.lm_head = torch.nn.Linear(32, VOCAB)
    draft.lm_head.weight.data.copy_(model.lm_head.weight)
    draft.lm_head.bias.data.zero_()[90] = 3.0  # among the leads or the fills, hardly ever the probe
    expected = causal_decoder(model=model, draft=draft).generate([[5, 6], [7]], params)
    broken = llama()
    broken.model.embed_tokens.weight[90] = np.nan
    one = causal_decoder(model=broken, draft=draft)
    assert any(90 in tree.token_ids for tree, _, _ in one.trace([5, 6], params, steps=3))
    assert texts(one.generate([[5, 6], [7]], params)) == texts(expected)
    with pytest.raises(GenerationError, match="request 0: the target's logits were NaN"):
        one.generate([[5, 90, 6]], params)


def test_a_bias_beyond_float32_is_infinite_for_the_kernels_alone() -> None:
    """Right: token 2, in float64 and in the float32 masks alike; and no mate's bits change for it."""
    logits = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(0))
    asked = [SamplingParams(logit_bias={2: 1e300, 3: 1e299}), SamplingParams()]
    laws = TargetLaws(logits, SamplingBatch.from_params(asked, [[0], [0]], 5))
    assert laws(torch.tensor([0, 0]))[0].tolist() == [0, 0, 1, 0, 0]
    masked = laws.masked_logits()
    assert masked[0, 0].softmax(0).tolist() == [0, 0, 1, 0, 0]
    assert torch.equal(masked[1], logits[1])


@pytest.mark.parametrize("temperature", [1e300, 1e-5])
def test_extreme_temperatures_make_laws_that_are_none(temperature: float) -> None:
    """Right: uniform over all that can be said, and the argmax; for the law and for the probe's, without NaN."""
    logits = torch.tensor([[[3.0, 1.0, -2.0, -torch.inf]]])
    batch = SamplingBatch.from_params([SamplingParams(temperature=temperature)], [[0]], 4)
    law = TargetLaws(logits, batch)(torch.tensor([0]))[0]
    expected = [1 / 3, 1 / 3, 1 / 3, 0] if temperature > 1 else [1, 0, 0, 0]
    torch.testing.assert_close(law, torch.tensor(expected).double())
    slots = level_slots(RheoConfig(branching=3), logits, torch.zeros(1, 1), batch.temperatures, torch.full((1, 1), 0.9))
    assert slots.law[0, 0].tolist() == ([0, 0.5, 0.5, 0] if temperature > 1 else [0, 1, 0, 0])


# Distribution


@pytest.mark.parametrize(
    ("ids", "size", "message"),
    [
        ([1, 4, 4, 9], 4, "must increase"),
        ([9, 4, 3, 1], 4, "must increase"),
        ([-3, 4, 5, 9], 4, "must increase from 0"),
        ([1, 4, 5], 4, r"shape \[3\], its vocab_size is 4"),
    ],
)
def test_a_drafter_whose_map_names_a_token_twice(ids: list[int], size: int, message: str) -> None:
    """Right: refused. Its probability would be counted twice, and ties would go by another order than the rule's."""
    drafter = PathDrafter(size, vocab_map=torch.tensor(ids))
    with pytest.raises(ValueError, match=message):
        RheoDecoder(PathTarget(13), drafter)  # type: ignore[arg-type]


def test_a_drafter_that_gives_more_logits_than_it_says() -> None:
    """Right: an error with both numbers, before a token that the target does not have reaches its embedding."""
    drafter = PathDrafter(20)
    drafter.vocab_size = 10
    with pytest.raises(GenerationError, match="the draft gave 20 logits; its vocab_size is 10"):
        RheoDecoder(PathTarget(13), drafter).generate([[1]])  # type: ignore[arg-type]


def test_a_draft_that_never_answers_the_same_twice() -> None:
    """Right: the walk of the reference on the very tree, with the probe laws in it and the request's random numbers.

    Any draft is lossless as long as the law that drew is the one that verifies: also one of new numbers at every call.
    """
    rng = np.random.default_rng(5)
    target_logits = random_logits(1, 13, "normal")
    drafter = PathDrafter(13, lambda _: rng.normal(scale=2, size=13).astype(np.float32))
    one = RheoDecoder(PathTarget(13, target_logits), drafter, config=CONFIG)  # type: ignore[arg-type]
    text = [1, 2, one.generate([[1, 2]], replace(PARAMS[0], max_new_tokens=1, min_new_tokens=0))[0].token_ids[0]]
    params = SamplingParams(seed=1, max_new_tokens=60)
    probes = 0
    for step, (tree, walk, _) in enumerate(one.trace([1, 2], params, steps=20), start=1):
        rows = [torch.from_numpy(target_logits((*text, *tree.path(row)))) for row in range(len(tree))]
        noise = verify_noise(1, step, CONFIG.tree_size + 1)
        assert verify(tree, torch.stack(rows).double().softmax(-1).numpy(), noise) == walk
        text += walk.token_ids
        probes += sum(tree.is_probe[row] for row in walk.accepted_nodes)
    assert probes > 0


# Seeds


def test_what_is_only_asked_to_be_shown_changes_the_text() -> None:
    """Right: one text, with log-probabilities, streamed, with a tokenizer, from the seed that its result names."""
    [plain] = toy_decoder().generate([[1, 2]], PARAMS[0])
    [shown] = toy_decoder(tokenizer=Letters()).generate([[1, 2]], replace(PARAMS[0], logprobs=5))
    streamed = [token for event in toy_decoder().stream([[1, 2]], PARAMS[0]) for token in event.token_ids]
    assert plain.token_ids == shown.token_ids == tuple(streamed)
    [unseeded] = toy_decoder().generate([[1, 2]], replace(PARAMS[0], seed=None))
    [again] = toy_decoder().generate([[1, 2]], replace(PARAMS[0], seed=unseeded.seed))
    assert again.token_ids == unseeded.token_ids
    twice = toy_decoder().generate([[1, 2], [1, 2]], PARAMS[0])
    assert texts(twice) == [plain.token_ids] * 2
    highest = replace(PARAMS[0], seed=np.uint64(2**64 - 1))  # type: ignore[arg-type]
    assert toy_decoder().generate([[1, 2]], highest)[0].seed == 2**64 - 1


@pytest.mark.parametrize("kind", MAKERS)
def test_the_state_of_torch_changes_the_text(kind: str) -> None:
    """Right: one text whatever torch's generator and default dtype are, and both are as they were afterwards."""
    expected = texts(MAKERS[kind]().generate(PROMPTS, PARAMS))
    one = MAKERS[kind]()
    torch.manual_seed(77)
    state = torch.random.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        assert texts(one.generate(PROMPTS, PARAMS)) == expected
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_decoders_that_share_a_draft_mix_their_texts_up() -> None:
    """Right: each its own text and acceptance, with two targets and one drafter between them, step by step in turn."""
    model, other = llama(), llama(seed=6)
    drafter = causal_decoder(model=model).drafter
    pair = [RheoDecoder(TargetModel(m), drafter, config=CONFIG) for m in (model, other)]
    expected = [one.generate([[5, 6, 7]], PARAMS[0])[0] for one in pair]
    streams = [one.stream([[5, 6, 7]], PARAMS[0]) for one in pair]
    results: list[Any] = [None, None]
    while None in results:
        for place, stream in enumerate(streams):
            event = next(stream, None)
            if event is not None and event.result is not None:
                results[place] = event.result
    for result, alone in zip(results, expected, strict=True):
        assert result.token_ids == alone.token_ids
        assert result.metrics.accepted_per_level == alone.metrics.accepted_per_level


# Trees


@pytest.mark.parametrize("vocab", [1, 2, 3])
@pytest.mark.parametrize("lead_tokens", [0, 1, 5])
def test_more_slots_than_tokens(vocab: int, lead_tokens: int) -> None:
    """Right: the argmax chain and full trees, for vocabularies of one token and more, with K = 4, depth 6 and any m."""
    target = PathTarget(vocab)
    config = RheoConfig(lead_tokens, branching=4, depth=6, tree_size=30, beam=7)
    one = RheoDecoder(target, PathDrafter(vocab), config=config)  # type: ignore[arg-type]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature, seed=1, max_new_tokens=12)
        [result] = one.generate([[0]], params)
        assert len(result.token_ids) == 12
        if temperature == 0 or vocab == 1:
            text = [0]
            while len(text) < 13:
                text.append(int(target.logits(tuple(text)).argmax()))
            assert list(result.token_ids) == text[1:]


@pytest.mark.parametrize("lead_tokens", [0, 1])
def test_a_draft_that_can_say_one_token_only(lead_tokens: int) -> None:
    """Right: a chain of that token, the probe itself if m = 0, and plain decoding's greedy text around it."""
    target_logits = random_logits(1, 13, "normal")
    drafter = PathDrafter(13, lambda _: np.where(np.arange(13) == 7, 0.0, -np.inf).astype(np.float32))
    config = RheoConfig(lead_tokens, branching=3, depth=3, tree_size=8)
    one = RheoDecoder(PathTarget(13, target_logits), drafter, config=config)  # type: ignore[arg-type]
    for tree, _, _ in one.trace([1], SamplingParams(seed=2, max_new_tokens=30), steps=4):
        assert tree.token_ids == (-1, 7, 7, 7)
        assert tree.is_probe == (False, *[lead_tokens == 0] * 3)
    [result] = one.generate([[1]], SamplingParams(temperature=0, max_new_tokens=15))
    [plain] = RheoDecoder(PathTarget(13, target_logits), None).generate(  # type: ignore[arg-type]
        [[1]], SamplingParams(temperature=0, max_new_tokens=15)
    )
    assert result.token_ids == plain.token_ids


@pytest.mark.parametrize("kind", MAKERS)
def test_a_tree_that_reaches_beyond_the_end_of_the_context(kind: str) -> None:
    """Right: plain decoding's greedy text up to the last position; a mate that ends there too does not matter."""
    model = llama(max_position_embeddings=32, eos_token_id=None)
    params = SamplingParams(temperature=0, max_new_tokens=100)
    prompts = [[5, 6, 7], [9] * 20, [3] * 31]
    results = MAKERS[kind](model=model).generate(prompts, params)
    plain = RheoDecoder(TargetModel(model), None, config=CONFIG).generate(prompts, params)
    assert texts(results) == texts(plain)
    assert [len(result.token_ids) for result in results] == [29, 12, 1]


# Caches and positions


def test_an_encoder_taken_for_a_decoder() -> None:
    """Right: refused where it looks ahead or counts positions from elsewhere; else plain decoding's text."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 48, "max_position_embeddings": 64}  # fmt: skip
    with pytest.raises(ValueError, match="BertLMHeadModel cannot run tree attention: its attention looks ahead"):
        TargetModel(spread(BertLMHeadModel(BertConfig(**sizes))))
    with pytest.raises(ValueError, match="it does not count positions from 0"):
        CausalDrafter(spread(RobertaForCausalLM(RobertaConfig(is_decoder=True, **sizes))), VOCAB)
    torch.manual_seed(0)
    model = spread(BertLMHeadModel(BertConfig(is_decoder=True, **sizes)))
    params = SamplingParams(temperature=0, max_new_tokens=15)
    one = causal_decoder(model=model)
    text = [5, 6, 7]
    with torch.no_grad():
        while len(text) < 18:
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    assert list(one.generate([[5, 6, 7]], params)[0].token_ids) == text[3:]


def test_a_decoder_made_while_another_one_generates_changes_its_features() -> None:
    """Right: the first one's text and acceptance; the second decoder on its target reads other layers."""
    model = llama()
    one = eagle_decoder(model=model)
    expected = one.generate(PROMPTS, PARAMS)
    results: dict[int, Any] = {}
    for count, event in enumerate(one.stream(PROMPTS, PARAMS)):
        if count == 5:
            RheoDecoder(one.target, Eagle3Drafter(eagle_head(), model.get_input_embeddings(), None, (0, 0, 0)))
        if event.result is not None:
            results[event.index] = event.result
    for index, result in results.items():
        assert result.token_ids == expected[index].token_ids
        assert result.metrics.accepted_per_level == expected[index].metrics.accepted_per_level


@pytest.mark.parametrize("kind", MAKERS)
def test_caches_taken_at_every_single_step(kind: str) -> None:
    """Right: the same texts, whenever the caches are lost: after the prompts, when a mate has just ended."""
    expected = texts(MAKERS[kind]().generate(PROMPTS, PARAMS))
    one = MAKERS[kind]()
    for when in range(12):
        results: list[Any] = [None] * len(PROMPTS)
        steps = 0
        for event in one.stream(PROMPTS, PARAMS):
            if event.index == 0 or results[0] is not None:
                steps += 1
                if steps == when:
                    one.generate([[4, 4]], SamplingParams(seed=1, max_new_tokens=2))
            if event.result is not None:
                results[event.index] = event.result
        assert texts(results) == expected


def test_a_long_mate_changes_the_rotation_of_a_short_text() -> None:
    """Right: one text, alone and beside a text at the context's end, where dynamic scaling turns with the longest."""
    model = llama(
        max_position_embeddings=48,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        eos_token_id=None,
    )
    one = causal_decoder(model=model, draft=near_copy(model))
    params = [SamplingParams(seed=1, max_new_tokens=20), SamplingParams(seed=2, max_new_tokens=6)]
    alone = one.generate([[5, 6, 7]], params[0])
    together = one.generate([[5, 6, 7], [8] * 42], params)
    assert together[0].token_ids == alone[0].token_ids
    assert together[0].metrics.accepted_per_level == alone[0].metrics.accepted_per_level


# Stopping and options


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1.7, 2]], "prompt 0 must be text or a list of integers"),
        (torch.tensor([[1.0, 2.0]]), "prompt 0 must be text or a list of integers"),
        ([1.0, 2.0], "prompt 0 must be text or a list of integers"),
        ([[1], ["a"]], "prompt 1 must be text or a list of integers"),
        (None, "prompts must be text or token ids"),
    ],
)
def test_tokens_that_are_no_integers_are_rounded(prompts: Any, message: str) -> None:
    """Right: ValueError; 1.7 is not token 1."""
    with pytest.raises(ValueError, match=message):
        toy_decoder().generate(prompts)


def test_options_as_a_dictionary_are_taken_for_something_else() -> None:
    """Right: ValueError that says what is wanted."""
    for params in ({"temperature": 0}, [{"temperature": 0}]):
        with pytest.raises(ValueError, match=r"params must be SamplingParams, one for all or a list of them"):
            toy_decoder().generate([[1]], params)  # type: ignore[arg-type]


def test_a_tokenizer_that_raises_ends_everyones_text() -> None:
    """Right: the request whose tokens it cannot decode fails by name, its mates have their texts."""
    expected = toy_decoder(tokenizer=Letters(), eos=()).generate(PROMPTS[:1] + PROMPTS[2:3], PARAMS[0])

    class Broken(Letters):
        def decode(self, ids: Sequence[int], **options: Any) -> str:
            if 11 in ids:
                raise KeyError("token 11")
            return super().decode(ids, **options)

    params = [replace(PARAMS[0], logit_bias={11: -np.inf})] * 2
    expected = toy_decoder(tokenizer=Letters(), eos=()).generate([[5, 6, 7], [3]], params)
    asked = [params[0], replace(PARAMS[0], logit_bias={11: 50.0}), params[1]]
    with pytest.raises(GenerationError, match="request 1: KeyError: 'token 11'") as caught:
        toy_decoder(tokenizer=Broken(), eos=()).generate([[5, 6, 7], [1], [3]], asked)
    assert texts(caught.value.results) == [expected[0].token_ids, None, expected[1].token_ids]


def test_an_end_of_text_beyond_the_vocabulary() -> None:
    """Right: it cannot be said, so it never ends a text, and a minimum length has nothing to forbid for it."""
    one = toy_decoder(eos=(0, 13, 50))
    [result] = one.generate([[1, 2]], SamplingParams(seed=1, min_new_tokens=5, max_new_tokens=20))
    assert 0 not in result.token_ids[:5]


# Checkpoints


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    """Right: refused at once and by name; every request would fail with it, and the weights would not be suspected."""
    tensors = head_tensors()
    tensors["norm.weight"][3] = value
    with pytest.raises(ValueError, match=r"norm\.weight holds NaN or infinity"):
        load_head(write(tmp_path / "head", RAW, tensors), HIDDEN, TARGET_VOCAB)


def test_two_shards_that_hold_the_same_weight(tmp_path: Path) -> None:
    """Right: refused; which of the two counts would depend on their names."""
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.zeros(1)}, tmp_path / name)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="shards that hold the same weights: x"):
        read_tensors(tmp_path)


def test_a_map_of_ids_where_offsets_are_meant(tmp_path: Path) -> None:
    """Right: refused. Absolute ids taken for offsets increase too; t2d, or the vocabulary's end, tells them apart."""
    tensors = head_tensors()
    tensors["d2t"] = tensors["d2t"] + torch.arange(37)
    with pytest.raises(ValueError, match="d2t maps draft id 32 to 101"):
        load_head(write(tmp_path / "a", RAW, tensors), HIDDEN, TARGET_VOCAB)
    ids = torch.arange(37)
    near = head_tensors() | {"d2t": ids.clone(), "t2d": torch.isin(torch.arange(TARGET_VOCAB), ids)}
    with pytest.raises(ValueError, match=r"t2d .* does not mark the 37 target ids"):
        load_head(write(tmp_path / "b", RAW, near), HIDDEN, TARGET_VOCAB)


# Batch, speed, use


@pytest.mark.parametrize("who", ["target", "draft"])
@pytest.mark.parametrize("where", ["prompt", "text"])
def test_a_model_that_raises_for_one_request_ends_the_batch(who: str, where: str) -> None:
    """Right: that request fails by name with the exception, every mate has the text that it has alone."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, 12, size=3).tolist() for _ in range(7)]
    params = [replace(PARAMS[0], seed=seed) for seed in range(7)]
    expected = texts(toy_decoder(eos=()).generate(prompts, params))
    one = toy_decoder(eos=())
    part = one.target if who == "target" else one.drafter
    good = part.logits  # type: ignore[union-attr]

    def logits(path: tuple[int, ...]) -> np.ndarray:
        if path[:3] == tuple(prompts[4]) and (where == "prompt" or len(path) > 10):
            raise MemoryError("too long")
        return good(path)

    part.logits = logits  # type: ignore[union-attr]
    with pytest.raises(GenerationError, match="request 4: MemoryError: too long") as caught:
        one.generate(prompts, params)
    assert list(caught.value.failures) == [4]
    assert isinstance(caught.value.__cause__, MemoryError)
    assert texts(caught.value.results) == [None if i == 4 else text for i, text in enumerate(expected)]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_batch_too_large_for_the_memory(kind: str) -> None:
    """Right: the texts of smaller batches, where a pass over more than two requests raises."""
    expected = texts(MAKERS[kind]().generate(PROMPTS, PARAMS))
    one = MAKERS[kind]()
    forward_tree = one.target.forward_tree

    def limited(token_ids: Tensor, *args: Any, **options: Any) -> Any:
        if len(token_ids) > 2:
            raise torch.OutOfMemoryError("no memory left")
        return forward_tree(token_ids, *args, **options)

    one.target.forward_tree = limited  # type: ignore[method-assign]
    assert texts(one.generate(PROMPTS, PARAMS)) == expected


@pytest.mark.parametrize("company", [1, 4])
def test_a_model_that_raises_once_fails_whoever_is_alone(company: int) -> None:
    """Right: all texts, alone as in company, at whichever pass it raises; twice at one step is a failure."""
    expected = texts(toy_decoder(eos=()).generate(PROMPTS[:company], PARAMS[:company]))
    for method in ("forward_tree", "prefill"):
        for when in (1, 2, 5):
            one = toy_decoder(eos=())
            original, calls = getattr(one.target, method), []

            def raising(*args: Any, when: int = when, calls: list = calls, original: Any = original) -> Any:
                calls.append(1)
                if len(calls) == when:
                    raise RuntimeError("once")
                return original(*args)

            setattr(one.target, method, raising)
            assert texts(one.generate(PROMPTS[:company], PARAMS[:company])) == expected
            assert len(calls) >= when or method == "prefill"


@pytest.mark.parametrize("kind", MAKERS)
def test_an_interrupted_or_abandoned_generation_leaves_the_decoder_broken(kind: str) -> None:
    """Right: an interrupt comes through as it is; after it, and after a stream left alone, all is as before."""
    expected = texts(MAKERS[kind]().generate(PROMPTS, PARAMS))
    one = MAKERS[kind]()
    for left in (1, 4, 9):
        stream = one.stream(PROMPTS, PARAMS)
        for _ in range(left):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert texts(one.generate(PROMPTS, PARAMS)) == expected
    forward_tree, calls = one.target.forward_tree, []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward_tree(*args, **options)

    one.target.forward_tree = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        one.generate(PROMPTS, PARAMS)
    assert texts(one.generate(PROMPTS, PARAMS)) == expected
    assert not torch.is_inference_mode_enabled()

"""``RheoDecoder`` on toy models: same seed same text in any company, exact stops, streams, failures, accounts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from optimized import GenerationError, RheoConfig, RheoDecoder, SamplingParams
from optimized.static_trees import count_acceptance
from proofs_tests.toy import random_logits
from proofs_tests.toy_models import PathDrafter, PathTarget

VOCAB = 13
CONFIG = RheoConfig(lead_tokens=1, branching=3, depth=3, tree_size=8)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 0], [3, 1, 4, 1, 5], [9, 2], [6], [5, 3, 5]]
MIXED = [
    SamplingParams(temperature=1.0, seed=1, max_new_tokens=17),
    SamplingParams(temperature=0.0, seed=2, max_new_tokens=9),
    SamplingParams(temperature=0.5, top_k=4, seed=3, max_new_tokens=23),
    SamplingParams(temperature=1.3, top_p=0.7, seed=4, max_new_tokens=1),
    SamplingParams(temperature=0.8, min_p=0.1, seed=5, max_new_tokens=12, repetition_penalty=1.4),
    SamplingParams(temperature=1.0, logit_bias={3: -5.0, 4: 2.0}, seed=6, max_new_tokens=20),
    SamplingParams(temperature=1.0, seed=7, max_new_tokens=15, stop_token_ids=(5, 6)),
    SamplingParams(temperature=1e-6, seed=8, max_new_tokens=11, min_new_tokens=4),
]


def decoder(config: RheoConfig = CONFIG, **options: Any) -> RheoDecoder:
    """Draft and target are related but different: the draft's logits are the target's plus noise."""
    target_logits, noise = random_logits(1, VOCAB, "normal"), random_logits(2, VOCAB, "normal")
    target = PathTarget(VOCAB, target_logits, eos=options.pop("eos", (0,)), max_positions=options.pop("context", None))
    drafter = PathDrafter(VOCAB, lambda path: target_logits(path) + np.float32(0.4) * noise(path))
    return RheoDecoder(target, drafter, config=config, **options)  # type: ignore[arg-type]


STATIC = RheoConfig.static([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
CHAIN = RheoConfig.static([(0,), (0, 0), (0, 0, 0)])
SHAPES = {
    "rheo": CONFIG,
    "topk": replace(CONFIG, proposal="topk"),
    "two probes": replace(CONFIG, probes=2),
    "static": STATIC,
}


@pytest.mark.parametrize("rule", ["rheo", "rrsw"])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_seed_same_text_alone_and_in_any_row_of_any_batch(rule: Any, shape: str) -> None:
    config = replace(SHAPES[shape], verification=rule)
    alone = [decoder(config).generate([p], params)[0] for p, params in zip(PROMPTS, MIXED, strict=True)]
    order = np.random.default_rng(0).permutation(len(PROMPTS)).tolist()
    for rows in (list(range(len(PROMPTS))), order, order[:3]):
        for size in (32, 3):
            batch = decoder(config, max_batch_size=size).generate([PROMPTS[i] for i in rows], [MIXED[i] for i in rows])
            for place, (row, result) in enumerate(zip(rows, batch, strict=True)):
                assert result.index == place
                assert result.token_ids == alone[row].token_ids
                assert result.finish_reason == alone[row].finish_reason
                counts = (result.metrics.accepted_per_level, result.metrics.target_passes)
                assert counts == (alone[row].metrics.accepted_per_level, alone[row].metrics.target_passes)


def test_different_seeds_give_different_texts() -> None:
    texts = {
        decoder().generate([[1, 2]], SamplingParams(seed=seed, max_new_tokens=20, min_new_tokens=20))[0].token_ids
        for seed in range(20)
    }
    assert len(texts) == 20


def test_greedy_is_the_argmax_chain_whatever_the_tree() -> None:
    target_logits = random_logits(1, VOCAB, "normal")
    for prompt in PROMPTS:
        text = list(prompt)
        while len(text) < len(prompt) + 12:
            text.append(int(target_logits(tuple(text)).argmax()))
        one_node = RheoConfig(lead_tokens=0, branching=1, depth=1, tree_size=1)
        for config in (*SHAPES.values(), CHAIN, one_node):
            [result] = decoder(config, eos=()).generate([prompt], SamplingParams(temperature=0, max_new_tokens=12))
            assert list(result.token_ids) == text[len(prompt) :]


def test_a_good_draft_needs_fewer_passes_and_plain_decoding_one_per_token() -> None:
    params = SamplingParams(seed=5, max_new_tokens=60, min_new_tokens=60)
    fast = decoder(eos=()).generate([[1]], params)[0].metrics
    target = PathTarget(VOCAB)
    plain = RheoDecoder(target, None, config=CONFIG).generate([[1]], params)[0].metrics  # type: ignore[arg-type]
    assert plain.target_passes == 59 == target.passes
    assert plain.tau == 1
    assert fast.tau > 1.5
    assert fast.target_passes < 40


def test_a_static_chain_gives_the_text_of_the_chain_that_grows() -> None:
    """Plain speculative sampling, two ways: the same tokens are proposed and accepted, seed by seed."""
    grown = RheoConfig(lead_tokens=0, branching=1, depth=3, tree_size=3, beam=1)
    for seed in range(10):
        params = SamplingParams(seed=seed, max_new_tokens=30)
        [static], [other] = (decoder(config).generate([[1, 2]], params) for config in (CHAIN, grown))
        assert static.token_ids == other.token_ids
        assert static.metrics.accepted_per_level == other.metrics.accepted_per_level


def test_a_trace_of_static_trees_measures_their_acceptance() -> None:
    """The target's own law as the draft: every first child is accepted, so no second one is ever tested."""
    logits = random_logits(1, VOCAB, "normal")
    perfect = RheoDecoder(PathTarget(VOCAB, logits), PathDrafter(VOCAB, logits), config=STATIC)  # type: ignore[arg-type]
    found = count_acceptance(perfect.trace([1, 2], SamplingParams(seed=1, max_new_tokens=60), steps=12), 3)
    assert found.tested.tolist() == found.accepted.tolist() == [36, 0, 0]
    related = count_acceptance(decoder(STATIC, eos=()).trace([1, 2], SamplingParams(seed=1), steps=12), 3)
    assert related.tested[0] > related.accepted[0] > 0
    assert related.tested[1] > 0


def test_max_new_tokens_cuts_in_the_middle_of_an_accepted_path() -> None:
    """The first n tokens of a longer run, for every n; at some n the cut falls inside an accepted path."""
    params = SamplingParams(seed=5, max_new_tokens=24, min_new_tokens=24)
    whole = decoder(eos=()).generate([[1]], params)[0]
    inside = 0
    for n in range(1, 24):
        [result] = decoder(eos=()).generate([[1]], replace(params, max_new_tokens=n, min_new_tokens=n))
        assert result.token_ids == whole.token_ids[:n]
        assert result.finish_reason == "length"
        inside += 1 + result.metrics.emitted_tokens > n
    assert inside > 3


def test_eos_and_stop_tokens_end_the_text_and_are_its_last_token() -> None:
    for seed in range(30):
        params = SamplingParams(seed=seed, max_new_tokens=40, min_new_tokens=3, stop_token_ids=(7,))
        [result] = decoder(eos=(2,)).generate([[1]], params)
        assert not {2, 7} & set(result.token_ids[:-1])
        assert len(result.token_ids) >= 3
        last = result.token_ids[-1]
        assert result.finish_reason == ("eos" if last == 2 else "stop" if last == 7 else "length")


def test_the_context_ends_the_text() -> None:
    [result] = decoder(eos=(), context=10).generate([[1, 2, 3]], SamplingParams(seed=0, max_new_tokens=50))
    assert len(result.token_ids) == 7
    assert result.finish_reason == "length"
    with pytest.raises(ValueError, match="must be shorter than the context, 3"):
        decoder(context=3).generate([[1, 2, 3]])


def test_stream_gives_what_generate_gives_and_raises_bad_arguments_at_once() -> None:
    whole = decoder().generate(PROMPTS, MIXED)
    pieces: dict[int, list[int]] = {i: [] for i in range(len(PROMPTS))}
    results = {}
    for event in decoder().stream(PROMPTS, MIXED):
        assert event.index not in results
        pieces[event.index] += event.token_ids
        if event.finished:
            results[event.index] = event.result
    for i, result in enumerate(whole):
        assert tuple(pieces[i]) == result.token_ids == results[i].token_ids
    with pytest.raises(ValueError, match="there is no prompt"):
        decoder().stream([])


def test_generations_that_share_their_models_take_the_caches_from_each_other_and_keep_their_texts() -> None:
    one = decoder()
    plain = RheoDecoder(one.target, None, config=CONFIG)
    params = SamplingParams(seed=1, max_new_tokens=30, min_new_tokens=30)
    expected = [decoder().generate([[1], [5, 6]], params)[i].token_ids for i in range(2)]
    other = decoder().generate([[4]], MIXED[0])[0].token_ids
    old = one.stream([[1], [5, 6]], params)
    results, plain_text = {}, plain.generate([[1]], MIXED[1])[0].token_ids
    for count, event in enumerate(old):
        if event.result:
            results[event.index] = event.result.token_ids
        if count % 3 == 0:
            assert one.generate([[4]], MIXED[0])[0].token_ids == other
        elif count % 3 == 1:
            assert plain.generate([[1]], MIXED[1])[0].token_ids == plain_text
    assert [results[0], results[1]] == expected


def test_two_generations_in_turns() -> None:
    one = decoder()
    expected = [decoder().generate([p], params)[0].token_ids for p, params in zip(PROMPTS[:2], MIXED[:2], strict=True)]
    streams = [one.stream([p], params) for p, params in zip(PROMPTS[:2], MIXED[:2], strict=True)]
    texts: list[list[int]] = [[], []]
    for events in itertools.zip_longest(*streams):
        for text, event in zip(texts, events, strict=True):
            text += event.token_ids if event else ()
    assert [tuple(text) for text in texts] == expected


def test_metrics_account_for_every_token() -> None:
    for result in decoder(eos=(2,)).generate(PROMPTS, MIXED):
        metrics = result.metrics
        assert sum(metrics.accepted_per_level) + metrics.target_passes == metrics.emitted_tokens
        assert metrics.generated_tokens == len(result.token_ids) <= 1 + metrics.emitted_tokens
        assert metrics.probe_accepted <= metrics.probe_offered
        assert all(a >= b for a, b in zip(metrics.accepted_per_level, metrics.accepted_per_level[1:], strict=False))
        parts = metrics.draft_seconds + metrics.target_seconds + metrics.sampling_seconds
        assert 0 < parts <= metrics.total_seconds
    greedy = decoder().generate(PROMPTS, SamplingParams(temperature=0))
    assert all(result.metrics.probe_offered == 0 for result in greedy)


def test_logprobs_are_the_raw_log_softmax_at_every_token() -> None:
    target_logits = random_logits(1, VOCAB, "normal")
    params = SamplingParams(temperature=0.7, top_k=5, seed=9, max_new_tokens=20, logprobs=3)
    mate = SamplingParams(seed=1, max_new_tokens=7)
    with_logprobs, without = decoder().generate([[1, 2], [3]], [params, mate])
    assert without.logprobs is None
    assert with_logprobs.logprobs is not None
    text = [1, 2]
    for entry in with_logprobs.logprobs:
        law = torch.from_numpy(target_logits(tuple(text))).double().log_softmax(0)
        assert entry.logprob == pytest.approx(float(law[entry.token_id]), abs=1e-5)
        assert [token for token, _ in entry.top] == law.topk(3).indices.tolist()
        text.append(entry.token_id)
    assert text[2:] == list(with_logprobs.token_ids)


@pytest.mark.parametrize("who", ["target at the prompt", "target in a tree", "draft"])
def test_nan_fails_its_own_request_and_the_others_are_not_lost(who: str) -> None:
    healthy = decoder(eos=()).generate(PROMPTS, [replace(params, stop_token_ids=()) for params in MIXED])
    one = decoder(eos=())
    params = [replace(p, stop_token_ids=()) for p in MIXED]
    broken = one.drafter if who == "draft" else one.target
    good = broken.logits  # type: ignore[union-attr]

    def logits(path: tuple[int, ...]) -> Any:
        poisoned = path[:7] == tuple(PROMPTS[2]) and (who == "target at the prompt" or len(path) > 7)
        return good(path) * (np.float32(np.nan) if poisoned else np.float32(1))

    broken.logits = logits  # type: ignore[union-attr]
    with pytest.raises(GenerationError, match=rf"request 2: the {who.split()[0]}'s logits were NaN") as caught:
        one.generate(PROMPTS, params)
    assert list(caught.value.failures) == [2]
    for index, result in enumerate(caught.value.results):
        assert (result is None) == (index == 2)
        assert result is None or result.token_ids == healthy[index].token_ids
    with pytest.raises(GenerationError, match="request 0"):
        one.trace(PROMPTS[2], params[2], steps=50)
    broken.logits = good  # type: ignore[union-attr]
    assert one.generate(PROMPTS, params)[2].token_ids == healthy[2].token_ids


def test_a_request_that_fails_has_a_last_event_at_once() -> None:
    """So that whoever streams it need not wait for its mates; also where a model raises for one request alone."""
    for poison in (np.float32(np.nan), None):
        one = decoder(eos=())
        good = one.drafter.logits  # type: ignore[union-attr]

        def logits(path: tuple[int, ...], good: Any = good, poison: Any = poison) -> Any:
            if path[0] == 4 and len(path) > 4:
                if poison is None:
                    raise RuntimeError("no more")
                return good(path) * poison
            return good(path)

        one.drafter.logits = logits  # type: ignore[union-attr]
        events = []
        with pytest.raises(GenerationError) as caught:
            events.extend(one.stream([[1, 2], [4]], SamplingParams(seed=1, max_new_tokens=20)))
        last = [event for event in events if event.finished]
        assert {event.index: event.failure for event in last} == {0: None, 1: caught.value.failures[1]}
        if poison is not None:  # where a model raises, one half of a batch goes on after the other
            assert (last[-1].index, last[-1].result is not None) == (0, True)
        assert [event.index for event in events].count(1) > 1
        assert not isinstance(caught.value, ValueError)  # the caller did nothing wrong


def test_ignored_ends_of_text_are_tokens_like_others() -> None:
    """The law does not change: the text begins as the one that ends there."""
    for seed in range(20):
        params = SamplingParams(seed=seed, max_new_tokens=30)
        [ended] = decoder().generate([[1, 2]], params)
        [whole] = decoder().generate([[1, 2]], replace(params, ignore_eos=True))
        assert whole.token_ids[: len(ended.token_ids)] == ended.token_ids
        assert (len(whole.token_ids), whole.finish_reason) == (30, "length")
    with pytest.raises(ValueError, match="ignore_eos must be True or False, got 1"):
        SamplingParams(ignore_eos=1)  # type: ignore[arg-type]


def test_arguments_of_another_type_are_named() -> None:
    target, drafter = decoder().target, decoder().drafter
    with pytest.raises(ValueError, match="config must be a RheoConfig or None, got dict"):
        RheoDecoder(target, drafter, config={})  # type: ignore[arg-type]
    assert RheoDecoder(target, drafter, max_batch_size=np.int64(4)).max_batch_size == 4  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_batch_size must be an integer of at least 1, got '8'"):
        RheoDecoder(target, drafter, max_batch_size="8")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="the drafter object has no vocab_map, vocab_size, feature_layers, max_positions"
    ):
        RheoDecoder(target, object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="which draft goes with some/target"):
        RheoDecoder.from_pretrained("some/target")
    with pytest.raises(ValueError, match="max_batch_size must be"):  # before anything is loaded
        RheoDecoder.from_pretrained("some/target", None, max_batch_size=0)


def test_a_trace_tells_the_token_at_every_root() -> None:
    """Whatever thresholds leave out: the root is the newest token of the text before the step."""
    for config in (CONFIG, replace(CONFIG, score_threshold=0.4)):
        params = SamplingParams(seed=3, max_new_tokens=40)
        [result] = decoder(config, eos=()).generate([[1, 2]], params)
        steps = decoder(config, eos=()).trace([1, 2], params, steps=30)
        text, found = result.token_ids, 0
        for step in steps:
            path = (step.root_token, *step.walk.token_ids)
            found = next(i for i in range(found, len(text)) if text[i : i + len(path)] == path[: len(text) - i])
            assert step.tree.token_ids[0] == -1
        assert len(steps) > 5
    with pytest.raises(ValueError, match="has no draft"):
        RheoDecoder(decoder().target, None).trace([1], SamplingParams(max_new_tokens=3))


def test_a_raising_model_leaves_the_decoder_usable() -> None:
    one = decoder()
    expected = one.generate([[1]], MIXED[0])[0].token_ids
    for part, method in ((one.target, "forward_tree"), (one.drafter, "expand"), (one.target, "prefill")):

        def fail(*_: object) -> None:
            raise RuntimeError("out of memory")

        original = getattr(part, method)
        setattr(part, method, fail)
        with pytest.raises(GenerationError, match="request 0: RuntimeError: out of memory") as caught:
            one.generate([[1]], MIXED[0])
        assert isinstance(caught.value.__cause__, RuntimeError)
        setattr(part, method, original)
        assert one.generate([[1]], MIXED[0])[0].token_ids == expected


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([], None, "there is no prompt"),
        ([[]], None, "prompt 0 is empty"),
        (["text"], None, "need a tokenizer"),
        ([[1], [2]], [SamplingParams()], "there are 2 prompts and 1 params"),
        ([[1]], SamplingParams(logit_bias={99: 1.0}), "names token 99"),
        ([[1]], SamplingParams(stop="x"), "need a tokenizer"),
    ],
)
def test_wrong_arguments_say_what_would_be_right(prompts: Any, params: Any, message: str) -> None:
    one = decoder()
    with pytest.raises(ValueError, match=message):
        one.generate(prompts, params)
    assert one.generate([1, 2], MIXED[0])[0].prompt_token_ids == (1, 2)


def test_prompts_come_as_a_list_as_lists_or_as_a_tensor() -> None:
    expected = decoder().generate([[1, 2]], MIXED[0])[0].token_ids
    for prompts in (
        [1, 2],
        [[1, 2]],
        torch.tensor([1, 2]),
        torch.tensor([[1, 2]]),
        np.array([1, 2]),
        [np.array([1, 2])],
    ):
        assert decoder().generate(prompts, MIXED[0])[0].token_ids == expected  # type: ignore[arg-type]


def test_a_draft_that_speaks_of_unknown_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the draft speaks of token 13; the target's vocabulary is 0\.\.12"):
        RheoDecoder(PathTarget(VOCAB), PathDrafter(VOCAB + 1))  # type: ignore[arg-type]
    wide = PathDrafter(2, vocab_map=torch.tensor([0, 40]))
    with pytest.raises(ValueError, match="the draft speaks of token 40"):
        RheoDecoder(PathTarget(VOCAB), wide)  # type: ignore[arg-type]


def test_a_small_draft_vocabulary_maps_into_the_targets() -> None:
    target_logits = random_logits(1, VOCAB, "normal")
    ids = torch.tensor([1, 4, 5, 9, 12])
    drafter = PathDrafter(5, lambda path: target_logits(path)[ids.numpy()], ids)
    one = RheoDecoder(PathTarget(VOCAB, target_logits), drafter, config=CONFIG)  # type: ignore[arg-type]
    [result] = one.generate([[1]], SamplingParams(seed=3, max_new_tokens=40))
    assert result.metrics.tau > 1.1
    for tree, walk, _ in one.trace([1], SamplingParams(seed=3, max_new_tokens=40), steps=5):
        assert set(tree.token_ids[1:]) <= set(ids.tolist())
        assert walk.token_ids[: len(walk.accepted_nodes)] == tuple(tree.token_ids[row] for row in walk.accepted_nodes)

"""The embedded model and its head, in float32: greedy equality, company, hostile input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from optimized import GenerationError, RheoConfig, RheoDecoder, SamplingParams
from optimized.trees import LevelNodes
from reference import DraftLaw, DraftTree, Margin, grow_tree, verify
from reference.philox import growth_noise, verify_noise

pytestmark = pytest.mark.model

CONFIG = RheoConfig(branching=4, depth=4, tree_size=8)
QUESTIONS = (
    "What is the capital of France?",
    "Explain why the sky is blue.",
    "Write a haiku about autumn.",
    "def fibonacci(n):",
    "List three uses of a paper clip.",
    "Translate 'good morning' into Spanish.",
    "A train leaves at 3 pm and travels 60 miles per hour. Where is it at 5 pm?",
    "Who wrote Pride and Prejudice?",
    "Give me a recipe for pancakes.",
    "Summarize: The council met on Tuesday to discuss the new bridge. No decision was reached.",
)


@pytest.fixture(scope="module")
def decoder() -> RheoDecoder:
    return RheoDecoder.from_pretrained(config=CONFIG)


@pytest.fixture(autouse=True)
def _same_config(decoder: RheoDecoder) -> Iterator[None]:
    yield
    decoder.config = CONFIG


def chat(decoder: RheoDecoder, question: str) -> list[int]:
    return decoder.chat_prompt([{"role": "user", "content": question}])


@pytest.fixture(scope="module")
def prompts(decoder: RheoDecoder) -> list[list[int]]:
    return [chat(decoder, question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def greedy_texts(decoder: RheoDecoder, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """``model.generate`` without speculation, one prompt at a time."""
    texts = []
    for prompt in prompts:
        output = decoder.target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=64)
        texts.append(tuple(output[0, len(prompt) :].tolist()))
    return texts


@pytest.mark.parametrize("batch", [1, 10])
def test_greedy_is_token_identical_to_model_generate(
    decoder: RheoDecoder, prompts: list[list[int]], greedy_texts: list[tuple[int, ...]], batch: int
) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=64)
    results = [
        result
        for first in range(0, len(prompts), batch)
        for result in decoder.generate(prompts[first : first + batch], params)
    ]
    assert [result.token_ids for result in results] == greedy_texts
    assert all(result.finish_reason == ("eos" if result.token_ids[-1] == 2 else "length") for result in results)
    passes = sum(result.metrics.target_passes for result in results)
    assert sum(result.metrics.emitted_tokens for result in results) / passes > 1.5


class Recorder:
    """What the draft and the target answered for every request, step by step, to run the reference on it."""

    def __init__(self, decoder: RheoDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.draft: list[list[Any]] = []  # per step: root logits, then (nodes, logits) per level
        self.target: list[torch.Tensor] = []
        drafter, target = decoder.drafter, decoder.target
        assert drafter is not None
        advance, expand, forward_tree = drafter.advance, drafter.expand, target.forward_tree

        def recorded_advance(*args: Any) -> torch.Tensor:
            self.draft.append([advance(*args)])
            return self.draft[-1][0]

        def recorded_expand(nodes: LevelNodes) -> torch.Tensor:
            self.draft[-1].append((nodes, expand(nodes)))
            return self.draft[-1][-1][1]

        def recorded_forward_tree(*args: Any) -> Any:
            logits, features = forward_tree(*args)
            self.target.append(logits)
            return logits, features

        monkeypatch.setattr(drafter, "advance", recorded_advance)
        monkeypatch.setattr(drafter, "expand", recorded_expand)
        monkeypatch.setattr(target, "forward_tree", recorded_forward_tree)

    def draft_law(self, decoder: RheoDecoder, step: int, b: int) -> Any:
        """Path -> the draft's law of request b at this step, from what was recorded."""
        assert decoder.drafter is not None
        assert decoder.drafter.vocab_map is not None
        vocab_map, laws, beam = decoder.drafter.vocab_map.numpy(), {}, [()]
        wide = np.full(decoder.target.vocab_size, -np.inf)

        def law(logits: torch.Tensor) -> DraftLaw:
            wide[vocab_map] = logits.float().numpy()
            return DraftLaw.from_logits(wide, 1.0, decoder.config.draft_support)

        laws[()] = law(self.draft[step][0][b])
        for nodes, logits in self.draft[step][1:]:
            pairs = zip(nodes.token_ids[b].tolist(), nodes.parents[b].tolist(), strict=True)
            beam = [(*beam[parent], token) for token, parent in pairs]
            laws |= {path: law(row) for path, row in zip(beam, logits[b], strict=True)}
        return laws.__getitem__


def run_recorded(
    decoder: RheoDecoder, prompts: list[list[int]], params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> tuple[Recorder, list[dict[int, tuple[DraftTree, list[int]]]]]:
    """Every step's tree and walk by request, without the prompts' own step."""
    requests = decoder._requests(prompts, params)
    live, steps = list(range(len(prompts))), []
    with monkeypatch.context() as patch:
        recorder = Recorder(decoder, patch)
        for outcome in decoder._steps(requests):
            trees, walk = outcome.trees, outcome.walk
            assert trees is not None
            assert walk is not None
            steps.append({b: (trees.to_tree(row), walk.token_ids[row].tolist()) for row, b in enumerate(live)})
            live = [b for b in live if not requests[b].done]
    return recorder, steps[1:]


def test_the_same_seed_in_a_batch_diverges_only_inside_a_margin(
    decoder: RheoDecoder, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batched float32 products differ in the last bits. The first step that differs must have had a close decision."""
    prompts, diverged = prompts[:6], 0
    params = [SamplingParams(seed=i, max_new_tokens=32, min_new_tokens=32) for i in range(len(prompts))]
    _, together = run_recorded(decoder, prompts, params, monkeypatch)
    for b, prompt in enumerate(prompts):
        recorder, alone = run_recorded(decoder, [prompt], [params[b]], monkeypatch)
        for step, (solo, batch) in enumerate(zip(alone, together, strict=False)):
            (tree, walk), (batch_tree, batch_walk) = solo[0], batch[b]
            if tree.key == batch_tree.key and walk == batch_walk:
                continue
            diverged += 1
            margins: list[Margin] = []
            noise = growth_noise(b, step + 1, decoder.config.depth, decoder.config.beam_width)
            assert grow_tree(decoder.config, recorder.draft_law(decoder, step, 0), noise, margins).key == tree.key
            if tree.key == batch_tree.key:
                margins.clear()
                law = torch.softmax(recorder.target[step][0, : len(tree)].double(), dim=-1).numpy()
                verify(tree, law, verify_noise(b, step + 1, len(tree)), margins=margins)
            assert any(0 < margin.value < 1e-4 for margin in margins), f"request {b}, step {step + 1}: {margins}"
            break
    with capsys.disabled():
        print(f"\n{diverged} of {len(prompts)} texts diverged in company, each at a decision within 1e-4")
    assert diverged <= 2


def test_same_seed_same_text_when_run_again(decoder: RheoDecoder, prompts: list[list[int]]) -> None:
    params = SamplingParams(seed=11, max_new_tokens=24)
    first, second = (decoder.generate(prompts[0], params)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.text == second.text == decoder.tokenizer.decode(first.token_ids, skip_special_tokens=True)


def test_wrong_input_is_refused_and_the_decoder_goes_on(
    decoder: RheoDecoder, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(seed=0, max_new_tokens=8)
    expected = decoder.generate(prompts[0], params)[0].token_ids
    for wrong, message in (
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_new_tokens": -3}, "max_new_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams(**wrong)  # type: ignore[arg-type]
    for prompt, message in (
        ([], "prompt 0 is empty"),
        ("", "prompt 0 is empty"),
        ([5] * 8193, "prompt 0 has 8193 tokens; the target reads at most 8192"),
        ([49152], "prompt 0 has token 49152"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.generate([prompt], params)  # type: ignore[list-item]
    forward_tree = decoder.target.forward_tree

    def nan_in_row_one(*args: Any, **options: Any) -> Any:
        logits, features = forward_tree(*args, **options)
        if len(logits) > 1:
            logits[1] = torch.nan
        return logits, features

    with monkeypatch.context() as patch:
        patch.setattr(decoder.target, "forward_tree", nan_in_row_one)
        with pytest.raises(GenerationError, match="request 1: the target's logits were NaN") as caught:
            decoder.generate(prompts[:2], params)
    assert caught.value.results[0] is not None
    assert decoder.generate(prompts[0], params)[0].token_ids == expected

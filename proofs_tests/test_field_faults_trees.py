"""Faults that users of speculative decoding met elsewhere, tried here: trees, caches and positions."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from optimized import RheoConfig, RheoDecoder, SamplingParams, grow_trees, verify_trees
from optimized.models.causal_drafter import CausalDrafter
from optimized.models.eagle3 import Eagle3Drafter
from optimized.models.kv_cache import TreeCache, causal
from optimized.models.target import TargetModel
from optimized.randomness import StepNoise
from optimized.trees import LevelNodes, TreeBatch
from proofs_tests.tiny_models import spread
from proofs_tests.tiny_pairs import (
    CONFIG,
    DRAFT_VOCAB,
    FEATURE_LAYERS,
    MAKERS,
    VOCAB,
    assert_cache_is_fresh,
    causal_decoder,
    eagle_decoder,
    eagle_head,
    llama,
    near_copy,
)
from proofs_tests.toy import random_logits
from proofs_tests.toy_models import PathDrafter, PathTarget
from reference.api import DraftLaw, GrowthNoise
from reference.growth import grow_tree
from reference.tree import DraftTree

ATOL = 2e-4  # float32 rounding moves logits by up to 4e-5 here; wrong positions, masks or features by more than 1e-2
PROMPTS = [[5, 6, 7], [9] * 10, [3]]


def greedy_text(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """The argmax chain in plain forward passes."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


# Trees


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((-1, 0, 9), "row 2 is an orphan: its parent 9"),
        ((-1, 0, -1), "row 2 is an orphan: its parent -1"),
        ((-1, 2, 1), "row 1 is part of a cycle"),
        ((-1, 0, 2), "row 2 is part of a cycle"),
        ((-1, 2, 0), "row 1 stands before its parent, row 2"),
    ],
)
def test_14_orphans_and_cycles_make_the_ancestor_walk_run_into_the_next_request(
    parents: tuple[int, ...], message: str
) -> None:
    """sglang#7477, #36201. Right: ValueError that names the row."""
    with pytest.raises(ValueError, match=message):
        DraftTree((-1, 5, 6), parents, (0, 1, 1), (0, 0, 1), (False,) * 3, (1.0, 0.5, 0.4))


def test_14_a_damaged_batch_of_trees_stays_within_its_own_request() -> None:
    """Right: a cycle put into the tensors by hand ends request 0's walk at its depth, and leaves request 1 alone."""
    tree = DraftTree((-1, 1, 2), (-1, 0, 1), (0, 1, 2), (0, 0, 0), (False,) * 3, (1.0, 0.5, 0.4))
    trees = TreeBatch.from_trees([tree, tree])
    damaged = replace(trees, parents=torch.tensor([[2, 0, 1], [-1, 0, 1]]))
    law = torch.zeros(2, 3, 4, dtype=torch.float64)
    law[:, 0, 1] = law[:, 1, 2] = law[:, 2, 3] = 1
    uniforms = torch.full((2, 3), 0.5)
    walk = verify_trees(damaged, law, StepNoise(uniforms, *[uniforms] * 3))
    assert walk.counts.tolist() == [3, 3]
    assert walk.token_ids[1].tolist() == [1, 2, 3]
    assert torch.equal(damaged.ancestors()[1], trees.ancestors()[1])


def grown(config: RheoConfig, logits: np.ndarray) -> DraftTree:
    """The tree of a draft that says the same after every path, from both implementations, which must agree."""
    noise = np.full((config.depth, config.beam_width), 0.6)
    reference = grow_tree(config, lambda _: DraftLaw.from_logits(logits), GrowthNoise(noise))
    row = torch.from_numpy(logits).float()[None]
    trees = grow_trees(
        config,
        row,
        lambda nodes: row.expand(1, nodes.token_ids.shape[1], -1),
        torch.ones(1),
        torch.from_numpy(noise)[None],
    )
    assert trees.to_tree(0).key == reference.key
    return reference


def test_15_depth_is_one_more_and_the_budget_one_less() -> None:
    """EAGLE#96, #118. Right: exactly R nodes on at most D levels; all there are where the budget is larger."""
    four = np.log([0.4, 0.3, 0.2, 0.1])
    assert len(grown(RheoConfig(branching=10, depth=1, tree_size=60), four)) == 1 + 4
    assert len(grown(RheoConfig(branching=10, depth=2, tree_size=60), four)) == 1 + 4 + 16
    for size in (1, 5, 19):
        tree = grown(RheoConfig(branching=4, depth=3, tree_size=size), four)
        assert len(tree) == 1 + size
        assert max(tree.depths) <= 3
    assert max(grown(RheoConfig(branching=2, depth=3, tree_size=3), np.log([0.98, 0.02])).depths) == 3
    target = PathTarget(4)
    drafter = PathDrafter(4, target.logits)
    wide = RheoConfig(branching=10, depth=1, tree_size=60)
    one = RheoDecoder(target, drafter, config=wide)  # type: ignore[arg-type]
    for tree, walk, _ in one.trace([1], SamplingParams(seed=1, max_new_tokens=20), steps=9):
        assert sorted(tree.token_ids[1:]) == [0, 1, 2, 3]
        assert len(walk.token_ids) == 2  # all of the vocabulary is offered: one is accepted, and one added


@pytest.mark.parametrize("others", [-np.inf, -800.0, -40.0])
@pytest.mark.parametrize("lead_tokens", [0, 1, 2])
def test_16_a_child_of_probability_one_is_kept_without_its_parent(others: float, lead_tokens: int) -> None:
    """openvino.genai#3451. Right: levels 1, 2, ... in turn: child and parent tie at score 1, and the level decides."""
    logits = np.array([others, 0.0, others, others])
    for size in range(1, 5):
        tree = grown(RheoConfig(lead_tokens, branching=3, depth=4, tree_size=size), logits)
        if lead_tokens:
            assert tree.token_ids[1:] == (1,) * size
            assert tree.depths == tuple(range(size + 1))
        assert all(tree.parents[row] < row for row in range(1, len(tree)))


class Spy:
    """A drafter that checks each answer of another one: after a text and a path, it must be that of ``fresh``.

    ``fresh`` gives the logits after whole texts and a path below them, without caches, trees or batch mates.
    """

    def __init__(self, drafter: Any, fresh: Callable[[list[int], list[int]], Tensor]) -> None:
        self._drafter, self._fresh = drafter, fresh
        self.checked = 0
        for name in ("vocab_size", "vocab_map", "feature_layers", "max_positions"):
            setattr(self, name, getattr(drafter, name))

    def reset(self, first_tokens: Tensor) -> None:
        self._drafter.reset(first_tokens)
        self.texts = [[token] for token in first_tokens.tolist()]

    def advance(self, token_ids: Tensor, counts: Tensor, features: Tensor | None) -> Tensor:
        logits = self._drafter.advance(token_ids, counts, features)
        for text, tokens, count in zip(self.texts, token_ids.tolist(), counts.tolist(), strict=True):
            text += tokens[:count]
        self._paths: list[list[list[int]]] = [[[]] for _ in self.texts]
        self._check(logits[:, None])
        return logits

    def expand(self, level: LevelNodes) -> Tensor:
        logits = self._drafter.expand(level)
        self._paths = [
            [[*above[parent], token] for parent, token in zip(parents, tokens, strict=True)]
            for above, parents, tokens in zip(
                self._paths, level.parents.tolist(), level.token_ids.tolist(), strict=True
            )
        ]
        self._check(logits, level.valid)
        return logits

    def select(self, keep: Tensor) -> None:
        self._drafter.select(keep)
        self.texts = [self.texts[b] for b in keep.tolist()]

    def _check(self, logits: Tensor, valid: Tensor | None = None) -> None:
        for b, paths in enumerate(self._paths):
            for w, path in enumerate(paths):
                if valid is None or valid[b, w]:
                    torch.testing.assert_close(logits[b, w], self._fresh(self.texts[b], path), atol=ATOL, rtol=0)
                    self.checked += 1


def fresh_eagle(model: Any) -> Callable[[list[int], list[int]], Tensor]:
    """A new head for every question: the whole text with the target's true features, then the path node by node."""
    head, embedding, vocab_map = eagle_head(), model.get_input_embeddings(), torch.arange(DRAFT_VOCAB) * 2 + 3

    def fresh(text: list[int], path: list[int]) -> Tensor:
        with torch.no_grad():
            hidden = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        drafter = Eagle3Drafter(head, embedding, vocab_map, FEATURE_LAYERS)
        drafter.reset(torch.tensor([text[0]]))
        features = torch.cat([hidden[layer] for layer in FEATURE_LAYERS], dim=-1)
        logits = drafter.advance(torch.tensor([text[1:]]), torch.tensor([len(text) - 1]), features)[0]
        for depth, token in enumerate(path, start=1):
            one = torch.tensor([[token]])
            logits = drafter.expand(LevelNodes(one, torch.zeros_like(one), torch.ones_like(one).bool(), depth))[0, 0]
        return logits

    return fresh


@pytest.mark.parametrize("kind", MAKERS)
def test_17_draft_steps_attend_to_keys_of_nodes_that_are_not_their_ancestors(kind: str) -> None:
    """sglang#8409. Right: every node's draft logits are those after its own path alone, in any batch, at any step."""
    model = llama()
    one = MAKERS[kind](model=model)
    if kind == "causal":
        draft = one.drafter.model  # type: ignore[union-attr]

        def fresh(text: list[int], path: list[int]) -> Tensor:
            with torch.no_grad():
                return draft(torch.tensor([text + path])).logits[0, -1]
    else:
        fresh = fresh_eagle(model)
    one.drafter = spy = Spy(one.drafter, fresh)  # type: ignore[assignment]
    lengths = [12, 20, 6]
    one.generate(PROMPTS, [SamplingParams(seed=1, max_new_tokens=n, min_new_tokens=n) for n in lengths])
    assert spy.checked > 60


# Caches and positions

LOCAL = [[["global", "local"], 1]]


@pytest.mark.parametrize("kind", MAKERS)
def test_18_draft_positions_are_off_by_one_and_only_acceptance_drops(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang#25015. Right: the head's index t stands at position t, a causal draft's token t at position t, and a node
    of level d stands d behind the root. A causal draft that is the target itself is always accepted (greedy): tau is
    depth + 1.
    """
    one = MAKERS[kind]()
    inner = one.drafter.head if kind == "eagle" else one.drafter.model  # type: ignore[union-attr]
    seen: list[Tensor] = []
    forward = type(inner).forward

    def record(self: Any, *args: Any, **options: Any) -> Any:
        if self is inner:
            seen.append(options.get("position_ids", args[2] if len(args) > 2 else None))
        return forward(self, *args, **options)

    monkeypatch.setattr(type(inner), "forward", record)
    length = new = 3
    for event in one.stream([5, 6, 7], SamplingParams(seed=1, max_new_tokens=30, min_new_tokens=30)):
        if seen:
            read, levels = seen[0], seen[1:]
            root = length - (2 if kind == "eagle" else 1)
            start = root + 1 - new if length > 3 + new else 0  # the first time it reads the whole text
            assert read[0].tolist() == list(range(start, start + read.shape[1]))
            assert [set(level.flatten().tolist()) for level in levels] == [{root + d} for d in range(1, CONFIG.depth)]
        new = len(event.token_ids)
        length += new
        seen.clear()
    monkeypatch.undo()
    if kind == "causal":
        chain = RheoConfig(lead_tokens=1, branching=1, depth=4, tree_size=4)
        model = llama(eos_token_id=None)
        same = causal_decoder(chain, model=model, draft=copy.deepcopy(model))
        [result] = same.generate([[5, 6, 7]], SamplingParams(temperature=0, max_new_tokens=41))
        assert result.metrics.tau == 5


def test_19_the_drafts_own_features_are_never_replaced_by_the_targets() -> None:
    """vllm#14649. Right: after n steps the head's cache is that of a fresh head that read the true features."""
    model = llama()
    one = eagle_decoder(model=model)
    text = [5, 6, 7]
    for count, event in enumerate(one.stream(text, SamplingParams(seed=1, max_new_tokens=40, min_new_tokens=40))):
        text += event.token_ids
        if count == 12:
            break
    assert isinstance(one.drafter, Eagle3Drafter)
    assert_cache_is_fresh(one.drafter, model, text, longer_than=12, atol=ATOL)


@pytest.mark.parametrize("kind", MAKERS)
def test_20_cutting_nothing_or_more_than_there_is_from_a_cache(kind: str) -> None:
    """transformers#47433. Right: the argmax chain from a prompt of one token; a wrong draft has nothing accepted."""
    model = llama(eos_token_id=None)
    [result] = MAKERS[kind](model=model).generate([[3]], SamplingParams(temperature=0, max_new_tokens=25))
    assert list(result.token_ids) == greedy_text(model, [3], 25)
    target_logits = random_logits(1, 13, "normal")
    drafter = PathDrafter(13, lambda path: -target_logits(path))  # never right
    wrong = RheoDecoder(PathTarget(13, target_logits), drafter, config=CONFIG)  # type: ignore[arg-type]
    [result] = wrong.generate([[1]], SamplingParams(temperature=0, max_new_tokens=20))
    assert sum(result.metrics.accepted_per_level) == 0
    assert result.metrics.target_passes == 19
    cache = TreeCache(1)
    cache.extend(causal(1, 2, "cpu"), torch.float32)
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    with pytest.raises(ValueError, match=r"cannot keep \[3\] of 2 pending rows"):
        cache.commit(torch.tensor([3]))
    cache.commit(torch.tensor([0]))
    assert (cache.lengths, cache.pending, cache.width) == ([0], 0, 0)


def small(kind: type, **options: Any) -> Any:
    return kind(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, **options,
    )  # fmt: skip


def test_21_a_sliding_window_is_corrupted_by_a_rollback() -> None:
    """transformers#48280. Right: windows are refused by name, for target and draft; without one the text is plain's."""
    windowed = [
        (MistralForCausalLM(small(MistralConfig, sliding_window=8)), "sliding_window=8"),
        (
            Qwen2ForCausalLM(small(Qwen2Config, use_sliding_window=True, sliding_window=8, max_window_layers=1)),
            "sliding_attention",
        ),
        (
            GPTNeoForCausalLM(
                GPTNeoConfig(vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=LOCAL)
            ),
            "local attention",
        ),
    ]  # fmt: skip
    for model, message in windowed:
        for use in (TargetModel, lambda model: CausalDrafter(model, VOCAB)):
            with pytest.raises(ValueError, match=message):
                use(model)
    torch.manual_seed(0)
    model = spread(MistralForCausalLM(small(MistralConfig, sliding_window=None)))
    one = causal_decoder(model=model)
    [result] = one.generate([[5, 6, 7]], SamplingParams(temperature=0, max_new_tokens=24, min_new_tokens=24))
    assert list(result.token_ids) == greedy_text(model, [5, 6, 7], 24)


def short_draft(kind: str, context: int, model: Any) -> RheoDecoder:
    """A decoder whose draft was made for so many positions."""
    if kind == "causal":
        draft = near_copy(model)
        draft.config.max_position_embeddings = context
        return causal_decoder(model=model, draft=draft)
    one = eagle_decoder(model=model)
    vocab_map = torch.arange(DRAFT_VOCAB) * 2 + 3
    head = eagle_head(max_position_embeddings=context)
    return RheoDecoder(
        one.target, Eagle3Drafter(head, model.get_input_embeddings(), vocab_map, FEATURE_LAYERS), config=CONFIG
    )


@pytest.mark.parametrize("kind", MAKERS)
def test_22_a_prompt_longer_than_the_drafts_context_crashes_the_engine(kind: str) -> None:
    """vllm#24662, #57941. Right: plain decoding's text for it, with a warning; its mates go on with their drafts. A
    text that outgrows the context on its way goes on without a draft; the draft never sees a position beyond its own.
    """
    model, context = llama(), 20
    long, growing, short = list(range(3, 43)), [5, 6, 7], [9]
    params = [SamplingParams(seed=s, max_new_tokens=n, min_new_tokens=n) for s, n in ((1, 12), (2, 40), (3, 8))]
    [plain] = RheoDecoder(TargetModel(model), None, config=CONFIG).generate([long], params[0])
    one = short_draft(kind, context, model)
    highest = 0
    runner = one.drafter.head if kind == "eagle" else one.drafter._runner  # type: ignore[union-attr]
    forward = runner.forward

    def watched(first: Any, second: Any, positions: Tensor, *rest: Any, **options: Any) -> Any:
        nonlocal highest
        highest = max(highest, int((positions if kind == "eagle" else second).max()))
        return forward(first, second, positions, *rest, **options)

    runner.forward = watched
    with pytest.warns(UserWarning, match=r"request 0: its text has 41 tokens and the draft's context is 20"):
        results = one.generate([long, growing, short], params)
    assert results[0].token_ids == plain.token_ids
    assert results[0].metrics.offered_per_level == []
    assert highest < context
    assert results[1].metrics.offered_per_level[0] < results[1].metrics.target_passes  # no draft at the end
    assert results[2].metrics.offered_per_level[0] == results[2].metrics.target_passes  # always one
    for prompt, param, result in ((growing, params[1], results[1]), (short, params[2], results[2])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if prompt is growing else "error")
            [alone] = short_draft(kind, context, model).generate([prompt], param)
        assert alone.token_ids == result.token_ids
        assert alone.metrics.accepted_per_level == result.metrics.accepted_per_level

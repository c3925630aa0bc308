"""TargetModel and TreeCache against plain forward passes of the same Hugging Face model."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from optimized.models import kv_cache
from optimized.models.kv_cache import TreeCache, causal
from optimized.models.target import TargetModel
from proofs_tests.tiny_models import spread

ATOL = 2e-4  # float32 rounding moved logits by up to 4e-5 here; wrong positions or masks move them by > 1e-2
VOCAB = 97
LIMIT = 64

# A tree of 8 rows, not level-major on purpose (only parents before children is needed), and a chain padded to 8 rows.
TREES = [[-1, 0, 0, 1, 1, 2, 3, 6], [-1, 0, 1, 2, -1, -1, -1, -1], [-1, 0, 0, 0, 2, 4, -1, -1]]


def llama(attention: str = "sdpa", **changes):
    torch.manual_seed(5)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LIMIT,
        "eos_token_id": 2,
        "attn_implementation": attention,
    }
    return spread(LlamaForCausalLM(LlamaConfig(**(settings | changes))))


def gpt2():
    torch.manual_seed(6)
    return spread(GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=LIMIT)))


def qwen(config_class, model_class):
    torch.manual_seed(7)
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=LIMIT,
    )
    return spread(model_class(config))


def ancestors_and_depths(parents: list[int]):
    rows = len(parents)
    ancestors = torch.eye(rows, dtype=torch.bool)
    depths = torch.zeros(rows, dtype=torch.long)
    for row in range(1, rows):
        if parents[row] >= 0:
            ancestors[row] |= ancestors[parents[row]]
            depths[row] = depths[parents[row]] + 1
    return ancestors, depths


def path_rows(parents: list[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


@torch.no_grad()
def plain(model, tokens: list[int]):
    output = model(torch.tensor([tokens]), output_hidden_states=True)
    return output.logits[0], output.hidden_states


def run_steps(model, prompts, feature_layers=(), steps=4, seed=0):
    """Prefill, then several trees with commits of different lengths; every row is checked against a plain forward."""
    generator = torch.Generator().manual_seed(seed)
    target = TargetModel(model, feature_layers)
    logits, features = target.prefill(prompts)
    texts = [list(prompt) for prompt in prompts]
    for b, text in enumerate(texts):
        expected, hidden = plain(model, text)
        torch.testing.assert_close(logits[b], expected[-1], atol=ATOL, rtol=0)
        if feature_layers:
            wanted = torch.cat([hidden[layer][0] for layer in feature_layers], dim=-1)
            torch.testing.assert_close(features[b, : len(text)], wanted, atol=ATOL, rtol=0)
        text.append(int(torch.randint(VOCAB, (), generator=generator)))
    for step in range(steps):
        parents = [TREES[(b + step) % 3] for b in range(len(texts))]
        shape = [ancestors_and_depths(p) for p in parents]
        token_ids = torch.randint(VOCAB, (len(texts), 8), generator=generator)
        token_ids[:, 0] = torch.tensor([text[-1] for text in texts])
        counts = torch.tensor([sum(row == 0 or p >= 0 for row, p in enumerate(tree)) for tree in parents])
        rows = token_ids, torch.stack([s[1] for s in shape]), torch.stack([s[0] for s in shape])
        logits, features = target.forward_tree(*rows, counts if step % 2 else None)
        chosen = []
        for b, text in enumerate(texts):
            used = [row for row in range(8) if row == 0 or parents[b][row] >= 0]
            for row in used:
                path = path_rows(parents[b], row)
                expected, hidden = plain(model, text + token_ids[b, path[1:]].tolist())
                torch.testing.assert_close(logits[b, row], expected[-1], atol=ATOL, rtol=0)
                if feature_layers:
                    wanted = torch.cat([hidden[layer][0, -1] for layer in feature_layers])
                    torch.testing.assert_close(features[b, row], wanted, atol=ATOL, rtol=0)
            # Step 0 rejects at the root for request 0; otherwise the deepest or some other node is accepted.
            leaf = 0 if (step + b) % 4 == 0 else used[-1 - (step % 2)]
            chosen.append(path_rows(parents[b], leaf))
        width = max(len(path) for path in chosen) + 1
        rows = torch.tensor([path + [7] * (width - len(path)) for path in chosen])  # padding must not matter
        target.commit(rows, torch.tensor([len(path) for path in chosen]))
        for b, path in enumerate(chosen):
            texts[b] += [*token_ids[b, path[1:]].tolist(), int(torch.randint(VOCAB, (), generator=generator))]
        assert target.lengths == tuple(len(text) - 1 for text in texts)
    return target, texts


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("prompts", [[[5, 6, 7, 8, 9]], [[3], [11, 12, 13, 14, 15, 16, 17], [21, 22]]])
def test_forward_tree_equals_plain_forward_along_every_path(attention, prompts):
    run_steps(llama(attention), prompts, feature_layers=(0, 1, 2))


@pytest.mark.parametrize(
    "make", [gpt2, lambda: qwen(Qwen2Config, Qwen2ForCausalLM), lambda: qwen(Qwen3Config, Qwen3ForCausalLM)]
)
def test_forward_tree_other_architectures(make):
    run_steps(make(), [[3], [11, 12, 13, 14]], feature_layers=(1,), steps=3)


def test_forward_tree_attention_implementations_agree():
    def logits(attention):
        target = TargetModel(llama(attention))
        target.prefill([[1, 2, 3], [4]])
        shape = [ancestors_and_depths(parents) for parents in TREES[:2]]
        return target.forward_tree(
            torch.arange(16).view(2, 8), torch.stack([s[1] for s in shape]), torch.stack([s[0] for s in shape])
        )[0]

    torch.testing.assert_close(logits("sdpa"), logits("eager"), atol=ATOL, rtol=0)


def test_commit_cache_equals_a_fresh_prefill():
    model = llama()
    target, texts = run_steps(model, [[3], [11, 12, 13, 14, 15]], steps=3)
    fresh = TargetModel(model)
    fresh.prefill([text[:-1] for text in texts])
    stepped, wanted = target._runner.cache, fresh._runner.cache
    assert stepped.lengths == wanted.lengths
    assert stepped.device_lengths.tolist() == wanted.lengths
    for layer in range(3):
        for which in range(2):
            for b, length in enumerate(wanted.lengths):
                expected = wanted._buffers[layer][which][b, :, :length]
                actual = stepped._buffers[layer][which][b, :, :length]
                torch.testing.assert_close(actual, expected, atol=ATOL, rtol=0)


def test_select_keeps_the_chosen_requests():
    model = llama()
    target = TargetModel(model, (1,))
    prompts = [[3, 4], [11, 12, 13, 14], [21], [31, 32, 33]]
    target.prefill(prompts)
    target.select(torch.tensor([1, 3]))
    assert target.lengths == (4, 3)
    ancestors, depths = ancestors_and_depths(TREES[0])
    token_ids = torch.arange(40, 56).view(2, 8)
    logits, _ = target.forward_tree(token_ids, depths.expand(2, -1), ancestors.expand(2, -1, -1))
    for b, prompt in enumerate((prompts[1], prompts[3])):
        expected, _ = plain(model, prompt + token_ids[b, path_rows(TREES[0], 7)].tolist())
        torch.testing.assert_close(logits[b, 7], expected[-1], atol=ATOL, rtol=0)


def test_forward_tree_forgets_a_tree_that_was_not_committed():
    target = TargetModel(llama())
    target.prefill([[1, 2, 3]])
    ancestors, depths = ancestors_and_depths(TREES[0])
    first, _ = target.forward_tree(torch.arange(8)[None], depths[None], ancestors[None])
    again, _ = target.forward_tree(torch.arange(8)[None], depths[None], ancestors[None])
    assert torch.equal(first, again)


def test_forward_tree_cache_grows_past_its_first_capacity():
    model = llama(max_position_embeddings=512)
    target = TargetModel(model)
    prompt = [token % VOCAB for token in range(3, 163)]
    target.prefill([prompt, prompt[:50]])
    ancestors, depths = ancestors_and_depths(TREES[0])
    for _ in range(3):
        logits, _ = target.forward_tree(
            torch.arange(8).expand(2, -1), depths.expand(2, -1), ancestors.expand(2, -1, -1)
        )
    for b, text in enumerate((prompt, prompt[:50])):
        torch.testing.assert_close(logits[b, 0], plain(model, [*text, 0])[0][-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_forward_tree_at_the_last_position_clamps_deeper_rows(make):
    model = make()
    target = TargetModel(model)
    prompt = [token % VOCAB for token in range(LIMIT - 1)]
    target.prefill([prompt])
    ancestors, depths = ancestors_and_depths(TREES[0])
    logits, _ = target.forward_tree(torch.arange(8)[None], depths[None], ancestors[None])
    torch.testing.assert_close(logits[0, 0], plain(model, [*prompt, 0])[0][-1], atol=1e-4, rtol=0)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1] * (LIMIT + 1)], f"prompt 0 has {LIMIT + 1} tokens; the target reads at most {LIMIT}"),
        ([[1], [2], [5, VOCAB]], f"prompt 2 has token {VOCAB}; the vocabulary is 0..{VOCAB - 1}"),
        ([[-1]], "prompt 0 has token -1"),
        ([], "there is no prompt"),
    ],
)
def test_prefill_names_the_bad_prompt(prompts, message):
    with pytest.raises(ValueError, match=message):
        TargetModel(llama()).prefill(prompts)


def _mistral():
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=16,
    )  # fmt: skip
    return MistralForCausalLM(config)


def _qwen_sliding():
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=16, max_window_layers=1,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def _t5():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    )


def _flash():
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_mistral, "sliding_window=16"),
        (_qwen_sliding, "sliding_attention"),
        (lambda: MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1)), "recurrent"),
        (_t5, "encoder-decoder"),
        (_flash, "flash_attention_2"),
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)), "position_ids"),
        (
            lambda: FalconForCausalLM(
                FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True)
            ),
            "ALiBi",
        ),
    ],
)
def test_target_model_refuses_what_cannot_run_a_tree(make, message):
    with pytest.raises(ValueError, match=message):
        TargetModel(make())


def test_feature_layers_must_exist():
    target = TargetModel(llama())
    with pytest.raises(ValueError, match=r"feature layers \[3\] do not exist; the target has layers 0\.\.2"):
        target.feature_layers = (0, 3)


def test_longrope_is_limited_to_its_original_positions():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 40}  # fmt: skip
    assert TargetModel(llama(rope_parameters=rope)).max_positions == 40


def test_eos_token_ids_of_int_list_and_none():
    model = llama()
    model.generation_config.eos_token_id = [4, 9]
    assert TargetModel(model).eos_token_ids == (4, 9)
    model.generation_config.eos_token_id = 7
    assert TargetModel(model).eos_token_ids == (7,)
    model.generation_config.eos_token_id = None
    assert TargetModel(model).eos_token_ids == (2,)  # the model config's
    model.config.eos_token_id = None
    assert TargetModel(model).eos_token_ids == ()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("lengths", [[13], [1, 13, 4], [5, 12, 8, 12], [4, 4]])
def test_prefill_in_chunks_equals_one_piece(attention, lengths, monkeypatch):
    generator = torch.Generator().manual_seed(sum(lengths))
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
    model = llama(attention).double()
    error = 1e-9 if attention == "sdpa" else 1e-5  # transformers' eager attention takes its softmax in float32
    batch, longest = len(lengths), max(lengths)
    masks, extend = [], TreeCache.extend

    def spied(cache, visible, *options):
        mask = extend(cache, visible, *options)
        masks.append(tuple(mask.shape))
        return mask

    monkeypatch.setattr(TreeCache, "extend", spied)
    whole, chunked = TargetModel(model, (0, 2)), TargetModel(model, (0, 2))
    logits, features = whole.prefill(prompts)
    monkeypatch.setattr(kv_cache, "CHUNK_ROWS", 4)
    actual_logits, actual_features = chunked.prefill(prompts)
    pieces = [(start, min(start + 4, longest)) for start in range(0, longest, 4)]
    assert masks == [(batch, 1, longest, longest), *((batch, 1, end - start, end) for start, end in pieces)]
    assert chunked.lengths == whole.lengths == tuple(lengths)
    torch.testing.assert_close(actual_logits, logits, atol=error, rtol=0)
    assert actual_features.shape == features.shape
    caches = [target._runner.cache for target in (chunked, whole)]
    for b, length in enumerate(lengths):
        torch.testing.assert_close(actual_features[b, :length], features[b, :length], atol=error, rtol=0)
        for layer in range(3):
            for which in range(2):
                actual, expected = (cache._buffers[layer][which][b, :, :length] for cache in caches)
                torch.testing.assert_close(actual, expected, atol=error, rtol=0)


def test_prefill_in_chunks_then_trees(monkeypatch):
    monkeypatch.setattr(kv_cache, "CHUNK_ROWS", 3)
    run_steps(llama(), [[3], [11, 12, 13, 14, 15, 16, 17], [21, 22, 23]], feature_layers=(0, 1, 2))
    run_steps(llama(), [list(range(11, 21))], steps=2)


def test_tree_cache_does_not_double_behind_a_long_prompt():
    cache = TreeCache(1)
    rows = torch.ones(1, 1, 1000, 2)
    cache.extend(causal(1, 1000, "cpu"), torch.float32)
    cache.update(rows, rows, 0)
    cache.commit(torch.tensor([1000]))
    cache.extend(causal(1, 61, "cpu"), torch.float32)
    cache.update(rows[:, :, :61], rows[:, :, :61], 0)
    assert all(1061 <= buffer.shape[2] < 1.3 * 1061 for buffer in cache._buffers[0])


def test_tree_cache_growing_row_by_row_is_seldom_copied():
    cache = TreeCache(1)
    visible, row = causal(1, 1, "cpu"), torch.ones(1, 1, 1, 2)
    capacities = []
    for length in range(4000):
        cache.extend(visible, torch.float32)
        cache.update(row * length, -row * length, 0)
        cache.commit(torch.tensor([1]))
        capacities.append(cache._buffers[0][0].shape[2])
    copied = [before for before, after in pairwise(capacities) if after != before]
    assert len(copied) <= 36
    assert sum(copied) <= 9 * 4000
    assert torch.equal(cache._buffers[0][0][0, 0, :4000, 0], torch.arange(4000.0))


def test_tree_cache_extend_masks_by_hand():
    cache = TreeCache(2)
    cache.extend(causal(2, 2, "cpu"), torch.float32)
    cache.update(torch.ones(2, 1, 2, 4), torch.ones(2, 1, 2, 4), 0)
    cache.commit(torch.tensor([2, 1]))
    low = torch.finfo(torch.float32).min
    mask = cache.extend(torch.tensor([[[True, False], [False, True]]]).expand(2, -1, -1), torch.float32)
    assert mask.tolist() == [[[[0, 0, 0, low], [0, 0, low, 0]]], [[[0, 0, low, low], [0, low, 0, low]]]]
    with pytest.raises(ValueError, match="extend announced 2 rows, layer 0 brings 3"):
        cache.update(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), 0)
    with pytest.raises(ValueError, match="cannot keep"):
        cache.commit(torch.tensor([3, 0]))
    with pytest.raises(ValueError, match="visible has shape"):
        cache.extend(causal(2, 1, "cpu"), torch.float32)


def test_tree_cache_commit_moves_overlapping_rows():
    cache = TreeCache(2)
    for length, count in ((3, [3, 1]), (6, [2, 3])):
        cache.extend(causal(2, length, "cpu"), torch.float32)
        rows = torch.arange(length, dtype=torch.float32).view(1, 1, length, 1).expand(2, -1, -1, -1) + 10 * length
        keys, values = cache.update(rows, -rows, 0)
        kept = None if length == 3 else torch.tensor([[1, 2, 99], [0, 3, 4]])
        cache.commit(torch.tensor(count), kept)
    keys, values = cache._buffers[0]
    assert cache.lengths == [5, 4]
    assert keys[0, 0, :5, 0].tolist() == [30, 31, 32, 61, 62]
    assert keys[1, 0, :4, 0].tolist() == [30, 60, 63, 64]
    assert torch.equal(values, -keys)

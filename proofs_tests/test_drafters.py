"""CausalDrafter against plain forward passes, and what both drafters' bookkeeping promises."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from optimized.models import kv_cache
from optimized.models.causal_drafter import CausalDrafter, check_same_tokenizer
from optimized.models.drafter import TreeMask
from optimized.models.hf_model import CachedModel
from optimized.trees import LevelNodes
from proofs_tests.tiny_models import spread

ATOL = 2e-4  # float32 rounding moved logits by up to 4e-5 here; wrong positions or masks move them by > 1e-2
VOCAB = 89


def llama(vocab: int = VOCAB):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return spread(LlamaForCausalLM(config))


def gpt2():
    torch.manual_seed(1)
    return spread(GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)))


@torch.no_grad()
def plain(model, tokens):
    return model(torch.tensor([tokens])).logits[0, -1]


def level(ids, parents, depth):
    return LevelNodes(token_ids=ids, parents=parents, valid=torch.ones_like(ids).bool(), depth=depth)


def check_steps(model, lengths, beams=(3, 3, 2), steps=3, seed=0):
    """Ragged advances, each followed by levels of changing width; every row against a plain forward over its path."""
    generator = torch.Generator().manual_seed(seed)
    drafter = CausalDrafter(model, VOCAB)
    batch = len(lengths)
    texts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
    drafter.reset(torch.tensor([text[0] for text in texts]))
    new = [text[1:] for text in texts]
    for step in range(steps):
        width = max(len(tokens) for tokens in new) + step
        token_ids = torch.full((batch, width), 17)
        for row, tokens in zip(token_ids, new, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        logits = drafter.advance(token_ids, torch.tensor([len(tokens) for tokens in new]), None)
        for b, text in enumerate(texts):
            torch.testing.assert_close(logits[b], plain(model, text), atol=ATOL, rtol=0)
        paths, above = [[[]] for _ in texts], 1
        for depth, beam in enumerate(beams, start=1):
            ids = torch.randint(VOCAB, (batch, beam), generator=generator)
            parents = torch.randint(above, (batch, beam), generator=generator)
            logits = drafter.expand(level(ids, parents, depth))
            paths = [[paths[b][parents[b, w]] + [int(ids[b, w])] for w in range(beam)] for b in range(batch)]
            above = beam
            for b, text in enumerate(texts):
                for w, path in enumerate(paths[b]):
                    torch.testing.assert_close(logits[b, w], plain(model, text + path), atol=ATOL, rtol=0)
        new = [torch.randint(VOCAB, (1 + (step + b) % 3,), generator=generator).tolist() for b in range(batch)]
        for text, tokens in zip(texts, new, strict=True):
            text += tokens
    return drafter


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("lengths", [[2], [5, 2, 7]])
def test_causal_drafter_equals_plain_forward_along_every_path(make, lengths):
    check_steps(make(), lengths)


@pytest.mark.parametrize("rows", [1, 3])
def test_causal_drafter_reads_long_texts_in_pieces(monkeypatch, rows):
    monkeypatch.setattr(kv_cache, "CHUNK_ROWS", rows)
    widest, run = [], CachedModel.forward
    spied = lambda runner, tokens, *args, **options: (  # noqa: E731
        widest.append(tokens.shape[1]) or run(runner, tokens, *args, **options)
    )
    monkeypatch.setattr(CachedModel, "forward", spied)
    check_steps(llama(), [2, 9, 4])
    assert (widest[0], max(widest)) == (rows, 3)  # the beam is as wide as that


def test_causal_drafter_advance_equals_a_fresh_drafter():
    model = llama()
    stepped, fresh = CausalDrafter(model, VOCAB), CausalDrafter(model, VOCAB)
    text = torch.arange(10, 22)[None]
    stepped.reset(text[:, 0])
    for start, stop in ((1, 4), (4, 5), (5, 12)):
        logits = stepped.advance(text[:, start:stop], torch.tensor([stop - start]), None)
        stepped.expand(level(torch.tensor([[1, 2]]), torch.tensor([[0, 0]]), 1))
    fresh.reset(text[:, 0])
    torch.testing.assert_close(logits, fresh.advance(text[:, 1:], torch.tensor([11]), None), atol=ATOL, rtol=0)
    fresh.reset(text[:, 0] + 1)  # and a reset forgets everything
    shifted = fresh.advance(text[:, 1:] + 1, torch.tensor([11]), None)
    torch.testing.assert_close(shifted[0], plain(model, (text[0] + 1).tolist()), atol=ATOL, rtol=0)


def test_causal_drafter_select_at_every_moment():
    model = llama()
    drafter = CausalDrafter(model, VOCAB)
    texts = [[3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]
    drafter.reset(torch.tensor([text[0] for text in texts]))
    drafter.select(torch.tensor([0, 1, 3]))  # before the first advance
    texts.pop(2)
    drafter.advance(torch.tensor([text[1:] for text in texts]), torch.tensor([2, 2, 1]), None)
    texts[2].pop()
    drafter.expand(level(torch.tensor([[1, 2]] * 3), torch.zeros(3, 2, dtype=torch.long), 1))
    drafter.select(torch.tensor([1, 2]))  # in the middle of a tree
    logits = drafter.expand(level(torch.tensor([[20], [30]]), torch.tensor([[1], [0]]), 2))
    torch.testing.assert_close(logits[0, 0], plain(model, [*texts[1], 2, 20]), atol=ATOL, rtol=0)
    torch.testing.assert_close(logits[1, 0], plain(model, [*texts[2], 1, 30]), atol=ATOL, rtol=0)


@pytest.mark.parametrize("draft_vocab", [VOCAB - 7, VOCAB, VOCAB + 7])
def test_causal_drafter_cuts_padded_vocabularies(draft_vocab):
    model = llama(draft_vocab)
    drafter = CausalDrafter(model, VOCAB)
    shared = min(draft_vocab, VOCAB)
    assert drafter.vocab_size == shared
    assert drafter.vocab_map is None
    drafter.reset(torch.tensor([1]))
    logits = drafter.advance(torch.tensor([[2, 3]]), torch.tensor([2]), None)
    assert logits.shape == (1, shared)
    torch.testing.assert_close(logits[0], plain(model, [1, 2, 3])[:shared], atol=ATOL, rtol=0)
    # A committed token that only the target knows: drafting goes on.
    logits = drafter.advance(torch.tensor([[VOCAB - 1]]), torch.tensor([1]), None)
    assert torch.isfinite(logits).all()
    expanded = drafter.expand(level(torch.tensor([[4, 5]]), torch.tensor([[0, 0]]), 1))
    assert expanded.shape == (1, 2, shared)


def test_causal_drafter_refuses_sliding_windows():
    config = MistralConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                           num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    with pytest.raises(ValueError, match="MistralForCausalLM cannot run tree attention: it uses sliding_window=4096"):
        CausalDrafter(MistralForCausalLM(config), VOCAB)


def test_tree_mask_by_hand():
    tree = TreeMask()
    zeros = torch.zeros(1, 2, dtype=torch.long)
    assert tree.descend(level(zeros, zeros, 1)).int().tolist() == [[[1, 0], [0, 1]]]
    parents = torch.tensor([[1, 0, 1]])
    expected = [[[0, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 1, 0, 0, 1]]]
    assert tree.descend(level(torch.zeros_like(parents), parents, 2)).int().tolist() == expected
    deeper = tree.descend(level(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[2]]), 3))
    assert deeper.int().tolist() == [[[0, 1, 0, 0, 1, 1]]]
    with pytest.raises(ValueError, match="level 1 is out of order"):
        tree.descend(level(zeros, zeros, 1))
    tree.clear()
    with pytest.raises(ValueError, match="level 2 is out of order"):
        tree.descend(level(zeros, zeros, 2))


class _Vocabulary:
    def __init__(self, **ids):
        self.ids = ids

    def get_vocab(self):
        return self.ids


def test_check_same_tokenizer():
    check_same_tokenizer(_Vocabulary(a=0, b=1), _Vocabulary(b=1, a=0))
    with pytest.raises(ValueError, match="2 tokens differ: 'b' is 1 for the target and unknown for the draft"):
        check_same_tokenizer(_Vocabulary(a=0, b=1), _Vocabulary(a=0, c=1))

"""Heads that share keys side by side as rows: the same attention, no copy of the keys, and only for who asks."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from optimized.models import TargetModel
from optimized.models.grouped_attention import can_group, grouped_attention
from proofs_tests.tiny_models import spread

HEADS, KEY_HEADS, HEAD_DIM = 6, 2, 8


def llama(key_heads: int = KEY_HEADS, attention: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=key_heads,
        attn_implementation=attention,
    )
    return spread(LlamaForCausalLM(config))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Widths of the keys that are repeated for their heads."""
    seen: list[int] = []
    repeat = sdpa_attention.repeat_kv

    def watched(states: torch.Tensor, groups: int) -> torch.Tensor:
        seen.append(states.shape[2])
        return repeat(states, groups)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", watched)
    return seen


@pytest.mark.parametrize("rows", [1, 2, 5, KEY_HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM + 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_attention_is_that_of_transformers(rows: int, dtype: torch.dtype, copies: list[int]) -> None:
    torch.manual_seed(rows)
    attention = llama().model.layers[0].self_attn
    batch, width = 3, 40
    query = torch.randn(batch, HEADS, rows, HEAD_DIM).to(dtype)
    key, value = torch.randn(2, batch, KEY_HEADS, width, HEAD_DIM).to(dtype)
    hidden = torch.rand(batch, 1, rows, width) < 0.5
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    found, _ = grouped_attention(attention, query, key, value, mask, scaling=0.3)
    copied = bool(copies)
    expected, _ = sdpa_attention_forward(attention, query, key, value, mask, scaling=0.3)
    assert found.shape == expected.shape == (batch, rows, HEADS, HEAD_DIM)
    torch.testing.assert_close(found, expected)
    assert copied == (rows > KEY_HEADS * HEAD_DIM)  # there the masks would be larger than the keys


def test_a_trees_pass_copies_no_keys(copies: list[int]) -> None:
    """The logits are those of the model's own pass; two passes in a row have masks of their own."""
    model = llama()
    target = TargetModel(model)
    prompt = [5, 9, 11, 2, 40, 17]
    target.prefill([prompt])
    copies.clear()
    for path in ([7, 8, 9], [7, 30, 31]):
        tokens, depths = torch.tensor([path]), torch.arange(3).unsqueeze(0)
        logits, _ = target.forward_tree(tokens, depths, torch.ones(1, 3, 3, dtype=torch.bool).tril())
        assert not copies
        own = model(torch.tensor([[*prompt, *path]])).logits[:, len(prompt) :]
        torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4)
        copies.clear()


def test_the_model_is_as_before_whatever_happens() -> None:
    model = llama()
    target = TargetModel(model)
    target.prefill([[1, 2, 3]])
    assert model.config._attn_implementation == "sdpa"

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    model.model.layers[1].mlp.forward = broken
    with pytest.raises(RuntimeError, match="no"):
        target.forward_tree(torch.tensor([[1]]), torch.tensor([[0]]), torch.ones(1, 1, 1, dtype=torch.bool))
    assert model.config._attn_implementation == "sdpa"


def test_who_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention, a model file with an SDPA of its own or an attention of another kind."""
    assert can_group(llama())
    assert can_group(llama(key_heads=HEADS))
    assert not can_group(llama(attention="eager"))
    assert not can_group(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2)))
    file = sys.modules[LlamaForCausalLM.__module__]
    monkeypatch.setattr(file, "ALL_ATTENTION_FUNCTIONS", {"sdpa": lambda *_: None})
    assert not can_group(llama())

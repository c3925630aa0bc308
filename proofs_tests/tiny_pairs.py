"""Decoders on tiny random transformers models: a Llama target with an EAGLE-3 head, or with a causal draft."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from optimized import RheoConfig, RheoDecoder
from optimized.models import CausalDrafter
from optimized.models.eagle3 import Eagle3Drafter, Eagle3Head, llama_config
from optimized.models.target import TargetModel
from proofs_tests.tiny_models import spread

VOCAB, HIDDEN, CONTEXT, DRAFT_VOCAB, EOS = 97, 32, 256, 41, 2
CONFIG = RheoConfig(lead_tokens=1, branching=3, depth=3, tree_size=8)
FEATURE_LAYERS = (1, 2, 3)


def llama(seed: int = 5, **changes: Any) -> Any:
    """A target of four layers; its logits are scaled so that a text is neither certain nor noise."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": EOS,
        "attn_implementation": "sdpa",
    }
    return spread(LlamaForCausalLM(LlamaConfig(**(settings | changes)))).requires_grad_(False)


def near_copy(model: Any, noise: float = 0.05) -> Any:
    """A draft that mostly agrees: the same weights, each moved by ``noise`` of its layer's spread."""
    torch.manual_seed(11)
    other = copy.deepcopy(model).requires_grad_(False)
    for parameter in other.parameters():
        if parameter.dim() > 1:
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return other


def eagle_head(draft_vocab: int = DRAFT_VOCAB, seed: int = 3, **changes: Any) -> Eagle3Head:
    """An untrained EAGLE-3 head for ``llama()``."""
    torch.manual_seed(seed)
    raw = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
    }
    head = Eagle3Head(llama_config(raw | changes), draft_vocab)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    return head.requires_grad_(False)


def eagle_decoder(config: RheoConfig = CONFIG, model: Any = None, **options: Any) -> RheoDecoder:
    """The target with an EAGLE-3 head of a smaller vocabulary."""
    model = model or llama()
    vocab_map = torch.arange(DRAFT_VOCAB) * 2 + 3
    drafter = Eagle3Drafter(eagle_head(), model.get_input_embeddings(), vocab_map, FEATURE_LAYERS)
    return RheoDecoder(TargetModel(model), drafter, config=config, **options)


def causal_decoder(config: RheoConfig = CONFIG, model: Any = None, draft: Any = None, **options: Any) -> RheoDecoder:
    """The target with a causal draft that mostly agrees with it."""
    model = model or llama()
    drafter = CausalDrafter(draft or near_copy(model), model.config.vocab_size)
    return RheoDecoder(TargetModel(model), drafter, config=config, **options)


def assert_cache_is_fresh(drafter: Eagle3Drafter, model: Any, text: list[int], longer_than: int, atol: float) -> None:
    """The head's cache is that of a fresh one that read the text's true features; not of all of it: what the last step
    emitted is not committed yet.
    """
    [length] = drafter._cache.lengths
    fresh = Eagle3Drafter(eagle_head(), model.get_input_embeddings(), None, FEATURE_LAYERS)
    with torch.no_grad():
        hidden = model(torch.tensor([text[:length]]), output_hidden_states=True).hidden_states
    fresh.reset(torch.tensor(text[:1]))
    features = torch.cat([hidden[layer] for layer in FEATURE_LAYERS], dim=-1)
    fresh.advance(torch.tensor([text[1 : length + 1]]), torch.tensor([length]), features)
    assert length > longer_than
    for actual, expected in zip(drafter._cache._buffers[0], fresh._cache._buffers[0], strict=True):
        torch.testing.assert_close(actual[:, :, :length], expected[:, :, :length], atol=atol, rtol=0)


MAKERS = {"eagle": eagle_decoder, "causal": causal_decoder}

"""The head that is trained: fresh, grown out of the target's own weights, or read from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optimized.models.checkpoints import feature_layers_of, load_head, official_config, read_config
from optimized.models.eagle3 import Eagle3Head, llama_config
from optimized.models.loading import default_feature_layers
from optimized.models.target import TargetModel


@dataclass(frozen=True)
class Student:
    """A head and what it needs of its target.

    Attributes:
        head: its weights; float32 to be trained.
        raw: its config.json, in the official layout.
        embedding: token ids -> [..., hidden]; the target's unless the head has its own.
        vocab_map: [draft_vocab_size] long, draft id -> target id, increasing; None when they are the same.
        feature_layers: the target's hidden states that it reads.
        origin: where its weights came from, in words.
    """

    head: Eagle3Head
    raw: dict[str, Any]
    embedding: nn.Module
    vocab_map: Tensor | None
    feature_layers: tuple[int, ...]
    origin: str


def head_config(target: TargetModel, draft_vocab_size: int) -> dict[str, Any]:
    """The config.json of a head for a target: a Llama layer of the target's sizes, whatever the target's own layers."""
    config = target.model.config.get_text_config(decoder=True)
    hidden, heads = config.hidden_size, config.num_attention_heads
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{getattr(config, 'rms_norm_eps', None) or 1e-5:.6g}"),
        "rope_theta": 10000.0,
        "max_position_embeddings": target.max_positions or 2048,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_theta" in rope:
        raw["rope_theta"] = float(rope.pop("rope_theta"))
    if rope.get("rope_type", "default") != "default":
        raw["rope_scaling"] = rope
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config, name, None) is not None:
            raw[name] = getattr(config, name)
    return raw


def new_student(
    target: TargetModel,
    vocab_ids: Tensor,
    feature_layers: tuple[int, int, int] | None = None,
    seed: int = 0,
) -> Student:
    """A head that starts from the target: ``fc`` passes the last feature, the layer is the target's last, reading
    the feature alone, ``norm`` and ``lm_head`` are the target's.

    What the target's last layer has no counterpart for (another kind of layer, other shapes) starts at random.

    Args:
        target: what the head drafts for.
        vocab_ids: [draft_vocab_size] long, increasing; all of the target's tokens: no map is needed.
        feature_layers: None is (2, n // 2, n - 3).
        seed: of the random weights.

    Raises:
        ValueError: the target has too few layers for the default.
    """
    raw = head_config(target, len(vocab_ids))
    head = Eagle3Head(llama_config(raw), len(vocab_ids))
    generator = torch.Generator().manual_seed(seed)
    start = _target_weights(target, vocab_ids)
    random = []
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            given = start.get(name)
            if given is not None and given.shape == parameter.shape:
                parameter.copy_(given)
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=generator)
                random.append(name)
            else:
                parameter.fill_(1.0)
    whole = len(vocab_ids) == target.vocab_size
    origin = "fc passes the last feature, the layer is the target's last (its hidden half), lm_head the target's rows"
    if random:
        origin += f"; at random: {', '.join(random)}"
    return Student(
        head.to(target.device),
        raw,
        target.model.get_input_embeddings(),
        None if whole else vocab_ids,
        feature_layers or default_feature_layers(target.num_layers),
        origin,
    )


def _target_weights(target: TargetModel, vocab_ids: Tensor) -> dict[str, Tensor]:
    """The head's start, by the names of the head's weights, as far as the target's layer has such weights."""
    hidden = target.hidden_size
    rows = target.model.get_output_embeddings().weight
    start = {
        "fc.weight": torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], dim=1),
        "lm_head.weight": rows[vocab_ids.to(rows.device)].float().cpu(),
    }
    decoder = target.model.get_decoder()
    norm = getattr(getattr(decoder, "norm", None), "weight", None)
    if norm is not None:
        start["norm.weight"] = norm.float().cpu()
    layers = getattr(decoder, "layers", None)
    if layers is None:
        return start
    for name, weight in layers[-1].named_parameters():
        weight = weight.float().cpu()
        if name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            weight = torch.cat([torch.zeros_like(weight), weight], dim=1)  # the embedding's half comes first
        start["midlayer." + ("hidden_norm.weight" if name == "input_layernorm.weight" else name)] = weight
    return start


def read_student(
    directory: Path | str,
    target: TargetModel,
    feature_layers: tuple[int, int, int] | None = None,
) -> Student:
    """A head from a checkpoint, in float32 on the target's device.

    Args:
        directory: see ``load_head``.
        target: what the head drafts for.
        feature_layers: None is what its config.json says, or else (2, n // 2, n - 3).

    Raises:
        ValueError: the checkpoint is damaged or not for this target (see ``load_head``), or the target has too few
            layers for the default.
    """
    directory = Path(directory)
    head, vocab_map = load_head(directory, target.hidden_size, target.vocab_size)
    head = head.float().to(target.device)
    raw = official_config(directory, read_config(directory))
    return Student(
        head,
        raw,
        head.embed_tokens if head.embed_tokens is not None else target.model.get_input_embeddings(),
        vocab_map,
        feature_layers or feature_layers_of(raw) or default_feature_layers(target.num_layers),
        f"the checkpoint {directory.resolve()}",
    )

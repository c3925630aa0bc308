"""Loading targets, drafters and tokenizers by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimized.models.causal_drafter import CausalDrafter
from optimized.models.checkpoints import feature_layers_of, is_eagle3_config, load_head, read_config
from optimized.models.drafter import Drafter
from optimized.models.eagle3 import Eagle3Drafter
from optimized.models.embedded import embedded_head_dir, embedded_target_dir
from optimized.models.packed_linear import pack_linears
from optimized.models.target import TargetModel

EMBEDDED = "embedded"  # the name of the default target and of its head


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs an EAGLE-3 head reads: near the bottom, the middle and near the top.

    Raises:
        ValueError: too few layers for three different ones.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not 2 < layers[1] < layers[2]:
        raise ValueError(f"a target of {num_layers} layers has no three default feature layers; name them")
    return layers


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer that goes with a target; ``name`` as for ``load_target``."""
    return AutoTokenizer.from_pretrained(embedded_target_dir() if name == EMBEDDED else name)


def load_target(
    name: str | Path = EMBEDDED,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    pack: bool = True,
) -> TargetModel:
    """Load a target.

    Args:
        name: "embedded", a directory, or a name that Hugging Face knows.
        dtype: of the weights; None keeps the checkpoint's.
        device: where it runs.
        pack: prepack linear layers where that helps (see ``pack_linears``), for about as much memory again.

    Raises:
        ValueError: the model cannot run tree attention.
        ModuleNotFoundError: the embedded target is not installed.
    """
    return TargetModel(_load_causal(embedded_target_dir() if name == EMBEDDED else name, dtype, device, pack))


def load_drafter(
    name: str | Path,
    target: TargetModel,
    *,
    dtype: torch.dtype | None = None,
    pack: bool = True,
    feature_layers: tuple[int, int, int] | None = None,
) -> Drafter:
    """Load a drafter onto the target's device: an EAGLE-3 head, or a causal language model with the target's tokenizer.

    The target is not changed; set ``target.feature_layers = drafter.feature_layers`` to feed an EAGLE-3 head.

    Args:
        name: "embedded" (the head for the embedded target), a directory, or a name that Hugging Face knows.
        target: what it drafts for.
        dtype: of the weights; None is the target's.
        pack: prepack linear layers where that helps (see ``pack_linears``), for about as much memory again.
        feature_layers: which of the target's hidden states an EAGLE-3 head reads; None is what its config.json says,
            or else (2, n // 2, n - 3).

    Raises:
        ValueError: the checkpoint is damaged, not for this target, or cannot draft trees.
    """
    dtype = dtype or target.dtype
    directory = embedded_head_dir() if name == EMBEDDED else _local(name)
    raw = read_config(directory)
    if not is_eagle3_config(raw):
        return CausalDrafter(_load_causal(directory, dtype, target.device, pack), target.vocab_size)
    head, vocab_map = load_head(directory, target.hidden_size, target.vocab_size)
    head = head.to(target.device, dtype)
    head.rotary_emb = type(head.rotary_emb)(head.rotary_emb.config).to(target.device)  # its frequencies stay float32
    if pack:
        pack_linears(head)
    layers = feature_layers or feature_layers_of(raw) or default_feature_layers(target.num_layers)
    return Eagle3Drafter(head, target.model.get_input_embeddings(), vocab_map, layers)


def _local(name: str | Path) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", "*.bin", "tokenizer*"]))


def _load_causal(source: str | Path, dtype: torch.dtype | None, device: torch.device | str, pack: bool) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(
        source, dtype=dtype or "auto", attn_implementation="sdpa", output_loading_info=True
    )
    missing = sorted(info["missing_keys"])
    if missing:  # transformers fills them with random numbers and goes on
        hint = "; it holds fc.weight, as EAGLE heads do" if "fc.weight" in info["unexpected_keys"] else ""
        raise ValueError(
            f"{source} lacks {len(missing)} weights of {type(model).__name__}: {', '.join(missing[:4])}"
            f"{', ...' if len(missing) > 4 else ''}{hint}"
        )
    model = model.to(device).eval().requires_grad_(False)
    if pack:
        pack_linears(model)
    return model

"""Reading an EAGLE-3 head from a directory: every name, shape and id is checked; nothing unknown is ever filled in.

Two layouts are read: the official one, and that of the ``speculators`` library, whose config.json keeps the layer's
settings in ``transformer_layer_config`` (what is a default there is left out) and whose layer is called ``layers.0``.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from optimized.files import read_json_object
from optimized.models.eagle3 import Eagle3Head, llama_config

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"  # see ``feature_layers_of``
_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_REQUIRED_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_OF_THE_TARGET = ("verifier_lm_head.weight", "verifier_norm.weight")  # copies that some speculators checkpoints hold


def is_eagle3_config(raw: dict[str, Any]) -> bool:
    """Whether a config.json describes an EAGLE-3 head."""
    architectures = [*(raw.get("architectures") or []), raw.get("speculators_model_type")]
    return "draft_vocab_size" in raw or any("eagle3" in str(name).lower() for name in architectures)


def feature_layers_of(raw: dict[str, Any]) -> tuple[int, ...] | None:
    """Which of the target's ``output_hidden_states`` a head's config.json says it was trained on; None if it does not.

    Named at the top (by speculators and vLLM), an id is that of the layer a hidden state enters, which is its index.
    Inside ``eagle_config`` (by SpecForge and SGLang), it is that of the layer the state comes out of: one less.

    Raises:
        ValueError: not a list of three integers.
    """
    nested = raw.get("eagle_config")
    for holder, shift in ((raw, 0), (nested if isinstance(nested, dict) else {}, 1)):
        layers = holder.get(LAYER_IDS)
        if layers is not None:
            if not isinstance(layers, list) or [type(layer) for layer in layers] != [int] * 3:
                raise ValueError(f"{LAYER_IDS} must be a list of integers, three of them, got {layers!r}")
            return tuple(layer + shift for layer in layers)
    return None


def load_head(
    directory: Path | str, target_hidden_size: int, target_vocab_size: int
) -> tuple[Eagle3Head, Tensor | None]:
    """Read and check a head.

    Args:
        directory: holds config.json and model.safetensors or pytorch_model.bin (or an index of shards).
        target_hidden_size, target_vocab_size: of the target that the head will serve.

    Returns:
        The head, in the checkpoint's dtype on the CPU, and its vocabulary map: [draft_vocab_size] long, draft id ->
        target id, increasing; None when both vocabularies are the same.

    Raises:
        ValueError: a file is missing or unsafe, a weight is missing, unexpected or of the wrong shape, the vocabulary
            map is wrong, or the head is not for this target.
    """
    directory = Path(directory)
    stored, tensors = read_config(directory), read_tensors(directory)
    raw = official_config(directory, stored)
    if raw is not stored:
        tensors = _official_names(tensors)
    _refuse_older_eagle(directory, tensors)
    if raw.get("norm_before_fc"):
        raise ValueError(f"the head in {directory} has norm_before_fc={raw['norm_before_fc']}, which is not supported")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(name) or {}, dict):
            raise ValueError(f"{directory / 'config.json'}: {name} must be an object, got {raw[name]!r}")
    for holder in (raw, raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}):
        if (factor := holder.get("partial_rotary_factor", 1)) != 1:
            raise ValueError(f"the head in {directory} has partial_rotary_factor={factor}, which is not supported")
    missing = [key for key in _REQUIRED_KEYS if not isinstance(raw.get(key), int)]
    if missing:
        raise ValueError(f"{directory / 'config.json'} gives no {', '.join(missing)}")
    if raw["hidden_size"] != target_hidden_size:
        raise ValueError(
            f"the head in {directory} has hidden_size {raw['hidden_size']}, the target has {target_hidden_size}; "
            "it was trained for another target"
        )
    if raw["vocab_size"] != target_vocab_size:
        raise ValueError(
            f"the head in {directory} is for a vocabulary of {raw['vocab_size']}, the target has {target_vocab_size}"
        )

    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    draft_vocab_size = raw.get("draft_vocab_size") or raw["vocab_size"]
    config = llama_config(raw)
    with torch.device("meta"):
        head = Eagle3Head(
            config,
            draft_vocab_size,
            own_embedding="embed_tokens.weight" in tensors,
            norm_before_residual=bool(raw.get("norm_before_residual", False)),
        )
    _check_weights(directory, head, tensors)
    vocab_map = _vocab_map(d2t, t2d, draft_vocab_size, target_vocab_size)
    head.load_state_dict(tensors, assign=True)
    head.rotary_emb = type(head.rotary_emb)(config)  # computed, not stored: it must leave the meta device too
    return head.requires_grad_(False), vocab_map


def official_config(directory: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """A head's config.json in the official layout: itself if it is, made from it if it is the speculators library's.

    Args:
        directory: where it is from, for messages.
        raw: see ``read_config``.

    Raises:
        ValueError: a speculator of another kind.
    """
    if "transformer_layer_config" not in raw:
        return raw
    layer = raw["transformer_layer_config"]
    kind = raw.get("speculators_model_type", "eagle3")
    model_type = layer.get("model_type", "llama") if isinstance(layer, dict) else None
    if kind != "eagle3" or model_type != "llama":
        raise ValueError(
            f"{directory} holds a speculator of type {kind} with layers of type {model_type}; only eagle3 "
            "with llama layers is supported"
        )
    theirs = ("transformer_layer_config", "auto_map")  # these and speculators_* tell readers that it is their layout
    kept = {key: value for key, value in raw.items() if key not in theirs and not key.startswith("speculators_")}
    fixed = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    return LlamaConfig(**layer).to_dict() | kept | fixed


def _official_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the speculators library by their names in the official layout."""
    return {
        "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name: tensor
        for name, tensor in tensors.items()
        if name not in _OF_THE_TARGET
    }


def read_config(directory: Path) -> dict[str, Any]:
    """The directory's config.json.

    Raises:
        ValueError: it is missing, or not a JSON object.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} is not a model directory: it has no config.json")
    return read_json_object(path)


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All weights of a directory, safetensors preferred. Pickled code is never run.

    Raises:
        ValueError: no weights, a damaged file, or one that holds more than tensors.
    """
    path = next((directory / name for name in _WEIGHT_FILES if (directory / name).is_file()), None)
    if path is None:
        raise ValueError(f"{directory} has no weights; one of {', '.join(_WEIGHT_FILES)} is needed")
    if path.suffix != ".json":
        return _read_file(path)
    tensors: dict[str, Tensor] = {}
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path} has no weight_map")
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or not (directory / name).is_file():
            raise ValueError(f"{path} names the shard {name!r}, which is not a file of {directory}")
        shard = _read_file(directory / name)
        twice = sorted(shard.keys() & tensors.keys())
        if twice:
            raise ValueError(f"{path} names shards that hold the same weights: {', '.join(twice)}")
        tensors |= shard
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise ValueError(f"{path} lists weights that its shards do not hold: {', '.join(absent)}")
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} is refused: it is damaged or holds pickled code besides tensors, which is never run ({error})"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{path} must hold a dictionary of tensors")
    return loaded


def _refuse_older_eagle(directory: Path, tensors: dict[str, Tensor]) -> None:
    if any(name.startswith("layers.0.") for name in tensors) and "midlayer.hidden_norm.weight" not in tensors:
        fc = tensors.get("fc.weight")
        shape = "" if fc is None else f" and fc.weight {list(fc.shape)}"
        raise ValueError(
            f"{directory} holds an EAGLE-1 or EAGLE-2 head (weights named layers.0.*{shape}); only EAGLE-3 heads, with "
            "weights named midlayer.*, are supported"
        )


def _check_weights(directory: Path, head: Eagle3Head, tensors: dict[str, Tensor]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    for name, tensor in tensors.items():
        if name not in expected:
            problems.append(f"unexpected {name} {list(tensor.shape)}")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"{name} is {list(tensor.shape)}, expected {list(expected[name])}")
        elif not tensor.is_floating_point():
            problems.append(f"{name} is {tensor.dtype}, expected floating point")
        elif not tensor.isfinite().all():
            problems.append(f"{name} holds NaN or infinity")
    if problems:
        raise ValueError(f"the EAGLE-3 head in {directory} does not fit its config.json: " + "; ".join(problems))


def _vocab_map(d2t: Tensor | None, t2d: Tensor | None, draft_vocab_size: int, target_vocab_size: int) -> Tensor | None:
    """draft id + offset, checked: the order of ids decides ties, so the map must keep it."""
    if d2t is None:
        if draft_vocab_size != target_vocab_size:
            raise ValueError(
                f"the head has no d2t, but its vocabulary ({draft_vocab_size}) is not "
                f"the target's ({target_vocab_size})"
            )
        return None
    if tuple(d2t.shape) != (draft_vocab_size,) or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise ValueError(f"d2t must be {draft_vocab_size} integers, got {d2t.dtype} {list(d2t.shape)}")
    ids = torch.arange(draft_vocab_size) + d2t.long()
    outside = torch.nonzero((ids < 0) | (ids >= target_vocab_size))
    if len(outside):
        draft = int(outside[0])
        raise ValueError(f"d2t maps draft id {draft} to {int(ids[draft])}; the target has 0..{target_vocab_size - 1}")
    falling = torch.nonzero(ids[1:] <= ids[:-1])
    if len(falling):
        draft = int(falling[0])
        raise ValueError(
            f"the ids that d2t maps to must increase, but draft ids {draft} and {draft + 1} map to "
            f"{int(ids[draft])} and {int(ids[draft + 1])}"
        )
    if t2d is not None:
        said = torch.zeros(target_vocab_size, dtype=torch.bool)
        said[ids] = True
        if tuple(t2d.shape) != (target_vocab_size,) or not torch.equal(t2d.bool(), said):
            raise ValueError(
                f"t2d ({list(t2d.shape)}) does not mark the {draft_vocab_size} target ids that d2t maps to"
            )
    return ids

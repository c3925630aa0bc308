"""A trained head as a directory in the official checkpoint layout, with the record of its training."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from optimized.files import write_json, write_whole
from optimized.models.checkpoints import LAYER_IDS
from optimized.training.student import Student
from optimized.training.vocabulary import membership, offsets


def write_head(directory: Path, student: Student, record: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``config.json``, ``model.safetensors`` and the record as ``README.md``.

    The config says what is written here, dtype and feature layers, in one place each.

    Args:
        directory: is made if it is missing; files of these names are replaced.
        student: the head, its vocabulary and its feature layers.
        record: Markdown.
        dtype: of the stored weights.
    """
    weights = student.head.state_dict()
    tensors = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in weights.items()}
    if student.vocab_map is not None:
        ids = student.vocab_map.cpu()
        tensors |= {"d2t": offsets(ids), "t2d": membership(ids, student.raw["vocab_size"])}
    write_whole(directory / "model.safetensors", lambda scratch: save_file(tensors, scratch, {"format": "pt"}))
    config = {key: value for key, value in student.raw.items() if key not in ("dtype", "eagle_config")}
    config |= {"torch_dtype": str(dtype).removeprefix("torch."), LAYER_IDS: list(student.feature_layers)}
    write_json(directory / "config.json", config)
    write_whole(directory / "README.md", lambda scratch: scratch.write_text(record, encoding="utf-8"))

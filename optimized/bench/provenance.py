"""What produced the numbers: this software's version and commit, and the machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True)
class Provenance:
    """This software.

    Attributes:
        version: of the installed distribution; "" when it runs from a folder that is not installed.
        commit: of the checkout, with "-dirty" when files differ from it; "" outside one.
    """

    version: str
    commit: str

    @classmethod
    def here(cls) -> Provenance:
        """Of the code that runs."""
        try:
            version = importlib.metadata.version("rheosampling")
        except importlib.metadata.PackageNotFoundError:
            version = ""
        return cls(version, _commit(Path(__file__).parents[2]))


def _commit(folder: Path) -> str:
    if not (folder / ".git").exists():  # say, inside somebody else's checkout
        return ""
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def machine(device: torch.device) -> str:
    """The name of the processor or accelerator that the models run on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


SAMPLE = 64


def weights_digest(model: nn.Module) -> str:
    """8 hexadecimal digits of a model's weights: names, shapes, and some ``SAMPLE`` entries of each, evenly spread.

    Another training changes all entries, so that a sample tells it.
    """
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLE)].double().cpu().numpy()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + sample.tobytes())
    return digest.hexdigest()[:8]

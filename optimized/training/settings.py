"""What the stages are told; the defaults are the first stage of the embedded head's recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch

Objective = Literal["cross-entropy", "acceptance", "hybrid"]


@dataclass(frozen=True)
class CorpusSettings:
    """How the target's conversations are written.

    Attributes:
        conversations: how many, those held out included; at least ``held_out + 1``.
        length: tokens of each; a conversation is cut there.
        batch: conversations written side by side, and so the size of a shard.
        answer_temperatures: one is drawn for each conversation; 0 is greedy.
        user_temperature: of the user turns, which the target writes as well.
        top_k: tokens that a draw chooses from; 0: all.
        held_out: conversations kept from training, the first ones.
        seed: of the draws, not negative.

    Raises:
        ValueError: a value out of its range.
    """

    conversations: int = 2496
    length: int = 352
    batch: int = 48
    answer_temperatures: tuple[float, ...] = (0.3, 0.7, 0.9, 1.0)
    user_temperature: float = 0.8
    top_k: int = 200
    held_out: int = 24
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(self, {"length": 8, "batch": 1, "user_temperature": 0, "top_k": 0, "held_out": 1, "seed": 0})
        if self.conversations <= self.held_out:
            raise ValueError(
                f"conversations={self.conversations}, held_out={self.held_out}: nothing is left to train on"
            )
        if not self.answer_temperatures or min(self.answer_temperatures) < 0:
            raise ValueError(f"answer_temperatures must be numbers >= 0, got {self.answer_temperatures}")

    @property
    def shards(self) -> int:
        """Files the corpus is stored in."""
        return -(-self.conversations // self.batch)


@dataclass(frozen=True)
class TrainSettings:
    """How a head is trained.

    Attributes:
        steps: of the optimiser.
        batch: conversations per step.
        unroll: steps of the test-time unroll: the first reads the target's features, the others the head's own.
        objective: what is lowered, see ``lessons.step_loss``.
        decay: the loss of unrolled step j = 0, 1, ... has the weight ``decay ** j``.
        learning_rate: its highest value, reached after ``warmup`` steps; a cosine then takes it to 0.
        warmup: steps of linear increase.
        weight_decay: of AdamW.
        clip: the gradient's norm is cut to this.
        seed: of the order of the conversations, and of weights that have no better start; not negative.
        save_every: steps between checkpoints.
        measure_every: steps between measurements on the held-out conversations.

    Raises:
        ValueError: a value out of its range.
    """

    steps: int = 1160
    batch: int = 6
    unroll: int = 4
    objective: Objective = "cross-entropy"
    decay: float = 0.8
    learning_rate: float = 6e-4
    warmup: int = 40
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    save_every: int = 20
    measure_every: int = 100

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch": 1, "unroll": 1, "warmup": 0, "weight_decay": 0, "seed": 0}
        _at_least(self, least | {"save_every": 1, "measure_every": 1})
        if self.objective not in get_args(Objective):
            raise ValueError(f"objective must be one of {', '.join(get_args(Objective))}, got {self.objective!r}")
        for name in ("decay", "learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


def _at_least(settings: Any, least: Mapping[str, float]) -> None:
    for name, value in least.items():
        if not getattr(settings, name) >= value:
            raise ValueError(f"{name} must be at least {value}, got {getattr(settings, name)}")


def check_same(what: str, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to go on with work that was begun under other settings.

    Raises:
        ValueError: naming every setting that differs.
    """
    differing = [key for key in {**stored, **wanted} if stored.get(key) != wanted.get(key)]
    if differing:
        told = ", ".join(f"{key}: {stored.get(key)!r} there, {wanted.get(key)!r} now" for key in differing)
        raise ValueError(f"{what} was begun with other settings ({told}); give those, or another folder")


def plain(settings: CorpusSettings | TrainSettings) -> dict[str, Any]:
    """The settings as JSON gives them back."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(settings).items()}


def compute_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16 where the machine multiplies it in hardware, else float32."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if "avx512_bf16" in _cpu_flags() else torch.float32


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((set(line.split()) for line in lines if line.startswith("flags")), set())
    except OSError:
        return set()

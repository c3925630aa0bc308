"""Training a head: one loop, whose state is a step number, the weights and the optimiser's moments."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optimized.files import write_whole
from optimized.models.target import TargetModel
from optimized.training.evaluation import Text, measure_overlap
from optimized.training.journal import Journal, Row
from optimized.training.lessons import read_lesson, score_steps, step_loss
from optimized.training.settings import TrainSettings, check_same, plain
from optimized.training.student import Student

CHECKPOINT = "checkpoint.pt"
_BETAS = (0.9, 0.95)


def train(
    directory: Path,
    target: TargetModel,
    student: Student,
    tokens: Tensor,
    settings: TrainSettings,
    held_out: Sequence[Text] = (),
    dtype: torch.dtype = torch.float32,
    report: Callable[[Row], None] | None = None,
) -> None:
    """Train the student's head in place, from the directory's checkpoint if there is one.

    On one machine with one number of threads a resumed run gives the same bits as one that was never interrupted: the
    order of the texts and the learning rate are functions of the step.

    Args:
        directory: for ``checkpoint.pt``, ``log.csv`` (a row per step) and ``held_out.csv``.
        target: teaches; of it, only the feature layers are set.
        student: its head is in float32 on the target's device.
        tokens: [texts, length] long, the training corpus.
        settings: how.
        held_out: texts that the head is measured on.
        dtype: of the head's matrix products; weights and moments stay float32.
        report: called with every row of ``log.csv``.

    Raises:
        ValueError: the checkpoint is of another run, or fewer texts than one batch.
        FloatingPointError: the loss is not finite.
    """
    if len(tokens) < settings.batch:
        raise ValueError(f"batch={settings.batch}, but only {len(tokens)} texts to train on")
    head = student.head.train().requires_grad_(True)
    parameters = list(head.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.learning_rate, betas=_BETAS, weight_decay=settings.weight_decay
    )
    identity = _identity(student, tokens, settings, dtype)
    first = _resume(directory / CHECKPOINT, head, optimizer, identity)
    log, measurements = Journal(directory / "log.csv", first), Journal(directory / "held_out.csv", first)

    def measure(step: int) -> None:
        if held_out:
            found = measure_overlap(target, student, held_out, settings.unroll, dtype)
            overlaps = {f"overlap_{j + 1}": mean for j, mean in enumerate(found.means)}
            measurements.write({"step": step, **overlaps})

    if first == 0:
        measure(0)
    for step in range(first, settings.steps):
        began = time.monotonic()
        rate = learning_rate(settings, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = tokens[batch_indices(len(tokens), settings, step)]
        lesson = read_lesson(target, batch, student.vocab_map, student.feature_layers)
        by_overlap = settings.objective != "cross-entropy"
        scores = score_steps(head, student.embedding, lesson, settings.unroll, dtype, by_overlap)
        weights = [settings.decay**j for j in range(settings.unroll)]
        losses = [step_loss(score, settings.objective) for score in scores]
        loss = torch.stack([w * x for w, x in zip(weights, losses, strict=True)]).sum() / sum(weights)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        if not bool(torch.isfinite(loss) & torch.isfinite(norm)):
            raise FloatingPointError(f"step {step + 1}: the loss is {float(loss)}, its gradient's norm {float(norm)}")
        optimizer.step()
        row = {
            "step": step + 1,
            "tokens": (step + 1) * batch.numel(),
            "learning_rate": rate,
            "loss": float(loss.detach()),
        }
        row |= {"gradient_norm": float(norm), "outside": float(scores[0].outside.mean())}
        row |= {f"overlap_{j + 1}": float(score.overlap.detach().mean()) for j, score in enumerate(scores)}
        row["seconds"] = time.monotonic() - began
        log.write(row)
        last = step + 1 == settings.steps
        if (step + 1) % settings.measure_every == 0 or last:
            measure(step + 1)
        if (step + 1) % settings.save_every == 0 or last:
            _save(directory / CHECKPOINT, head, optimizer, step + 1, identity)
        if report:
            report(row)
    head.eval().requires_grad_(False)


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Of step 0, 1, ...: a line up to the highest value, then half a cosine down."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def batch_indices(texts: int, settings: TrainSettings, step: int) -> list[int]:
    """Which texts step 0, 1, ... reads: one seeded order per epoch, the epochs end to end."""
    places = range(step * settings.batch, (step + 1) * settings.batch)
    orders = {
        epoch: np.random.default_rng([settings.seed, epoch]).permutation(texts)
        for epoch in {place // texts for place in places}
    }
    return [int(orders[place // texts][place % texts]) for place in places]


def _identity(student: Student, tokens: Tensor, settings: TrainSettings, dtype: torch.dtype) -> dict[str, Any]:
    """What a run must have in common with its checkpoint."""
    run = plain(settings)
    del run["save_every"]  # changes no result
    vocabulary = torch.empty(0, dtype=torch.long) if student.vocab_map is None else student.vocab_map
    return {
        **run,
        "dtype": str(dtype),
        "start": student.origin,
        "feature layers": list(student.feature_layers),
        "corpus": _digest(tokens),
        "vocabulary": _digest(vocabulary),
    }


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def _save(
    path: Path, head: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, identity: dict[str, Any]
) -> None:
    state = {"step": step, "identity": identity, "head": head.state_dict(), "optimizer": optimizer.state_dict()}
    write_whole(path, lambda scratch: torch.save(state, scratch))


def _resume(path: Path, head: torch.nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any]) -> int:
    """Load the checkpoint, if any; returns the steps done."""
    if not path.is_file():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    stored = {"objective": TrainSettings.objective} | state["identity"]  # runs begun before there was a choice
    check_same(f"the run of {path}", stored, identity)
    head.load_state_dict(state["head"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])

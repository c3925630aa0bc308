"""Single layers: the measurement against the closed forms, the support's law, and the command."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimized.bench.layer import LayerPlan, measured_rate, on_support, predicted_rate
from optimized.bench.layer_report import difference_in_errors
from optimized.cli import app
from optimized.decoder import RheoDecoder
from proofs_tests.test_bench_run import CliRunner, tiny_decoder, write_sets
from reference.acceptance import LayerRule, single_layer
from reference.api import DraftLaw

WALKS = 20_000


def plan(**changes: Any) -> LayerPlan:
    values: dict[str, Any] = {
        "sets": (), "temperatures": (1.0,), "branchings": (4,), "lead_tokens": (0, 1), "draft_support": 16,
        "supports": (16,), "contexts": 2, "walks": WALKS, "max_new_tokens": 8, "seed": 0,
    }  # fmt: skip
    return LayerPlan(**{**values, **changes})


def laws(seed: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft logits, and a target law that is near the draft's."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=2, size=vocab).astype(np.float32)
    target = torch.from_numpy(logits + rng.normal(scale=1.0, size=vocab)).softmax(-1)
    return torch.from_numpy(logits), target


@pytest.mark.parametrize("rule", ["topk", "rrsw", "rheo"])
@pytest.mark.parametrize(("branching", "leads"), [(4, 1), (3, 0), (2, 1), (4, 3)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_measured_is_predicted(rule: LayerRule, branching: int, leads: int, temperature: float) -> None:
    logits, target = on_support(*laws(branching + 7 * leads, 60), 24, None)
    measured = measured_rate(logits, target, branching, leads, rule, temperature, plan(), seed=3)
    predicted, bound = predicted_rate(logits, target, branching, leads, rule, temperature)
    assert abs(measured - predicted) <= 5 * math.sqrt(predicted * (1 - predicted) / WALKS)  # 1 in 2 million
    assert predicted <= bound + 1e-12


@pytest.mark.parametrize("vocab_map", [None, torch.arange(3, 63)])
def test_the_support_and_one_token_for_the_rest(vocab_map: torch.Tensor | None) -> None:
    logits, _ = laws(1, 60)
    _, target = laws(2, 70)
    small_logits, small_target = on_support(logits, target, 24, vocab_map)
    assert small_logits.shape == small_target.shape == (25,)
    assert float(small_target.sum()) == pytest.approx(1)
    ids = torch.arange(60) if vocab_map is None else vocab_map
    wide = torch.full((70,), -torch.inf)
    wide[ids] = logits
    draft = DraftLaw.from_logits(wide.numpy(), 0.8, 24)
    whole = single_layer(draft.construction, target.numpy(), 5, 1, "rrsw", draft.sampling)
    assert predicted_rate(small_logits, small_target, 5, 1, "rrsw", 0.8)[0] == pytest.approx(float(whole), abs=1e-12)


def test_variants_and_bad_plans() -> None:
    assert plan(branchings=(2,), lead_tokens=(0, 1, 2)).variants() == [
        ("topk", 2, None), ("rrsw", 2, 0), ("rrsw", 2, 1), ("rheo", 2, 0), ("rheo", 2, 1),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="name temperatures above 0"):
        plan(temperatures=(1.0, 0.0))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RheoDecoder, "from_pretrained", tiny_decoder)
    sets = write_sets(tmp_path / "sets")
    options = ["--branchings", "3,4", "-m", "0,1", "--supports", "8,full", "--contexts", "2", "--walks", "300"]
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["layer", *map(str, sets), "--out", str(out), *options, "-n", "6"])
    assert result.exit_code == 0, result.output
    for title in ("## Acceptance of a single layer", "## Coverage of the support"):
        assert title in result.stdout
        assert title in (out / "layers.md").read_text()
    with (out / "layers.csv").open() as file:
        rows = list(csv.DictReader(file))
    contexts = {(row["set_name"], row["question_id"], row["position"]) for row in rows}
    assert len(rows) == len(contexts) * 10  # two K; top-K once, the others for two m
    assert {name for name, _, _ in contexts} == {"chats", "single"}
    best: dict[Any, float] = {}
    for row in rows:
        measured, predicted, bound = (float(row[name]) for name in ("measured", "predicted", "bound"))
        assert abs(measured - predicted) <= 6 * math.sqrt(max(predicted * (1 - predicted), 1e-9) / 300) + 1e-9
        assert predicted <= bound + 1e-9
        best[row["rule"]] = best.get(row["rule"], 0.0) + predicted
    with (out / "coverage.csv").open() as file:
        coverage = list(csv.DictReader(file))
    assert len(coverage) == 2 * len(contexts)
    assert all(float(row["draft_mass"]) == pytest.approx(1) for row in coverage if row["support"] == "257")
    assert all(0 < float(row["draft_mass"]) < 1 for row in coverage if row["support"] == "8")
    again = CliRunner().invoke(app, ["layer", *map(str, sets), "--out", str(out / "b"), *options, "-n", "6"])
    assert (out / "b" / "layers.csv").read_text() == (out / "layers.csv").read_text()
    assert again.exit_code == 0


def test_the_gap_has_the_error_of_its_walks() -> None:
    from optimized.bench.layer import LayerRow

    row = LayerRow("s", "1", 1, 1.0, "rheo", 4, 1, 16, 100, 0.52, 0.5, 0.6)
    gap, error = difference_in_errors([row] * 4)
    assert gap == pytest.approx(0.02)
    assert error == pytest.approx(0.05 / 2)

"""Reports: estimates and intervals against known ones, pairing, and what is written or left out."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from optimized.bench.aggregate import (
    AVERAGE,
    Results,
    bootstrap,
    coverage,
    estimates,
    expected_tau,
    milliseconds_per_pass,
    pooled_levels,
    tau,
)
from optimized.bench.figures import COLORS, sweep
from optimized.bench.methods import SETTING_NAMES, SETTINGS, Method
from optimized.bench.report import write_report
from optimized.bench.rows import Row, header_line
from optimized.cli import app

SHAPE = {"branching": 4, "depth": 2, "tree_size": 8, "draft_support": 16}
TOP_K, RHEO = Method("topk", **SHAPE), Method("rheo", 1, 1, **SHAPE)


def row(
    method: Method, set_name: str = "a", question_id: str = "1", turn: int = 1, seed: int = 0, **changes: Any
) -> Row:
    """A row of ten passes that emitted fifteen tokens in two seconds, half a second of it the prompt's."""
    values: dict[str, Any] = {
        "temperature": 1.0, "category": "", "prompt_tokens": 5, "tokens": 16, "passes": 10, "emitted": 15, "tau": 1.5,
        "expected_tau": 1.6, "contexts_used": 2, "offered_per_level": (10, 8), "accepted_per_level": (4, 1),
        "probes_offered": 6, "probes_accepted": 2, "coverage": 0.9, "seconds": 2.0, "tokens_per_second": 8.0,
        "prompt_seconds": 0.5, "target_seconds": 1.5, "draft_seconds": 0.3, "sampling_seconds": 0.1,
        "other_seconds": 0.1, "finish_reason": "length", "text_crc": "0", "place": 0, "target": "t", "draft": "d",
        "dtype": "float32", "device": "cpu", "threads": 1, "machine": "m", "max_new_tokens": 16, "contexts": 2,
        "backend": "torch", "texts": "timed", "batch_size": 1,
            "min_new_tokens": 0, "questions": "q", "version": "1", "commit": "c",
    }  # fmt: skip
    if method.name == "generate":
        values |= dict.fromkeys(("passes", "emitted", "tau", "target_seconds", "draft_seconds"))
        values |= {"sampling_seconds": None, "other_seconds": None, "coverage": None, "expected_tau": 1.0}
        values |= {"offered_per_level": (), "accepted_per_level": ()}
    settings = {n: getattr(method, n) for n in SETTING_NAMES}
    made = Row(
        set_name=set_name, question_id=question_id, turn=turn, method=method.name, seed=seed, **settings, **values
    )
    return replace(made, **changes)


def small_file(sizes: tuple[int, ...] = (8,), temperatures: tuple[float, ...] = (1.0,)) -> list[Row]:
    """Two sets of four questions, two seeds; rheo is 0.1 above topk, give or take."""
    rng = np.random.default_rng(0)
    rows = []
    for set_name in ("a", "b"):
        for question in "1234":
            for seed in (0, 1):
                for temperature in temperatures:
                    common = rng.normal(1.5, 0.3)
                    at = {"question_id": question, "seed": seed, "temperature": temperature}
                    rows.append(row(Method("generate"), set_name, **at, seconds=4.0, tokens_per_second=4.0))
                    for size in sizes:
                        for method, shift in ((TOP_K, 0.0), (RHEO, 0.1)):
                            sized = replace(method, tree_size=size)
                            value = common + shift + rng.normal(0, 0.02)
                            rows.append(row(sized, set_name, **at, expected_tau=value, emitted=round(10 * value)))
    return rows


def test_measures_weigh_by_passes_and_contexts() -> None:
    rows = [row(TOP_K), row(TOP_K, turn=2, passes=30, emitted=30, expected_tau=1.0, contexts_used=6)]
    assert tau(rows) == 45 / 40
    assert expected_tau(rows) == pytest.approx((2 * 1.6 + 6 * 1.0) / 8)
    assert math.isnan(expected_tau([row(TOP_K, expected_tau=None)]))
    assert math.isnan(tau([row(Method("generate"))]))
    assert coverage([row(TOP_K), row(TOP_K, coverage=0.5, contexts_used=6)]) == pytest.approx((1.8 + 3.0) / 8)
    assert pooled_levels([row(TOP_K), row(TOP_K, accepted_per_level=(2,))]) == [6 / 20, 1 / 20]
    spent = milliseconds_per_pass([row(TOP_K), row(Method("generate"))])
    assert spent == pytest.approx({"target": 100.0, "draft": 30.0, "sampling": 10.0, "other": 10.0})
    assert milliseconds_per_pass([row(Method("generate"))]) is None


def test_estimates_by_set_and_on_average() -> None:
    values = {("a", "1"): 1.0, ("a", "2"): 3.0, ("b", "1"): 5.0, ("b", "2"): 5.0, ("b", "3"): 8.0}
    found = estimates(values, ["a", "b"])
    assert (found["a"].mean, found["a"].standard_error, found["a"].questions) == (2.0, pytest.approx(1.0), 2)
    assert found["b"].mean == 6.0
    assert found["b"].standard_error == pytest.approx(math.sqrt(3) / math.sqrt(3))
    assert found[AVERAGE].mean == 4.0  # sets weigh alike
    assert found[AVERAGE].standard_error == pytest.approx(math.sqrt(2) / 2)
    assert AVERAGE not in estimates(values, ["a", "b", "c"])
    assert math.isnan(estimates({("a", "1"): 1.0}, ["a"])["a"].standard_error)


def test_bootstrap_interval_of_a_constant_and_of_a_normal_sample() -> None:
    constant = bootstrap({("a", str(i)): 0.25 for i in range(5)}, ["a"], 100, 0)
    assert (constant["a"].low, constant["a"].high) == (0.25, 0.25)
    rng = np.random.default_rng(3)
    values = {(name, str(i)): float(x) for name in "ab" for i, x in enumerate(rng.normal(1, 2, size=400))}
    found = bootstrap(values, ["a", "b"], 4000, 1)
    for name in ("a", "b", AVERAGE):
        estimate = found[name].estimate
        assert found[name].low == pytest.approx(estimate.mean - 1.96 * estimate.standard_error, abs=0.02)
        assert found[name].high == pytest.approx(estimate.mean + 1.96 * estimate.standard_error, abs=0.02)
    assert bootstrap(values, ["a", "b"], 4000, 1) == found
    assert bootstrap(values, ["a", "b"], 4000, 2) != found
    lonely = bootstrap({("a", "1"): 1.0, ("b", "1"): 2.0, ("b", "2"): 3.0}, ["a", "b"], 10, 0)
    assert math.isnan(lonely["a"].low)
    assert math.isnan(lonely[AVERAGE].low)
    assert lonely["b"].low < 2.5 < lonely["b"].high


def test_bootstrap_of_two_values_is_known_exactly() -> None:
    found = bootstrap({("a", "1"): 0.0, ("a", "2"): 1.0}, ["a"], 20_000, 0)["a"]
    # The mean is 0, 1/2, 1 with probability 1/4, 1/2, 1/4; Student's t of one degree of freedom is 12.7, not 1.96.
    half = 0.5 * math.sqrt(2) * 12.7062 / 1.95996
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-4)


@pytest.mark.parametrize(("sets", "questions"), [(1, 40), (1, 10), (1, 4), (6, 4)])
def test_bootstrap_intervals_cover(sets: int, questions: int) -> None:
    rng, hits, names = np.random.default_rng(8), 0, [str(index) for index in range(sets)]
    for trial in range(300):
        values = {(name, str(i)): float(x) for name in names for i, x in enumerate(rng.normal(0.5, 1, size=questions))}
        found = bootstrap(values, names, 400, trial)[AVERAGE]
        hits += found.low <= 0.5 <= found.high
    assert 0.89 <= hits / 300 <= 0.99


def test_differences_are_paired_on_common_turns_and_seeds() -> None:
    rows = [
        row(TOP_K, expected_tau=1.0), row(TOP_K, seed=1, expected_tau=9.0), row(RHEO, expected_tau=1.2),
        row(RHEO, question_id="2", expected_tau=7.0), row(RHEO, turn=2, expected_tau=3.0),
    ]  # fmt: skip
    found = Results(rows).differences(expected_tau, RHEO, TOP_K, 1.0)
    assert found == {("a", "1"): pytest.approx(0.2)}


def test_partners_have_the_same_shape() -> None:
    larger = replace(TOP_K, tree_size=16)
    chain, odd = Method("chain", depth=2, draft_support=16), replace(RHEO, tree_size=32)
    results = Results([row(method) for method in (TOP_K, larger, RHEO, chain, odd)])
    assert results.partner(RHEO, "topk") == TOP_K
    assert results.partner(replace(RHEO, tree_size=16), "topk") == larger
    assert results.partner(chain, "topk") == "2 variants of topk have its settings"
    assert results.partner(odd, "topk") == "no topk has its settings"


def test_speed_up_is_over_generate_else_over_plain() -> None:
    plain = row(Method("plain"), seconds=8.0)
    results = Results([row(Method("generate"), seconds=4.0), plain, row(TOP_K)])
    assert results.baseline(1.0) == Method("generate")
    assert results.speed_ups(TOP_K, 1.0) == {("a", "1"): 2.0}
    assert Results([plain, row(TOP_K)]).speed_ups(TOP_K, 1.0) == {("a", "1"): 4.0}
    assert Results([row(TOP_K)]).baseline(1.0) is None
    greedy = [row(Method("plain"), seconds=8.0, temperature=0.0), row(TOP_K, temperature=0.0)]
    both = Results([row(Method("generate"), seconds=4.0), row(TOP_K), *greedy])
    assert both.baselines() == ["plain", "generate"]
    assert both.speed_ups(TOP_K, 0.0) == {("a", "1"): 4.0}


def test_a_report_of_one_setting(tmp_path: Path) -> None:
    rows = small_file()
    (tmp_path / "rows.csv").write_text(header_line() + "".join(one.as_line() for one in rows))
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "rows.csv"), "--out", str(out), "--resamples", "500"])
    assert result.exit_code == 0, result.output
    text = (out / "report.md").read_text()
    for title in ("Expected acceptance length", "paired differences against top-K", "Speed-up", "Where a step's time"):
        assert title in text
    assert "Tokens per second over those of generate" in text
    for setting, value in {"lead_tokens": "1", "temperature": "1", "tree_size": "8", "draft_support": "16"}.items():
        assert f"- picture against_{setting}: the rows have one value of it ({value})" in text
        assert not (out / f"against_{setting}.svg").exists()
    for name in ("tau_by_set", "acceptance_by_level", "step_time"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / f"{name}.svg").read_text()[:2000]
        assert f"({name}.svg)" in text
    with (out / "expected_tau_differences.csv").open() as file:
        found = {line["set"]: line for line in csv.DictReader(file)}
    assert set(found) == {"a", "b", AVERAGE}
    for line in found.values():
        assert float(line["low"]) < 0.1 < float(line["high"])
        assert float(line["low"]) > 0
    with (out / "speed_up.csv").open() as file:
        assert {float(line["mean"]) for line in csv.DictReader(file)} == {2.0}
    pictures = {path.name: path.read_bytes() for path in out.glob("*.svg")}
    CliRunner().invoke(app, ["report", str(tmp_path / "rows.csv"), "--out", str(out), "--resamples", "500"])
    assert pictures == {path.name: path.read_bytes() for path in out.glob("*.svg")}


def test_a_report_draws_what_was_varied(tmp_path: Path) -> None:
    report = write_report(small_file((4, 8), (0.5, 1.0)), tmp_path, resamples=50)
    drawn = {name for name, _ in report.pictures}
    assert {"against_tree_size", "against_temperature"} <= drawn
    left_out = dict(report.left_out)
    assert left_out["picture against_lead_tokens"] == "the rows have one value of it (1)"
    assert "rheo R=4" in report.markdown()


def test_a_report_says_what_it_cannot_show(tmp_path: Path) -> None:
    report = write_report([row(RHEO, expected_tau=None, contexts_used=0)], tmp_path, resamples=5)
    left_out = dict(report.left_out)
    assert left_out["table “Speed-up”"] == "there are no rows of generate or plain to compare with"
    assert left_out["table “Acceptance length, sampled: paired differences”"] == "there are no rows of topk"
    assert left_out["table “Expected acceptance length, on common contexts”"] == "no row has it"
    plain = write_report([row(Method("generate"))], tmp_path, resamples=5)
    assert not plain.pictures
    assert dict(plain.left_out)["picture tau_by_set"] == "no method with trees has an acceptance length"
    with pytest.raises(ValueError, match="no rows to report on"):
        write_report([], tmp_path)


def test_every_method_has_a_colour() -> None:
    assert set(COLORS) == set(SETTINGS)


def test_rows_without_texts_are_drawn_too(tmp_path: Path) -> None:
    """A sweep of the expected acceptance length needs no timed texts."""
    rows = [replace(made, passes=None, tau=None, tokens=0, seconds=0.0) for made in small_file((4, 8))]
    figure = sweep(Results([made for made in rows if made.method != "generate"]), "tree_size")
    assert not isinstance(figure, str)

"""A run on tiny models: rows and their keys, the order of the methods, conversations, and going on after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from optimized.bench.aggregate import PHASES
from optimized.bench.methods import Grid, Method, methods_of
from optimized.bench.provenance import Provenance, weights_digest
from optimized.bench.questions import read_sets
from optimized.bench.randomness import derived_seed
from optimized.bench.rows import COLUMNS, KEY, Row, RunSettings, header_line, parse_rows, read_rows
from optimized.bench.run import Bench, Plan, rotated
from optimized.bench.running import Answer, MethodRunner, hf_generate
from optimized.bench.store import RowStore
from optimized.calibration import prior_weights, save_weights
from optimized.cli import app
from optimized.decoder import RheoDecoder
from optimized.models import CausalDrafter, TargetModel
from optimized.sampling_params import SamplingParams
from proofs_tests.test_cli import tiny_model
from proofs_tests.tiny_models import byte_tokenizer
from reference.api import RheoConfig

TIMES = {"seconds", "tokens_per_second", "prompt_seconds", *(f"{phase}_seconds" for phase in PHASES)}
OPTIONS = [
    "--methods", "plain,generate,topk,rheo,rrsw,chain", "--temperatures", "1,0", "--lead-tokens", "0,1",
    "--tree-sizes", "4", "--branchings", "3", "--depths", "2", "--supports", "full", "-n", "6", "--contexts", "2",
    "--threads", "1",
]  # fmt: skip


def tiny_decoder(*_: object, **__: object) -> RheoDecoder:
    target = TargetModel(tiny_model(1, 2))
    return RheoDecoder(target, CausalDrafter(tiny_model(2, 1), target.vocab_size), byte_tokenizer())


def write_sets(folder: Path) -> list[Path]:
    """Two sets, three questions, five turns."""
    for name, questions in {"chats": [["ab", "cd"], ["e", "fgh"]], "single": [["xyz"]]}.items():
        (folder / name).mkdir(parents=True)
        lines = [json.dumps({"question_id": i, "category": "c", "turns": turns}) for i, turns in enumerate(questions)]
        (folder / name / "question.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return [folder / "chats", folder / "single"]


def comparable(rows: list[Row]) -> dict[Any, dict[str, Any]]:
    """Rows by key, without what the clock gave; a commit may come in between."""
    return {
        row.key: {name: value for name, value in vars(row).items() if name not in TIMES and name != "commit"}
        for row in rows
    }


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RheoDecoder, "from_pretrained", tiny_decoder)


def rheo_bench(out: Path, sets: list[Path], *options: str) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, sets), "--out", str(out), *OPTIONS, *options])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RheoDecoder, "from_pretrained", tiny_decoder)
        result = rheo_bench(folder / "rows.csv", write_sets(folder / "sets"))
    assert result.exit_code == 0, result.output
    assert "80 rows to do of 80" in result.stdout  # 8 methods, 5 turns, 2 temperatures
    return folder


def test_rows_hold_what_was_measured(undisturbed: Path) -> None:
    rows = read_rows(undisturbed / "rows.csv")
    assert len(rows) == len({row.key for row in rows}) == 80
    for row in rows:
        assert 1 <= row.tokens <= 6
        assert row.contexts_used <= 2
        assert row.tokens_per_second == pytest.approx(row.tokens / row.seconds)
        assert 0 < row.prompt_seconds <= row.seconds
        if row.method == "generate":
            assert (row.passes, row.tau, row.target_seconds, row.coverage) == (None,) * 4
            continue
        assert row.passes is not None
        assert sum(row.accepted_per_level) + row.passes == row.emitted
        phases = [getattr(row, f"{phase}_seconds") for phase in PHASES]
        assert sum(phases) == pytest.approx(row.seconds)
        if row.passes:
            assert row.tau == row.emitted / row.passes
        if row.method == "plain" and row.contexts_used:
            assert row.expected_tau == 1
        elif row.contexts_used:
            assert 1 <= (row.expected_tau or 0) <= 3
            assert row.coverage == pytest.approx(1)  # the support is full
    assert {row.draft_support for row in rows if row.method == "rheo"} == {257}
    assert any(row.probes_offered for row in rows if row.method == "rheo")
    assert not any(row.probes_offered for row in rows if row.method == "topk" or row.temperature == 0)


def test_greedy_texts_and_greedy_trees_agree(undisturbed: Path) -> None:
    rows = [row for row in read_rows(undisturbed / "rows.csv") if row.temperature == 0]
    texts: dict[Any, set[str]] = {}
    expected: dict[Any, set[float | None]] = {}
    for row in rows:
        texts.setdefault((row.set_name, row.question_id, row.turn), set()).add(row.text_crc)
        if row.method in ("topk", "rheo", "rrsw"):
            expected.setdefault((row.set_name, row.question_id, row.turn), set()).add(row.expected_tau)
    assert all(len(found) == 1 for found in [*texts.values(), *expected.values()])


def test_methods_take_turns_in_being_first(undisturbed: Path) -> None:
    rows = read_rows(undisturbed / "rows.csv")
    turns: dict[Any, list[Row]] = {}
    for row in rows:
        turns.setdefault((row.set_name, row.question_id, row.turn, row.temperature), []).append(row)
    for together in turns.values():  # all methods of a turn stand together, each at its own place
        assert [row.place for row in together] == list(range(8))
        start = rows.index(together[0])
        assert rows[start : start + 8] == together
    for set_name in ("chats", "single"):
        for temperature in (0, 1):
            here = [
                together[0].of_method for key, together in turns.items() if (key[0], key[3]) == (set_name, temperature)
            ]
            assert len(set(here)) == len(here)  # 8 methods, at most 4 turns: never the same one first
    methods = list(methods_of(["plain", "topk", "rheo"], Grid()))
    assert [rotated(methods, by)[0] for by in range(4)] == [*methods, methods[0]]


def test_conversations_go_on_with_the_plain_text_for_every_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Method, tuple[int, ...], SamplingParams, Answer]] = []
    run_batch = MethodRunner.run_batch

    def spy(self: MethodRunner, method: Method, prompts: list[list[int]], params: list[SamplingParams]) -> list[Answer]:
        answers = run_batch(self, method, prompts, params)
        for prompt, how, answer in zip(prompts, params, answers, strict=True):
            if how.seed != 0:  # the warm-up's
                asked.append((method, tuple(prompt), how, answer))
        return answers

    monkeypatch.setattr(MethodRunner, "run_batch", spy)
    sets = read_sets(write_sets(tmp_path / "sets"))
    grid = Grid(branching=(3,), depth=(2,), tree_size=(4,))
    decoder, settings = tiny_decoder(), some_settings()
    plan = Plan(tuple(sets), tuple(methods_of(["topk", "rheo"], grid)), (1.0,), (0, 1), 5, 2)
    with RowStore(tmp_path / "rows.csv", settings, {}) as store:
        assert Bench(decoder, plan, settings, Provenance("", "")).run(store) == 20
    by_prompt: dict[tuple[tuple[int, ...], int | None], list[Any]] = {}
    for method, prompt, params, answer in asked:
        by_prompt.setdefault((prompt, params.seed), []).append((method, answer))
    assert len(by_prompt) == 10  # turns times seeds: the methods share prompts and seeds
    assert all([method.name for method, _ in group].count("plain") == 1 for group in by_prompt.values())
    assert len({params.seed for _, _, params, _ in asked}) == 10
    plain = {prompt: answer for (prompt, _), group in by_prompt.items() for m, answer in group if m.name == "plain"}
    first = decoder.chat_prompt([{"role": "user", "content": "ab"}])
    texts = {answer.text for (prompt, _), group in by_prompt.items() if prompt == tuple(first) for _, answer in group}
    assert len(texts) > 1  # so that it matters whose text the conversation goes on with
    for (prompt, seed), group in by_prompt.items():
        if prompt == tuple(first):
            said = next(answer.text for method, answer in group if method.name == "plain")
            messages = [("user", "ab"), ("assistant", said), ("user", "cd")]
            second = decoder.chat_prompt([{"role": role, "content": text} for role, text in messages])
            run_seed = next(s for s in (0, 1) if derived_seed(s, "chats", "0", 1) == seed)
            assert (tuple(second), derived_seed(run_seed, "chats", "0", 2)) in by_prompt
    assert plain


def some_settings(**changes: Any) -> RunSettings:
    return replace(RunSettings("t", "d", "float32", "cpu", 1, "m", 5, 2, "timed", 1, 0), **changes)


def test_a_killed_run_goes_on_to_the_same_rows(undisturbed: Path, tmp_path: Path, tiny: None) -> None:
    out, sets = tmp_path / "rows.csv", [undisturbed / "sets" / "chats", undisturbed / "sets" / "single"]
    command = [sys.executable, "-m", "proofs_tests.test_bench_run", "bench", *map(str, sets), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    process = subprocess.Popen([*command, *OPTIONS], cwd=root, env=environment, stdout=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not (out.exists() and out.read_bytes().count(b"\n") > 9):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    left = read_rows(out)
    assert 9 <= len(left) < 80
    result = rheo_bench(out, sets)
    assert result.exit_code == 0, result.output
    assert f"wrote {80 - len(left)} rows" in result.stdout
    rows = read_rows(out)
    assert rows[: len(left)] == left
    assert comparable(rows) == comparable(read_rows(undisturbed / "rows.csv"))
    assert [row.key for row in rows] == [row.key for row in read_rows(undisturbed / "rows.csv")]
    assert "0 rows to do of 80" in rheo_bench(out, sets).stdout
    assert len(read_rows(out)) == 80


@pytest.mark.parametrize("torn", [1, 40, 700])
def test_a_torn_line_is_written_again(undisturbed: Path, tmp_path: Path, tiny: None, torn: int) -> None:
    whole = (undisturbed / "rows.csv").read_bytes()
    out = tmp_path / "rows.csv"
    out.write_bytes(whole[:-torn])
    result = rheo_bench(out, [undisturbed / "sets" / "chats", undisturbed / "sets" / "single"])
    assert result.exit_code == 0, result.output
    assert comparable(read_rows(out)) == comparable(read_rows(undisturbed / "rows.csv"))


@pytest.mark.parametrize("kept", [0, 7, len(header_line()) - 1, len(header_line()), len(header_line()) + 30])
def test_a_file_without_a_whole_row_starts_anew(undisturbed: Path, tmp_path: Path, kept: int) -> None:
    out = tmp_path / "rows.csv"
    out.write_bytes((undisturbed / "rows.csv").read_bytes()[:kept])
    with RowStore(out, some_settings(), {}) as store:
        assert not store.done
    assert out.read_text() == header_line()


def test_other_settings_are_refused_by_name(undisturbed: Path, tmp_path: Path, tiny: None) -> None:
    out, sets = tmp_path / "rows.csv", [undisturbed / "sets" / "chats", undisturbed / "sets" / "single"]
    content = (undisturbed / "rows.csv").read_bytes()
    out.write_bytes(content)
    for options, what in (
        (["-n", "7"], "max new tokens 6, this run has 7"),
        (["--contexts", "3"], "contexts 2, this run has 3"),
    ):
        result = rheo_bench(out, sets, *options)
        assert result.exit_code == 2
        assert f"line 2: measured with {what}; use the same, or another --out" in " ".join(result.stderr.split())
    rows = read_rows(out)
    for item in fields(RunSettings):
        changed = replace(rows[0].run_settings, **{item.name: getattr(rows[0], item.name) * 2 or 1})
        with pytest.raises(ValueError, match=f"measured with {item.name.replace('_', ' ')} "):
            RowStore(out, changed, {})
    with pytest.raises(ValueError, match="the questions of chats have changed since"):
        RowStore(out, rows[0].run_settings, {"chats": "0" * 12})
    assert out.read_bytes() == content
    more = rheo_bench(out, sets, "--lead-tokens", "2", "--methods", "rheo", "--temperatures", "1")
    assert more.exit_code == 0, more.output  # another value of what the key tells apart
    assert len(read_rows(out)) == 85


def test_files_that_are_not_ours_are_left_alone(undisturbed: Path, tmp_path: Path) -> None:
    settings = read_rows(undisturbed / "rows.csv")[0].run_settings
    lines = (undisturbed / "rows.csv").read_text().splitlines(keepends=True)
    for content, message in {
        "a,b\n1,2\n": r"line 1: these are not the columns of rheo bench \(missing: set_name, .*unknown: a, b\)",
        "some notes": "is no file of rheo bench",
        lines[0] + "1,2\n": "line 2: 2 cells, ",
        lines[0] + lines[1] + lines[2] + lines[1]: r"line 4: the same row as line 2 \(set_name chats, ",
        lines[0] + lines[1].replace(",1.0,", ",warm,", 1): "line 2: temperature is 'warm', which is no float",
    }.items():
        out = tmp_path / "other.csv"
        out.write_text(content)
        with pytest.raises(ValueError, match=message):
            RowStore(out, settings, {})
        assert out.read_text() == content
    out.write_text(lines[0])
    with pytest.raises(ValueError, match="holds no rows"):
        read_rows(out)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        RowStore(tmp_path / "rows.csv", some_settings(), {}),
        pytest.raises(ValueError, match="is being written by another rheo bench"),
    ):
        RowStore(tmp_path / "rows.csv", some_settings(), {})
    RowStore(tmp_path / "rows.csv", some_settings(), {}).close()


def test_rows_survive_the_file(undisturbed: Path, tmp_path: Path) -> None:
    rows = read_rows(undisturbed / "rows.csv")
    assert parse_rows(header_line() + "".join(row.as_line() for row in rows), tmp_path) == rows
    strange = replace(
        rows[0], category='a "quoted", one', topology="x,y.json", tau=0.1 + 0.2, accepted_per_level=(3, 0)
    )
    assert parse_rows(header_line() + strange.as_line(), tmp_path) == [strange]
    assert set(KEY) < set(COLUMNS)


def test_bad_options_are_told_before_models_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("models were loaded")

    monkeypatch.setattr(RheoDecoder, "from_pretrained", loaded)
    [sets, _] = write_sets(tmp_path / "sets")
    for options, message in {
        ("--methods", "beam"): "unknown method 'beam'",
        ("--tree-sizes", "a"): "integers with commas are wanted",
        ("--temperatures", "-1"): "numbers from 0 on are wanted",
        ("--no-draft",): "--no-draft leaves plain and generate only",
        ("--methods", "plain,topk", "--batch-size", "3"): "set chats has 2 questions, and the last would be asked in a",
        ("--methods", "topk", "--weights", "embedded"): "--weights: none of topk has a use for it",
    }.items():
        result = rheo_bench(tmp_path / "rows.csv", [sets], *options)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())
    assert "no such file of questions" in rheo_bench(tmp_path / "rows.csv", [tmp_path / "nothing"]).stderr
    assert not (tmp_path / "rows.csv").exists()


def test_a_tokenizer_without_a_template_is_refused() -> None:
    decoder = tiny_decoder()
    decoder.tokenizer = byte_tokenizer(chat_template=None)
    plan = Plan((), (Method("plain"),), (1.0,), (0,), 5, 0)
    with pytest.raises(ValueError, match="has no chat template"):
        Bench(decoder, plan, some_settings(), Provenance("", ""))


def test_questions_that_are_too_long_are_named_before_any_is_asked(tmp_path: Path, tiny: None) -> None:
    sets = write_sets(tmp_path / "sets")
    with open(sets[1] / "question.jsonl", "a", encoding="utf-8") as lines:
        lines.write("\n" + json.dumps({"question_id": "long", "turns": ["x" * 3000]}))
    for command in (["bench", "--methods", "topk"], ["layer"], ["calibrate"]):
        out = ["--out", str(tmp_path / command[0])]
        result = CliRunner().invoke(app, [command[0], *map(str, sets), *out, *command[1:]])
        assert result.exit_code == 2, result.output
        assert "too long: set single, question long: 30" in " ".join(result.stderr.split())


def test_generate_samples_the_law_of_the_logits_whatever_the_checkpoint_asks_for() -> None:
    decoder = tiny_decoder()
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    expected = MethodRunner(decoder).run(Method("plain"), [5, 6, 7], params).token_ids
    model = decoder.target.model
    for name, value in {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "eos_token_id": expected[3]}.items():
        setattr(model.generation_config, name, value)
    own = model.generation_config
    assert hf_generate(decoder, [5, 6, 7], params).token_ids == expected
    assert model.generation_config is own


def test_another_head_of_the_same_name_is_another_draft() -> None:
    one, same, other = tiny_model(1, 1), tiny_model(1, 1), tiny_model(2, 1)
    assert weights_digest(one) == weights_digest(same) != weights_digest(other)


def test_without_contexts_nothing_is_expected(tmp_path: Path, tiny: None) -> None:
    [_, single] = write_sets(tmp_path / "sets")
    result = rheo_bench(tmp_path / "rows.csv", [single], "--methods", "topk", "--contexts", "0")
    assert result.exit_code == 0, result.output
    for row in read_rows(tmp_path / "rows.csv"):
        assert (row.expected_tau, row.contexts_used, row.coverage) == (None, 0, None)


def test_without_texts_the_expected_tau_is_the_same(undisturbed: Path, tmp_path: Path, tiny: None) -> None:
    """Nothing is timed; calibrated weights come from a file and take part like any other method."""
    save_weights(prior_weights(), tmp_path / "weights.json", {})
    sets = [undisturbed / "sets" / "chats", undisturbed / "sets" / "single"]
    options = ("--methods", "topk,rheo,calibrated,auto-m", "--weights", str(tmp_path / "weights.json"), "--no-texts")
    result = rheo_bench(tmp_path / "rows.csv", sets, *options)
    assert result.exit_code == 0, result.output
    timed = {row.key: row for row in read_rows(undisturbed / "rows.csv")}
    rows = read_rows(tmp_path / "rows.csv")
    assert len(rows) == 6 * 10  # topk, rheo and calibrated with m = 0 and 1, auto-m
    for row in rows:
        assert (row.tokens, row.passes, row.seconds, row.texts) == (0, None, 0.0, "none")
        if row.method in ("topk", "rheo"):
            assert row.expected_tau == timed[row.key].expected_tau
        else:
            assert row.expected_tau is None or row.expected_tau >= 1
    result = rheo_bench(tmp_path / "none.csv", sets, "--no-texts", "--contexts", "0")
    assert "--no-texts leaves nothing to measure" in result.output
    options = ("--methods", "auto", "--weights", str(tmp_path / "weights.json"), "--no-texts")
    assert "auto-m has fixed sizes" in rheo_bench(tmp_path / "none.csv", sets, *options).output


def test_a_batch_asks_side_by_side_and_a_torn_one_is_asked_again(undisturbed: Path, tmp_path: Path, tiny: None) -> None:
    """Texts by fixed methods are those of one after the other; what is missing of a batch is measured anew."""
    save_weights(prior_weights(), tmp_path / "weights.json", {})
    sets = [undisturbed / "sets" / "chats"]
    options = ("--methods", "plain,rheo,auto", "--weights", str(tmp_path / "weights.json"), "--lead-tokens", "1")
    rows = {}
    for size in (1, 2):
        out = tmp_path / f"rows{size}.csv"
        result = rheo_bench(out, sets, *options, "--batch-size", str(size))
        assert result.exit_code == 0, result.output
        rows[size] = {row.key: row for row in read_rows(out)}
    assert rows[1].keys() == rows[2].keys()
    for key, row in rows[2].items():
        assert (row.batch_size, rows[1][key].batch_size) == (2, 1)
        assert row.tokens > 0
        assert row.seconds > 0
        if row.method == "auto":
            assert (row.tree_size, row.expected_tau) == (None, None)
        else:
            assert row.text_crc == rows[1][key].text_crc
    lines = (tmp_path / "rows2.csv").read_text().splitlines(keepends=True)
    (tmp_path / "torn.csv").write_text("".join(lines[:-2]))
    result = rheo_bench(tmp_path / "torn.csv", sets, *options, "--batch-size", "2")
    assert result.exit_code == 0, result.output
    assert {row.key for row in read_rows(tmp_path / "torn.csv")} == rows[2].keys()
    out = tmp_path / "long.csv"
    result = rheo_bench(out, sets, "--methods", "generate,plain", "-n", "20", "--min-new-tokens", "20")
    assert result.exit_code == 0, result.output
    assert {row.tokens for row in read_rows(out)} == {20}
    result = rheo_bench(tmp_path / "no.csv", sets, "--methods", "plain", "-n", "5", "--min-new-tokens", "20")
    assert "--min-new-tokens 20 is more than --max-new-tokens 5" in " ".join(result.output.split())
    result = rheo_bench(tmp_path / "no.csv", sets, "--methods", "generate", "--batch-size", "2")
    assert "generate takes one request at a time" in result.output


def test_plain_methods_need_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def without_draft(target: str, draft: str | None, config: RheoConfig, **_: object) -> RheoDecoder:
        asked.append(draft)
        decoder = tiny_decoder()
        return RheoDecoder(decoder.target, None, decoder.tokenizer)

    monkeypatch.setattr(RheoDecoder, "from_pretrained", without_draft)
    [_, single] = write_sets(tmp_path / "sets")
    result = rheo_bench(tmp_path / "rows.csv", [single], "--methods", "generate", "--temperatures", "1")
    assert result.exit_code == 0, result.output
    assert asked == [None]
    assert [row.draft for row in read_rows(tmp_path / "rows.csv")] == [""]


if __name__ == "__main__":  # what the test of a killed run starts
    RheoDecoder.from_pretrained = tiny_decoder  # type: ignore[method-assign, assignment]
    app()

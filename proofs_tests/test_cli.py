"""The command line, with a tiny random decoder in place of the models: what is written, and how errors are told."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from optimized.calibration import load_weights
from optimized.cli import app
from optimized.cli.chat import turn_seed
from optimized.cli.options import SamplingOptions, TreeOptions
from optimized.decoder import RheoDecoder
from optimized.models import CausalDrafter, TargetModel
from optimized.outputs import GenerationError
from optimized.sampling_params import SamplingParams
from proofs_tests.tiny_models import byte_tokenizer
from reference.api import RheoConfig

SMALL = ["--tree-size", "5", "--depth", "2", "--branching", "3", "-n", "12"]


def tiny_model(seed: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, bos_token_id=None, eos_token_id=256, pad_token_id=256,
        initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> dict[str, Any]:
    """Replaces the loading of models; holds what the command asked for, and the tokenizer it will get."""
    asked: dict[str, Any] = {"tokenizer": byte_tokenizer()}

    def from_pretrained(target: str, draft: str | None, config: RheoConfig, **where: Any) -> RheoDecoder:
        asked.update(target=target, draft=draft, config=config, **where)
        model = TargetModel(tiny_model(1, 2))
        drafter = None if draft is None else CausalDrafter(tiny_model(2, 1), model.vocab_size)
        return RheoDecoder(model, drafter, asked["tokenizer"], config)

    monkeypatch.setattr(RheoDecoder, "from_pretrained", from_pretrained)
    monkeypatch.setenv("COLUMNS", "120")
    return asked


def rheo(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def told(result: Result, code: int) -> str:
    """The one line of complaint on standard error."""
    assert result.exit_code == code, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in result.output
    return lines[0].removeprefix("error: ")


def test_help_lists_the_commands_and_the_groups_of_options() -> None:
    result = rheo("--help")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("demo", "generate", "chat", "tree", "info"))
    result = rheo("generate", "--help")
    assert result.exit_code == 0
    assert all(panel in result.stdout for panel in (" Prompt ", " Sampling ", " Tree ", " Model ", " Output "))


def test_option_defaults_are_the_libraries() -> None:
    assert TreeOptions().config() == RheoConfig()
    assert SamplingOptions().params() == SamplingParams()


def test_generate_streams_the_decoders_text(loaded: dict[str, Any]) -> None:
    result = rheo("generate", "once", "--seed", "5", "--raw", *SMALL)
    assert result.exit_code == 0
    decoder = RheoDecoder.from_pretrained("embedded", "embedded", loaded["config"])
    expected = decoder.generate("once", SamplingParams(seed=5, max_new_tokens=12))[0]
    assert result.stdout == expected.text + "\n"
    assert loaded["config"] == RheoConfig(tree_size=5, depth=2, branching=3)
    assert (loaded["target"], loaded["draft"]) == ("embedded", "embedded")


def test_trees_of_automatic_size_go_by_weights(loaded: dict[str, Any]) -> None:
    auto = ["--tree-size", "auto", "--lead-tokens", "auto", "--weights", "embedded", "-t", "0", "-n", "12"]
    result = rheo("generate", "once", *auto)
    assert result.exit_code == 0, result.output
    assert result.stdout == rheo("generate", "once", "-t", "0", "--no-draft", "-n", "12").stdout
    result = rheo("demo", "-n", "3", *auto[:6])
    assert result.exit_code == 0, result.output
    assert (loaded["config"].tree_size, loaded["config"].lead_tokens) == ("auto", "auto")
    assert loaded["config"].weights == load_weights("embedded")
    assert "trees of as many as pay, up to 60 nodes" in " ".join(result.output.split())


def test_static_trees_come_from_a_topology_file(loaded: dict[str, Any], tmp_path: Path) -> None:
    """At temperature 0 the text is plain greedy decoding's, also where the draft has too few tokens for a child."""
    file = tmp_path / "tree.json"
    file.write_text("[[0], [1], [0, 0], [0, 1], [1, 0], [1, 0, 0]]")
    static = ["--proposal", "static", "--topology", str(file)]
    plain = rheo("generate", "once", "-t", "0", "--no-draft", "-n", "12")
    for support in ("128", "2", "1"):
        result = rheo("generate", "once", "-t", "0", "-n", "12", "--support", support, *static)
        assert result.stdout == plain.stdout
        assert loaded["config"] == RheoConfig.static(json.loads(file.read_text()), draft_support=int(support))
        assert rheo("generate", "once", "--seed", "3", "-n", "12", "--support", support, *static).exit_code == 0
    assert rheo("tree", "once", "--seed", "4", *static).exit_code == 0
    shown = rheo("demo", "--temperature", "0", "-n", "4", "--limit", "1", *static)
    assert shown.exit_code == 0
    assert "static tree" in shown.stdout
    assert "RheoSampling" not in shown.stdout
    assert "the demo shows other trees beside top-K" in told(rheo("demo", "--proposal", "topk"), 2)
    assert "go together" in told(rheo("generate", "once", "--proposal", "static"), 2)
    assert "go together" in told(rheo("generate", "once", "--topology", str(file)), 2)
    file.write_text("[[0], [2]]")
    assert "without its sibling" in told(rheo("generate", "once", *static), 2)


@pytest.mark.parametrize("stdin", [None, "once"])
def test_generate_reads_argument_option_and_input_alike(
    loaded: dict[str, Any], stdin: str | None, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("once")
    ways = (["once"], ["--prompt", "once"], ["--file", str(tmp_path / "prompt.txt")]) if stdin is None else ([], ["-"])
    lines = [rheo("generate", *way, "--json", "--seed", "1", *SMALL, stdin=stdin).stdout for way in ways]
    assert [json.loads(line)["prompt"] for line in lines] == ["once"] * len(ways)
    assert len({json.loads(line)["text"] for line in lines}) == 1


def test_generate_uses_the_chat_template_unless_raw(loaded: dict[str, Any]) -> None:
    def prompt_tokens(*options: str) -> int:
        return json.loads(rheo("generate", "abc", "--json", *options, *SMALL).stdout)["prompt_tokens"]

    assert prompt_tokens() == prompt_tokens("--chat") == len("uabc;a")
    assert prompt_tokens("--raw") == len("abc")
    loaded["tokenizer"] = byte_tokenizer(chat_template=None)
    assert prompt_tokens() == len("abc")
    assert "--chat needs a chat template" in told(rheo("generate", "abc", "--chat", *SMALL), 2)


def test_generate_batch_is_each_prompt_alone(loaded: dict[str, Any]) -> None:
    options = ["--seed", "3", "--json", *SMALL]
    batch = [json.loads(line) for line in rheo("generate", "a", "--prompt", "bcd", *options).stdout.splitlines()]
    alone = [json.loads(rheo("generate", prompt, *options).stdout) for prompt in ("a", "bcd")]
    assert [entry["prompt"] for entry in batch] == ["a", "bcd"]
    for together, single in zip(batch, alone, strict=True):
        for name in ("text", "token_ids", "finish_reason", "seed"):
            assert together[name] == single[name]


def test_generate_batch_shows_every_prompt(loaded: dict[str, Any]) -> None:
    result = rheo("generate", "--prompt", "first", "--prompt", "second", "--metrics", *SMALL)
    assert result.exit_code == 0
    assert result.stdout.index("1. first") < result.stdout.index("2. second")
    assert "tau" in result.stderr


def test_generate_metrics_go_to_standard_error(loaded: dict[str, Any]) -> None:
    plain = rheo("generate", "once", "--seed", "7", *SMALL)
    measured = rheo("generate", "once", "--seed", "7", "--metrics", *SMALL)
    assert measured.stdout == plain.stdout
    assert plain.stderr == ""
    for word in ("tokens/s", "tau", "level 1", "level 2", "probes", "draft", "target", "sampling", "seed 7"):
        assert word in measured.stderr


def test_generate_json_has_numbers_only_where_something_was_measured(loaded: dict[str, Any]) -> None:
    record = json.loads(rheo("generate", "once", "--json", "--no-draft", "-t", "0", "-n", "3").stdout)
    assert loaded["draft"] is None
    assert record["metrics"]["tau"] == 1.0
    assert record["metrics"]["probe_acceptance_rate"] is None
    assert len(record["token_ids"]) == record["metrics"]["generated_tokens"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--temperature", "-1"], "temperature must be"),
        (["--top-p", "0"], "top_p must be"),
        (["--tree-size", "0"], "tree_size must be"),
        (["--tree-size", "many"], "--tree-size many: a whole number is wanted, or auto"),
        (["--tree-size", "auto"], "give --weights"),
        (["--level-threshold", "2"], "level_threshold must lie in"),
        (["--seed", "-5"], "seed must be"),
        (["--target", "./no/such/model"], "--target ./no/such/model: no such folder"),
        (["--draft", "~nothing"], "--draft ~nothing: no such folder"),
        (["--draft", "x", "--no-draft"], "contradict"),
        (["--target", "some/model"], "Give --draft, or --no-draft"),
    ],
)
def test_generate_tells_bad_input_in_one_line(loaded: dict[str, Any], options: list[str], says: str) -> None:
    assert says in told(rheo("generate", "once", *options), 2)


@pytest.mark.parametrize("command", ["generate", "tree"])
@pytest.mark.parametrize("prompt", ["", " \n"])
def test_empty_prompts_are_refused(loaded: dict[str, Any], command: str, prompt: str) -> None:
    assert told(rheo(command, prompt), 2) == "the prompt is empty"
    assert told(rheo(command, stdin=prompt), 2) == "the prompt is empty"


def test_usage_errors_exit_with_2(loaded: dict[str, Any], tmp_path: Path) -> None:
    for arguments in (
        ["--temperature", "warm"],
        ["--file", str(tmp_path / "none")],
        ["--proposal", "x"],
        ["--nothing"],
    ):
        assert rheo("generate", "once", *arguments).exit_code == 2


def test_a_model_that_cannot_be_loaded_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_pretrained(*args: Any, **kwargs: Any) -> RheoDecoder:
        raise OSError("no-such/model is not a local folder\nand is not a valid model identifier")

    monkeypatch.setattr(RheoDecoder, "from_pretrained", from_pretrained)
    line = told(rheo("generate", "once", "--target", "no-such/model", "--no-draft"), 2)
    assert line.startswith("cannot load --target no-such/model")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (GenerationError({0: "NaN logits"}, [None]), 1, "NaN logits"),
        (RuntimeError("out of\nmemory"), 1, "RuntimeError: out of memory"),
        (ModuleNotFoundError("pip install it"), 1, "pip install it"),
        (KeyError(), 1, "KeyError"),
    ],
)
def test_failures_exit_with_1_and_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, says: str
) -> None:
    def from_pretrained(*args: Any, **kwargs: Any) -> RheoDecoder:
        raise error

    monkeypatch.setattr(RheoDecoder, "from_pretrained", from_pretrained)
    assert (
        told(rheo("generate", "once"), code) == says if len(says) > 12 else says in told(rheo("generate", "once"), code)
    )
    assert rheo("generate", "once", "--debug").exception is error


def test_a_failed_request_does_not_lose_the_others_texts(
    loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream(self: RheoDecoder, prompts: Any, params: SamplingParams) -> Iterator[Any]:
        monkeypatch.undo()
        yield from (event for event in self.stream([prompts[0]], params))
        raise GenerationError({1: "NaN logits"}, [None, None])

    monkeypatch.setattr(RheoDecoder, "stream", stream)
    result = rheo("generate", "--prompt", "a", "--prompt", "b", "--json", *SMALL)
    assert "request 1: NaN logits" in told(result, 1)
    assert json.loads(result.stdout)["prompt"] == "a"


def test_chat_answers_keep_their_seed_and_the_conversation(loaded: dict[str, Any]) -> None:
    lines = "hi\n\n/metrics\nmore\n/reset\n/metrics\nhi\n/what\n/exit\nnever read\n"
    result = rheo("chat", "--seed", "9", *SMALL, stdin=lines)
    assert result.exit_code == 0
    assert "tau" in result.stderr
    assert "unknown command /what" in result.stdout

    decoder = RheoDecoder.from_pretrained("embedded", "embedded", loaded["config"])
    messages = [{"role": "user", "content": "hi"}]
    first = decoder.generate([decoder.chat_prompt(messages)], SamplingParams(seed=9, max_new_tokens=12))[0].text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
    params = SamplingParams(seed=turn_seed(9, 1), max_new_tokens=12)
    second = decoder.generate([decoder.chat_prompt(messages)], params)[0].text
    after = result.stdout[result.stdout.index("> ") :]  # behind the greeting, however wide the terminal is
    assert after.startswith(f"> {first}\n> > > {second}\n> a new conversation\n")
    assert after.count(f"> {first}\n") == 2


def test_chat_ends_with_the_input_and_takes_a_system_message(loaded: dict[str, Any]) -> None:
    asked: list[int] = []
    original = RheoDecoder.chat_prompt

    def chat_prompt(self: RheoDecoder, messages: Any) -> list[int]:
        asked.append(len(messages))
        return original(self, messages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RheoDecoder, "chat_prompt", chat_prompt)
        assert rheo("chat", "--system", "be brief", *SMALL, stdin="hi").exit_code == 0
    assert asked == [2]


def test_chat_goes_on_after_an_answer_that_failed(loaded: dict[str, Any]) -> None:
    result = rheo("chat", *SMALL, stdin=f"{'x' * 600}\nhi\n/exit\n")
    assert result.exit_code == 0
    assert "/reset starts over" in result.stderr


def test_chat_needs_a_chat_template(loaded: dict[str, Any]) -> None:
    loaded["tokenizer"] = byte_tokenizer(chat_template=None)
    assert "chat needs a chat template" in told(rheo("chat", *SMALL, stdin="hi\n"), 2)


def test_turn_seed_starts_with_the_given_one_and_never_repeats() -> None:
    seeds = [turn_seed(seed, turn) for seed in (0, 1, 2**64 - 1) for turn in range(50)]
    assert seeds[::50] == [0, 1, 2**64 - 1]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert turn_seed(0, 1) == 4881901421217228719


@pytest.mark.parametrize("step", [1, 2])
def test_tree_draws_the_steps_tree_and_walk(loaded: dict[str, Any], tmp_path: Path, step: int) -> None:
    file = tmp_path / "tree.svg"
    result = rheo("tree", "once", "--seed", "4", "--raw", "--step", str(step), "--svg", str(file), *SMALL)
    assert result.exit_code == 0
    decoder = RheoDecoder.from_pretrained("embedded", "embedded", loaded["config"])
    params = SamplingParams(seed=4, max_new_tokens=12)
    seen = decoder.trace("once", params, steps=step)
    tree, walk, root = seen[-1]
    assert result.stdout.count("→") == len(tree) - 1 + 1  # every draft node, and the legend
    assert result.stdout.count("✓") == len(walk.accepted_nodes)
    assert "★" in result.stdout
    nodes = [g for g in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}g")]
    assert len(nodes) == len(tree) + 1
    accepted = [int(g.attrib["data-row"]) for g in nodes if "accepted" in g.attrib["class"].split()]
    assert accepted == [0, *walk.accepted_nodes, len(tree)]

    text = decoder.generate("once", params)[0].token_ids
    emitted = [1, *(len(walk.token_ids) for _, walk, _ in seen)]
    assert root == text[sum(emitted[:step]) - 1]
    assert nodes[0][0].text is not None
    assert f"token {root}" in nodes[0][0].text


def test_tree_refuses_what_it_cannot_draw(loaded: dict[str, Any]) -> None:
    assert "--step must be at least 1" in told(rheo("tree", "once", "--step", "0"), 2)
    assert "--no-draft leaves no tree" in told(rheo("tree", "once", "--no-draft"), 2)
    assert "one prompt is wanted here, got 2" in told(rheo("tree", "once", "--prompt", "more"), 2)
    assert "the text ends after" in told(rheo("tree", "once", "--step", "40", *SMALL), 2)


def test_info_names_versions_backends_and_what_is_missing() -> None:
    result = rheo("info", "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert set(facts) == {"versions", "devices", "backends", "embedded model"}
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["backends"]["torch"].startswith("can run")
    if facts["versions"]["triton"] == "not installed":
        assert "triton is not installed" in facts["backends"]["triton"]
    if not torch.cuda.is_available():
        assert "CUDA" in facts["backends"]["cupy"]
    assert "cache folder" in facts["embedded model"]
    assert "triton" in rheo("info").stdout


def test_demo_compares_three_methods_per_temperature(loaded: dict[str, Any], tmp_path: Path) -> None:
    questions = tmp_path / "question.jsonl"
    lines = [{"question_id": i, "category": "c", "turns": [f"prompt {i}", "again"]} for i in range(4)]
    questions.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    result = rheo("demo", "--prompts-file", str(questions), "--limit", "2", "--json", "-n", "6")
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert [section["temperature"] for section in record["temperatures"]] == [1.0, 0.0]
    for section in record["temperatures"]:
        methods = ["model.generate", "top-K tree (EAGLE-3)", "RheoSampling"]
        assert [row["method"] for row in section["summary"]] == methods
        assert section["summary"][0]["speed_up"] == 1.0
        assert [(t["prompt"], t["method"]) for t in section["texts"]] == [
            (f"prompt {i}", method)
            for i in (0, 2)
            for method in methods  # spread over the file
        ]
    assert record["temperatures"][1]["same_tokens"] is True  # greedy: lossless to the token


def test_demo_shows_texts_and_a_table(loaded: dict[str, Any]) -> None:
    result = rheo("demo", "--temperature", "0", "-n", "4", "--limit", "1", "--tree-size", "3")
    assert result.exit_code == 0
    assert loaded["config"].tree_size == 3
    for word in ("temperature 0", "model.generate", "RheoSampling", "speed-up", "all methods wrote the same texts"):
        assert word in result.stdout
    assert "temperature 1" not in result.stdout


@pytest.mark.parametrize("text", ["", "not json", '{"turns": []}', '{"turns": "ab"}', '["turns"]', "3"])
def test_demo_names_the_line_of_a_bad_prompts_file(loaded: dict[str, Any], tmp_path: Path, text: str) -> None:
    (tmp_path / "q.jsonl").write_text(text)
    says = f"{tmp_path / 'q.jsonl'}" + (", line 1: " if text else " holds no questions")
    assert says in told(rheo("demo", "--prompts-file", str(tmp_path / "q.jsonl")), 2)


def test_demo_needs_a_draft(loaded: dict[str, Any]) -> None:
    assert "--no-draft leaves nothing to compare" in told(rheo("demo", "--no-draft"), 2)

"""The corpus that a target writes, and the two commands from end to end; the target is tiny and random."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from optimized.cli import app
from optimized.models import load_drafter
from optimized.models.target import TargetModel
from optimized.training import (
    CorpusSettings,
    TrainSettings,
    load_corpus,
    new_student,
    read_student,
    write_corpus,
    write_head,
)
from optimized.training.conversations import conversation_format, draw
from optimized.training.journal import read_journal
from optimized.training.pipeline import train_head
from proofs_tests.tiny_models import byte_tokenizer, spread
from reference.api import GREEDY_TEMPERATURE

EOS = 256
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};\n{% endfor %}"
ATOL = 1e-5  # float32 rounding, which differs with where the weights lie in their file
SETTINGS = CorpusSettings(conversations=7, length=40, batch=3, held_out=2, top_k=0, answer_temperatures=(0.5, 1.0))


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny_model(seed: int = 1) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=7, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, bos_token_id=None, eos_token_id=EOS, pad_token_id=EOS,
        initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def same(one, other) -> bool:
    names = ("tokens", "in_answer", "temperatures", "held_out")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


# --- conversations


def test_conversation_format_of_a_chat_template():
    tokenizer = byte_tokenizer(TEMPLATE)
    layout = conversation_format(tokenizer, (EOS,))
    assert tokenizer.decode(layout.opening) == "u:"
    assert tokenizer.decode(layout.to_answer) == ";\na:"
    assert tokenizer.decode(layout.to_user) == ";\nu:"
    assert layout.ends == {tokenizer(";")["input_ids"][0], EOS}


def test_conversation_format_without_a_template():
    layout = conversation_format(byte_tokenizer(None), (EOS,))
    assert (layout.opening, layout.to_answer, layout.to_user) == ((EOS,), (EOS,), (EOS,))
    with_bos = byte_tokenizer(None, bos="<bos>")
    bos, eos = with_bos.bos_token_id, with_bos.eos_token_id
    layout = conversation_format(with_bos, (eos,))
    assert (layout.opening, layout.to_answer) == ((bos,), (eos, bos))
    with pytest.raises(ValueError, match="no token that begins or ends a text"):
        conversation_format(byte_tokenizer(None), ())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content | lower }};{% endfor %}", "does not keep the turns"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "nothing before the first turn"),
    ],
)
def test_conversation_format_refuses_templates_that_it_cannot_follow(template, message):
    with pytest.raises(ValueError, match=message):
        conversation_format(byte_tokenizer(template), (EOS,))


def test_draw_is_the_inverse_cdf_of_the_tempered_law():
    logits = torch.tensor([0.0, 2.0, 1.0]).expand(1000, 3)
    uniforms = (torch.arange(1000).double() + 0.5) / 1000
    for temperature in (0.5, 1.0, 2.0):
        drawn = draw(logits, torch.full((1000,), temperature), 0, uniforms)
        law = (logits[0] / temperature).softmax(-1)
        torch.testing.assert_close(torch.bincount(drawn, minlength=3) / 1000, law, atol=1.1e-3, rtol=0)
    drawn = draw(logits, torch.ones(1000), 2, uniforms)
    assert set(drawn.tolist()) == {1, 2}
    assert set(draw(logits, torch.zeros(1000), 0, uniforms).tolist()) == {1}


def test_draw_is_greedy_below_the_one_cut_off():
    sampled = torch.full((9,), GREEDY_TEMPERATURE)
    logits, uniforms = torch.zeros(9, 3), (torch.arange(9).double() + 0.5) / 9
    assert torch.bincount(draw(logits, sampled, 0, uniforms)).tolist() == [3, 3, 3]
    greedy = sampled.nextafter(torch.tensor(0.0))
    assert len(set(draw(logits, greedy, 0, uniforms).tolist())) == 1


# --- the corpus


def test_corpus_follows_the_template_and_the_target(tmp_path):
    target, tokenizer = TargetModel(tiny_model()), byte_tokenizer(TEMPLATE)
    semicolon, newline, colon, user, assistant = (tokenizer(char)["input_ids"][0] for char in ";\n:ua")
    # A target that ends its turns now and then: EOS, which the template never writes, stands for the template's end.
    target.model.lm_head.weight[EOS] *= 2
    settings = replace(SETTINGS, conversations=12, length=100, answer_temperatures=(0.0,), user_temperature=0.0)
    corpus = write_corpus(tmp_path, target, tokenizer, settings)
    turns = 0
    for text, in_answer in zip(corpus.tokens.tolist(), corpus.in_answer.tolist(), strict=True):
        likeliest = target.model(torch.tensor([text])).logits[0].argmax(-1).tolist()
        assert text[:2] == [user, colon]
        position, answering = 2, False
        while position < len(text):
            if likeliest[position - 1] in (semicolon, EOS):
                bridge = [semicolon, newline, user if answering else assistant, colon]
                assert text[position : position + 4] == bridge[: len(text) - position]
                assert in_answer[position : position + 4] == [answering, False, False, False][: len(text) - position]
                answering, position, turns = not answering, position + 4, turns + 1
            else:
                assert (text[position], in_answer[position]) == (likeliest[position - 1], answering)
                position += 1
    assert turns >= 2


class Killed(Exception):
    pass


def test_corpus_goes_on_where_it_stopped(tmp_path):
    target, tokenizer = TargetModel(tiny_model()), byte_tokenizer(TEMPLATE)
    reports = []
    whole = write_corpus(tmp_path / "whole", target, tokenizer, SETTINGS, "tiny", lambda *done: reports.append(done))
    assert whole.tokens.shape == (7, 40)
    assert reports[-1] == (280, 280)
    assert reports == sorted(reports)
    assert int(whole.held_out.sum()) == 2
    assert whole.training_tokens.shape == (5, 40)
    assert whole.about["target"] == "tiny"
    assert len({tuple(text) for text in whole.tokens.tolist()}) == 7

    def kill(done, total):
        if done > 150:  # in the second shard
            raise Killed

    with pytest.raises(Killed):
        write_corpus(tmp_path / "parts", target, tokenizer, SETTINGS, "tiny", kill)
    assert [path.name for path in sorted((tmp_path / "parts").iterdir())] == ["corpus.json", "shard-00000.safetensors"]
    with pytest.raises(ValueError, match=r"not complete: .*shard-00001.safetensors is missing"):
        load_corpus(tmp_path / "parts")
    assert same(write_corpus(tmp_path / "parts", target, tokenizer, SETTINGS, "tiny"), whole)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes()
    other = write_corpus(tmp_path / "other", target, tokenizer, replace(SETTINGS, seed=1), "tiny")
    assert not torch.equal(other.tokens, whole.tokens)
    more = write_corpus(tmp_path / "more", target, tokenizer, replace(SETTINGS, conversations=9), "tiny")
    assert torch.equal(more.tokens[:6], whole.tokens[:6])
    assert torch.equal(more.tokens[more.held_out], whole.tokens[whole.held_out])  # nothing trained on is held out later


def test_corpus_refusals(tmp_path):
    target, tokenizer = TargetModel(tiny_model()), byte_tokenizer(TEMPLATE)
    write_corpus(tmp_path, target, tokenizer, SETTINGS)
    with pytest.raises(ValueError, match=r"other settings \(seed: 0 there, 1 now\)"):
        write_corpus(tmp_path, target, tokenizer, replace(SETTINGS, seed=1))
    with pytest.raises(ValueError, match=r"at most 128 tokens"):
        write_corpus(tmp_path / "long", target, tokenizer, replace(SETTINGS, length=129))
    with pytest.raises(ValueError, match="holds no corpus"):
        load_corpus(tmp_path / "nowhere")
    shard = tmp_path / "shard-00001.safetensors"
    shard.write_bytes((tmp_path / "shard-00002.safetensors").read_bytes())  # whole, but of one conversation
    with pytest.raises(ValueError, match="not a shard of 3 conversations"):
        load_corpus(tmp_path)
    shard.write_bytes(b"broken")
    with pytest.raises(ValueError, match="is damaged"):
        load_corpus(tmp_path)
    (tmp_path / "corpus.json").write_text("[]")
    with pytest.raises(ValueError, match=r"corpus\.json must hold a JSON object, got list"):
        load_corpus(tmp_path)
    (tmp_path / "corpus.json").write_text('{"length": 40}')
    with pytest.raises(ValueError, match=r"corpus\.json does not say conversations, batch"):
        load_corpus(tmp_path)
    with pytest.raises(ValueError, match="nothing is left to train on"):
        CorpusSettings(conversations=24)
    with pytest.raises(ValueError, match="answer_temperatures must be numbers >= 0"):
        CorpusSettings(answer_temperatures=())


# --- everything


def test_pipeline_with_a_checkpoint_to_go_on_from(tmp_path):
    target, tokenizer = TargetModel(tiny_model()), byte_tokenizer(TEMPLATE)
    training = TrainSettings(steps=3, batch=2, warmup=1, measure_every=3)
    stages = []
    first = train_head(
        tmp_path / "a", target, tokenizer, SETTINGS, training, draft_vocab_size=30, plot=False,
        report=lambda stage, *rest: stages.append(stage),
    )  # fmt: skip
    assert list(dict.fromkeys(stages)) == ["corpus", "training", "measuring"]
    drafter = load_drafter(first, target)
    assert drafter.vocab_size == 30
    assert EOS in drafter.vocab_map.tolist()
    assert drafter.feature_layers == (2, 3, 4)
    record = (first / "README.md").read_text()
    assert "30 tokens" in record
    assert "before training" in record
    second = train_head(tmp_path / "b", target, tokenizer, SETTINGS, training, init=first, plot=False)
    assert torch.equal(load_drafter(second, target).vocab_map, drafter.vocab_map)
    before, after = (read_journal(tmp_path / name / "held_out.csv") for name in "ab")
    assert after[0]["overlap_1"] == pytest.approx(before[-1]["overlap_1"], abs=0.01)  # rounded to bfloat16 between


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_settings": TrainSettings(batch=6)}, "batch=6, but only 5 texts to train on"),
        ({"train_settings": TrainSettings(batch=2, unroll=40)}, "40 unrolled steps need texts of at least 41 tokens"),
        ({"draft_vocab_size": 0}, "a draft vocabulary of 0 tokens; 1 to 257 are possible"),
        ({"init": Path("nowhere")}, "nowhere"),
    ],
)
def test_pipeline_refuses_before_it_writes_a_corpus(tmp_path, changes, message):
    settings = {"train_settings": TrainSettings(steps=1, batch=2), **changes}
    with pytest.raises((ValueError, OSError), match=message):
        train_head(
            tmp_path / "run", TargetModel(tiny_model()), byte_tokenizer(TEMPLATE), SETTINGS, plot=False, **settings
        )
    assert not (tmp_path / "run").exists()


def as_speculators(official: Path, directory: Path) -> Path:
    """The same head as the ``speculators`` library stores it: the layer's settings are nested, its weights renamed."""
    directory.mkdir()
    raw = json.loads((official / "config.json").read_text())
    config = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "eagle_aux_hidden_state_layer_ids": raw.pop("eagle_aux_hidden_state_layer_ids"),
    }
    size = raw.pop("draft_vocab_size")
    if size < raw["vocab_size"]:  # else it may be left out
        config["draft_vocab_size"] = size
    (directory / "config.json").write_text(json.dumps(config | {"transformer_layer_config": raw}))
    tensors = load_file(official / "model.safetensors")
    save_file({name.replace("midlayer.", "layers.0."): it for name, it in tensors.items()},
              directory / "model.safetensors")  # fmt: skip
    return directory


@pytest.mark.parametrize("draft_vocab", [40, 257])
def test_pipeline_goes_on_from_a_speculators_head(tmp_path, draft_vocab):
    target, tokenizer = TargetModel(tiny_model()), byte_tokenizer(TEMPLATE)
    student = new_student(target, torch.arange(257 - draft_vocab, 257), (1, 3, 5))
    spread(student.head)
    write_head(tmp_path / "official", student, "", torch.float32)
    given = as_speculators(tmp_path / "official", tmp_path / "given")
    write_head(tmp_path / "again", read_student(given, target), "", torch.float32)
    features = torch.randn(1, 6, 48, generator=torch.Generator().manual_seed(0))
    drafters = [load_drafter(tmp_path / name, target) for name in ("official", "given", "again")]
    drafted = []
    for drafter in drafters:
        drafter.reset(torch.tensor([1]))
        drafted.append(drafter.advance(torch.arange(10, 16)[None], torch.tensor([6]), features))
        torch.testing.assert_close(drafted[-1], drafted[0], atol=ATOL, rtol=0)
        weights = drafter.head.state_dict()
        assert all(torch.equal(weights[name], it) for name, it in student.head.state_dict().items())
        ids = torch.arange(draft_vocab) if drafter.vocab_map is None else drafter.vocab_map
        assert ids.tolist() == list(range(257 - draft_vocab, 257))
        assert drafter.feature_layers == (1, 3, 5)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["num_hidden_layers"] == 1
    assert not {"speculators_model_type", "speculators_config", "auto_map", "transformer_layer_config"} & set(written)

    training = TrainSettings(steps=1, batch=2)
    made = train_head(tmp_path / "run", target, tokenizer, SETTINGS, training, init=given, plot=False)
    assert f"| {draft_vocab} tokens" in (made / "README.md").read_text()
    assert load_drafter(made, target).feature_layers == (1, 3, 5)


def rheo(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_commands_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "160")
    model = tmp_path / "target"
    tiny_model().save_pretrained(model)
    byte_tokenizer(TEMPLATE).save_pretrained(model)
    where = ["--target", model, "--dtype", "float32", "--device", "cpu"]
    small = ["--conversations", 6, "--length", 30, "--shard", 4, "--held-out", 2, "--vocabulary", 50, "--batch", 2]
    command = ["train-head", tmp_path / "run", *where, *small, "--steps", 3, "--answer-temperature", 1]
    result = rheo(*command)
    assert result.exit_code == 0, result.output
    assert "held-out overlap, all tokens" in result.stdout
    made = {path.name for path in (tmp_path / "run").iterdir()}
    assert made == {
        "corpus", "checkpoint.pt", "log.csv", "held_out.csv", "loss.svg", "loss.png", "overlap.json", "head"
    }  # fmt: skip
    assert rheo(*command).stdout == result.stdout  # nothing left to do, the same record
    result = rheo(*command[:-4], "--steps", 4, "--answer-temperature", 1)
    assert result.exit_code == 2
    assert "steps: 3 there, 4 now" in " ".join(result.stderr.split())

    questions = tmp_path / "alpaca" / "question.jsonl"
    questions.parent.mkdir()
    asked = [{"question_id": number, "turns": [text]} for number, text in enumerate(("what?", "why?", "how?"))]
    questions.write_text("".join(json.dumps(question) + "\n" for question in asked))
    measure = ["evaluate-head", questions, *where, "--draft", tmp_path / "run" / "head", "-n", 6]
    result = rheo(*measure, "--corpus", tmp_path / "run" / "corpus", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    stored = json.loads((tmp_path / "run" / "overlap.json").read_text())
    assert found["held out, all tokens"]["means"] == pytest.approx(stored["all tokens"]["means"], abs=1e-5)
    assert found[str(questions)]["texts"] == 3
    result = rheo(*measure, "--texts", 1)
    assert result.exit_code == 0, result.output
    assert "alpaca" in result.stdout
    assert rheo(*measure[:1], questions.parent, *measure[2:], "--texts", 1).stdout == result.stdout  # a folder will do
    about = tmp_path / "run" / "corpus" / "corpus.json"
    written = json.loads(about.read_text())
    about.write_text(json.dumps(written | {"target": "another"}))
    result = rheo(*measure, "--texts", 1, "--corpus", about.parent)
    assert result.exit_code == 0
    assert "was written by another, not by" in " ".join(result.stderr.split())
    about.write_text(json.dumps(written | {"vocab_size": 300}))
    assert "300 tokens; the target has 257" in " ".join(rheo(*measure, "--corpus", about.parent).stderr.split())
    for wrong, message in (
        (["evaluate-head", *where], "nothing to measure on"),
        (["evaluate-head", tmp_path / "no.jsonl", *where], "no such file"),
        (["evaluate-head", questions, *where, "--unroll", 0], "at least 1"),
        (["train-head", tmp_path / "x", *where, "--init", tmp_path / "none"], "no such folder"),
        (["train-head", tmp_path / "x", *where, "--batch", 0], "batch must be at least 1"),
    ):
        result = rheo(*wrong)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.stderr.split())

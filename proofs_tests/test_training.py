"""Training a head, on a tiny random target: every stage, and that the training forward is the drafter's."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from optimized.models.checkpoints import load_head
from optimized.models.eagle3 import Eagle3Drafter
from optimized.models.loading import load_drafter
from optimized.models.target import TargetModel
from optimized.sampling_params import SamplingParams
from optimized.training import (
    TrainSettings,
    choose_vocabulary,
    measure_overlap,
    new_student,
    read_student,
    train,
    write_head,
)
from optimized.training.evaluation import Text, _summary, answered_questions
from optimized.training.journal import plot_training, read_journal
from optimized.training.lessons import StepScore, read_lesson, score_steps, step_loss
from optimized.training.settings import compute_dtype
from optimized.training.trainer import CHECKPOINT, batch_indices, learning_rate
from optimized.training.unroll import unroll
from optimized.trees import LevelNodes
from proofs_tests.tiny_models import spread

VOCAB, HIDDEN, UNROLL = 61, 16, 4
IDS = torch.arange(40) + torch.arange(40) // 2  # 0, 1, 3, 4, 6, ...: with gaps, below 61
LAYERS = (1, 2, 3)
ATOL = 1e-4  # float32 rounding; a wrong mask, position or feature moves these logits by > 1e-2


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny_target(seed: int = 1, layers: int = 5) -> TargetModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rope_theta=500.0, max_position_embeddings=64, eos_token_id=2,
        bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return TargetModel(spread(LlamaForCausalLM(config)).requires_grad_(False))


def tiny_student(target: TargetModel, ids=IDS, seed: int = 0):
    """A head with nothing zero in it, so that every input matters."""
    student = new_student(target, ids, LAYERS, seed)
    generator = torch.Generator().manual_seed(seed + 10)
    with torch.no_grad():
        for parameter in student.head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 / parameter.shape[-1] ** 0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return student


def texts(count: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))


def state_of(head) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in head.state_dict().items()}


# --- the unroll


@pytest.mark.parametrize(("length", "steps"), [(9, 4), (7, 6), (2, 1)])
def test_unroll_equals_the_drafter_along_the_text(length, steps):
    target = tiny_target()
    student = tiny_student(target)
    tokens = texts(3, length)
    lesson = read_lesson(target, tokens, student.vocab_map, LAYERS)
    with torch.no_grad():
        trained = list(unroll(student.head, student.embedding, tokens, lesson.features, steps))
    drafter = Eagle3Drafter(student.head, student.embedding, student.vocab_map, LAYERS)
    for base in range(length - steps):
        drafter.reset(tokens[:, 0])
        counts = torch.full((3,), base + 1)
        logits = drafter.advance(tokens[:, 1 : base + 2], counts, lesson.features[:, : base + 1])
        torch.testing.assert_close(trained[0][:, base], logits, atol=ATOL, rtol=0)
        for step in range(1, steps):
            node = LevelNodes(
                token_ids=tokens[:, base + step + 1, None],
                parents=torch.zeros(3, 1, dtype=torch.long),
                valid=torch.ones(3, 1, dtype=torch.bool),
                depth=step,
            )
            logits = drafter.expand(node)[:, 0]
            torch.testing.assert_close(trained[step][:, base], logits, atol=ATOL, rtol=0)


def test_unroll_gradient_equals_finite_differences():
    target = tiny_target()
    student = tiny_student(target)
    lesson = read_lesson(target, texts(2, 8), student.vocab_map, LAYERS)
    head, embedding = student.head.double(), student.embedding.double()
    directions = [torch.randn_like(p, generator=torch.Generator().manual_seed(5)) for p in head.parameters()]

    def loss() -> torch.Tensor:
        logits = list(unroll(head, embedding, lesson.tokens, lesson.features.double(), UNROLL))
        return sum((0.5**j) * step.log_softmax(-1)[..., 3].mean() for j, step in enumerate(logits))

    loss().backward()
    analytic = sum(float((p.grad * d).sum()) for p, d in zip(head.parameters(), directions, strict=True))
    values = []
    for scale in (1e-4, -2e-4):  # the norms compute in float32, so not smaller
        with torch.no_grad():
            for parameter, direction in zip(head.parameters(), directions, strict=True):
                parameter += scale * direction
            values.append(float(loss()))
    assert (values[0] - values[1]) / 2e-4 == pytest.approx(analytic, rel=1e-3)


def test_unroll_refuses_short_texts():
    target = tiny_target()
    student = tiny_student(target)
    with pytest.raises(ValueError, match="4 unrolled steps need texts of at least 5 tokens, got 4"):
        next(unroll(student.head, student.embedding, texts(1, 4), torch.zeros(1, 4, 3 * HIDDEN), 4))


def test_lesson_is_the_target_s_law_and_features():
    target = tiny_target()
    tokens = texts(2, 6)
    lesson = read_lesson(target, tokens, IDS, LAYERS)
    output = target.model(tokens, output_hidden_states=True)
    law = output.logits.softmax(-1)
    torch.testing.assert_close(lesson.laws, law[..., IDS], atol=1e-6, rtol=0)
    features = torch.cat([output.hidden_states[layer] for layer in LAYERS], dim=-1)
    torch.testing.assert_close(lesson.features, features, atol=1e-5, rtol=0)
    student = tiny_student(target)
    with torch.no_grad():
        score = score_steps(student.head, student.embedding, lesson, 2)[1]
    outside = law[:, 2:6].sum(-1) - law[:, 2:6, IDS].sum(-1)
    torch.testing.assert_close(score.outside, outside, atol=1e-5, rtol=0)
    whole = read_lesson(target, tokens, None, LAYERS)
    torch.testing.assert_close(whole.laws, law, atol=1e-6, rtol=0)


# --- the vocabulary


def test_vocabulary_takes_the_most_frequent():
    tokens = torch.tensor([[5, 5, 5, 3, 3], [9, 9, 1, 7, 0]])
    chosen = choose_vocabulary(tokens, 12, 3)
    assert chosen.ids.tolist() == [3, 5, 9]
    assert chosen.coverage == pytest.approx(0.7)
    assert choose_vocabulary(tokens, 12, 5).ids.tolist() == [0, 1, 3, 5, 9]  # 0, 1 and 7 tie: the lower ids
    assert choose_vocabulary(tokens, 12, 3, always=[11, 5]).ids.tolist() == [3, 5, 11]
    everything = choose_vocabulary(tokens, 12, 12)
    assert everything.ids.tolist() == list(range(12))
    assert everything.coverage == 1
    with pytest.raises(ValueError, match="2 to 12 are possible"):
        choose_vocabulary(tokens, 12, 1, always=[1, 2])
    with pytest.raises(ValueError, match="1 to 12 are possible"):
        choose_vocabulary(tokens, 12, 13)


# --- the start


def test_new_student_starts_from_the_target():
    target = tiny_target()
    student = new_student(target, IDS, LAYERS)
    weights, last = student.head.state_dict(), target.model.model.layers[-1]
    feature = torch.randn(3 * HIDDEN)
    torch.testing.assert_close(weights["fc.weight"] @ feature, feature[-HIDDEN:])
    for name in ("q_proj", "k_proj", "v_proj"):
        wide = weights[f"midlayer.self_attn.{name}.weight"]
        assert torch.equal(wide[:, HIDDEN:], getattr(last.self_attn, name).weight)
        assert not wide[:, :HIDDEN].any()
    assert torch.equal(weights["midlayer.self_attn.o_proj.weight"], last.self_attn.o_proj.weight)
    assert torch.equal(weights["midlayer.mlp.down_proj.weight"], last.mlp.down_proj.weight)
    assert torch.equal(weights["midlayer.hidden_norm.weight"], last.input_layernorm.weight)
    assert torch.equal(weights["norm.weight"], target.model.model.norm.weight)
    assert torch.equal(weights["lm_head.weight"], target.model.lm_head.weight[IDS])
    assert student.raw["rope_theta"] == 500.0
    assert "at random" not in student.origin
    with pytest.raises(ValueError, match="no three default feature layers"):
        new_student(target, IDS)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_any_target_can_teach(kind, tmp_path):
    torch.manual_seed(0)
    if kind == "qwen3":
        sizes = {"hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
        rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}
        config = Qwen3Config(
            vocab_size=VOCAB, **sizes, num_key_value_heads=1, head_dim=8, rope_parameters=rope, use_sliding_window=False
        )
        model = Qwen3ForCausalLM(config)
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=4, n_head=2, n_positions=64))
    target = TargetModel(model.eval().requires_grad_(False))
    student = new_student(target, torch.arange(VOCAB), LAYERS)
    assert ("at random" in student.origin) == (kind == "gpt2")
    assert student.vocab_map is None
    train(tmp_path, target, student, texts(4, 12), TrainSettings(steps=2, batch=2, warmup=0))
    write_head(tmp_path / "head", student, "", torch.float32)
    drafter = load_drafter(tmp_path / "head", target, pack=False)
    assert drafter.vocab_map is None
    frequencies = drafter.head.rotary_emb.inv_freq
    torch.testing.assert_close(frequencies, student.head.rotary_emb.inv_freq)
    if kind == "qwen3":
        torch.testing.assert_close(frequencies, 300.0 ** (-torch.arange(4) / 4) / 2)


# --- training


class Killed(Exception):
    pass


def run(directory: Path, settings: TrainSettings, kill_after: int | None = None, dtype=torch.float32):
    """A training run on a fresh target and student; returns the head's weights."""
    target = tiny_target()
    student = new_student(target, IDS, LAYERS)

    def report(row):
        if row["step"] == kill_after:
            raise Killed

    held = [Text(text, torch.ones(14, dtype=torch.bool)) for text in texts(2, 14, seed=9)]
    train(directory, target, student, texts(5, 14), settings, held, dtype, report)
    return state_of(student.head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_training_gives_the_same_bits(tmp_path, dtype):
    settings = TrainSettings(steps=6, batch=2, warmup=2, learning_rate=1e-2, save_every=3, measure_every=2)
    whole = run(tmp_path / "whole", settings, dtype=dtype)
    for kill_after in (2, 5):  # before the first checkpoint, and after it: steps 4 and 5 are done twice
        with pytest.raises(Killed):
            run(tmp_path / "parts", settings, kill_after, dtype)
    parts = run(tmp_path / "parts", settings, dtype=dtype)
    assert all(torch.equal(parts[name], weight) for name, weight in whole.items())
    assert not torch.equal(whole["fc.weight"], state_of(new_student(tiny_target(), IDS, LAYERS).head)["fc.weight"])
    for name in ("log.csv", "held_out.csv"):
        rows = [read_journal(tmp_path / kind / name) for kind in ("whole", "parts")]
        for row in rows[0] + rows[1]:
            row.pop("seconds", None)
        assert rows[0] == rows[1]
    assert [row["step"] for row in read_journal(tmp_path / "parts" / "held_out.csv")] == [0, 2, 4, 6]
    finished = (tmp_path / "whole" / CHECKPOINT).stat().st_mtime_ns
    again = run(tmp_path / "whole", settings, dtype=dtype)  # nothing is left to do
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())
    assert (tmp_path / "whole" / CHECKPOINT).stat().st_mtime_ns == finished


def test_training_refuses_another_run_s_checkpoint(tmp_path):
    run(tmp_path, TrainSettings(steps=2, batch=2))
    with pytest.raises(ValueError, match=r"steps: 2 there, 3 now\); give those, or another folder"):
        run(tmp_path, TrainSettings(steps=3, batch=2))
    run(tmp_path, TrainSettings(steps=2, batch=2, save_every=1))  # changes nothing that is learned
    state = torch.load(tmp_path / CHECKPOINT)
    del state["identity"]["objective"]  # as it was before there was a choice
    torch.save(state, tmp_path / CHECKPOINT)
    run(tmp_path, TrainSettings(steps=2, batch=2))
    with pytest.raises(ValueError, match="batch=6, but only 5 texts"):
        run(tmp_path / "new", TrainSettings())


def test_training_lowers_the_loss_and_raises_the_overlap(tmp_path):
    run(tmp_path, TrainSettings(steps=40, batch=5, warmup=5, learning_rate=1e-2, measure_every=40))
    log = read_journal(tmp_path / "log.csv")
    assert log[-1]["loss"] < log[0]["loss"] - 0.3
    for step in range(1, UNROLL + 1):
        assert log[-1][f"overlap_{step}"] > log[0][f"overlap_{step}"] + 0.05
    assert 0 < log[0]["outside"] < 1
    assert log[-1]["tokens"] == 40 * 5 * 14
    files = plot_training(tmp_path)
    assert [file.name for file in files] == ["loss.svg", "loss.png"]
    assert all(file.stat().st_size > 5000 for file in files)


@pytest.mark.parametrize("objective", ["acceptance", "hybrid"])
def test_the_overlap_may_be_the_objective(tmp_path, objective):
    settings = TrainSettings(steps=40, batch=5, warmup=5, learning_rate=1e-2, measure_every=40)
    run(tmp_path, replace(settings, objective=objective))
    log = read_journal(tmp_path / "log.csv")
    assert log[-1]["loss"] < log[0]["loss"]
    for step in range(1, UNROLL + 1):
        assert log[-1][f"overlap_{step}"] > log[0][f"overlap_{step}"] + 0.05


def test_losses_by_hand():
    overlap = torch.tensor([[0.5, 0.125]], requires_grad=True)
    score = StepScore(torch.tensor([[1.0, 3.0]]), overlap, torch.zeros(1, 2))
    assert float(step_loss(score, "cross-entropy")) == 2.0
    loss = step_loss(score, "acceptance")
    assert float(loss.detach()) == pytest.approx(2 * math.log(2))
    loss.backward()
    torch.testing.assert_close(overlap.grad, torch.tensor([[-1.0, -4.0]]))
    weight = math.exp(-3 * 0.3125)
    assert float(step_loss(score, "hybrid").detach()) == pytest.approx(weight * 2 + (1 - weight) * 0.6875)


def test_schedule_and_order():
    settings = TrainSettings(steps=100, warmup=10, learning_rate=1.0, batch=3)
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert 0 < rates[99] < 1e-3
    places = [index for step in range(10) for index in batch_indices(5, settings, step)]
    for epoch in range(6):
        assert sorted(places[5 * epoch : 5 * epoch + 5]) == list(range(5))
    assert places[:5] != places[5:10]


def test_settings_errors():
    with pytest.raises(ValueError, match="unroll must be at least 1, got 0"):
        TrainSettings(unroll=0)
    with pytest.raises(ValueError, match="decay must be above 0"):
        TrainSettings(decay=0)
    with pytest.raises(ValueError, match="learning_rate must be above 0"):
        TrainSettings(learning_rate=float("nan"))
    with pytest.raises(ValueError, match="objective must be one of cross-entropy, acceptance, hybrid, got 'kl'"):
        TrainSettings(objective="kl")
    assert compute_dtype("cpu") in (torch.float32, torch.bfloat16)


# --- checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_head_is_read_as_it_was(tmp_path, dtype):
    target = tiny_target()
    student = tiny_student(target)
    write_head(tmp_path, student, "# A head\n", dtype)
    head, vocab_map = load_head(tmp_path, HIDDEN, VOCAB)
    assert torch.equal(vocab_map, IDS)
    for name, weight in student.head.state_dict().items():
        assert torch.equal(head.state_dict()[name], weight.to(dtype))
    assert (tmp_path / "README.md").read_text() == "# A head\n"
    again = read_student(tmp_path, target)
    assert again.head.fc.weight.dtype == torch.float32
    write_head(tmp_path / "again", again, "", dtype)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_written_head_names_its_feature_layers(tmp_path):
    target = tiny_target(layers=10)
    student = new_student(target, IDS, (1, 4, 8))  # not the default, (2, 5, 7)
    write_head(tmp_path, student, "")
    assert load_drafter(tmp_path, target).feature_layers == (1, 4, 8)
    assert read_student(tmp_path, target).feature_layers == (1, 4, 8)
    assert read_student(tmp_path, target, (2, 3, 9)).feature_layers == (2, 3, 9)
    nested = student.raw | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}}  # what leaves a layer
    (tmp_path / "config.json").write_text(json.dumps(nested | {"dtype": "float16"}))
    other = read_student(tmp_path, target)
    assert other.feature_layers == (1, 4, 8)
    write_head(tmp_path, replace(other, feature_layers=(1, 5, 9)), "")
    assert load_drafter(tmp_path, target).feature_layers == (1, 5, 9)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["eagle_aux_hidden_state_layer_ids"] == [1, 5, 9]
    assert "eagle_config" not in written
    assert (written["torch_dtype"], written.get("dtype")) == ("bfloat16", None)
    del nested["eagle_config"]
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert read_student(tmp_path, target).feature_layers == load_drafter(tmp_path, target).feature_layers == (2, 5, 7)
    (tmp_path / "config.json").write_text(json.dumps(nested | {"eagle_aux_hidden_state_layer_ids": [1, 4, 8, 9]}))
    with pytest.raises(ValueError, match=r"must be a list of integers, three of them, got \[1, 4, 8, 9\]"):
        read_student(tmp_path, target)


# --- evaluation


def flat_student(target: TargetModel, ids):
    student = new_student(target, ids, LAYERS)
    with torch.no_grad():
        student.head.lm_head.weight.zero_()
    return student


def test_overlap_of_equal_laws_is_one():
    target = tiny_target()
    target.model.lm_head.weight.zero_()
    student = flat_student(target, torch.arange(VOCAB))
    every = [Text(text, torch.ones(7, dtype=torch.bool)) for text in texts(3, 7)]
    found = measure_overlap(target, student, every, UNROLL)
    assert found.means == pytest.approx([1.0] * UNROLL, abs=1e-5)
    assert found.standard_errors == pytest.approx([0.0] * UNROLL, abs=1e-5)
    assert found.tokens == (15, 12, 9, 6)  # tokens 2 + j .. 6 of each
    assert found.texts == 3


def test_overlap_of_a_flat_head_by_hand():
    target = tiny_target()
    student = flat_student(target, IDS)
    first, second = texts(2, 8)
    counted = [torch.arange(8) >= 5, torch.arange(6) == 3]
    found = measure_overlap(target, student, [Text(first, counted[0]), Text(second[:6], counted[1])], UNROLL)
    law = [target.model(text[None]).logits[0].softmax(-1)[:, IDS] for text in (first, second[:6])]
    overlap = [torch.minimum(rows, torch.tensor(1 / len(IDS))).sum(-1) for rows in law]
    # Token i is predicted by the law after token i - 1; step j reaches the tokens from 2 + j on.
    near = [*overlap[0][4:7].tolist(), float(overlap[1][2])]
    expected = [sum(near) / 4] * 2 + [sum(near[:3]) / 3] * 2
    assert found.means == pytest.approx(expected, abs=1e-5)
    assert found.tokens == (4, 4, 3, 3)
    assert found.texts == 2
    assert math.isnan(found.standard_errors[2])
    assert found.as_json()["standard_errors"][2] is None
    with pytest.raises(ValueError, match="no text has a token to count"):
        measure_overlap(target, student, [Text(first, torch.arange(8) < 2)], 1)


def test_standard_error_by_hand():
    sums, counts = torch.tensor([[2.0], [1.0], [0.0]]).double(), torch.tensor([[4.0], [1.0], [0.0]]).double()
    found = _summary(sums, counts)
    assert found.means == (0.6,)
    assert found.standard_errors[0] == pytest.approx(math.sqrt((0.4**2 + 0.4**2) * 2) / 5)
    assert (found.tokens, found.texts) == ((5,), 2)


def test_questions_are_answered():
    class Words:
        chat_template = None

        def __call__(self, text):
            return {"input_ids": [len(word) for word in text.split()]}

        def decode(self, ids, **options):
            return " ".join(map(str, ids))

    params = SamplingParams(temperature=1.0, max_new_tokens=5, seed=3, min_new_tokens=2)
    answered = answered_questions(tiny_target(), Words(), ["a bb ccc", "dddd a"], params, batch=1)
    assert answered[0].tokens[:3].tolist() == [1, 2, 3]
    assert answered[0].counted[:4].tolist() == [False, False, False, True]
    together = answered_questions(tiny_target(), Words(), ["a bb ccc", "dddd a"], params, batch=2)
    for alone, batched in zip(answered, together, strict=True):
        assert alone.tokens.tolist() == batched.tokens.tolist()

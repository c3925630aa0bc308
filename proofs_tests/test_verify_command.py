"""``rheo verify``: it agrees with the real code, it fails on a broken one, and it refuses what proves nothing."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import optimized.backends as backends
import optimized.evidence.batched as batched
import optimized.evidence.exact as exact
import optimized.verification as verification
import reference.exact
from optimized.cli import app
from optimized.decoder import RheoDecoder
from optimized.evidence.markov import target_law
from optimized.evidence.pair import OTHER, block_law, named
from optimized.models import CausalDrafter, TargetModel
from optimized.sampling_params import SamplingParams
from proofs_tests.test_cli import tiny_model, told
from proofs_tests.tiny_models import byte_tokenizer
from reference.api import RheoConfig
from reference.statistics import ImpossibleOutcomeError, aligned, compare

TREE = ["--lead-tokens", "0", "--branching", "2", "--support", "6"]
PAIR = ["--target", "embedded", "--prompt", "once", "--raw", "--top-k", "4", "--draws", "400", *TREE]
BUILT_IN = ["--draws", "2400"]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> dict[str, Any]:
    """Loads a tiny target, and a draft that is the same network, six times as sure of itself."""
    asked: dict[str, Any] = {}

    def from_pretrained(target: str, draft: str | None, config: RheoConfig, **where: Any) -> RheoDecoder:
        asked.update(target=target, draft=draft, config=config, **where)
        asked["decoder"] = tiny_decoder(config, where["backend"])
        return asked["decoder"]

    monkeypatch.setattr(RheoDecoder, "from_pretrained", from_pretrained)
    monkeypatch.setenv("COLUMNS", "120")
    return asked


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in tiers on a few of their cases."""
    grid = list(exact.exact_grid())[::17]
    monkeypatch.setattr(exact, "exact_grid", lambda: iter(grid))
    cases = [batched.CASES[0], batched.CASES[4]]
    monkeypatch.setattr(batched.check_batched, "__defaults__", (cases,))
    monkeypatch.setattr(batched.check_draws, "__defaults__", (cases,))
    monkeypatch.setenv("COLUMNS", "120")


def tiny_decoder(config: RheoConfig, backend: Any = "auto") -> RheoDecoder:
    target, draft = TargetModel(tiny_model(1, 2)), tiny_model(1, 2)
    draft.model.norm.weight.data *= 6  # of the logits
    return RheoDecoder(target, CausalDrafter(draft, target.vocab_size), byte_tokenizer(), config, backend=backend)


def rheo_verify(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments])


def accept_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every probe is accepted where the target gives it any mass."""
    step = verification._step

    class Eager:
        def __init__(self, noise: Any) -> None:
            self.accept_uniforms = torch.zeros_like(noise.accept_uniforms)
            self.residual_uniforms, self.lead_uniforms = noise.residual_uniforms, noise.lead_uniforms

    monkeypatch.setattr(
        verification, "_step", lambda trees, row, law, noise, rule: step(trees, row, law, Eager(noise), rule)
    )


def recover_from_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that was turned down is followed by a draw from p, not from the residual."""
    step, draw = verification._step, verification.inverse_cdf
    laws: list[Tensor] = []

    def remember(trees: Any, row: Tensor, law: Tensor, noise: Any, rule: Any) -> Any:
        laws.append(law)
        return step(trees, row, law, noise, rule)

    monkeypatch.setattr(verification, "_step", remember)
    monkeypatch.setattr(verification, "inverse_cdf", lambda weights, uniforms: draw(laws[-1], uniforms))


BROKEN = [accept_everything, recover_from_the_target]


def test_built_in_laws_agree(few: None) -> None:
    result = rheo_verify(*BUILT_IN)
    assert result.exit_code == 0, result.output
    for words in ("0 exactly", "opposite rankings, m = 0", "all of these", "passed  every law agrees"):
        assert words in result.stdout


def test_built_in_laws_as_json(few: None) -> None:
    result = rheo_verify("--json", "--seed", "5", *BUILT_IN)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["agrees"], record["problems"], record["alpha"], record["seed"]) == (True, [], 1e-6, 5)
    assert {row["rule"] for row in record["exact"]} == {"rheo", "rrsw", "topk"}
    assert {row["total_variation"] for row in record["exact"]} == {"0"}
    assert [row["draws"] for row in record["batched"]] == [1200, 1200, 2400] * 3
    assert all(0 < row["detectable_tv"] < 1 and row["accepted_per_step"] > 0 for row in record["batched"])


def test_exact_grid_covers_rules_cases_and_every_m() -> None:
    grid = list(exact.exact_grid())
    for shape, _ in exact.SHAPES:
        for rule in ("rheo", "rrsw"):
            of_rule = [config for name, _, config, _ in grid if name == rule and config.branching == shape.branching]
            assert {config.lead_tokens for config in of_rule} == set(range(shape.branching + 1))
            assert {config.verification for config in of_rule} == {rule}
    assert {config.proposal for name, _, config, _ in grid if name == "topk"} == {"topk"}


@pytest.mark.parametrize("broken", BROKEN)
def test_built_in_laws_fail_on_a_broken_verifier(few: None, monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    broken(monkeypatch)
    monkeypatch.setattr(backends, "missing", lambda name, device: [f"{name} is left out"])  # what is broken is Torch's
    result = rheo_verify("--json", *BUILT_IN)
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert not record["agrees"]
    assert {row["rule"] for row in record["batched"] if not row["agrees"]} >= {"rheo", "rrsw"}
    assert all(row["agrees"] for row in record["batched"] if row["rule"] == "topk")  # it has no probe to get wrong


def test_exact_tier_fails_on_a_broken_residual(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference.exact, "residual", lambda law, probe_law: law)
    result = rheo_verify(*BUILT_IN)
    assert result.exit_code == 1
    assert "rheo: the law of the output is at total variation" in " ".join(result.stdout.split())
    assert "every law agrees" not in result.stdout


@pytest.mark.parametrize("options", [[], ["--temperature", "0.7", "--min-p", "0.02"], ["--verification", "rrsw"]])
def test_models_agree_with_their_target(loaded: dict[str, Any], options: list[str]) -> None:
    result = rheo_verify(*PAIR, *options, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["agrees"]
    assert (loaded["target"], loaded["draft"]) == ("embedded", "embedded")
    assert record["accepted"] > 40
    assert sum(block["seen"] for block in record["blocks"]) == record["draws"] == 400
    assert sum(block["probability"] for block in record["blocks"]) == pytest.approx(1, abs=1e-9)
    assert record["cells"] > 5
    assert record["prompt_tokens"] == len("once")


def test_models_report_is_readable(loaded: dict[str, Any]) -> None:
    result = rheo_verify(*PAIR, "--tokens", "3")
    assert result.exit_code == 0, result.output
    for words in ("> once", "The first 3 tokens of 400 texts", "expected", "seen", "bias seen", "every law agrees"):
        assert words in result.stdout


@pytest.mark.parametrize("broken", BROKEN)
def test_models_fail_on_a_broken_verifier(loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    broken(monkeypatch)
    result = rheo_verify(*PAIR, "--draws", "1200", "--backend", "torch")  # what is broken is Torch's
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.stdout


def test_a_draft_that_is_never_accepted_is_no_evidence(loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "child_with", lambda trees, among, token: torch.zeros_like(token))
    result = rheo_verify(*PAIR, "--proposal", "topk", "--backend", "torch")
    assert result.exit_code == 1
    assert "no draft token was accepted, so nothing was tested" in result.stdout


def test_greedy_texts_are_certain(loaded: dict[str, Any]) -> None:
    result = rheo_verify("--target", "embedded", "--prompt", "once", "-t", "0", "--draws", "100", "--json")
    record = json.loads(result.stdout)
    assert [block["probability"] for block in record["blocks"]] == [1.0]
    assert (result.exit_code, record["agrees"], record["detectable_tv"]) == (0, True, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "0.5"], "temperature is for models, and --target names none"),
        (["once"], "prompt is for models"),
        (["--draft", "embedded"], "draft is for models"),
        (["--tokens", "3"], "--tokens is for models"),
        (["--draws", "10"], "draws must be at least"),
        (["--draws", "0"], "draws must be at least"),
        (["--alpha", "0"], "alpha must lie between 0 and 1"),
        (["--seed", "-1"], "seed must be"),
        ([*PAIR, "--no-draft"], "--no-draft leaves nothing to test"),
        ([*PAIR, "--tokens", "1"], "tokens must be at least 2"),
        ([*PAIR, "--draws", "99"], "draws must be at least 100"),
        ([*PAIR, "--top-p", "0"], "top_p"),
        ([*PAIR, "--prompt", "again"], "one prompt is wanted"),
        ([*PAIR, "--tokens", "512"], "exceeds the context of 512"),
        (["--target", "no/such/folder"], "--target no/such/folder: no such folder"),
    ],
)
def test_bad_input_is_refused(loaded: dict[str, Any], arguments: list[str], message: str) -> None:
    assert message in told(rheo_verify(*arguments), 2)


def test_block_law_is_the_targets_law_token_by_token(loaded: dict[str, Any]) -> None:
    """Against ``target_law``, written from the definitions; an end-of-sequence token ends a block."""
    decoder = tiny_decoder(RheoConfig())
    model = decoder.target.model
    decoder.target.eos_token_ids = (32,)
    params = SamplingParams(temperature=0.8, top_k=6, min_p=0.05)
    prompt = [5, 9, 200]

    def law(*block: int) -> list[float]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *block]])).logits[0, -1].double().numpy()
        return target_law(logits, params).tolist()

    laws = block_law(decoder, prompt, params, tokens=2, draws=200)
    assert sum(laws.values()) == pytest.approx(1)
    assert any(OTHER in block for block in laws)
    for block, probability in laws.items():
        expected, before = 1.0, ()
        for token in block:
            row = law(*before)
            named_here = {b[len(before)] for b in laws if b[: len(before)] == before}
            expected *= 1 - sum(row[t] for t in named_here if t != OTHER) if token == OTHER else row[token]
            before = (*before, token)
        assert probability == pytest.approx(expected, rel=1e-4, abs=1e-9), block
        assert OTHER in block or probability * 200 >= 10


def test_named_stops_at_the_first_token_without_a_name() -> None:
    names = {(3,), (3, 4), (3, OTHER), (OTHER,), (7,)}
    assert named((3, 4), names) == (3, 4)
    assert named((3, 5), names) == (3, OTHER)
    assert named((8, 4), names) == (OTHER,)
    assert named((7,), names) == (7,)


def test_impossible_outcome_is_an_error_of_its_own() -> None:
    with pytest.raises(ImpossibleOutcomeError, match="is impossible and came up 2 times") as caught:
        compare({(1,): 5, (2,): 2}, {(1,): 1.0}, alpha=0.01)
    assert (caught.value.outcome, caught.value.count) == ((2,), 2)
    with pytest.raises(ImpossibleOutcomeError) as caught:
        aligned([5, 2], [1.0, 0.0])
    assert (caught.value.outcome, caught.value.count) == (1, 2)

"""Weights learned while decoding: from exact chances, for later steps only, saved and loaded; texts stay lossless."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from optimized import drafting
from optimized.calibration import Calibrator, WalkedNodes, load_weights, prior_weights, save_weights
from optimized.cli import app
from optimized.decoder import RheoDecoder
from optimized.growth import grow_trees
from optimized.loop import CALIBRATION_STEPS
from optimized.models import CausalDrafter, TargetModel
from optimized.randomness import StepRandomness, fresh_seed
from optimized.sampling_params import SamplingParams
from optimized.target_laws import SamplingBatch, TargetLaws
from optimized.verification import verify_trees
from proofs_tests.statistics import Family
from proofs_tests.test_cli import tiny_model
from proofs_tests.tiny_models import byte_tokenizer
from proofs_tests.toy import ToyDrafter, random_logits
from proofs_tests.toy_models import PathDrafter, PathTarget, text_counts, text_law
from reference.api import RheoConfig
from reference.weights import KNOTS, Curve, Curves, Weights, band_of


def decoder(calibrator: Calibrator | None = None, **config: object) -> RheoDecoder:
    target = TargetModel(tiny_model(1, 2))
    shape = RheoConfig(branching=3, depth=3, tree_size=6, **config)  # type: ignore[arg-type]
    return RheoDecoder(
        target, CausalDrafter(tiny_model(2, 1), target.vocab_size), byte_tokenizer(), shape, calibrator=calibrator
    )


def test_chances_are_the_exact_ones_by_hand() -> None:
    """One node, q = (1/2, 1/4, 1/4), p = (1/4, 1/4, 1/2): every point can be computed."""
    q, p = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    config = RheoConfig(lead_tokens=1, branching=2, depth=1, tree_size=2, weights=prior_weights())
    toy = ToyDrafter([lambda path: np.log(q).astype(np.float32)], 3)
    noise = StepRandomness([1], 1, 2, 3).at(torch.zeros(1, dtype=torch.long))
    trees = grow_trees(config, toy.root_logits(), toy.expand, torch.ones(1), noise.probe_uniforms)
    sampling = SamplingBatch.from_params([SamplingParams()], [[0]], 3)
    laws = TargetLaws(torch.from_numpy(np.log(p)).expand(1, 3, 3), sampling, trees)
    laws.kept = []
    walk = verify_trees(trees, laws, noise)
    seen: list[tuple[int, list[float], list[float]]] = []

    class Recorder(Calibrator):
        def _add(self, kind, points):  # type: ignore[no-untyped-def]
            seen.append((kind, points.masses.tolist(), points.chances.tolist()))

    Recorder().observe(trees, walk, laws.kept, 2, torch.ones(1))
    expected = {
        0: ([0.5, 0.25], [0.25, 0.25]),
        # m = 0: q~ = q, overlap 1/4 + 1/4 + 1/4; m = 1: q~ = (1/2, 1/2) over the tail, overlap 1/4 + 1/2.
        1: ([0.5, 0.25], [0.75, 0.75]),
        # m = 0: max(0, p - q) of the two ranked first; m = 1: of the second, max(0, 1/4 - 1/2).
        2: ([0.5, 0.25, 0.25], [0.0, 0.0, 0.0]),
    }
    assert len(seen) == 3
    for kind, masses, chances in seen:
        np.testing.assert_allclose(masses, expected[kind][0], rtol=1e-6)
        np.testing.assert_allclose(chances, expected[kind][1], rtol=1e-6, atol=1e-7)


MASSES, TARGET = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.1, 0.3, 0.2])  # of four tokens; p has 0.3 elsewhere


def equal_nodes(count: int) -> WalkedNodes:
    return WalkedNodes(np.zeros(count, int), np.tile(MASSES, (count, 1)), np.tile(TARGET, (count, 1)))


def exact_chances(law: dict[int, float], left: dict[int, float], probes: int) -> list[float]:
    """Of each probe in turn, by enumeration of the tokens drawn before."""
    if not probes or not left:
        return [0.0] * probes
    q = {token: mass / sum(left.values()) for token, mass in left.items()}
    overlap = sum(min(law[token], q[token]) for token in q)
    rest = {token: max(law[token] - q.get(token, 0.0), 0.0) / (1 - overlap) for token in law}
    later = np.zeros(probes - 1)
    for token in q:
        turned_down = max(1 - law[token] / q[token], 0.0)
        below = exact_chances(rest, {other: mass for other, mass in left.items() if other != token}, probes - 1)
        later += q[token] * turned_down * np.array(below)
    return [overlap, *later]


def behind_a_lead(probes: int) -> list[float]:
    return exact_chances(dict(enumerate(TARGET)), {token: MASSES[token] for token in (1, 2, 3)}, probes)


def test_chances_of_further_probes_are_the_exact_ones_on_average() -> None:
    """Three probes behind a lead, over four tokens and one outside; and a fill behind the first."""
    expected, count = behind_a_lead(4), 40_000
    nodes = equal_nodes(count)
    chances, rest, drawn = nodes.probes(1, 4, np.random.default_rng(0))
    assert (drawn.sum(axis=1) == 3).all()
    assert (rest == 0).all()
    _, rest, drawn = nodes.probes(1, 1, np.random.default_rng(1))
    assert not rest[drawn].any()
    np.testing.assert_allclose(rest.mean(axis=0), nodes.probe(1)[1][0], atol=0.003)
    assert (chances.sum(axis=1) <= 1 + 1e-12).all()
    error = chances.std(axis=0) / count**0.5
    assert (np.abs(chances.mean(axis=0) - expected) <= 4 * error + 1e-12).all()
    assert expected[1] > 0.03
    assert expected[3] == 0  # nothing is left to draw


def test_a_share_is_what_the_exact_chances_have_of_the_mean() -> None:
    calibrator, prior, band = Calibrator(), prior_weights().at(1.0), band_of(1.0)
    calibrator._add_probes(equal_nodes(40_000), np.full(40_000, band))
    chances = behind_a_lead(3)
    means = [chance / share for chance, share in zip(prior.probes(list(MASSES[1:])), (1, *prior.further), strict=False)]
    learned = calibrator.weights().at(1.0)
    assert learned.further[0] == pytest.approx(chances[1] / means[1], rel=0.05)
    assert chances[2] == 0  # what the first two leave is never accepted here
    assert 0 < learned.further[1] < 0.001
    assert learned.probe == prior.probe
    assert calibrator.weights().at(0.6) == prior_weights().at(0.6)


def test_shares_of_further_probes_are_learned_where_there_are_several() -> None:
    params = SamplingParams(seed=3, max_new_tokens=40)
    for probes in (1, 2):
        calibrator = Calibrator()
        decoder(calibrator, weights=prior_weights(), probes=probes).generate([[5, 6, 7], [8, 9]], params)
        learned, prior = calibrator.weights(), prior_weights()
        assert (learned.at(1.0).further != prior.at(1.0).further) == (probes > 1)
        assert learned.at(0.0).further == prior.at(0.0).further


def test_curves_follow_what_was_seen_and_never_fall() -> None:
    rng = np.random.default_rng(3)
    calibrator = Calibrator()
    truth = Curves(*(Curve(tuple(np.minimum(1, a * np.array(KNOTS) ** 0.5))) for a in (0.9, 0.3, 0.5)))
    from optimized.calibration import KINDS, Points

    for kind, name in enumerate(KINDS):
        masses = rng.random(20_000) ** 3
        chances = np.array([getattr(truth, name)(float(mass)) for mass in masses])
        noisy = (rng.random(20_000) < chances).astype(float)
        calibrator._add(kind, Points(np.full(20_000, band_of(1.0)), masses, noisy))
    weights = calibrator.weights()
    for name in KINDS:
        curve = getattr(weights.at(1.0), name)
        assert all(a <= b for a, b in zip(curve.values, curve.values[1:], strict=False))
        for knot, value in zip(KNOTS[4:], curve.values[4:], strict=True):
            assert value == pytest.approx(getattr(truth, name)(knot), abs=0.08)
        assert getattr(weights.at(0.0), name) == getattr(prior_weights().at(0.0), name)  # nothing seen there
    assert weights.source == f"learned online, {calibrator.points} points"
    assert calibrator.points > 50_000  # those below the first knot say nothing


def test_weights_change_between_steps_only_and_come_from_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tree is grown with weights that the calibrator had made before the step, and they hold for some steps."""
    calibrator = Calibrator()
    made: list[Weights] = []
    used: list[tuple[int, Weights | None]] = []
    original_weights, original_grow = calibrator.weights, drafting.grow_trees

    def weights() -> Weights:
        made.append(original_weights())
        return made[-1]

    def grow(config, *arguments):  # type: ignore[no-untyped-def]
        used.append((calibrator.points, config.weights))
        return original_grow(config, *arguments)

    monkeypatch.setattr(calibrator, "weights", weights)
    monkeypatch.setattr(drafting, "grow_trees", grow)
    decoder(calibrator).generate([[5, 6, 7], [8, 9]], SamplingParams(seed=1, max_new_tokens=40))
    assert len({weights for _, weights in used}) > 1
    for step, (points, weights) in enumerate(used):
        assert weights in made
        assert weights is made[1 + step // CALIBRATION_STEPS]  # made[0] is the decoder's own
        assert int(weights.source.split(", ")[1].split()[0]) <= points


@pytest.mark.parametrize("lead_tokens", [1, "auto"])
def test_greedy_texts_stay_the_targets(lead_tokens: object) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=24)
    prompts = [[5, 6, 7], [8, 9], [40]]
    plain = decoder()
    expected = RheoDecoder(plain.target, None, plain.tokenizer).generate(prompts, params)
    calibrated = decoder(Calibrator(), lead_tokens=lead_tokens, weights=prior_weights())
    actual = calibrated.generate(prompts, params)
    assert [result.token_ids for result in actual] == [result.token_ids for result in expected]
    assert calibrated.calibrator is not None
    assert calibrated.calibrator.points > 0


@pytest.mark.lossless
def test_texts_have_the_targets_law_while_weights_are_learned() -> None:
    with Family("weights while they are learned", 2) as family:
        check_texts(family, 6000, 0.07)


@pytest.mark.lossless
@pytest.mark.deep
def test_texts_have_the_targets_law_while_weights_are_learned_at_length() -> None:
    with Family("weights while they are learned deep", 2) as family:
        check_texts(family, 60_000, 0.025)


def check_texts(family: Family, requests: int, tv: float) -> None:
    """Joint law of three tokens, at T = 1 and a prior that is far off: the weights move while the sample is drawn.

    One seed for all prompts must do no harm: the weights would meet the random numbers again that shaped them.
    """
    for seeds in ("distinct", "one for all"):
        counts, law = sample_while_learning(seeds, requests)
        family.compare(f"{seeds} seeds", counts, law, min_detectable_tv=tv)


def sample_while_learning(seeds: str, requests: int) -> tuple[np.ndarray, np.ndarray]:
    target, calibrator = PathTarget(4, random_logits(5, 4, "normal")), Calibrator()
    shape = RheoConfig(lead_tokens="auto", branching=3, depth=2, tree_size=3, weights=prior_weights())
    learning = RheoDecoder(target, PathDrafter(4), None, shape, max_batch_size=500, calibrator=calibrator)  # type: ignore[arg-type]
    counts = text_counts(learning, requests, seeds == "distinct")
    assert calibrator.points > requests
    return counts, text_law(target)


def test_a_step_that_is_repeated_teaches_once() -> None:
    """A target that raises once: the same points as an undisturbed run, whose texts are the same."""
    seen = []
    for broken in (False, True):
        calibrator = Calibrator()
        target = PathTarget(5, random_logits(5, 5, "normal"))
        forward, raised = target.forward_tree, []

        def sometimes(*arguments, forward=forward, raised=raised, broken=broken, **options):  # type: ignore[no-untyped-def]
            if broken and len(raised) == 0 and target.passes == 3:  # noqa: B023
                raised.append(True)
                raise RuntimeError("once")
            return forward(*arguments, **options)

        target.forward_tree = sometimes  # type: ignore[method-assign]
        shape = RheoConfig(branching=3, depth=2, tree_size=3, weights=prior_weights())
        learning = RheoDecoder(target, PathDrafter(5), None, shape, calibrator=calibrator)  # type: ignore[arg-type]
        [result] = learning.generate([[1, 2]], SamplingParams(seed=4, max_new_tokens=12))
        assert bool(raised) == broken
        seen.append((result.token_ids, calibrator.points))
    assert seen[0] == seen[1]


def test_fixed_weights_keep_a_text_a_function_of_its_seed() -> None:
    params = SamplingParams(seed=11, max_new_tokens=24)
    fixed = decoder(lead_tokens="auto", weights=prior_weights())
    alone = fixed.generate([[5, 6, 7]], params)[0].token_ids
    assert fixed.generate([[5, 6, 7], [8, 9]], params)[0].token_ids == alone


def test_a_file_gives_the_same_weights_and_says_where_they_come_from(tmp_path: Path) -> None:
    weights, path = prior_weights(), tmp_path / "weights.json"
    save_weights(weights, path, {"target": "t"})
    loaded = load_weights(path)
    assert loaded.bands == weights.bands
    assert loaded.source == f"{path}: prior"
    assert json.loads(path.read_text())["provenance"] == {"target": "t"}


@pytest.mark.parametrize("change", ["text", "format", "curve", "bands"])
def test_a_file_that_holds_none_is_refused_by_name(tmp_path: Path, change: str) -> None:
    path = tmp_path / "weights.json"
    save_weights(prior_weights(), path, {})
    content = json.loads(path.read_text())
    if change == "format":
        content["format"] = 99
    elif change == "curve":
        content["bands"][2]["lead"][3] = 7
    elif change == "bands":
        content["bands"].pop()
    path.write_text("nothing" if change == "text" else json.dumps(content))
    with pytest.raises(ValueError, match=r"weights\.json holds no calibrated weights"):
        load_weights(path)


def test_the_command_writes_weights_that_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """``rheo calibrate`` on two questions; its file goes into ``generate`` and goes on in another ``calibrate``."""

    def tiny(*_: object, calibrator: Calibrator | None = None, **__: object) -> RheoDecoder:
        return decoder(calibrator, weights=prior_weights())

    monkeypatch.setattr(RheoDecoder, "from_pretrained", tiny)
    questions, out = tmp_path / "few.jsonl", tmp_path / "made" / "weights.json"
    questions.write_text("".join(json.dumps({"question_id": i, "turns": [f"say {i}"]}) + "\n" for i in range(2)))
    command = ["calibrate", str(questions), "-n", "12", "--temperatures", "1,0"]
    result = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert content["provenance"]["temperatures"] == "1,0"
    assert "1 probes, K 10" in content["provenance"]["trees"]
    learned = load_weights(out)
    assert learned.at(1.0) != prior_weights().at(1.0)
    assert learned.at(0.0).lead != prior_weights().at(0.0).lead
    assert learned.at(0.3) == prior_weights().at(0.3)  # no such request
    again = CliRunner().invoke(app, [*command, "--weights", str(out), "--out", str(tmp_path / "more.json")])
    assert again.exit_code == 0, again.output
    assert str(out) in json.loads((tmp_path / "more.json").read_text())["provenance"]["began_with"]
    refused = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert refused.exit_code == 2
    assert "exists already" in " ".join(refused.output.split())


def test_a_calibrator_replaces_the_configurations_weights() -> None:
    other = replace(prior_weights(), source="another")
    assert decoder(Calibrator(prior=other), weights=prior_weights()).config.weights.source.startswith("learned online")  # type: ignore[union-attr]


def test_weights_do_not_meet_the_random_numbers_again_that_shaped_them() -> None:
    """A calibrator that goes on from what another learned counts its requests from elsewhere."""
    first = Calibrator()
    learned = replace(prior_weights(), bands=(replace(prior_weights().bands[0], fill=Curve((0.5,) * len(KNOTS))),) * 6)
    second, again = Calibrator(learned), Calibrator(learned)
    assert first.requests == 0
    assert second.requests == again.requests > 2**32
    assert fresh_seed(5, first.requests) != fresh_seed(5, second.requests)

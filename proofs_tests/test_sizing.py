"""Trees that pay: the thresholds that follow from what steps cost, steps without a draft; texts stay the target's."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from optimized.calibration import Calibrator, prior_weights
from optimized.committed import Committed, joined
from optimized.decoder import RheoDecoder
from optimized.drafting import MOST_UNREAD
from optimized.growth import grow_trees
from optimized.models.eagle3 import Eagle3Drafter
from optimized.randomness import StepRandomness
from optimized.sampling_params import SamplingParams
from optimized.sizing import COMPARED, COMPARING, PRIOR_GAIN, SHORTEST_PAUSE, TRIAL, StepCosts, TreeSizer
from optimized.trees import TreeBatch
from optimized.verification import VerifyBatch
from proofs_tests.statistics import Family
from proofs_tests.tiny_pairs import MAKERS, assert_cache_is_fresh, eagle_decoder, llama
from proofs_tests.toy import ToyDrafter, random_logits
from proofs_tests.toy_models import PathDrafter, PathTarget, text_counts, text_law
from reference.api import RheoConfig
from reference.tree import DraftTree

AUTO = RheoConfig(lead_tokens="auto", branching=3, depth=3, tree_size="auto", weights=prior_weights())
COSTS = StepCosts(plain=1.0, base=1.1, node=0.1, level=0.2)


def step(scores: list[float], accepted: int) -> tuple[TreeBatch, VerifyBatch]:
    """A chain of nodes with these path scores, of which the walk took some; without any, a step without a draft."""
    n = len(scores)
    tree = DraftTree(
        token_ids=(-1, *range(n)),
        parents=tuple(range(-1, n)),
        depths=tuple(range(n + 1)),
        slots=(0,) * (n + 1),
        is_probe=(False,) * (n + 1),
        scores=(1.0, *scores),
        probe_laws={},
    )
    tokens = torch.zeros(1, n + 1, dtype=torch.long)
    none = torch.zeros(1, n + 1, dtype=torch.bool)
    return TreeBatch.from_trees([tree]), VerifyBatch(tokens, tokens, torch.tensor([accepted + 1]), none, none)


def test_thresholds_are_what_a_second_is_worth() -> None:
    """Before anything is known a second is worth plain decoding's one token, and scores are taken at their word."""
    shape = TreeSizer(lambda batch: COSTS).shape(AUTO, 1)
    assert shape is not None
    assert shape.score_threshold == pytest.approx(0.1)  # a node takes a tenth of a second
    assert shape.level_threshold == pytest.approx(0.2 / PRIOR_GAIN)  # a level takes a fifth of one
    assert replace(shape, score_threshold=0, level_threshold=0) == AUTO


def test_thresholds_follow_what_is_seen() -> None:
    """Steps of two nodes, promised 0.8 and 0.4, that accept 1.2 on average: worth 2.2 tokens in 1.4 s."""
    sizer = TreeSizer(lambda batch: replace(COSTS, level=0.1))
    for turn in range(500):
        shape = sizer.shape(AUTO, 1)
        if shape is None:
            sizer.observe(None, *step([], 0), seconds=1.0)
            continue
        last = shape
        sizer.observe(shape, *step([0.8, 0.4], accepted=2 if turn % 5 < 3 else 0), seconds=1.4)
    worth = 2.2 / (1.1 + 0.1 * 2 + 0.1 * 1)
    assert last.score_threshold == pytest.approx(worth * 0.1, rel=0.1)
    gain = (0.4 - worth * 0.1) / 0.8  # of the second level, what its node costs taken off
    assert last.level_threshold == pytest.approx(worth * 0.1 / gain, rel=0.1)


def test_scores_that_promise_too_much_are_discounted() -> None:
    sizer = TreeSizer(lambda batch: replace(COSTS, base=0.1))
    for turn in range(500):
        shape = sizer.shape(AUTO, 1)
        sizer.observe(shape, *step([0.8, 0.4], accepted=turn % 5 == 0), seconds=0.5)
    assert shape is not None
    worth = 1.2 / (0.1 + 0.2 + 0.2) * (1.2 / 0.2)  # a sixth of what was promised, up to the prior
    assert 0.5 < shape.score_threshold / (worth * 0.1) < 1


def drafts(
    sizer: TreeSizer, steps: int, scores: list[float], accepted: int, batch: int = 1, **seconds: float
) -> list[bool]:
    """Which of so many steps had a draft."""
    drafted = []
    for _ in range(steps):
        shape = sizer.shape(AUTO, batch)
        drafted.append(shape is not None)
        trees, walk = step(scores, accepted) if drafted[-1] else step([], 0)
        usual = COSTS.seconds(trees.rows - 1, trees.depth - 1) if drafted[-1] else COSTS.plain
        trees = replace(trees, **{name: torch.cat([getattr(trees, name)] * batch) for name in TREE_TENSORS})
        walk = replace(walk, counts=torch.cat([walk.counts] * batch))
        sizer.observe(shape, trees, walk, seconds.get("drafted" if drafted[-1] else "plain", usual))
    return drafted


TREE_TENSORS = ("token_ids", "parents", "depths", "slots", "is_probe", "log_scores", "num_nodes")


def test_drafting_that_does_not_pay_is_turned_off_and_tried_again() -> None:
    drafted = drafts(TreeSizer(lambda batch: COSTS), 6000, [0.1, 0.01], accepted=0)
    assert drafted[:TRIAL] == [True] * TRIAL
    assert drafted[TRIAL : TRIAL + SHORTEST_PAUSE] == [False] * SHORTEST_PAUSE
    assert drafted[TRIAL + SHORTEST_PAUSE]
    assert sum(drafted[2000:]) < 0.02 * 4000  # pauses grow
    assert any(drafted[2000:])  # and end


def always_but_to_compare(drafted: list[bool]) -> bool:
    """Whether only single steps, some way apart, had no draft."""
    missing = [place for place, had in enumerate(drafted) if not had]
    return all(later - earlier > COMPARED for earlier, later in itertools.pairwise([-COMPARED, *missing]))


def test_drafting_that_pays_is_never_turned_off() -> None:
    assert always_but_to_compare(drafts(TreeSizer(lambda batch: COSTS), 300, [0.8, 0.6], accepted=1))


def test_steps_that_take_longer_than_was_measured_count_as_they_are() -> None:
    """By the measured costs 1.9 tokens in 1.5 s pay; drafted steps that take 2.5 s do not, unless plain ones do too."""
    paying = {"scores": [0.6, 0.3], "accepted": 1}
    assert always_but_to_compare(drafts(TreeSizer(lambda batch: COSTS), 300, **paying))
    assert sum(drafts(TreeSizer(lambda batch: COSTS), 300, **paying, drafted=2.5)) < 100
    slow = drafts(TreeSizer(lambda batch: COSTS), 900, **paying, drafted=2.5, plain=1.7)
    assert always_but_to_compare(slow[-200:])


def test_a_plain_step_that_was_measured_too_slow_is_found_out() -> None:
    """By the measured costs drafting is ahead by a seventh; plain steps that take 1.1 s and not 1.4 are faster."""
    sizer = TreeSizer(lambda batch: replace(COSTS, plain=1.4))
    drafted = drafts(sizer, 3000, [0.15, 0.05], accepted=0, drafted=1.2, plain=1.1)
    assert drafted[:COMPARED] == [True] * COMPARED
    assert COMPARED < drafted.index(False) < 30
    assert sum(drafted[1000:]) < 0.1 * 2000


def test_drafting_that_is_a_little_ahead_goes_on_but_for_a_step_now_and_then() -> None:
    """Two tokens in 1.7 s, or one in 1 s: a step without a draft loses 0.15 of one. So many give half a percent."""
    drafted = drafts(TreeSizer(lambda batch: COSTS), 3000, [0.8, 0.4], accepted=1, drafted=1.7)
    assert drafted[1000:].count(False) / 2000 * (1 - 1.7 / 2) == pytest.approx(COMPARING, rel=0.15)
    far = drafts(TreeSizer(lambda batch: COSTS), 3000, [0.9, 0.9], accepted=2)
    assert far[1000:].count(False) / 2000 * (1 - 1.5 / 3) == pytest.approx(COMPARING, rel=0.15)


def test_a_disturbed_step_counts_little() -> None:
    """One step of a hundred times the usual length: drafting goes on."""
    sizer = TreeSizer(lambda batch: COSTS)
    drafts(sizer, 100, [0.6, 0.3], accepted=1)
    before = sizer._costs(1)
    drafts(sizer, 1, [0.6, 0.3], accepted=1, drafted=150.0, plain=100.0)
    assert sizer._costs(1).plain < 1.02 * before.plain
    assert always_but_to_compare(drafts(sizer, 100, [0.6, 0.3], accepted=1))


def test_who_goes_on_alone_pays_for_a_level_alone() -> None:
    """By hand, a price of 0.1 and a gain of 0.4 per score: alone 0.25 times the batch; with others by their chance."""
    sizer = TreeSizer(lambda batch: COSTS)
    assert sizer._level_threshold(0.1, 1) == pytest.approx(0.25)
    assert sizer._level_threshold(0.1, 3) == pytest.approx(0.75)
    assert sizer._level_threshold(0.1, 8) == 1.0
    sizer._bests.extend([0.9] * 10)  # all go on: 0.36 each, and one pass
    assert sizer._level_threshold(0.1, 8) == 0.0
    sizer._bests.extend([0.0] * 10)  # half of them do
    assert sizer._level_threshold(0.1, 3) == pytest.approx(0.75 / 4)
    sizer._bests.extend([0.0] * 236)  # one in 25 does: alone it earns 0.36, and its level costs 0.8
    assert sizer._level_threshold(0.1, 1) == pytest.approx(0.25)
    assert sizer._level_threshold(0.1, 8) == 1.0


def test_every_batch_size_has_a_pace_of_its_own() -> None:
    """A new one is judged by what was seen of another, at its own costs: no trial where drafting cannot pay."""
    sizer = TreeSizer(lambda batch: replace(COSTS, base=0.8 + 0.2 * batch))
    assert sum(drafts(sizer, 200, [0.6, 0.3], 1, batch=8, drafted=2.8)) < 60
    assert not any(drafts(sizer, 20, [0.6, 0.3], 1, batch=7, drafted=2.6))
    assert always_but_to_compare(drafts(sizer, 20, [0.6, 0.3], 1, batch=1, drafted=1.4))


def test_an_automatic_size_wants_nothing_of_plain_decoding() -> None:
    target = PathTarget(5, random_logits(5, 5, "normal"))
    assert RheoDecoder(target, None, None, AUTO).sizer is None  # type: ignore[arg-type]


class Alternating:
    """Drafts in some steps and not in others; thresholds come and go."""

    requests = 0

    def __init__(self) -> None:
        self._turn = 0
        self.observed: list[tuple[bool, bool]] = []  # of every step: whether it had a draft, whether its time counts

    def shape(self, config: RheoConfig, batch: int) -> RheoConfig | None:
        self._turn += 1
        if self._turn % 7 in (0, 1, 2, 5):
            return None
        return replace(config, score_threshold=0.02 * (self._turn % 3), level_threshold=0.1 * (self._turn % 4))

    def observe(self, shape: RheoConfig | None, trees: TreeBatch, walk: VerifyBatch, seconds: float | None) -> None:
        assert seconds is None or seconds > 0
        self.observed.append((shape is not None, seconds is not None))


def alternating(decoder: RheoDecoder) -> RheoDecoder:
    decoder.sizer = Alternating()  # type: ignore[assignment]
    decoder._costs.cover = lambda batch: None  # type: ignore[method-assign]
    return decoder


def test_what_was_committed_without_a_draft_is_read_later() -> None:
    """The toy drafter checks every token and feature it is given; requests end at different steps."""
    target = PathTarget(6, random_logits(5, 6, "normal"))
    decoder = alternating(RheoDecoder(target, PathDrafter(6), None, AUTO))  # type: ignore[arg-type]
    params = [SamplingParams(seed=seed, max_new_tokens=5 + 7 * seed) for seed in range(5)]
    results = decoder.generate([[1], [2, 3], [1, 2, 3, 4], [5], [4, 4]], params)
    assert [len(result.token_ids) for result in results] == [5, 12, 19, 26, 33]
    assert sum(sum(result.metrics.offered_per_level) for result in results) > 0
    assert any(result.metrics.target_passes > sum(result.metrics.offered_per_level[:1]) for result in results)


def test_a_step_in_which_the_drafter_catches_up_is_not_timed() -> None:
    decoder = alternating(RheoDecoder(PathTarget(6, random_logits(5, 6, "normal")), PathDrafter(6), None, AUTO))  # type: ignore[arg-type]
    decoder.generate([[1, 2]], SamplingParams(seed=4, max_new_tokens=40))
    observed = decoder.sizer.observed  # type: ignore[union-attr]
    drafted = [draft for draft, _ in observed]
    assert [timed for _, timed in observed] == [
        now == before or not now for before, now in zip([False, *drafted], drafted, strict=False)
    ]
    assert sum(drafted) > 5


def test_plain_steps_with_something_else_to_read_are_not_timed() -> None:
    """In a long pause the drafter reads now and then; a stream whose caches were taken reads its text again."""
    one = alternating(RheoDecoder(PathTarget(6, random_logits(5, 6, "normal")), PathDrafter(6), None, AUTO))  # type: ignore[arg-type]
    one.sizer.shape = lambda config, batch: None  # type: ignore[union-attr, method-assign]
    one.generate([[1, 2]], SamplingParams(seed=4, max_new_tokens=200))
    timed = [timed for _, timed in one.sizer.observed]  # type: ignore[union-attr]
    assert [step for step, usual in enumerate(timed, 1) if not usual] == [65, 130, 195]
    one.sizer.observed.clear()  # type: ignore[union-attr]
    params = SamplingParams(seed=4, max_new_tokens=20)
    for _ in zip(one.stream([[1, 2]], params), one.stream([[3]], params), strict=True):
        pass
    assert [timed for _, timed in one.sizer.observed].count(True) <= 1  # type: ignore[union-attr]


def test_a_step_that_is_repeated_has_the_same_shape() -> None:
    """A target that raises once, with a draft and without: one shape is asked for per step; texts are the same."""
    seen = []
    for broken in (None, 4, 6, 9):
        target = PathTarget(6, random_logits(5, 6, "normal"))
        forward, raised = target.forward_tree, []

        def sometimes(*arguments, forward=forward, raised=raised, target=target, broken=broken, **options):  # type: ignore[no-untyped-def]
            if target.passes == broken and not raised:
                raised.append(True)
                raise RuntimeError("once")
            return forward(*arguments, **options)

        target.forward_tree = sometimes  # type: ignore[method-assign]
        decoder = alternating(RheoDecoder(target, PathDrafter(6), None, AUTO))  # type: ignore[arg-type]
        [result] = decoder.generate([[1, 2]], SamplingParams(seed=4, max_new_tokens=25))
        assert bool(raised) == (broken is not None)
        seen.append((result.token_ids, decoder.sizer._turn))  # type: ignore[union-attr]
    assert len(set(seen)) == 1


def test_a_drafter_that_catches_up_reads_no_more_columns_than_its_context() -> None:
    """A long request ends while drafting pauses; what is left is read at once, without the columns of the long one."""
    target, drafter = PathTarget(6, random_logits(5, 6, "normal")), PathDrafter(6)
    widths: list[int] = []
    advance = drafter.advance

    def spy(token_ids, counts, features):  # type: ignore[no-untyped-def]
        widths.append(token_ids.shape[1] - int(counts.max()))
        return advance(token_ids, counts, features)

    drafter.advance = spy  # type: ignore[method-assign]
    decoder = alternating(RheoDecoder(target, drafter, None, AUTO))  # type: ignore[arg-type]
    decoder.sizer.shape = lambda config, batch: config if batch == 1 else None  # type: ignore[union-attr, method-assign]
    params = [SamplingParams(seed=1, max_new_tokens=3), SamplingParams(seed=2, max_new_tokens=20)]
    decoder.generate([[1] * 50, [2, 3]], params)
    assert widths
    assert max(widths) <= AUTO.depth


def test_a_drafter_that_is_not_asked_keeps_little_unread() -> None:
    """In a long pause what was missed is read now and then; the drafter checks what it is given."""
    target, drafter = PathTarget(6, random_logits(5, 6, "normal")), PathDrafter(6)
    decoder = alternating(RheoDecoder(target, drafter, None, AUTO))  # type: ignore[arg-type]
    advance, turns, reads = drafter.advance, itertools.count(), []

    def spy(token_ids, counts, features):  # type: ignore[no-untyped-def]
        reads.append(int(counts.max()))
        return advance(token_ids, counts, features)

    drafter.advance = spy  # type: ignore[method-assign]
    decoder.sizer.shape = lambda config, batch: None if next(turns) < 300 else config  # type: ignore[union-attr, method-assign]
    params = [SamplingParams(seed=1, max_new_tokens=400), SamplingParams(seed=2, max_new_tokens=150)]
    results = decoder.generate([[1, 2], [3]], params)
    assert [len(result.token_ids) for result in results] == [400, 150]
    assert reads[:4] == [MOST_UNREAD + 2, *[MOST_UNREAD + 1] * 3]  # the first look reads the prompt, too
    assert max(reads[4:]) <= MOST_UNREAD + 1


def test_a_batch_that_shrinks_tries_again_soon() -> None:
    """Pauses that grew at one batch size are not handed on to the next."""
    sizer = TreeSizer(lambda batch: COSTS)
    assert sum(drafts(sizer, 3000, [0.1, 0.01], accepted=0, batch=8)) < 100
    for batch in range(7, 0, -1):
        assert any(drafts(sizer, 40, [0.1, 0.01], accepted=0, batch=batch))


def test_what_is_not_expanded_teaches_nothing() -> None:
    """Two requests, the second below the level's threshold: its nodes are in the tree, and none was expanded."""
    config = replace(AUTO, tree_size=12, level_threshold=0.4, score_threshold=0.0)
    toy = ToyDrafter([lambda path: np.array([6, 1, 0], np.float32), lambda path: np.zeros(3, np.float32)], 3)
    noise = StepRandomness([1, 2], config.depth, config.beam_width, 13).at(torch.zeros(2, dtype=torch.long))
    trees = grow_trees(config, toy.root_logits(), toy.expand, torch.ones(2), noise.probe_uniforms)
    assert trees.law_rows is not None
    assert trees.depths[1].max() == 1
    assert (trees.law_rows[0] > 0).any()
    assert (trees.law_rows[1] == 0).all()


@pytest.mark.parametrize("kind", MAKERS)
def test_greedy_texts_stay_the_targets_with_and_without_a_draft(kind: str) -> None:
    params = [SamplingParams(temperature=0, max_new_tokens=n) for n in (40, 11, 25)]
    decoder = alternating(MAKERS[kind](AUTO))
    plain = RheoDecoder(decoder.target, None).generate([[5, 6, 7], [8, 9], [11]], params)
    assert [r.token_ids for r in decoder.generate([[5, 6, 7], [8, 9], [11]], params)] == [r.token_ids for r in plain]


def test_a_heads_cache_after_pauses_is_that_of_a_fresh_head() -> None:
    model = llama()
    decoder = alternating(eagle_decoder(AUTO, model))
    text = [5, 6, 7]
    for count, event in enumerate(decoder.stream(text, SamplingParams(seed=1, max_new_tokens=40, min_new_tokens=40))):
        text += event.token_ids
        if count == 10:  # a step with a draft behind steps without
            break
    assert isinstance(decoder.drafter, Eagle3Drafter)
    assert_cache_is_fresh(decoder.drafter, model, text, longer_than=8, atol=1e-5)


def test_joined_texts_by_hand() -> None:
    def part(rows: list[list[int]], counts: list[int]) -> Committed:
        token_ids = torch.tensor(rows)
        return Committed(token_ids, torch.tensor(counts), token_ids.unsqueeze(2).float() / 10)

    whole = joined([part([[1, 2, 0], [3, 0, 0]], [2, 1]), part([[4], [5]], [1, 1]), part([[6, 0], [7, 8]], [1, 2])])
    assert whole.counts.tolist() == [4, 4]
    assert whole.token_ids[:, :4].tolist() == [[1, 2, 4, 6], [3, 5, 7, 8]]
    assert whole.features is not None
    np.testing.assert_allclose(whole.features[:, :4, 0], whole.token_ids[:, :4] / 10)


def sized_texts(monkeypatch: pytest.MonkeyPatch, costs: StepCosts, learning: bool) -> tuple[RheoDecoder, PathTarget]:
    monkeypatch.setattr("optimized.decoder.measure_costs", lambda *_: costs)
    target = PathTarget(4, random_logits(5, 4, "normal"))
    shape = replace(AUTO, depth=2)
    calibrator = Calibrator() if learning else None
    decoder: Any = RheoDecoder(target, PathDrafter(4), None, shape, max_batch_size=100, calibrator=calibrator)  # type: ignore[arg-type]
    return decoder, target


@pytest.mark.lossless
def test_texts_have_the_targets_law_while_trees_are_sized(monkeypatch: pytest.MonkeyPatch) -> None:
    with Family("sizes while they are learned", 2) as family:
        check_texts(monkeypatch, family, 5000, 0.08)


@pytest.mark.lossless
@pytest.mark.deep
def test_texts_have_the_targets_law_while_trees_are_sized_at_length(monkeypatch: pytest.MonkeyPatch) -> None:
    with Family("sizes while they are learned deep", 2) as family:
        check_texts(monkeypatch, family, 60_000, 0.025)


def check_texts(monkeypatch: pytest.MonkeyPatch, family: Family, requests: int, tv: float) -> None:
    """Costs at which thresholds move and drafting is turned off now and then; weights learned at the same time."""
    for name, costs in (("paying", StepCosts(1.0, 1.02, 0.02, 0.05)), ("doubtful", StepCosts(1.0, 1.2, 0.1, 0.3))):
        decoder, target = sized_texts(monkeypatch, costs, learning=name == "doubtful")
        family.compare(name, text_counts(decoder, requests, name == "paying"), text_law(target), min_detectable_tv=tv)

"""``grow_tree`` and the slots: golden trees written by hand, most of them full of ties; floats and Fractions alike."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from optimized.evidence.cases import Law, law, one_hot
from proofs_tests.laws import as_floats
from reference import DraftLaw, DraftTree, GrowthNoise, RheoConfig, grow_tree
from reference.exact import tree_classes
from reference.slots import draw_probes, plan_slots

FLAT = law(1, 1, 1)
HALVES = law(1, 1, 0)
SLOPE = law(3, 2, 1)
NOT_SORTED = law(1, 1, 2)  # ranked 2, 0, 1


def noise(*levels) -> GrowthNoise:
    """Probe uniforms by level, padded with zeros."""
    uniforms = np.zeros((4, 6))
    for level, row in enumerate(levels):
        uniforms[level, : len(row)] = row
    return GrowthNoise(uniforms)


def rows(tree: DraftTree) -> list[tuple[int, int, int, bool, Fraction]]:
    """(token, parent, slot, probe flag, score) of each draft node."""
    columns = zip(tree.token_ids, tree.parents, tree.slots, tree.is_probe, tree.scores, strict=True)
    return list(columns)[1:]


def same(draft_laws: dict[tuple[int, ...], Law], otherwise: Law):
    return lambda path: draft_laws.get(path, otherwise)


F = Fraction
GOLDEN = {
    "a uniform law is cut by level, then rank, then slot": (
        RheoConfig(lead_tokens=1, branching=2, depth=2, tree_size=5),
        same({}, FLAT),
        noise([0.5], [0.0, 0.75]),  # 0.5 is exactly the cumulative of the first tail token: the second is drawn
        [
            (0, 0, 0, False, F(1, 3)),
            (2, 0, 1, True, F(1, 3)),
            (0, 1, 0, False, F(1, 9)),
            (1, 1, 1, True, F(1, 9)),
            (0, 2, 0, False, F(1, 9)),  # (2, 2) ties with it and loses by its slot
        ],
    ),
    "slot 1 of the better parent comes before slot 0 of the other": (
        RheoConfig(lead_tokens=1, branching=2, depth=2, tree_size=4),
        same({}, FLAT),
        noise([0.0], [0.0]),
        [
            (0, 0, 0, False, F(1, 3)),
            (1, 0, 1, True, F(1, 3)),
            (0, 1, 0, False, F(1, 9)),
            (1, 1, 1, True, F(1, 9)),
        ],
    ),
    "a chain of certain tokens, each tying with its parent": (
        RheoConfig(lead_tokens=1, branching=2, depth=3, tree_size=2),
        same({}, one_hot(3, 1)),
        noise(),
        [(1, 0, 0, False, F(1)), (1, 1, 0, False, F(1))],
    ),
    "a chain of probes that can only be one token": (
        RheoConfig(lead_tokens=0, branching=2, depth=3, tree_size=60),
        same({}, one_hot(3, 1)),
        noise([0.99], [0.99], [0.99]),
        [(1, 0, 0, True, F(1)), (1, 1, 0, True, F(1)), (1, 2, 0, True, F(1))],
    ),
    "a certain child ties with its parent and its parent's sibling: the upper level first": (
        RheoConfig(lead_tokens=1, branching=2, depth=3, tree_size=3, beam=1),
        same({(): HALVES}, one_hot(3, 2)),
        noise(),
        [(0, 0, 0, False, F(1, 2)), (1, 0, 1, True, F(1, 2)), (2, 1, 0, False, F(1, 2))],
    ),
    "for m = 0 the probe comes first with the weight of the top token": (
        RheoConfig(lead_tokens=0, branching=2, depth=1, tree_size=1),
        same({}, SLOPE),
        noise([0.5]),
        [(1, 0, 0, True, F(1, 2))],
    ),
    "for m = 0 the top token is then a fill of the same weight": (
        RheoConfig(lead_tokens=0, branching=2, depth=1, tree_size=2),
        same({}, SLOPE),
        noise([0.9]),
        [(2, 0, 0, True, F(1, 2)), (0, 0, 1, False, F(1, 2))],
    ),
    "a probe that would be a slot anyway leaves the others to the fills": (
        RheoConfig(lead_tokens=1, branching=3, depth=1, tree_size=3),
        same({}, law(4, 3, 2, 1)),
        noise([0.6]),  # q~ = 1/2, 1/3, 1/6 over tokens 1, 2, 3
        [(0, 0, 0, False, F(2, 5)), (2, 0, 1, True, F(2, 5)), (1, 0, 2, False, F(3, 10))],
    ),
    "a proxy capped by the tail's mass": (
        RheoConfig(lead_tokens=1, branching=3, depth=1, tree_size=3),
        same({}, law(7, 1, 1, 1)),
        noise([0.7]),
        [(0, 0, 0, False, F(7, 10)), (3, 0, 1, True, F(3, 10)), (1, 0, 2, False, F(1, 10))],
    ),
    "ranked by q, ties by lower token id": (
        RheoConfig(lead_tokens=1, branching=3, depth=1, tree_size=3),
        same({}, NOT_SORTED),
        noise([0.5]),
        [(2, 0, 0, False, F(1, 2)), (1, 0, 1, True, F(1, 2)), (0, 0, 2, False, F(1, 4))],
    ),
    "beam 1 expands the best node only": (
        RheoConfig(lead_tokens=1, branching=2, depth=2, tree_size=60, beam=1),
        same({}, FLAT),
        noise([0.5], [0.5]),
        [
            (0, 0, 0, False, F(1, 3)),
            (2, 0, 1, True, F(1, 3)),
            (0, 1, 0, False, F(1, 9)),
            (2, 1, 1, True, F(1, 9)),
        ],
    ),
    "m = K has no probe": (
        RheoConfig(lead_tokens=2, branching=2, depth=1, tree_size=60),
        same({}, NOT_SORTED),
        noise([0.9]),
        [(2, 0, 0, False, F(1, 2)), (0, 0, 1, False, F(1, 4))],
    ),
    "top-k has no probe": (
        RheoConfig(lead_tokens=1, branching=2, depth=1, tree_size=60, proposal="topk"),
        same({}, SLOPE),
        noise([0.9]),
        [(0, 0, 0, False, F(1, 2)), (1, 0, 1, False, F(1, 3))],
    ),
    "fewer ranked tokens than slots": (
        RheoConfig(lead_tokens=1, branching=4, depth=1, tree_size=60),
        same({}, law(0, 1, 3)),
        noise([0.9]),
        [(2, 0, 0, False, F(3, 4)), (1, 0, 1, True, F(1, 4))],
    ),
}


@pytest.mark.parametrize("exact", [True, False], ids=["fractions", "floats"])
@pytest.mark.parametrize("name", GOLDEN)
def test_grow_tree_golden(name, exact):
    config, construction, uniforms, wanted = GOLDEN[name]

    def draft(path):
        q = construction(path) if exact else as_floats(construction(path))
        return DraftLaw(q, q)

    tree = grow_tree(config, draft, uniforms)
    assert [row[:4] for row in rows(tree)] == [row[:4] for row in wanted]
    if exact:
        assert rows(tree) == wanted
    else:
        np.testing.assert_allclose(tree.scores[1:], [float(row[4]) for row in wanted], rtol=1e-15)


def test_grow_tree_draws_the_probe_from_the_sampling_law_only():
    """The probe is drawn from q_T without the leads; ranks, weights and fills never see it."""
    config = RheoConfig(lead_tokens=1, branching=3, depth=1, tree_size=3)
    draft_law = DraftLaw(law(4, 3, 2, 1), law(1, 1, 1, 7))
    tree = grow_tree(config, lambda path: draft_law, noise([0.5]))
    assert rows(tree) == [(0, 0, 0, False, F(2, 5)), (3, 0, 1, True, F(2, 5)), (1, 0, 2, False, F(3, 10))]
    token_ids, probabilities = tree.probe_laws[0]
    assert token_ids == (1, 2, 3)
    assert list(probabilities) == [F(1, 9), F(1, 9), F(7, 9)]


@pytest.mark.parametrize("sampling", [None, one_hot(3, 0)], ids=["greedy", "massless tail"])
def test_grow_tree_without_probe(sampling):
    config = RheoConfig(lead_tokens=1, branching=2, depth=1, tree_size=2)
    tree = grow_tree(config, lambda path: DraftLaw(SLOPE, sampling), noise([0.9]))
    assert rows(tree) == [(0, 0, 0, False, F(1, 2)), (1, 0, 1, False, F(1, 3))]
    assert tree.probe_laws == {}


def test_grow_tree_reads_the_uniform_of_the_level_and_rank():
    """Depth 2, beam 2: [0, 0] draws the root's probe, [1, r] that of the r-th node of level 1; no other matters."""
    config = RheoConfig(lead_tokens=0, branching=2, depth=2, tree_size=60)
    uniforms = np.zeros((2, 2))
    base = grow_tree(config, lambda path: DraftLaw(SLOPE, SLOPE), GrowthNoise(uniforms))
    changed = {}
    for level, rank in np.ndindex(2, 2):
        other = uniforms.copy()
        other[level, rank] = 0.9
        tree = grow_tree(config, lambda path: DraftLaw(SLOPE, SLOPE), GrowthNoise(other))
        changed[level, rank] = [tree.path(row) for row in range(1, len(tree)) if tree.is_probe[row]]
    probes = [base.path(row) for row in range(1, len(base)) if base.is_probe[row]]
    assert probes == [(0,), (0, 0), (1, 0)]
    assert changed[0, 0] == [(2,), (2, 0), (0, 0)]
    assert changed[0, 1] == probes
    assert changed[1, 0] == [(0,), (0, 2), (1, 0)]
    assert changed[1, 1] == [(0,), (0, 0), (1, 2)]


def test_grow_tree_asks_the_draft_once_per_expanded_node():
    asked = []

    def draft(path):
        asked.append(path)
        return DraftLaw(FLAT, FLAT)

    grow_tree(RheoConfig(lead_tokens=1, branching=3, depth=3, tree_size=1, beam=2), draft, noise())
    assert asked == [(), (0,), (1,), (0, 0), (0, 1)]


def test_grow_tree_numbers_level_major():
    """A deep chain outscores a sibling of its top, and still comes after it in the rows."""
    laws = {(): law(8, 1, 1), (0,): law(1, 9, 0)}
    config = RheoConfig(lead_tokens=1, branching=2, depth=2, tree_size=3)
    tree = grow_tree(config, lambda path: DraftLaw(*[laws.get(path, FLAT)] * 2), noise())
    assert rows(tree) == [(0, 0, 0, False, F(4, 5)), (1, 0, 1, True, F(1, 5)), (1, 1, 0, False, F(18, 25))]


def test_grow_tree_records_margins():
    margins = []
    config = RheoConfig(lead_tokens=1, branching=2, depth=2, tree_size=3, beam=1)
    grow_tree(config, lambda path: DraftLaw(FLAT, FLAT), noise([0.5], [0.125]), margins)
    assert [(margin.kind, margin.value, margin.where) for margin in margins] == [
        ("draw", 0.0, "level 1 rank 0"),
        ("order", 0.0, "beam of level 1"),
        ("draw", 0.375, "level 2 rank 0"),  # to 1/2; nothing lies below the first token
        ("order", 0.0, "budget"),
    ]
    margins.clear()
    config = RheoConfig(lead_tokens=2, branching=2, depth=1, tree_size=1)
    grow_tree(config, lambda path: DraftLaw(law(2, 1), law(2, 1)), noise(), margins)
    assert [(margin.kind, margin.where) for margin in margins] == [("order", "budget")]
    assert margins[0].value == pytest.approx(np.log(2))


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (0, 0)])
def test_grow_tree_refuses_too_few_uniforms(shape):
    config = RheoConfig(branching=2, depth=2)
    with pytest.raises(ValueError, match=r"probe_uniforms has shape .*; depth and beam need at least \(2, 2\)"):
        grow_tree(config, lambda path: DraftLaw(FLAT, FLAT), GrowthNoise(np.zeros(shape)))


def test_from_logits_cuts_ties_at_the_lower_token_id():
    draft_law = DraftLaw.from_logits([1.0, 2.0, 1.0, 2.0, 1.0], draft_support=3)
    assert list(draft_law.ranked_tokens()) == [1, 3, 0]
    assert draft_law.construction[2] == draft_law.construction[4] == 0
    assert draft_law.sampling[2] == 0
    e = np.exp(-1.0)
    np.testing.assert_allclose(draft_law.construction, np.array([e, 1, 0, 1, 0]) / (2 + e), rtol=1e-15)


def test_from_logits_constructs_at_temperature_one_and_samples_at_the_temperature():
    logits = np.array([0.0, 1.0, 3.0, -np.inf])
    cold, warm = DraftLaw.from_logits(logits, 0.5), DraftLaw.from_logits(logits, 2.0)
    assert (cold.construction == warm.construction).all()
    np.testing.assert_allclose(cold.sampling, np.exp([0, 2, 6, -np.inf]) / np.exp([0, 2, 6]).sum(), rtol=1e-14)
    np.testing.assert_allclose(warm.sampling, np.exp([0, 0.5, 1.5, -np.inf]) / np.exp([0, 0.5, 1.5]).sum(), rtol=1e-14)


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (9.9e-6, True), (1e-5, False)])
def test_from_logits_is_greedy_below_the_cut_off(temperature, greedy):
    draft_law = DraftLaw.from_logits([0.0, 1.0, 2.0], temperature)
    assert (draft_law.sampling is None) == greedy
    assert (plan_slots(RheoConfig(branching=3), draft_law).probe_law is None) == greedy


def test_from_logits_keeps_a_tail_that_a_low_temperature_would_erase():
    """The lead dwarfs the tail by exp(-3000) at T = 0.01; the tail's own softmax still has a law, (1, e^-100)."""
    draft_law = DraftLaw.from_logits([30.0, 0.0, -1.0], 0.01)
    assert list(draft_law.sampling) == [1.0, 0.0, 0.0]
    token_ids, q = plan_slots(RheoConfig(lead_tokens=1, branching=2), draft_law).probe_law
    assert token_ids == (1, 2)
    np.testing.assert_allclose(q, [1.0, np.exp(-100)], rtol=1e-12)


def test_from_logits_gives_no_rank_to_a_token_that_underflows():
    draft_law = DraftLaw.from_logits([0.0, -800.0, 1.0], temperature=1000.0)
    assert list(draft_law.ranked_tokens()) == [2, 0]
    assert draft_law.sampling[1] == 0


@pytest.mark.parametrize("lead_tokens", [0, 1, 3])
def test_float_weights_never_increase_along_the_schedule(lead_tokens):
    """Rounding of the tail's sum must not lift the proxy over a lead or push it under a fill."""
    rng = np.random.default_rng(lead_tokens)
    config = RheoConfig(lead_tokens=lead_tokens, branching=6)
    for scale in (1e-9, 0.1, 1.0, 5.0, 20.0, 40.0):
        for _ in range(20):
            plan = plan_slots(config, DraftLaw.from_logits(rng.normal(size=63) * scale))
            slots = plan.slots(draw_probes(plan, [rng.random()]))
            assert all(high.weight >= low.weight for high, low in pairwise(slots))
            assert all(0 < slot.weight <= 1 for slot in slots)


def test_float_growth_is_one_of_the_float_classes_bit_by_bit():
    """Level by level and best first round alike: same keys, same scores."""
    rng = np.random.default_rng(5)
    for trial in range(20):
        logits = rng.normal(size=(7, 5))
        logits[:, 1] = logits[:, 3]
        draft = {index: DraftLaw.from_logits(row, 0.7, draft_support=3) for index, row in enumerate(logits)}
        config = RheoConfig(trial % 3, branching=2, depth=2, tree_size=1 + trial % 6)
        classes = {
            tree.key: (tree.scores, probability)
            for tree, probability in tree_classes(config, lambda path, draft=draft: draft[sum(path) % 7])
        }
        assert sum(probability for _, probability in classes.values()) == pytest.approx(1, abs=1e-12)
        for _ in range(10):
            tree = grow_tree(config, lambda path, draft=draft: draft[sum(path) % 7], GrowthNoise(rng.random((2, 2))))
            assert classes[tree.key][0] == tree.scores


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.249, 1), (0.25, 2), (0.749, 2), (0.75, 3), (1 - 2.0**-53, 3)]
)
def test_draw_probes_by_inverse_cdf_in_rank_order(uniform, token):
    plan = plan_slots(RheoConfig(lead_tokens=1, branching=2), DraftLaw(law(4, 3, 2, 1), law(0, 1, 2, 1)))
    assert draw_probes(plan, [uniform]) == (token,)


def test_draw_probes_skips_tokens_without_mass():
    plan = plan_slots(RheoConfig(lead_tokens=0, branching=2), DraftLaw(law(4, 3, 2, 1), law(0, 1, 0, 1)))
    assert [draw_probes(plan, [uniform]) for uniform in (0.0, 0.49, 0.5, 0.99)] == [(1,), (1,), (3,), (3,)]


def test_slots_refuse_a_probe_that_does_not_fit_the_plan():
    with_probe = plan_slots(RheoConfig(lead_tokens=1, branching=2), DraftLaw(SLOPE, SLOPE))
    without = plan_slots(RheoConfig(lead_tokens=2, branching=2), DraftLaw(SLOPE, SLOPE))
    with pytest.raises(ValueError, match=r"probe_tokens are \[\], but this node has 1 probe\(s\)"):
        with_probe.slots()
    with pytest.raises(ValueError, match=r"probe_tokens are \[2\], but this node has 0 probe\(s\)"):
        without.slots((2,))

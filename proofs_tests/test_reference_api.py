"""What the shared types refuse, and that the message says which row or entry and why."""

from fractions import Fraction

import numpy as np
import pytest

from optimized.evidence.cases import law
from reference import DraftLaw, DraftTree, GrowthNoise, RheoConfig, VerifyNoise
from reference.api import is_greedy
from reference.numbers import as_vector, check_law, inverse_cdf, is_exact
from reference.tree import check_parents, root_only

F = Fraction
HALF = law(1, 1)


def test_config_defaults():
    config = RheoConfig()
    assert (config.lead_tokens, config.branching, config.depth, config.tree_size, config.draft_support) == (
        1,
        10,
        8,
        60,
        128,
    )
    assert (config.proposal, config.verification) == ("rheo", "rheo")
    assert config.beam_width == 10
    assert RheoConfig(beam=3).beam_width == 3
    assert RheoConfig(lead_tokens=12, branching=10).lead_tokens == 12  # no probe, but no mistake


@pytest.mark.parametrize("value", [-1, 1.5, True, "2", None, float("nan")])
@pytest.mark.parametrize(
    ("name", "least"), [("lead_tokens", 0), ("branching", 1), ("depth", 1), ("tree_size", 1), ("draft_support", 1)]
)
def test_config_refuses_counts(name, least, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer >= {least}, got {value!r}"):
        RheoConfig(**{name: value})


@pytest.mark.parametrize("name", ["branching", "depth", "tree_size", "draft_support", "beam"])
def test_config_refuses_zero(name):
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, got 0"):
        RheoConfig(**{name: 0})


@pytest.mark.parametrize("name", ["proposal", "verification"])
def test_config_refuses_names(name):
    with pytest.raises(ValueError, match=rf"{name} must be one of \('rheo'(, '\w+')+\), got 'eagle'"):
        RheoConfig(**{name: "eagle"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.5, float("nan"), 0.5], r"target\[1\] is nan; a law holds finite probabilities"),
        ([0.5, 0.5, float("inf")], r"target\[2\] is inf; a law holds finite probabilities"),
        ([0.75, -0.25, 0.5], r"target\[1\] is -0.25; probabilities are not negative"),
        ([F(3, 2), F(-1, 2)], r"target\[1\] is -1/2; probabilities are not negative"),
        ([0.5, 0.25], r"target sums to 0.75, not to 1"),
        ([F(1, 2), F(1, 3)], r"target sums to 5/6, not to 1"),
        ([0.5, 0.5 + 3e-6], r"target sums to 1.00000\d+, not to 1"),
        ([F(1), F(1, 10**30)], r"target sums to .*, not to 1"),  # exact means exact
        ([], r"target must be a non-empty vector, got shape \(0,\)"),
        ([[0.5, 0.5]], r"target must be a non-empty vector, got shape \(1, 2\)"),
        (0.5, r"target must be a non-empty vector, got shape \(\)"),
        (["a", "b"], r"target must hold numbers, got dtype <U1"),
        ([True, False], r"target must hold numbers, got dtype bool"),
        ([F(1), None], r"target must hold numbers, got \[Fraction\(1, 1\), None\]"),
    ],
)
def test_check_law_refuses(values, message):
    with pytest.raises(ValueError, match=message):
        check_law(values, "target")


def test_check_law_keeps_the_arithmetic():
    assert is_exact(check_law([F(1, 2), F(1, 2)], "law"))
    assert is_exact(check_law([F(1, 2), 0, F(1, 2)], "law"))  # integers mix with Fractions
    assert all(isinstance(value, F) for value in as_vector([F(1, 2), 0, F(1, 2)], "law"))
    assert not is_exact(check_law([0.5, 0.5], "law"))
    assert not is_exact(check_law([0, 1], "law"))  # integers alone are floats
    assert not is_exact(check_law([F(1, 2), 0.5], "law"))  # one float makes it a float law
    assert check_law(np.array([0.5, 0.5], dtype=np.float32), "law").dtype == np.float64
    assert check_law([0.5, 0.5 + 5e-7], "law").sum() > 1  # what a float32 softmax leaves


def test_check_law_does_not_share_memory_with_its_argument():
    values = np.array([0.5, 0.5])
    assert not np.shares_memory(check_law(values, "law"), values)


@pytest.mark.parametrize(
    ("construction", "sampling", "message"),
    [
        ([0.5, 0.4], None, "construction sums to 0.9, not to 1"),
        (HALF, [F(1), F(1)], "sampling sums to 2, not to 1"),
        (HALF, law(1, 1, 1), "sampling has 3 entries and construction has 2; they must agree"),
        (HALF, [0.5, 0.5], "construction and sampling must both be exact"),
        (law(1, 0, 1), law(1, 1, 2), r"sampling\[1\] is 1/4 where construction\[1\] is 0"),
        ([1.0, 0.0], [0.5, 0.5], r"sampling\[1\] is 0.5 where construction\[1\] is 0"),
    ],
)
def test_draft_law_refuses(construction, sampling, message):
    with pytest.raises(ValueError, match=message):
        DraftLaw(construction, sampling)


@pytest.mark.parametrize(
    ("logits", "options", "message"),
    [
        ([0.0, float("nan")], {}, r"logits\[1\] is nan; draft logits are finite or -inf"),
        ([float("inf"), 0.0], {}, r"logits\[0\] is inf; draft logits are finite or -inf"),
        ([-np.inf, -np.inf], {}, "logits are all -inf: no token is left"),
        ([[0.0, 1.0]], {}, r"logits must be a non-empty vector, got shape \(1, 2\)"),
        ([], {}, r"logits must be a non-empty vector, got shape \(0,\)"),
        ([0.0], {"temperature": -0.1}, "temperature must be finite and >= 0, got -0.1"),
        ([0.0], {"temperature": float("nan")}, "temperature must be finite and >= 0, got nan"),
        ([0.0], {"temperature": float("inf")}, "temperature must be finite and >= 0, got inf"),
        ([0.0], {"draft_support": 0}, "draft_support must be an integer >= 1, got 0"),
    ],
)
def test_from_logits_refuses(logits, options, message):
    with pytest.raises(ValueError, match=message):
        DraftLaw.from_logits(logits, **options)


def test_greedy_cut_off():
    assert is_greedy(0.0)
    assert is_greedy(9.99e-6)
    assert not is_greedy(1e-5)


@pytest.mark.parametrize(
    ("uniform", "index"), [(0.0, 1), (0.49, 1), (0.5, 3), (0.99, 3)], ids=["zero", "inside", "edge", "end"]
)
@pytest.mark.parametrize("weights", [[F(0), F(1), F(0), F(1), F(0)], [0.0, 0.5, 0.0, 0.5, 0.0]], ids=["exact", "float"])
def test_inverse_cdf_never_draws_an_empty_index(weights, uniform, index):
    drawn, margin = inverse_cdf(as_vector(weights, "weights"), uniform)
    assert drawn == index
    edges = [0.5, 1.0]
    assert margin == pytest.approx(min(abs(uniform - edge) for edge in edges) * float(sum(weights)))


@pytest.mark.parametrize("value", [1.0, -1e-9, float("nan"), 2.0])
def test_noise_refuses_what_is_no_uniform(value):
    with pytest.raises(ValueError, match=r"probe_uniforms\[1, 2\] is .*; uniforms lie in \[0, 1\)"):
        GrowthNoise(np.array([[0.0, 0.5, 0.999], [0.0, 0.5, value]]))
    with pytest.raises(ValueError, match=r"residual_uniforms\[0\] is .*; uniforms lie in \[0, 1\)"):
        VerifyNoise(np.zeros(2), np.array([value, 0.0]), np.zeros(2))


def test_noise_refuses_shapes():
    with pytest.raises(ValueError, match=r"probe_uniforms must have 2 or 3 dimension\(s\), got shape \(4,\)"):
        GrowthNoise(np.zeros(4))
    with pytest.raises(ValueError, match=r"accept_uniforms must have 1 or 2 dimension\(s\), got shape \(4, 1, 1\)"):
        VerifyNoise(np.zeros((4, 1, 1)), np.zeros(4), np.zeros(4))
    with pytest.raises(ValueError, match=r"residual_uniforms must have 1 dimension\(s\), got shape \(4, 2\)"):
        VerifyNoise(np.zeros((4, 2)), np.zeros((4, 2)), np.zeros(4))
    with pytest.raises(ValueError, match=r"one length, got .*'lead_uniforms': 3"):
        VerifyNoise(np.zeros(4), np.zeros(4), np.zeros(3))


GOOD = {
    "token_ids": (-1, 5, 7, 5),
    "parents": (-1, 0, 0, 1),
    "depths": (0, 1, 1, 2),
    "slots": (0, 0, 1, 0),
    "is_probe": (False, False, True, False),
    "scores": (1.0, 0.5, 0.5, 0.25),
    "probe_laws": {0: ((6, 7), [0.25, 0.75])},
}


def test_draft_tree():
    tree = DraftTree(**GOOD)
    assert len(tree) == 4
    assert [tree.path(row) for row in range(4)] == [(), (5,), (7,), (5, 5)]
    assert [list(tree.children(row)) for row in range(4)] == [[1, 2], [3], [], []]
    assert [tree.probe_child(row) for row in range(4)] == [2, None, None, None]
    assert tree.key == ((0, 0, 5, False), (0, 1, 7, True), (1, 0, 5, False))


def test_draft_tree_takes_arrays_and_keeps_plain_python():
    arrays = {name: np.array(value) for name, value in GOOD.items() if name != "probe_laws"}
    tree = DraftTree(**arrays, probe_laws=GOOD["probe_laws"])
    assert tree.key == DraftTree(**GOOD).key
    assert all(type(value) is int for value in (*tree.token_ids, *tree.parents, *tree.depths, *tree.slots))
    assert all(type(value) is bool for value in tree.is_probe)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parents": (-1, 0, 0)}, "parents has 3 rows, token_ids has 4"),
        ({"scores": (1.0, 0.5)}, "scores has 2 rows, token_ids has 4"),
        ({"token_ids": (3, 5, 7, 5)}, "row 0 must be the root: .* got token 3"),
        ({"parents": (0, 0, 0, 1)}, "row 0 must be the root: .* parent 0"),
        ({"scores": (0.9, 0.5, 0.5, 0.25)}, "row 0 must be the root: .* score 0.9"),
        ({"parents": (-1, 0, 0, 9)}, r"row 3 is an orphan: its parent 9 is not a row of the tree \(0..3\)"),
        ({"parents": (-1, 0, 0, -1)}, "row 3 is an orphan: its parent -1"),
        ({"parents": (-1, 0, 0, 3)}, "row 3 is part of a cycle: following its parents comes back to row 3"),
        ({"parents": (-1, 2, 1, 1)}, "row 1 is part of a cycle: following its parents comes back to row 1"),
        ({"parents": (-1, 3, 0, 0)}, "row 1 stands before its parent, row 3; parents precede their children"),
        ({"token_ids": (-1, 5, 7, -5)}, "row 3 has token -5; token ids are not negative"),
        ({"depths": (0, 1, 1, 1)}, r"row 3 has depth 1, its parent \(row 1\) has 1"),
        ({"depths": (0, 2, 1, 3)}, r"row 1 has depth 2, its parent \(row 0\) has 0"),
        ({"token_ids": (-1, 7, 7, 5)}, "rows 1 and 2 are siblings with the same token 7"),
        ({"slots": (0, 1, 0, 0)}, "row 2 has slot 0, after a sibling with slot 1"),
        ({"slots": (0, 1, 1, 0)}, "row 2 has slot 1, after a sibling with slot 1"),
        ({"slots": (0, 0, 1, -1)}, "row 3 has slot -1; slots are not negative"),
        ({"scores": (1.0, 0.5, 0.5, 0.75)}, "row 3 has score 0.75; it must lie between 0 and its parent's 0.5"),
        ({"scores": (1.0, 0.5, -0.5, 0.25)}, "row 2 has score -0.5"),
        ({"scores": (1.0, 0.5, float("nan"), 0.25)}, "row 2 has score nan"),
        ({"is_probe": (False, True, True, False)}, r"row 1 is a probe, but probe_laws\[0\] gives its token 5 no mass"),
        (
            {"is_probe": (False, True, True, False), "slots": (0, 0, 2, 0)},
            "row 2 is a probe in slot 2, row 1 the probe before it in slot 0; a node's probes have neighbouring slots",
        ),
        ({"is_probe": (False, False, False, False)}, r"probe_laws has rows \[0\]; rows \[\] have a probe in the tree"),
        ({"probe_laws": {}}, r"probe_laws has rows \[\]; rows \[0\] have a probe in the tree"),
        ({"probe_laws": {0: ((6, 7), [0.25, 0.25])}}, r"probe_laws\[0\] sums to 0.5, not to 1"),
        ({"probe_laws": {0: ((6, 7, 8), [0.5, 0.5])}}, r"probe_laws\[0\] needs one probability for each of distinct"),
        ({"probe_laws": {0: ((7, 7), [0.5, 0.5])}}, r"probe_laws\[0\] needs one probability for each of distinct"),
        ({"probe_laws": {0: ((7, -1), [0.5, 0.5])}}, r"probe_laws\[0\] needs .* token ids >= 0"),
        ({"probe_laws": {0: ((6, 7), [1.0, 0.0])}}, r"row 2 is a probe, but probe_laws\[0\] gives its token 7 no mass"),
        ({"probe_laws": {0: ((6, 8), [0.5, 0.5])}}, r"row 2 is a probe, but probe_laws\[0\] gives its token 7 no mass"),
        (
            {"probe_laws": {0: ((5, 7), [0.5, 0.5])}},
            r"row 1 stands before the probe, but probe_laws\[0\] can draw its token 5",
        ),
    ],
)
def test_draft_tree_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        DraftTree(**{**GOOD, **changes})


def test_draft_tree_refuses_no_rows():
    with pytest.raises(ValueError, match="a tree has at least its root, got 0 rows"):
        DraftTree((), (), (), (), (), ())


@pytest.mark.parametrize("parents", [(-1,), (-1, 0, 0, 1, 1, 4), tuple(range(-1, 9))])
def test_check_parents_accepts(parents):
    check_parents(parents)


def test_check_parents_names_a_long_cycle():
    with pytest.raises(ValueError, match="row 2 is part of a cycle"):
        check_parents((-1, 0, 4, 2, 3))


def test_root_only():
    tree = root_only()
    assert len(tree) == 1
    assert tree.key == ()
    assert list(tree.children(0)) == []

"""``verify`` on trees small enough to follow with a pencil. The law of the walk is in test_exact_law.py."""

from fractions import Fraction

import numpy as np
import pytest

from optimized.evidence.cases import law, one_hot
from proofs_tests.laws import as_floats
from reference import DraftTree, VerifyNoise, verify
from reference.tree import root_only
from reference.verification import accepts, residual, without_tokens

F = Fraction
# root -> lead 0, probe 2 (drawn from 1/2, 1/4, 1/4 over tokens 1, 2, 3), fill 1; lead 0 -> 3
TREE = DraftTree(
    token_ids=(-1, 0, 2, 1, 3),
    parents=(-1, 0, 0, 0, 1),
    depths=(0, 1, 1, 1, 2),
    slots=(0, 0, 1, 2, 0),
    is_probe=(False, False, True, False, False),
    scores=(1, F(1, 2), F(1, 2), F(1, 4), F(1, 4)),
    probe_laws={0: ((1, 2, 3), [F(1, 2), F(1, 4), F(1, 4)])},
)
LEAF = law(1, 1, 1, 1)
ROOT = law(2, 3, 1, 2)  # p = 1/4, 3/8, 1/8, 1/4; p / q~ of the probe is 1/2; residual 1, 0, 0, 0
NUMBERS = pytest.mark.parametrize("exact", [True, False], ids=["fractions", "floats"])


def walk(root, *, accept=0.0, residual=0.0, lead=0.0, rule="rheo", exact=True, leaf=(0.0, 0.0)):
    """Verify TREE with these uniforms at the root; ``leaf``: the residual uniforms of row 1 and of later rows."""
    noise = VerifyNoise(
        accept_uniforms=np.array([accept, 0.9, 0.9, 0.9, 0.9]),
        residual_uniforms=np.array([residual, leaf[0], *[leaf[1]] * 3]),
        lead_uniforms=np.array([lead, 0.9, 0.9, 0.9, 0.9]),
    )
    target = [root, LEAF, LEAF, LEAF, LEAF]
    target = target if exact else [as_floats(row) for row in target]
    result = verify(TREE, target, noise, rule)
    return result.token_ids, result.accepted_nodes


@NUMBERS
@pytest.mark.parametrize(
    ("accept", "residual", "wanted"),
    [
        (0.0, 0.0, ((2, 3), (2,))),
        (0.4999, 0.0, ((2, 3), (2,))),
        (0.5, 0.0, ((0, 3, 3), (1, 4))),  # exactly u q~ = p: turned down; the residual is all on the lead
        (0.9, 0.9999, ((0, 3, 3), (1, 4))),
    ],
)
def test_verify_accepts_the_probe_below_p_over_q(accept, residual, wanted, exact):
    assert walk(ROOT, accept=accept, residual=residual, exact=exact, leaf=(0.75, 0.75)) == wanted


@NUMBERS
def test_verify_never_accepts_an_impossible_probe(exact):
    """u = 0 and p(Y) = 0: not below. The residual of (0, 1, 0, 0) is token 1, the fill."""
    assert walk(one_hot(4, 1), accept=0.0, exact=exact) == ((1, 0), (3,))


@NUMBERS
@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.24, 0), (0.25, 1), (0.5, 2), (0.75, 3), (0.99, 3)])
def test_verify_draws_the_bonus_token_in_ascending_token_id(uniform, token, exact):
    assert walk(ROOT, accept=0.0, exact=exact, leaf=(0.0, uniform)) == ((2, token), (2,))


@NUMBERS
@pytest.mark.parametrize(
    ("uniform", "wanted"),
    [
        (0.0, ((0, 0), (1,))),  # 1/2 on the lead
        (0.4999, ((0, 0), (1,))),
        (0.5, ((3,), ())),  # 1/2 on token 3, no child: the recovered token ends the walk
        (0.9, ((3,), ())),
    ],
)
def test_verify_draws_the_recovered_token_from_the_residual(uniform, wanted, exact):
    """p - q~ = (3/8, 0, -, 3/8)."""
    assert walk(law(3, 0, 0, 5), accept=0.9, residual=uniform, exact=exact) == wanted


@NUMBERS
@pytest.mark.parametrize(
    ("lead", "accept", "residual", "wanted"),
    [
        (0.0, 0.9, 0.9, ((0, 0), (1,))),
        (0.2499, 0.9, 0.9, ((0, 0), (1,))),  # p(lead) = 1/4
        (0.25, 0.6, 0.9, ((2, 0), (2,))),  # p' = p / (3/4): 1/2, 1/6, 1/3 on 1, 2, 3; p' / q~ of the probe is 2/3
        (0.25, 0.7, 0.9, ((3,), ())),  # residual of p': token 3 only
        (0.9, 0.7, 0.0, ((3,), ())),
    ],
)
def test_verify_rrsw_takes_leads_first(lead, accept, residual, wanted, exact):
    assert walk(ROOT, lead=lead, accept=accept, residual=residual, rule="rrsw", exact=exact) == wanted


def test_verify_rrsw_matches_the_fill():
    """p' = (-, 3/4, 0, 1/4): the probe is impossible, p' - q~ = (1/4, -, 0), so the fill."""
    assert walk(law(4, 3, 0, 1), lead=0.9, accept=0.0, residual=0.9, rule="rrsw") == ((1, 0), (3,))


@pytest.mark.parametrize("rule", ["rheo", "rrsw"])
def test_verify_without_probe_draws_once_and_matches(rule):
    tree = DraftTree((-1, 2, 0), (-1, 0, 0), (0, 1, 1), (0, 0, 1), (False,) * 3, (1, F(1, 2), F(1, 4)))
    for uniform, wanted in ((0.0, (0, 1)), (0.25, (1,)), (0.5, (2, 1)), (0.75, (3,))):
        noise = VerifyNoise(np.full(3, 0.9), np.array([uniform, 0.3, 0.3]), np.full(3, 0.9))
        assert verify(tree, [LEAF] * 3, noise, rule).token_ids == wanted


@pytest.mark.parametrize("rule", ["rheo", "rrsw"])
def test_verify_uses_only_the_uniforms_of_the_rows_where_it_stands(rule):
    rng = np.random.default_rng(1)
    target = [ROOT, LEAF, LEAF, LEAF, LEAF]
    seen = set()
    for _ in range(100):
        uniforms = rng.random((3, 5))
        result = verify(TREE, target, VerifyNoise(*uniforms), rule)
        others = [row for row in range(5) if row not in (0, *result.accepted_nodes)]
        uniforms[:, others] = rng.random((3, len(others)))
        assert verify(TREE, target, VerifyNoise(*uniforms), rule) == result
        seen.add(result.accepted_nodes)
    assert seen >= {(1,), (1, 4), (2,)}


def test_verify_of_the_root_alone_samples_the_target():
    noise = VerifyNoise(np.zeros(1), np.array([0.6]), np.zeros(1))
    result = verify(root_only(), [law(1, 1, 2)], noise)
    assert (result.token_ids, result.accepted_nodes) == ((2,), ())


def test_verify_never_emits_a_token_without_mass():
    """The last uniform below one, and weights whose float cumulative sum stays under it."""
    target = np.array([[0.1] * 10 + [0.0, 0.0]])
    target[0, 9] = 1 - target[0, :9].sum() - 1e-7
    noise = VerifyNoise(np.zeros(1), np.array([1 - 2.0**-53]), np.zeros(1))
    assert verify(root_only(), target, noise).token_ids == (9,)


def test_verify_records_margins():
    margins = []
    noise = VerifyNoise(np.full(5, 0.75), np.full(5, 0.5), np.full(5, 0.5))
    result = verify(TREE, [law(3, 0, 0, 5), LEAF, LEAF, LEAF, LEAF], noise, margins=margins)
    assert result.token_ids == (3,)
    assert [(margin.kind, margin.value, margin.where) for margin in margins] == [
        ("accept", 0.75 / 4, "row 0"),  # |3/4 * 1/4 - 0|
        ("draw", 0.0, "row 0"),  # the residual's half
    ]
    margins.clear()
    verify(TREE, [ROOT, LEAF, LEAF, LEAF, LEAF], noise, "rrsw", margins)
    assert [margin.kind for margin in margins] == ["draw", "accept", "draw"]


def test_accepts_is_strict():
    assert accepts(F(0), F(1, 2), F(1, 2))
    assert not accepts(F(0), F(1, 2), F(0))
    assert not accepts(F(1, 2), F(1, 2), F(1, 4))
    assert accepts(0.5, 0.5, np.nextafter(0.25, 1))


def test_residual_is_the_normalised_positive_part():
    probe_law = ((1, 2), np.array([F(3, 4), F(1, 4)], dtype=object))
    target = np.array(law(1, 1, 2), dtype=object)
    assert list(residual(target, probe_law)) == [F(1, 2), 0, F(1, 2)]
    assert list(target) == list(law(1, 1, 2)), "the argument must not change"
    same = (0, 1, 2), np.array(law(1, 1, 2), dtype=object)
    assert list(residual(target, same)) == list(target), "without mass it is the target's law"


def test_without_tokens_is_the_conditional_law():
    target = np.array(law(1, 1, 2), dtype=object)
    assert list(without_tokens(target, [0])) == [0, F(1, 3), F(2, 3)]
    assert list(without_tokens(target, [0, 1, 2])) == list(target)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([LEAF] * 4, "target_probs has 4 rows, the tree has 5"),
        ([LEAF] * 4 + [law(1, 1, 1)], r"target_probs rows have different lengths: \[3, 4\]"),
        ([law(1, 1, 1)] * 5, "row 0 speaks of token 3, but target_probs has 3 columns"),
        ([LEAF, LEAF, [F(1, 2)] * 4, LEAF, LEAF], "target_probs row 2: the law sums to 2, not to 1"),
        ([LEAF, LEAF, LEAF, [0.5, np.nan, 0.5, 0.0], LEAF], r"target_probs row 3: the law\[1\] is nan"),
        ([LEAF, LEAF, LEAF, LEAF, [1.5, -0.5, 0, 0]], r"target_probs row 4: the law\[1\] is -0.5"),
        ([LEAF, [[0.5, 0.5]], LEAF, LEAF, LEAF], r"target_probs row 1: the law must be a non-empty vector, got shape"),
    ],
)
def test_verify_refuses_target_probs(target, message):
    with pytest.raises(ValueError, match=message):
        verify(TREE, target, VerifyNoise(np.zeros(5), np.zeros(5), np.zeros(5)))


def test_verify_refuses_a_rule_and_short_noise():
    with pytest.raises(ValueError, match=r"rule must be one of .*'rheo', 'rrsw'.*, got 'naive'"):
        verify(TREE, [LEAF] * 5, VerifyNoise(np.zeros(5), np.zeros(5), np.zeros(5)), "naive")
    with pytest.raises(ValueError, match="noise has 4 rows, the tree has 5"):
        verify(TREE, [LEAF] * 5, VerifyNoise(np.zeros(4), np.zeros(4), np.zeros(4)))

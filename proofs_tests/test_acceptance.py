"""Theorem 3: the acceptance rate of one layer against enumeration, and the bound against the true optimum.

The optimum is computed twice from scratch: as the minimum cut of the transport network, exactly, over all sets of
tokens; and as a linear program.
"""

import random
from fractions import Fraction
from itertools import chain, combinations

import numpy as np
import pytest
from scipy.optimize import linprog

from optimized.evidence.cases import HARD_CASES_BY_NAME, Law, law, one_hot, tempered
from proofs_tests.laws import random_law, sizes
from reference.acceptance import optimal_transport, single_layer
from reference.api import DraftLaw, RheoConfig
from reference.exact import tree_classes, walk_law

SEED = 20260902
Slots = tuple[tuple[int, ...], ...]


def slot_law(
    q: Law, branching: int, lead_tokens: int, sampling: Law | None
) -> list[tuple[set[int], int | None, Fraction]]:
    """Every set of slots, which of them is the probe, and its probability; from the definition, not by the growth."""
    ranked = sorted((token for token in range(len(q)) if q[token] > 0), key=lambda token: (-q[token], token))
    tail = {token: (sampling or q)[token] for token in ranked[lead_tokens:]}
    total = sum(tail.values())
    if lead_tokens >= branching or not total:
        return [(set(ranked[:branching]), None, Fraction(1))]
    result = []
    for probe, mass in tail.items():
        if mass > 0:
            fills = [token for token in tail if token != probe][: branching - lead_tokens - 1]
            result.append(({*ranked[:lead_tokens], probe, *fills}, probe, mass / total))
    return result


def minimum_cut(classes: list[tuple[set[int], int | None, Fraction]], p: Law) -> Fraction:
    """The largest P(target's token is in the slots) over all couplings: max-flow, as its smallest cut.

    Source -> slots (their probability) -> their tokens -> sink (p). A cut keeps a set A of tokens on the source's side
    and pays p(A), and the probability of all slots that are not inside A.
    """
    tokens = range(len(p))
    subsets = chain.from_iterable(combinations(tokens, count) for count in range(len(p) + 1))
    return min(
        sum((p[token] for token in subset), Fraction(0))
        + sum((mass for slots, _, mass in classes if not slots <= set(subset)), Fraction(0))
        for subset in subsets
    )


def enumerated(q: Law, p: Law, branching: int, lead_tokens: int, rule: str, sampling: Law | None) -> Fraction:
    """P(the walk goes down) by enumerating trees and walks."""
    config = RheoConfig(
        lead_tokens,
        branching,
        depth=1,
        tree_size=branching,
        proposal="topk" if rule == "topk" else "rheo",
        verification="rheo" if rule == "topk" else rule,
    )
    draft = DraftLaw(q, sampling or q)
    return sum(
        (
            probability * walked
            for tree, probability in tree_classes(config, lambda path: draft)
            for result, walked in walk_law(tree, lambda path: p, config.verification)
            if result.accepted_nodes
        ),
        Fraction(0),
    )


def random_layers(size: int):
    """Laws with zeros and ties, every m and K, own sampling laws, p = q and disjoint supports among them."""
    rng = random.Random(SEED)
    for index in range(size):
        vocab_size = rng.randrange(1, 7)
        q = random_law(rng, vocab_size)
        p = random_law(rng, vocab_size)
        if index % 10 == 0:
            p = q
        elif index % 10 == 1:
            free = [int(value == 0) * rng.randrange(3) for value in q]
            p = law(*free) if any(free) else p
        sampling = None
        if index % 3 == 0:
            weights = [int(value > 0) * rng.randrange(4) for value in q]
            sampling = law(*weights) if any(weights) else None
        elif index % 3 == 1:
            sampling = tempered(q, 2)
        branching = rng.randrange(1, vocab_size + 2)
        yield q, p, branching, rng.randrange(0, branching + 2), sampling


@sizes(700, 8000)
def test_single_layer_equals_enumeration(size):
    for q, p, branching, lead_tokens, sampling in random_layers(size):
        for rule in ("topk", "rheo", "rrsw"):
            rate = single_layer(q, p, branching, lead_tokens, rule, sampling)
            assert rate == enumerated(q, p, branching, lead_tokens, rule, sampling), (
                q,
                p,
                branching,
                lead_tokens,
                rule,
            )


@sizes(1000, 8000)
def test_rrsw_layer_equals_its_definition(size):
    """Leads one after the other, then the probe, then the fills: recursive rejection written as it is told."""
    for q, p, branching, lead_tokens, sampling in random_layers(size):
        rate = Fraction(0)
        for slots, probe, mass in slot_law(q, branching, lead_tokens, sampling):
            if probe is None:
                rate += mass * sum(p[token] for token in slots)
                continue
            ranked = sorted(range(len(q)), key=lambda token: (-q[token], token))
            left = Fraction(1)  # the probability that all so far were turned down
            current = list(p)
            for lead in ranked[:lead_tokens]:
                rate += mass * left * current[lead]
                left *= 1 - current[lead]
                current[lead] = Fraction(0)
                current = [value / sum(current) for value in current] if any(current) else current
            if left == 0:
                continue
            tail = [Fraction(0) if token in ranked[:lead_tokens] else (sampling or q)[token] for token in range(len(q))]
            tail = [value / sum(tail) for value in tail]
            accepted = min(current[probe] / tail[probe], Fraction(1))
            rate += mass * left * accepted
            left *= 1 - accepted
            if left == 0:
                continue
            current = [max(value - other, Fraction(0)) for value, other in zip(current, tail, strict=True)]
            fills = slots - {probe, *ranked[:lead_tokens]}
            rate += mass * left * sum(current[token] for token in fills) / sum(current)
        assert rate == single_layer(q, p, branching, lead_tokens, "rrsw", sampling)


@sizes(1500, 8000)
def test_optimal_transport_is_the_minimum_cut(size):
    for q, p, branching, lead_tokens, sampling in random_layers(size):
        bound = optimal_transport(q, p, branching, lead_tokens, sampling)
        assert bound == minimum_cut(slot_law(q, branching, lead_tokens, sampling), p), (q, p, branching, lead_tokens)


@sizes(100, 1000)
def test_optimal_transport_is_the_value_of_the_linear_program(size):
    """max sum of pi(slots, token) over tokens in the slots; pi has the slots' law and p as its marginals."""
    solved = 0
    for q, p, branching, lead_tokens, sampling in random_layers(size):
        classes = slot_law(q, branching, lead_tokens, sampling)
        rows, columns = len(classes), len(p)
        gain = -np.array([[float(token in slots) for token in range(columns)] for slots, _, _ in classes])
        marginals = [np.kron(np.eye(rows), np.ones(columns)), np.kron(np.ones(rows), np.eye(columns))]
        masses = [float(mass) for _, _, mass in classes] + [float(value) for value in p]
        program = linprog(gain.ravel(), A_eq=np.vstack(marginals), b_eq=masses)
        assert program.status == 0
        assert abs(-program.fun - float(optimal_transport(q, p, branching, lead_tokens, sampling))) < 1e-9
        solved += rows > 1
    assert solved > size // 4


@sizes(1500, 8000)
def test_no_rule_beats_the_bound(size):
    for q, p, branching, lead_tokens, sampling in random_layers(size):
        bound = optimal_transport(q, p, branching, lead_tokens, sampling)
        assert single_layer(q, p, branching, lead_tokens, "rheo", sampling) <= bound <= 1
        assert single_layer(q, p, branching, lead_tokens, "rrsw", sampling) <= bound


@sizes(1500, 8000)
def test_rheo_reaches_the_bound_of_the_greedy_draft(size):
    """m = K - 1 is the greedy multi-draft of Hu et al.: K - 1 top tokens and one sampled; the rate is the optimum.

    K = 2, m = 1 is SpecHub's: the hub x_1 and one token from the rest, p(x_1) + sum of min(p, q / (1 - q(x_1))).
    """
    for q, p, branching, _, sampling in random_layers(size):
        rate = single_layer(q, p, branching, branching - 1, "rheo", sampling)
        assert rate == optimal_transport(q, p, branching, branching - 1, sampling)
        hub = max(range(len(q)), key=lambda token: (q[token], -token))
        if q[hub] < 1:
            others = [min(p[token], q[token] / (1 - q[hub])) for token in range(len(q)) if token != hub]
            assert single_layer(q, p, 2, 1) == p[hub] + sum(others)


def test_rheo_often_reaches_the_bound_and_the_gap_is_small():
    """m < K - 1: in most random cases Rheo is optimal as well. Uniform laws on the simplex, rounded to rationals."""
    rng = random.Random(SEED)
    gaps = []
    for _ in range(400):
        vocab_size = rng.randrange(4, 8)
        q, p = (law(*(int(1e6 * rng.expovariate(1)) + 1 for _ in range(vocab_size))) for _ in range(2))
        branching = rng.randrange(2, vocab_size)
        lead_tokens = rng.randrange(0, branching - 1)
        gaps.append(optimal_transport(q, p, branching, lead_tokens) - single_layer(q, p, branching, lead_tokens))
    assert sum(gap == 0 for gap in gaps) > 0.7 * len(gaps)
    assert 0 < sum(gaps) / len(gaps) < 0.01


def test_no_rule_dominates_pointwise():
    q, p = law(6, 4), one_hot(2, 0)
    assert single_layer(q, p, 1, 0, "topk") == 1
    assert single_layer(q, p, 1, 0, "rheo") == Fraction(3, 5)
    assert single_layer(q, one_hot(2, 1), 1, 0, "topk") == 0
    assert single_layer(q, one_hot(2, 1), 1, 0, "rheo") == Fraction(2, 5)


@pytest.mark.parametrize("branching", [2, 3, 4])
def test_on_average_rheo_beats_rrsw_beats_topk(branching):
    """Targets near the draft, as a trained head has them: p mixes q with another random law, half and half."""
    rng = random.Random(SEED)
    total = {"topk": Fraction(0), "rrsw": Fraction(0), "rheo": Fraction(0)}
    for _ in range(80):
        q, noise = (law(*(int(1e4 * rng.expovariate(1)) + 1 for _ in range(6))) for _ in range(2))
        p = tuple((a + b) / 2 for a, b in zip(q, noise, strict=True))
        for rule in total:
            total[rule] += single_layer(q, p, branching, 1, rule)
    assert total["rheo"] > total["rrsw"] > total["topk"]


def test_single_layer_by_hand():
    """q = (1/2, 1/3, 1/6), K = 2, m = 0, p = (1/6, 1/3, 1/2), q~ = q. Turned down: only 0, by 1/3. x_K is token 1:
    p(x_1) + min(p, q~)(x_2) + min(p, q~)(x_3) + 1 * max(0, p - q~)(x_2) = 1/6 + 1/3 + 1/6 + 0."""
    q, p = law(3, 2, 1), law(1, 2, 3)
    assert single_layer(q, p, 2, 0, "rheo") == Fraction(2, 3)
    assert single_layer(q, p, 2, 0, "topk") == Fraction(1, 2)
    assert optimal_transport(q, p, 2, 0) == Fraction(2, 3)
    assert single_layer(q, p, 2, 1, "rheo") == Fraction(1, 6) + Fraction(1, 3) + Fraction(1, 3)
    assert single_layer((q[2], q[0], q[1]), (p[2], p[0], p[1]), 2, 1, "rheo") == Fraction(5, 6)  # ids do not matter


@pytest.mark.parametrize("lead_tokens", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("rule", ["topk", "rheo", "rrsw"])
def test_single_layer_at_the_edges(rule, lead_tokens):
    q = law(3, 2, 1)
    assert single_layer(q, q, 3, lead_tokens, rule) == 1  # every token has a slot
    assert single_layer(q, q, 7, lead_tokens, rule) == 1
    assert single_layer(law(1, 1, 0), one_hot(3, 2), 2, lead_tokens, rule) == 0  # disjoint
    assert single_layer(one_hot(3, 1), one_hot(3, 1), 2, lead_tokens, rule) == 1
    assert single_layer(q, law(1, 2, 3), 3, lead_tokens, rule, sampling=one_hot(3, 0)) == 1
    assert optimal_transport(q, law(1, 2, 3), 2, lead_tokens, sampling=one_hot(3, 0)) == Fraction(1, 2)


def test_single_layer_in_floats():
    for name in ("opposite rankings", "cold sampling law", "sampling law with holes"):
        case = HARD_CASES_BY_NAME[name]
        q, p = case.construction(()), case.target(())
        sampling = case.sampling((), q)
        floats = [np.array(values, dtype=float) for values in (q, p, sampling)]
        for rule in ("topk", "rheo", "rrsw"):
            rate = single_layer(floats[0], floats[1], 2, 1, rule, floats[2])
            assert isinstance(rate, float)
            assert abs(rate - single_layer(q, p, 2, 1, rule, sampling)) < 1e-14
        assert abs(optimal_transport(*floats[:2], 2, 1, floats[2]) - optimal_transport(q, p, 2, 1, sampling)) < 1e-14


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(rule="naive"), r"rule must be one of .*'topk', 'rheo', 'rrsw'.*, got 'naive'"),
        (dict(p=law(1, 1)), "p has 2 entries and q has 3"),
        (dict(p=(Fraction(1), Fraction(1), Fraction(0))), "p sums to 2, not to 1"),
        (dict(q=(0.5, float("nan"), 0.5)), r"construction\[1\] is nan"),
        (dict(branching=0), "branching must be an integer >= 1, got 0"),
        (dict(lead_tokens=-1), "lead_tokens must be an integer >= 0, got -1"),
        (dict(q=law(1, 1, 0), sampling=law(1, 0, 1)), r"sampling\[2\] is 1/2 where construction\[2\] is 0"),
    ],
)
def test_single_layer_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        single_layer(**{"q": law(3, 2, 1), "p": law(1, 2, 3), "branching": 2, "lead_tokens": 1, **arguments})

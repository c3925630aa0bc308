"""Rational laws for the exact proofs: a list of hard cases written by hand, and Hypothesis strategies.

A *case* is a draft and a target, both functions of the path below the root. Everything is a Fraction, so tests compare
with ``==`` and have no tolerance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from reference.api import DraftLaw, RheoConfig

Path = tuple[int, ...]
Law = tuple[Fraction, ...]


def exact_settings(examples: int) -> settings:
    """The profile of every property here: the same examples on every run, no deadline, no example database."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def sizes(default: int, deep: int) -> pytest.MarkDecorator:
    """Parametrise a test by ``size``: the default one, and the one of ``-m deep``."""
    return pytest.mark.parametrize("size", [default, pytest.param(deep, marks=pytest.mark.deep)])


def law(*weights: int | Fraction) -> Law:
    """The law proportional to ``weights``."""
    total = Fraction(sum(weights))
    return tuple(Fraction(weight) / total for weight in weights)


def one_hot(vocab_size: int, token: int) -> Law:
    return law(*(int(index == token) for index in range(vocab_size)))


def tempered(construction: Law, power: int) -> Law:
    """The sampling law at temperature 1 / ``power``."""
    return law(*(value**power for value in construction))


@dataclass(frozen=True)
class Case:
    """A draft and a target.

    Attributes:
        name: what makes it hard.
        construction: path -> q.
        sampling: (path, q) -> q_T, or None for a greedy request.
        target: path -> p.
        vocab_size: the target's.
    """

    name: str
    construction: Callable[[Path], Law]
    target: Callable[[Path], Law]
    vocab_size: int
    sampling: Callable[[Path, Law], Law | None] = lambda path, q: q

    def draft(self) -> Callable[[Path], DraftLaw]:
        """path -> DraftLaw, remembered."""

        def draft_law(path: Path) -> DraftLaw:
            q = self.construction(path)
            return DraftLaw(q, self.sampling(path, q))

        return cache(draft_law)


Q3, P3 = law(3, 2, 1), law(1, 2, 3)
Q4, P4 = law(4, 3, 2, 1), law(1, 5, 2, 4)


def _turned(values: Law, path: Path) -> Law:
    """The law rotated by the path: every context another ranking."""
    shift = sum((index + 1) * (token + 1) for index, token in enumerate(path)) % len(values)
    return values[shift:] + values[:shift]


HARD_CASES: list[Case] = [
    Case("p equals q", lambda path: Q3, lambda path: Q3, 3),
    Case("opposite rankings", lambda path: Q3, lambda path: P3, 3),
    Case("disjoint supports", lambda path: law(2, 1, 0, 0), lambda path: law(0, 0, 1, 3), 4),
    Case("uniform draft, all ties", lambda path: law(1, 1, 1), lambda path: _turned(P3, path), 3),
    Case("uniform draft of four", lambda path: law(1, 1, 1, 1), lambda path: _turned(P4, path), 4),
    Case("ties at the proxy, q(x_1) = z", lambda path: law(2, 1, 1), lambda path: _turned(law(0, 1, 3), path), 3),
    Case("one-hot draft, scores tie with the parent", lambda path: one_hot(3, 1), lambda path: _turned(P3, path), 3),
    Case("one-hot target", lambda path: Q3, lambda path: one_hot(3, len(path) % 3), 3),
    Case("one-hot target where the draft has nothing", lambda path: law(2, 1, 0), lambda path: one_hot(3, 2), 3),
    Case("zeros in both", lambda path: _turned(law(3, 0, 1, 2), path), lambda path: _turned(law(0, 2, 3, 1), path), 4),
    Case("draft vocabulary smaller", lambda path: law(1, 2), lambda path: _turned(P4, path), 4),
    Case("draft of ranked tokens fewer than slots", lambda path: law(0, 1, 2), lambda path: _turned(P3, path), 3),
    Case("massless tail", lambda path: Q3, lambda path: P3, 3, lambda path, q: one_hot(3, 0)),
    Case("massless tail after some tokens", lambda path: Q3, lambda path: _turned(P3, path), 3,
         lambda path, q: one_hot(3, 0) if path and path[-1] == 0 else q),
    Case("cold sampling law", lambda path: Q4, lambda path: _turned(P4, path), 4, lambda path, q: tempered(q, 3)),
    Case("hot sampling law", lambda path: Q3, lambda path: _turned(P3, path), 3,
         lambda path, q: law(*(int(value > 0) for value in q))),
    Case("reversed sampling law", lambda path: Q4, lambda path: _turned(Q4, path), 4,
         lambda path, q: tuple(reversed(q))),
    Case("sampling law with holes", lambda path: Q4, lambda path: P4, 4, lambda path, q: law(0, 1, 0, 2)),
    Case("greedy request", lambda path: Q3, lambda path: _turned(P3, path), 3, lambda path, q: None),
    Case("greedy after a token", lambda path: Q3, lambda path: _turned(P3, path), 3,
         lambda path, q: None if path[-1:] == (0,) else q),
    Case("draft turns with the path", lambda path: _turned(Q3, path), lambda path: _turned(P3, path), 3),
    Case("target copies the last token", lambda path: Q3, lambda path: one_hot(3, path[-1]) if path else Q3, 3),
    Case("target never repeats", lambda path: _turned(Q3, path),
         lambda path: law(*(int(token not in path[-1:]) for token in range(3))), 3),
    Case("draft is certain after a rare token", lambda path: one_hot(3, 2) if path[-1:] == (2,) else Q3,
         lambda path: _turned(P3, path), 3),
    Case("tails of a child dwarf the fills", lambda path: law(9, 1, 1) if path else law(5, 4, 3), lambda path: P3, 3),
]  # fmt: skip
HARD_CASES_BY_NAME = {case.name: case for case in HARD_CASES}


def configs(
    branchings: Sequence[int], depths: Sequence[int], *, beams: Sequence[int] | None = None, tree_size: int = 60
) -> Iterator[RheoConfig]:
    """Every m from 0 to K, for every K, depth and beam; ``beams`` defaults to 1, 2, ..., K + 2."""
    for branching in branchings:
        for lead_tokens in range(branching + 1):
            for depth in depths:
                for beam in beams or range(1, branching + 3):
                    yield RheoConfig(lead_tokens, branching, depth, tree_size, beam)


@st.composite
def laws(draw: st.DrawFn, vocab_size: int, support: Sequence[int] | None = None) -> Law:
    """A law of small integer weights, so that ties and zeros are common; no mass outside ``support``."""
    allowed = list(range(vocab_size) if support is None else support)
    weights = draw(
        st.lists(st.integers(0, 4), min_size=len(allowed), max_size=len(allowed)).filter(any), label="weights"
    )
    values = [0] * vocab_size
    for token, weight in zip(allowed, weights, strict=True):
        values[token] = weight
    return law(*values)


@st.composite
def cases(draw: st.DrawFn, max_vocab: int = 4) -> Case:
    """A draft and a target that depend on the path: up to four laws of each, picked by the path."""
    vocab_size = draw(st.integers(2, max_vocab), label="vocab_size")
    draft_vocab = draw(st.integers(1, vocab_size), label="draft_vocab")
    contexts = draw(st.integers(1, 4), label="contexts")
    factors = draw(st.lists(st.integers(1, 5), min_size=2, max_size=2), label="factors")
    constructions = [draw(laws(draft_vocab)) for _ in range(contexts)]
    kind = draw(st.sampled_from(["same", "cold", "free", "greedy"]), label="sampling")
    samplings: list[Law | None] = []
    for q in constructions:
        if kind == "free":
            samplings.append(draw(laws(draft_vocab, [token for token in range(draft_vocab) if q[token] > 0])))
        else:
            samplings.append({"same": q, "cold": tempered(q, 2), "greedy": None}[kind])
    targets = [draw(laws(vocab_size)) for _ in range(contexts)]

    def context(path: Path) -> int:
        return sum((factors[0] * index + 1) * (factors[1] * token + 1) for index, token in enumerate(path)) % contexts

    return Case(
        f"drawn, sampling {kind}",
        construction=lambda path: constructions[context(path)],
        sampling=lambda path, q: samplings[context(path)],
        target=lambda path: targets[context(path)],
        vocab_size=vocab_size,
    )


@st.composite
def rheo_configs(draw: st.DrawFn, max_branching: int = 3, max_depth: int = 3, max_size: int = 8) -> RheoConfig:
    """m = 0 .. K + 1, beam 1 .. K + 2, every proposal and rule."""
    branching = draw(st.integers(1, max_branching), label="branching")
    return RheoConfig(
        lead_tokens=draw(st.integers(0, branching + 1), label="lead_tokens"),
        branching=branching,
        depth=draw(st.integers(1, max_depth), label="depth"),
        tree_size=draw(st.integers(1, max_size), label="tree_size"),
        beam=draw(st.none() | st.integers(1, branching + 2), label="beam"),
        proposal=draw(st.sampled_from(["rheo", "rheo", "rheo", "topk"]), label="proposal"),
        verification=draw(st.sampled_from(["rheo", "rrsw"]), label="verification"),
    )


def random_law(rng: random.Random, vocab_size: int, *, denominator: int | None = None, top: int = 6) -> Law:
    """A random law; with ``denominator`` a power of two, a dyadic one that floats hold exactly."""
    if denominator is None:
        while True:
            weights = [rng.choice((0, *range(top + 1))) for _ in range(vocab_size)]
            if any(weights):
                return law(*weights)
    cuts = sorted(rng.randrange(denominator + 1) for _ in range(vocab_size - 1))
    ends = [0, *cuts, denominator]
    return tuple(Fraction(high - low, denominator) for low, high in pairwise(ends))


def random_case(rng: random.Random, vocab_size: int, *, denominator: int | None = None) -> Case:
    """A case with a law of its own for every path, drawn from ``rng`` when the path is first asked for.

    The laws depend on the path only, not on the order of asking: each path seeds its own generator.
    """
    seed = rng.randrange(2**32)
    own_sampling = rng.random() < 0.5

    @cache
    def drawn(path: Path, what: str) -> Law:
        return random_law(random.Random(f"{seed} {path} {what}"), vocab_size, denominator=denominator)

    def sampling(path: Path, q: Law) -> Law:
        if not own_sampling:
            return q
        # some other law, cut to the support of q; q itself when nothing is left
        cut = [value if q[token] > 0 else 0 for token, value in enumerate(drawn(path, "sampling"))]
        return law(*cut) if denominator is None and any(cut) else q

    return Case("random", lambda path: drawn(path, "draft"), lambda path: drawn(path, "target"), vocab_size, sampling)


def as_floats(values: Sequence[Fraction]) -> np.ndarray:
    """float64 of each entry; exact for dyadic laws."""
    return np.array([float(value) for value in values])

"""Rational laws for the exact proofs: Hypothesis strategies and random cases (hard ones: ``optimized.evidence.cases``).

A *case* is a draft and a target, both functions of the path below the root. Everything is a Fraction, so tests compare
with ``==`` and have no tolerance.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from optimized.evidence.cases import Case, Law, Path, law, tempered
from reference.api import RheoConfig


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
    """m = 0 .. K + 1, beam 1 .. K + 2, one probe or up to three, every rule, every proposal but "static"."""
    branching = draw(st.integers(1, max_branching), label="branching")
    return RheoConfig(
        lead_tokens=draw(st.integers(0, branching + 1), label="lead_tokens"),
        branching=branching,
        depth=draw(st.integers(1, max_depth), label="depth"),
        tree_size=draw(st.integers(1, max_size), label="tree_size"),
        beam=draw(st.none() | st.integers(1, branching + 2), label="beam"),
        proposal=draw(st.sampled_from(["rheo", "rheo", "rheo", "topk"]), label="proposal"),
        verification=draw(st.sampled_from(["rheo", "rrsw"]), label="verification"),
        probes=draw(st.sampled_from([1, 1, 2, 3]), label="probes"),
    )


@st.composite
def static_configs(draw: st.DrawFn, max_nodes: int = 6, max_depth: int = 3, max_branching: int = 3) -> RheoConfig:
    """Static trees of every topology up to this size, built child by child."""
    paths: list[Path] = [(0,)]
    for _ in range(draw(st.integers(0, max_nodes - 1), label="further nodes")):
        children = {node: sum(path[:-1] == node for path in paths) for node in [(), *paths]}
        free = [node for node, count in children.items() if len(node) < max_depth and count < max_branching]
        if free:
            parent = draw(st.sampled_from(free), label="parent")
            paths.append((*parent, children[parent]))
    return RheoConfig.static(paths, verification=draw(st.sampled_from(["rheo", "rrsw"]), label="verification"))


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

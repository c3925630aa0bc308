"""Every outcome of every probe, one after the other: the naive enumeration that ``reference.exact`` must agree with.

The level-by-level growth draws one probe for every expanded node, also for those that global pruning throws away. The
enumeration replays ``grow_with_probes`` with every combination of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, product

import numpy as np

from reference.api import DraftLaw, RheoConfig, Verification, VerifyNoise, VerifyResult
from reference.growth import grow_with_probes
from reference.slots import SlotPlan
from reference.tree import DraftTree
from reference.verification import verify

Draft = Callable[[tuple[int, ...]], DraftLaw]
TreeKey = tuple[tuple[int, int, int, bool], ...]
Choices = dict[tuple[int, int], tuple[int, ...]]  # (level it offers, rank in its beam) -> probe tokens


@dataclass(frozen=True)
class Outcome:
    """One combination of probes: the tree it gives, its probability, and the probes themselves."""

    tree: DraftTree
    probability: Fraction
    choices: Choices


@dataclass
class MergedClass:
    """Outcomes with the same tree.

    Attributes:
        tree: their tree.
        probability: of all of them together.
        outcomes: how many there are.
    """

    tree: DraftTree
    probability: Fraction
    outcomes: int


def outcomes(config: RheoConfig, draft: Draft) -> Iterator[Outcome]:
    """Every combination of probe tokens with positive probability, in lexicographic order of replay."""
    pending: list[list[int]] = [[]]
    while pending:
        script = pending.pop()
        drawn: list[int] = []
        choices: Choices = {}
        probability = Fraction(1)

        def choose(plan: SlotPlan, level: int, rank: int) -> tuple[int, ...]:
            nonlocal probability
            if plan.probe_law is None:
                return ()
            mass = {token: q for token, q in zip(*plan.probe_law, strict=True) if q > 0}
            tokens: list[int] = []
            for _ in range(plan.num_probes):
                if len(drawn) == len(script):  # noqa: B023 - called within this iteration only
                    first, *others = mass
                    pending.extend([*drawn, other] for other in others)  # noqa: B023
                    script.append(first)  # noqa: B023
                token = script[len(drawn)]  # noqa: B023
                drawn.append(token)  # noqa: B023
                tokens.append(token)
                probability *= mass[token] / sum(mass.values())
                del mass[token]
            choices[level, rank] = tuple(tokens)  # noqa: B023
            return tuple(tokens)

        tree = grow_with_probes(config, draft, choose)
        yield Outcome(tree, probability, choices)


def merged(config: RheoConfig, draft: Draft) -> dict[TreeKey, MergedClass]:
    """The law of the tree, by its key."""
    classes: dict[TreeKey, MergedClass] = {}
    for outcome in outcomes(config, draft):
        found = classes.setdefault(outcome.tree.key, MergedClass(outcome.tree, Fraction(0), 0))
        found.probability += outcome.probability
        found.outcomes += 1
    return classes


def grow_replayed(config: RheoConfig, draft: Draft, choices: Choices) -> DraftTree:
    """The tree that these probes give; ``choices`` may come from the same growth under another budget."""
    return grow_with_probes(config, draft, lambda plan, level, rank: choices.get((level, rank), ()))


def integrated_walk_law(
    tree: DraftTree, target_probs: Sequence[Sequence[Fraction]], rule: Verification
) -> dict[VerifyResult, Fraction]:
    """The law of ``verify`` by integrating over its uniforms, exactly.

    Each uniform runs over one point inside each cell between neighbouring thresholds, weighted by the cell's width.
    Rows are integrated as the walk reaches them: uniforms of rows it never visits do not matter.
    """
    law: dict[VerifyResult, Fraction] = {}
    cells = [[cells_between(edges) for edges in thresholds(tree, row, p, rule)] for row, p in enumerate(target_probs)]
    probes = max(len(edges) - 2 for edges in cells)

    def integrate(fixed: dict[int, tuple[float, ...]], weight: Fraction) -> None:
        filled = np.zeros((len(tree), 2 + probes))
        for row, points in fixed.items():
            filled[row, : len(points)] = points
        result = verify(tree, target_probs, VerifyNoise(filled[:, 2:], filled[:, 0], filled[:, 1]), rule)
        unfixed = next((row for row in (0, *result.accepted_nodes) if row not in fixed), None)
        if unfixed is None:
            law[result] = law.get(result, Fraction(0)) + weight
            return
        for chosen in product(*cells[unfixed]):
            points, widths = zip(*chosen, strict=True)
            integrate({**fixed, unfixed: points}, weight * math.prod(widths))

    integrate({}, Fraction(1))
    return law


def cells_between(edges: Iterable[Fraction]) -> list[tuple[float, Fraction]]:
    """A float strictly inside each cell that ``edges`` cut [0, 1) into, and the cell's width."""
    ends = sorted({Fraction(0), Fraction(1), *edges})
    return [(float((low + high) / 2), high - low) for low, high in pairwise(ends)]


def cumulative(weights: Sequence[Fraction]) -> list[Fraction]:
    """The thresholds of a draw by inverse CDF; none when there is no mass."""
    total = sum(weights)
    return [sum(weights[:stop], Fraction(0)) / total for stop in range(1, len(weights))] if total else []


def thresholds(tree: DraftTree, row: int, p: Sequence[Fraction], rule: Verification) -> list[set[Fraction]]:
    """Every threshold of a row's uniforms: residual, lead, and one accept uniform per probe; none where none decides.

    Written out from the definitions (cumulative sums of p, of p without the leads in the tree, and of the residuals;
    p / q~, where q~ lost the earlier probes), not taken from the walk's code.
    """
    residual = set(cumulative(p))
    siblings = [child for child in range(len(tree)) if tree.parents[child] == row]
    probes = [child for child in siblings if tree.is_probe[child]]
    if not probes:
        return [residual, set(), set()]
    q = dict(zip(*tree.probe_laws[row], strict=True))
    leads = [tree.token_ids[child] for child in siblings if tree.slots[child] < tree.slots[probes[0]]]
    lead: set[Fraction] = set()
    if rule == "rrsw" and leads:
        lead = set(cumulative(p))
        rest = [Fraction(0) if token in leads else value for token, value in enumerate(p)]
        p = [value / sum(rest) for value in rest] if any(rest) else p
    accept = []
    for probe in probes:
        token = tree.token_ids[probe]
        left = sum(q.values())
        accept.append({min(p[token] * left / q[token], Fraction(1))})
        rest = [max(value - q.get(other, 0) / left, Fraction(0)) for other, value in enumerate(p)]
        p = [value / sum(rest) for value in rest] if any(rest) else p
        residual.update(cumulative(p))
        del q[token]
    return [residual, lead, *accept]

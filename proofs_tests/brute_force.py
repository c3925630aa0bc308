"""Every outcome of every probe, one after the other: the naive enumeration that ``reference.exact`` must agree with.

The level-by-level growth draws one probe for every expanded node, also for those that global pruning throws away. The
enumeration replays ``grow_with_probes`` with every combination of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np

from reference.api import DraftLaw, RheoConfig, Verification, VerifyNoise, VerifyResult
from reference.growth import grow_with_probes
from reference.slots import SlotPlan
from reference.tree import DraftTree
from reference.verification import verify

Draft = Callable[[tuple[int, ...]], DraftLaw]
TreeKey = tuple[tuple[int, int, int, bool], ...]
Choices = dict[tuple[int, int], int]  # (level it offers, rank in its beam) -> probe token


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

        def choose(plan: SlotPlan, level: int, rank: int) -> int | None:
            nonlocal probability
            if plan.probe_law is None:
                return None
            mass = {token: q for token, q in zip(*plan.probe_law, strict=True) if q > 0}
            if len(drawn) == len(script):  # noqa: B023 - called within this iteration only
                first, *others = mass
                pending.extend([*drawn, other] for other in others)  # noqa: B023
                script.append(first)  # noqa: B023
            token = script[len(drawn)]  # noqa: B023
            drawn.append(token)  # noqa: B023
            choices[level, rank] = token  # noqa: B023
            probability *= mass[token]
            return token

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
    return grow_with_probes(config, draft, lambda plan, level, rank: choices.get((level, rank)))


def integrated_walk_law(
    tree: DraftTree, target_probs: Sequence[Sequence[Fraction]], rule: Verification, cells: int
) -> dict[VerifyResult, Fraction]:
    """The law of ``verify`` by integrating over its uniforms, exactly.

    Every uniform runs over the midpoints of ``cells`` equal cells. That integrates exactly when no threshold falls
    inside a cell, that is when ``cells`` is a common multiple of the thresholds' denominators (see ``common_cells``).
    Rows are integrated as the walk reaches them: uniforms of rows it never visits do not matter.
    """
    midpoints = (np.arange(cells) + 0.5) / cells
    law: dict[VerifyResult, Fraction] = {}

    def integrate(fixed: dict[int, tuple[float, float, float]], weight: Fraction) -> None:
        filled = np.full((3, len(tree)), 0.5 / cells)
        for row, triple in fixed.items():
            filled[:, row] = triple
        result = verify(tree, target_probs, VerifyNoise(*filled), rule)
        open_rows = [row for row in (0, *result.accepted_nodes) if row not in fixed]
        if not open_rows:
            law[result] = law.get(result, Fraction(0)) + weight
            return
        row = open_rows[0]
        has_probe = tree.probe_child(row) is not None
        has_leads = rule == "rrsw" and has_probe and not tree.is_probe[next(tree.children(row))]
        axes = [midpoints if used else midpoints[:1] for used in (has_probe, True, has_leads)]
        share = weight / math.prod(len(axis) for axis in axes)
        for triple in product(*axes):
            integrate({**fixed, row: triple}, share)

    integrate({}, Fraction(1))
    return law


def common_cells(tree: DraftTree, target_probs: Sequence[Sequence[Fraction]]) -> int:
    """A number of cells whose edges hold every threshold of every decision that ``verify`` can take on this tree.

    Thresholds are written out here from the definitions (cumulative sums of p, of p without the leads, and of the
    residuals of both; p / q~), not taken from the walk's code.
    """
    denominators = {1}

    def add_cumulative(weights: list[Fraction]) -> None:
        total = sum(weights)
        if total > 0:
            denominators.update((sum(weights[:stop]) / total).denominator for stop in range(len(weights) + 1))

    for row in range(len(tree)):
        p = list(target_probs[row])
        add_cumulative(p)
        if row not in tree.probe_laws:
            continue
        q = dict(zip(*tree.probe_laws[row], strict=True))
        leads = [tree.token_ids[child] for child in tree.children(row) if child < (tree.probe_child(row) or 0)]
        without = [Fraction(0) if token in leads else value for token, value in enumerate(p)]
        total = sum(without)
        for values in (p, [value / total for value in without] if total else p):
            for token, mass in q.items():
                if mass > 0:
                    denominators.add(min(values[token] / mass, Fraction(1)).denominator)
            add_cumulative([max(value - q.get(token, 0), Fraction(0)) for token, value in enumerate(values)])
    return math.lcm(*denominators)

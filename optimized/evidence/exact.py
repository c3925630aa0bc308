"""Theorem 1 on hard cases (docs/theory.md): the law of the output, enumerated in rationals, is the target's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args

from optimized.evidence.cases import HARD_CASES, Case
from reference.api import RheoConfig
from reference.exact import output_law, target_law, total_variation, tree_classes

Rule = Literal["rheo", "rrsw", "topk"]
RULES: tuple[Rule, ...] = get_args(Rule)
"""What is proved: probe first, siblings in their order, and trees without a probe (EAGLE's)."""

SHAPES = (
    (RheoConfig(branching=2, depth=3, tree_size=5), 3),
    (RheoConfig(branching=3, depth=2, tree_size=5), 3),
    (RheoConfig(branching=3, depth=2, tree_size=3, beam=1), 2),
)
"""Trees' shapes, and how many tokens' joint law is computed with each; m runs from 0 to K."""


@dataclass(frozen=True)
class ExactCheck:
    """One law of the output against the target's.

    Attributes:
        rule: one of ``RULES``.
        case: what makes the draft and the target hard.
        config: the trees' shape.
        classes: how many equivalence classes of trees were enumerated.
        sequences: how many sequences of tokens have positive probability.
        distance: total variation between output and target; 0 when lossless.
    """

    rule: Rule
    case: str
    config: RheoConfig
    classes: int
    sequences: int
    distance: Fraction


@dataclass(frozen=True)
class ExactSummary:
    """The checks of one rule and one m.

    Attributes:
        rule: one of ``RULES``.
        lead_tokens: m; None for "topk", which has no leads.
        laws: how many laws were compared.
        classes, sequences: of all of them.
        distance: the largest total variation.
        worst: the check that has it; None when all distances are 0.
    """

    rule: Rule
    lead_tokens: int | None
    laws: int
    classes: int
    sequences: int
    distance: Fraction
    worst: ExactCheck | None

    @property
    def agrees(self) -> bool:
        """Whether every output's law is the target's, exactly."""
        return self.distance == 0


def exact_grid() -> Iterator[tuple[Rule, Case, RheoConfig, int]]:
    """Every check: rule, case, shape with rule and m set, number of tokens."""
    for shape, horizon in SHAPES:
        for lead_tokens in range(shape.branching + 1):
            for case in HARD_CASES:
                for rule in RULES:
                    if rule != "topk":
                        yield rule, case, replace(shape, lead_tokens=lead_tokens, verification=rule), horizon
                    elif lead_tokens == 0:
                        yield rule, case, replace(shape, proposal="topk"), horizon


def check_exactly(rule: Rule, case: Case, config: RheoConfig, horizon: int) -> ExactCheck:
    """Enumerate one law of the output and measure its distance from the target's."""
    draft = case.draft()
    output, wanted = output_law(config, draft, case.target, horizon), target_law(case.target, horizon)
    return ExactCheck(
        rule=rule,
        case=case.name,
        config=config,
        classes=sum(1 for _ in tree_classes(config, draft)),
        sequences=len(wanted),
        distance=Fraction(total_variation(output, wanted)),
    )


def summarise(checks: Iterable[ExactCheck]) -> list[ExactSummary]:
    """The checks by rule and m."""
    groups: dict[tuple[Rule, int | None], list[ExactCheck]] = {}
    for check in checks:
        lead_tokens = None if check.rule == "topk" else check.config.fewest_leads
        groups.setdefault((check.rule, lead_tokens), []).append(check)
    summaries = []
    for rule, lead_tokens in sorted(groups, key=lambda key: (RULES.index(key[0]), key[1] or 0)):
        group = groups[rule, lead_tokens]
        worst = max(group, key=lambda check: check.distance)
        summaries.append(
            ExactSummary(
                rule=rule,
                lead_tokens=lead_tokens,
                laws=len(group),
                classes=sum(check.classes for check in group),
                sequences=sum(check.sequences for check in group),
                distance=worst.distance,
                worst=worst if worst.distance else None,
            )
        )
    return summaries

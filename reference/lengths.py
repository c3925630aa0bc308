"""The expected acceptance length of a draft tree: exact for the tree, or with the chance of its probes taken out.

Both are what the walk emits on average, accepted tokens and the bonus token, as a function of a tree and the target's
laws. Over all trees that a configuration may grow they have the same mean, which is what methods are compared by; the
second varies far less from tree to tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce

import numpy as np

from reference.api import Verification
from reference.exact import step_law
from reference.numbers import Number, Vector, as_number
from reference.tree import DraftTree, law_without
from reference.verification import check_rule, check_target

TargetProbs = Sequence[Sequence[Number] | Vector] | np.ndarray
Step = tuple[dict[int, Number], Number, Vector]  # what ``step_law`` gives


def expected_acceptance_length(tree: DraftTree, target_probs: TargetProbs, rule: Verification = "rheo") -> Number:
    """The exact expected number of tokens that the walk emits on this tree, accepted and bonus.

    The walk emits one token at every row where it stands, so this is the sum over rows of the probability to reach
    them: one pass over the rows, no enumeration.

    Args:
        tree: the draft tree.
        target_probs: [rows, vocab_size] the target's law after each row's path, tempered and filtered.
        rule: "rheo" or "rrsw".

    Raises:
        ValueError: as ``reference.verify``.
    """
    check_rule(rule)
    laws = check_target(tree, target_probs)
    reached: list[Number] = [as_number(1, laws[0]), *([0] * (len(tree) - 1))]
    length: Number = 0
    for row, law in enumerate(laws):
        step = step_law(tree, row, law, rule)
        for child in tree.children(row):
            reached[child] = reached[row] * _chance(tree, child, step)
        length += reached[row]
    return length


def _chance(tree: DraftTree, child: int, step: Step) -> Number:
    """That the walk goes down to a child from where its parent's step is made."""
    entered, mass, last = step
    return entered[child] if child in entered else mass * last[tree.token_ids[child]]


def smoothed_acceptance_length(tree: DraftTree, target_probs: TargetProbs, rule: Verification = "rheo") -> Number:
    """An estimate of the expected acceptance length of all trees that may grow where this one grew.

    Unbiased, as ``expected_acceptance_length`` is, with less variance. The nodes of a tree enter it one by one, in the
    total order, and the chance to reach one is, given those before it, the same whatever enters behind it
    (docs/theory.md, theorem 1). So every node is counted with the chance to reach it in the tree that ends with it; and
    where it is a probe, with the mean of that over the tokens that it may be.

    Args:
        tree: the draft tree, with the scores that it was grown by.
        target_probs, rule: as of ``expected_acceptance_length``, which raises the same.
    """
    check_rule(rule)
    laws = check_target(tree, target_probs)
    order = sorted(range(1, len(tree)), key=lambda row: (-tree.scores[row], row))  # rows count by level, parent, slot
    entered_by: list[list[int]] = [[] for _ in laws]  # every row's children so far

    @cache
    def step_with(row: int, count: int) -> Step:
        return step_law(tree, row, laws[row], rule, entered_by[row][:count])

    def step(row: int) -> Step:
        return step_with(row, len(entered_by[row]))

    def next_probe(parent: int) -> Number:
        _, mass, last = step(parent)
        drawn = [tree.token_ids[child] for child in entered_by[parent] if tree.is_probe[child]]
        token_ids, law = reduce(law_without, drawn, tree.probe_laws[parent])
        return mass * np.minimum(last[list(token_ids)], law).sum()

    length: Number = as_number(1, laws[0])
    for row in order:
        parent = tree.parents[row]
        here, below = (next_probe(parent), parent) if tree.is_probe[row] else (1, row)
        entered_by[parent].append(row)
        while below != 0:
            above = tree.parents[below]
            here *= _chance(tree, below, step(above))
            below = above
        length += here
    return length

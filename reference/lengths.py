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
from reference.exact import check_rule, step_law
from reference.numbers import Number, Vector, as_number
from reference.tree import DraftTree, law_without
from reference.verification import check_target

TargetProbs = Sequence[Sequence[Number] | Vector] | np.ndarray


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
        entered, mass, last = step_law(tree, row, law, rule)
        for child in tree.children(row):
            here = entered[child] if child in entered else mass * last[tree.token_ids[child]]
            reached[child] = reached[row] * here
        length += reached[row]
    return length


def smoothed_acceptance_length(tree: DraftTree, target_probs: TargetProbs, rule: Verification = "rheo") -> Number:
    """An estimate of the expected acceptance length of all trees that may grow where this one grew.

    Unbiased, as ``expected_acceptance_length`` is, with less variance. The nodes of a tree enter it one by one, in the
    total order, and the chance to reach one is, given those before it, the same whatever enters behind it
    (docs/theory.md, theorem 1). So every node is counted with the chance to reach it in the tree that ends with it; and
    where it is a probe, with the mean of that over the tokens that it may be.

    Args:
        tree: the draft tree, with the scores that it was grown by.
        target_probs: [rows, vocab_size] the target's law after each row's path, tempered and filtered.
        rule: "rheo" or "rrsw".

    Raises:
        ValueError: as ``reference.verify``.
    """
    check_rule(rule)
    laws = check_target(tree, target_probs)
    order = sorted(range(1, len(tree)), key=lambda row: (-tree.scores[row], row))  # rows count by level, parent, slot
    entered_by: list[list[int]] = [[] for _ in laws]  # every row's children so far

    @cache
    def step(row: int, count: int) -> tuple[dict[int, Number], Number, Vector]:
        return step_law(tree, row, laws[row], rule, entered_by[row][:count])

    def chance(child: int) -> Number:
        parent = tree.parents[child]
        entered, mass, last = step(parent, len(entered_by[parent]))
        return entered[child] if child in entered else mass * last[tree.token_ids[child]]

    def probe_chance(probe: int) -> Number:
        parent = tree.parents[probe]
        _, mass, last = step(parent, len(entered_by[parent]))
        drawn = [tree.token_ids[child] for child in entered_by[parent] if tree.is_probe[child]]
        token_ids, law = reduce(law_without, drawn, tree.probe_laws[parent])
        return mass * np.minimum(last[list(token_ids)], law).sum()

    length: Number = as_number(1, laws[0])
    for row in order:
        here: Number = 1
        if tree.is_probe[row]:
            here = probe_chance(row)
        entered_by[tree.parents[row]].append(row)
        above = tree.parents[row] if tree.is_probe[row] else row
        while above != 0:
            here *= chance(above)
            above = tree.parents[above]
        length += here
    return length

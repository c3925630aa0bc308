"""The verification walk: which drafted tokens are kept, and the token the target adds itself.

Words: a drafted token is *accepted* when the walk goes down to it. At a node whose probes were turned down the next
token comes from the *residual* law; drawn from there it is the *recovered* token. The token that ends the walk, drawn
from the target's law or from the residual and not in the tree, is the *bonus* token. The output is the accepted tokens
and then the bonus token, at least one token in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from reference.api import Margin, Verification, VerifyNoise, VerifyResult
from reference.numbers import Number, Vector, as_number, check_law, inverse_cdf
from reference.tree import DraftTree, ProbeLaw, law_without


def verify(
    tree: DraftTree,
    target_probs: Sequence[Sequence[Number]] | np.ndarray,
    noise: VerifyNoise,
    rule: Verification = "rheo",
    margins: list[Margin] | None = None,
) -> VerifyResult:
    """Walk the tree (docs/algorithm.md, "Verification").

    Args:
        tree: the draft tree.
        target_probs: [rows, vocab_size] the target's law after each row's path, tempered and filtered; rows sum to one.
        noise: uniforms by tree row, at least one per row.
        rule: "rheo" tests a node's probes first; "rrsw" its leads, then the probes, then its fills.
        margins: when a list is given, receives one record per float decision.

    Raises:
        ValueError: wrong shapes, a row that is no law (the row is named), a token beyond the vocabulary, an unknown
            rule.
    """
    check_rule(rule)
    laws = check_target(tree, target_probs)
    if len(noise.accept_uniforms) < len(tree):
        raise ValueError(f"noise has {len(noise.accept_uniforms)} rows, the tree has {len(tree)}")
    columns = noise.accept_by_probe.shape[1]
    if columns < tree.most_probes:
        raise ValueError(f"accept_uniforms has {columns} column(s), the tree has a node with {tree.most_probes} probes")

    emitted: list[int] = []
    accepted: list[int] = []
    row = 0
    while True:
        token, child = _step(tree, row, laws[row], noise, rule, margins)
        emitted.append(token)
        if child is None:
            return VerifyResult(tuple(emitted), tuple(accepted))
        accepted.append(child)
        row = child


def _step(
    tree: DraftTree, row: int, law: Vector, noise: VerifyNoise, rule: Verification, margins: list[Margin] | None
) -> tuple[int, int | None]:
    """One node of the walk: the emitted token, and the child it leads to (None: the walk ends)."""
    children = {tree.token_ids[child]: child for child in tree.children(row)}
    probes = tree.probe_children(row)

    def draw(weights: Vector, uniform: float) -> int:
        index, margin = inverse_cdf(weights, uniform)
        if margins is not None:
            margins.append(Margin("draw", margin, f"row {row}"))
        return index

    if probes and rule == "rrsw":
        leads = [child for child in children.values() if child < probes[0]]
        if leads:
            token = draw(law, noise.lead_uniforms[row])
            if children.get(token) in leads:
                return token, children[token]
            law = without_tokens(law, [tree.token_ids[lead] for lead in leads])
    probe_law = tree.probe_laws.get(row, ((), law))
    for index, probe in enumerate(probes):
        token = tree.token_ids[probe]
        q_probe = probe_law[1][probe_law[0].index(token)]
        accept_uniform = as_number(noise.accept_by_probe[row, index], law)
        if margins is not None:
            margins.append(Margin("accept", float(abs(accept_uniform * q_probe - law[token])), f"row {row}"))
        if accepts(accept_uniform, q_probe, law[token]):
            return token, probe
        law, probe_law = residual(law, probe_law), law_without(probe_law, token)
        del children[token]
    token = draw(law, noise.residual_uniforms[row])
    return token, children.get(token)


def accepts(accept_uniform: Number, draft_prob: Number, target_prob: Number) -> bool:
    """Whether a probe is accepted; strict, so that a uniform of exactly 0 never accepts an impossible token."""
    return bool(accept_uniform * draft_prob < target_prob)


def residual(target_law: Vector, probe_law: ProbeLaw) -> Vector:
    """norm(max(0, p - q~)); p itself when rounding left no mass.

    A probe's own token never survives here: it is turned down only where q~ > p.
    """
    token_ids, q = probe_law
    rest = target_law.copy()
    index = np.array(token_ids)
    rest[index] = np.maximum(rest[index] - q, 0)
    total = rest.sum()
    return rest / total if total > 0 else target_law


def without_tokens(target_law: Vector, token_ids: Sequence[int]) -> Vector:
    """p without some tokens, normalised; p itself when nothing is left (the walk then cannot have come here)."""
    rest = target_law.copy()
    rest[list(token_ids)] = 0
    total = rest.sum()
    return rest / total if total > 0 else target_law


def check_rule(rule: str) -> None:
    """Raises what ``verify`` says it raises about ``rule``."""
    if rule not in get_args(Verification):
        raise ValueError(f"rule must be one of {get_args(Verification)}, got {rule!r}")


def check_target(tree: DraftTree, target_probs: Sequence[Sequence[Number] | Vector] | np.ndarray) -> list[Vector]:
    """One checked law per row of the tree; raises what ``verify`` says it raises about ``target_probs``."""
    if len(target_probs) != len(tree):
        raise ValueError(f"target_probs has {len(target_probs)} rows, the tree has {len(tree)}")
    laws = [check_law(law, f"target_probs row {row}: the law") for row, law in enumerate(target_probs)]
    sizes = {law.size for law in laws}
    if len(sizes) != 1:
        raise ValueError(f"target_probs rows have different lengths: {sorted(sizes)}")
    vocab_size = sizes.pop()
    for row in range(len(tree)):
        ids = (tree.token_ids[row], *tree.probe_laws.get(row, ((), ()))[0])
        if max(ids) >= vocab_size:
            raise ValueError(f"row {row} speaks of token {max(ids)}, but target_probs has {vocab_size} columns")
    return laws

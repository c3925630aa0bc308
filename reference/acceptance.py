"""How often a single layer accepts: Theorem 3 and the bound that no verification can beat (docs/acceptance.md).

One node, all of its slots in the tree, no further level. The rate is the probability that the next token is one of the
slots' tokens, i.e. that the walk goes down. Tokens are ranked by q; x_1, x_2, ... as everywhere. The results are exact
for Fractions and float64 for floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from reference.api import DraftLaw, RheoConfig
from reference.numbers import Number, Vector, check_law
from reference.slots import SlotPlan, plan_slots

LayerRule = Literal["topk", "rheo", "rrsw"]


def single_layer(
    q: Sequence[Number] | Vector,
    p: Sequence[Number] | Vector,
    branching: int,
    lead_tokens: int,
    rule: LayerRule = "rheo",
    sampling: Sequence[Number] | Vector | None = None,
) -> Number:
    """The acceptance rate of one layer.

    With K = ``branching``, m = ``lead_tokens``, q~ the probe's law, absent tokens and 0/0 counting 0:

    - "topk": p(x_1) + ... + p(x_K).
    - "rheo": p(x_1..x_{K-1}) + sum_{j>=K} min(p, q~)(x_j) + rho max(0, p - q~)(x_K), where
      rho = sum_{j=m+1..K} max(0, q~ - p)(x_j) / sum_{j>m} max(0, q~ - p)(x_j).
      The slots are x_1..x_K when the probe is one of them, else x_1..x_{K-1} and the probe: only x_K is at stake.
    - "rrsw": lambda + (1 - lambda) R, lambda = p(x_1..x_m), R being what "rheo" accepts at the probe and the fills
      alone when the target's law is p without the leads, normalised.

    Args:
        q: [vocab_size] the draft's construction law, in token ids, not necessarily sorted.
        p: [vocab_size] the target's law.
        branching: K >= 1.
        lead_tokens: m >= 0; from K on there is no probe and every rule is "topk".
        rule: which proposal and verification.
        sampling: [vocab_size] q_T before the leads are removed; None means q itself.

    Raises:
        ValueError: not laws, lengths that differ, sampling mass where q has none, or a parameter out of its range.
    """
    if rule not in get_args(LayerRule):
        raise ValueError(f"rule must be one of {get_args(LayerRule)}, got {rule!r}")
    target, plan = _layer(q, p, branching, lead_tokens, sampling)
    if rule == "topk" or plan.probe_law is None:
        return target[list(plan.tokens[:branching])].sum()
    leads, tail = list(plan.tokens[:lead_tokens]), list(plan.tokens[lead_tokens:])
    lead_rate, q_tail = target[leads].sum(), plan.probe_law[1]
    if rule == "rheo":
        return lead_rate + _tail_rate(target[tail], q_tail, branching - lead_tokens)
    left = np.delete(target, leads).sum()
    return lead_rate + (left * _tail_rate(target[tail] / left, q_tail, branching - lead_tokens) if left > 0 else 0)


def _tail_rate(p_tail: Vector, q_tail: Vector, slots: int) -> Number:
    """What the probe and the fills accept together: the sums of "rheo" behind the leads, for ``slots`` = K - m."""
    last = slots - 1  # where x_K stands in the tail
    turned_down = np.maximum(q_tail - p_tail, 0)
    rate = p_tail[:last].sum() + np.minimum(p_tail, q_tail)[last:].sum()
    if last < p_tail.size and turned_down.sum() > 0:
        rate += turned_down[:slots].sum() / turned_down.sum() * max(p_tail[last] - q_tail[last], 0)
    return rate


def optimal_transport(
    q: Sequence[Number] | Vector,
    p: Sequence[Number] | Vector,
    branching: int,
    lead_tokens: int,
    sampling: Sequence[Number] | Vector | None = None,
) -> Number:
    """The best acceptance rate that any lossless verification reaches over the same random slots.

    p(x_1..x_{K-1}) + min(p(x_K), sum_{j=m+1..K} q~(x_j)) + sum_{j>K} min(p, q~)(x_j): the value of the transport
    problem between the slots, drawn by the proposal, and the target's token.

    Args:
        q, p, branching, lead_tokens, sampling: as for ``single_layer``.

    Raises:
        ValueError: as ``single_layer``.
    """
    target, plan = _layer(q, p, branching, lead_tokens, sampling)
    if plan.probe_law is None:
        return target[list(plan.tokens[:branching])].sum()
    p_tail, q_tail = target[list(plan.tokens[lead_tokens:])], plan.probe_law[1]
    past_last = branching - lead_tokens  # where x_{K+1} stands in the tail
    rate = target[list(plan.tokens[: branching - 1])].sum() + np.minimum(p_tail, q_tail)[past_last:].sum()
    if past_last <= p_tail.size:
        rate += min(p_tail[past_last - 1], q_tail[:past_last].sum())
    return rate


def _layer(
    q: Sequence[Number] | Vector,
    p: Sequence[Number] | Vector,
    branching: int,
    lead_tokens: int,
    sampling: Sequence[Number] | Vector | None,
) -> tuple[Vector, SlotPlan]:
    config = RheoConfig(lead_tokens=lead_tokens, branching=branching, depth=1, tree_size=branching)
    draft = DraftLaw(q, q if sampling is None else sampling)
    target = check_law(p, "p")
    if target.size != draft.vocab_size:
        raise ValueError(f"p has {target.size} entries and q has {draft.vocab_size}; they must agree")
    return target, plan_slots(config, draft)

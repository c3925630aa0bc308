"""The slots of one node: leads, probe, fills, and the two identities of the probe.

Everything except the probe's token is a function of the draft's law, so it is *planned* first (``plan_slots``); the
probe is drawn next (``draw_probe``) and the slots follow (``SlotPlan.slots``). That split is what the proof needs: a
probe's weight and place are known before its token is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reference.api import DraftLaw, Margin, RheoConfig, softmax
from reference.numbers import Number, Vector, inverse_cdf
from reference.tree import ProbeLaw


@dataclass(frozen=True)
class Slot:
    """One child offered at a node: its token, its weight in path scores, and whether it is the probe."""

    token_id: int
    weight: Number
    is_probe: bool


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """What the slots of a node are, up to the probe's token.

    Attributes:
        tokens: x_1, x_2, ...: all tokens with q > 0, by q, ties by lower token id.
        weights: q of each of them.
        num_slots: min(K, number of ranked tokens).
        lead_tokens: how many of the slots are leads; all of them when there is no probe.
        probe_law: (token ids in rank order, q~); None when there is no probe.
        proxy: the probe's weight in path scores; None when there is no probe.
    """

    tokens: tuple[int, ...]
    weights: tuple[Number, ...]
    num_slots: int
    lead_tokens: int
    probe_law: ProbeLaw | None
    proxy: Number | None

    def slots(self, probe_token: int | None = None) -> list[Slot]:
        """The node's slots in schedule order: leads, probe, fills.

        Args:
            probe_token: the token drawn from ``probe_law``; None exactly when there is no probe.
        """
        if (self.probe_law is None) != (probe_token is None):
            raise ValueError(
                f"probe_token is {probe_token}, but this node has {'no' if self.probe_law is None else 'a'} probe"
            )
        ranked = [Slot(token, weight, False) for token, weight in zip(self.tokens, self.weights, strict=True)]
        if probe_token is None or self.proxy is None:
            return ranked[: self.num_slots]
        leads = ranked[: self.lead_tokens]
        fills = [slot for slot in ranked[self.lead_tokens :] if slot.token_id != probe_token]
        return [*leads, Slot(probe_token, self.proxy, True), *fills][: self.num_slots]


def plan_slots(config: RheoConfig, law: DraftLaw) -> SlotPlan:
    """Plan the slots of one node (docs/algorithm.md, "Slots of one node")."""
    ranked = law.ranked_tokens()
    q = law.construction[ranked]
    num_slots = min(config.branching, ranked.size)
    lead_tokens = config.lead_tokens

    probe_law, proxy = None, None
    if config.proposal == "rheo" and lead_tokens < min(config.branching, ranked.size):
        probabilities = tail_law(law, ranked[lead_tokens:])
        if probabilities is not None:
            probe_law = (tuple(int(token) for token in ranked[lead_tokens:]), probabilities)
            proxy = proxy_weight(q, lead_tokens)
    return SlotPlan(
        tokens=tuple(int(token) for token in ranked),
        weights=tuple(q),
        num_slots=num_slots,
        lead_tokens=num_slots if probe_law is None else lead_tokens,
        probe_law=probe_law,
        proxy=proxy,
    )


def tail_law(law: DraftLaw, tail: np.ndarray) -> Vector | None:
    """q~ over the tail tokens: the sampling law without the leads, or None for a greedy request or a massless tail.

    A law made of logits softmaxes the tail's own logits over T, so that a small T cannot erase a tail the leads dwarf.
    """
    if law.sampling is None:
        return None
    if law.kept_logits is not None:
        return softmax(law.kept_logits[tail] / law.temperature)
    mass = law.sampling[tail]
    total = mass.sum()
    return mass / total if total > 0 else None


def proxy_weight(q: Vector, lead_tokens: int) -> Number:
    """The probe's weight: min(q(x_m), z), z the mass behind the leads; for m = 0 q(x_1).

    The clamp into [q(x_{m+1}), q(x_m)] holds exactly anyway and guards the float sum z against its rounding.
    """
    ceiling = q[max(lead_tokens, 1) - 1]
    tail_mass = q[lead_tokens:].sum()
    return max(q[lead_tokens], min(ceiling, tail_mass))


def draw_probe(plan: SlotPlan, uniform: float, where: str = "", margins: list[Margin] | None = None) -> int | None:
    """Draw the probe's token from q~ by inverse CDF in rank order; None when the node has no probe.

    Args:
        plan: the node's slots.
        uniform: in [0, 1).
        where: how the margin record names the node.
        margins: receives the draw's margin.
    """
    if plan.probe_law is None:
        return None
    token_ids, probabilities = plan.probe_law
    index, margin = inverse_cdf(probabilities, uniform)
    if margins is not None:
        margins.append(Margin("draw", margin, where))
    return token_ids[index]

"""The slots of one node: leads, probes, fills, and the two identities of a probe.

Everything except the probes' tokens is a function of the draft's law, so it is *planned* first (``plan_slots``); the
probes are drawn next (``draw_probes``) and the slots follow (``SlotPlan.slots``). That split is what the proof needs: a
probe's weight and place are known before its token is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reference.api import DraftLaw, Margin, RheoConfig, softmax
from reference.numbers import Number, Vector, inverse_cdf
from reference.tree import ProbeLaw


@dataclass(frozen=True)
class Slot:
    """One child offered at a node: its token, its weight in path scores, and whether it is a probe."""

    token_id: int
    weight: Number
    is_probe: bool


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """What the slots of a node are, up to the probes' tokens.

    Attributes:
        tokens: x_1, x_2, ...: all tokens with q > 0, by q, ties by lower token id.
        weights: q of each of them; in a static tree all 1.
        num_slots: min(K, number of ranked tokens); in a static tree no more than there are tokens to sample.
        lead_tokens: how many of the slots are leads; all of them when there is no probe.
        num_probes: how many of the slots are probes.
        probe_law: (token ids in rank order, q~), the law of the first probe; None when there is no probe.
        proxy: the first probe's weight in path scores; None when there is no probe.
    """

    tokens: tuple[int, ...]
    weights: tuple[Number, ...]
    num_slots: int
    lead_tokens: int
    num_probes: int
    probe_law: ProbeLaw | None
    proxy: Number | None

    def slots(self, probe_tokens: Sequence[int] = ()) -> list[Slot]:
        """The node's slots in schedule order: leads, probes, fills.

        Args:
            probe_tokens: the ``num_probes`` tokens drawn, in drawing order.

        Raises:
            ValueError: another number of tokens.
        """
        if len(probe_tokens) != self.num_probes:
            raise ValueError(f"probe_tokens are {list(probe_tokens)}, but this node has {self.num_probes} probe(s)")
        ranked = [Slot(token, weight, False) for token, weight in zip(self.tokens, self.weights, strict=True)]
        leads = ranked[: self.lead_tokens]
        probes = [Slot(token, self.probe_weight(probe_tokens[:j]), True) for j, token in enumerate(probe_tokens)]
        fills = [slot for slot in ranked[self.lead_tokens :] if slot.token_id not in probe_tokens]
        return [*leads, *probes, *fills][: self.num_slots]

    def probe_weight(self, drawn: Sequence[int]) -> Number:
        """The weight of the probe that is drawn after the probes ``drawn``: a function of their tokens, not of its own.

        It stands for the tail that they left, min(weight of the probe before, sum of q over that tail), clamped below
        by the q of the best token left, so that weights never increase along the schedule.
        """
        if not drawn:
            assert self.proxy is not None, "this node has no probe"
            return self.proxy
        tail = zip(self.tokens[self.lead_tokens :], self.weights[self.lead_tokens :], strict=True)
        left = np.array([weight for token, weight in tail if token not in drawn])
        return max(left[0], min(self.probe_weight(drawn[:-1]), left.sum()))

    def law_after(self, drawn: Sequence[int]) -> ProbeLaw:
        """The weights that draw the next probe: q~ with the tokens drawn so far at zero, not renormalised."""
        assert self.probe_law is not None, "this node has no probe"
        token_ids, probabilities = self.probe_law
        if not drawn:
            return self.probe_law
        left = probabilities.copy()
        for token in drawn:
            left[token_ids.index(token)] *= 0
        return token_ids, left


def plan_slots(config: RheoConfig, law: DraftLaw, slots: int | None = None) -> SlotPlan:
    """Plan the slots of one node (docs/algorithm.md, "Slots of one node").

    Args:
        config: the tree's shape.
        law: the draft's law at the node.
        slots: how many children a static tree gives the node; None is ``config.branching``.
    """
    ranked = law.ranked_tokens()
    static = config.proposal == "static"
    q = law.construction[ranked]
    weights = q / q if static else q
    num_slots = min(config.branching if slots is None else slots, ranked.size)
    lead_tokens = config.lead_tokens

    probe_law, proxy, num_probes = None, None, 0
    if config.proposal != "topk" and lead_tokens < num_slots:
        probabilities = tail_law(law, ranked[lead_tokens:])
        if probabilities is not None:
            possible = int((probabilities > 0).sum())
            num_slots = min(num_slots, possible) if static else num_slots
            num_probes = min(config.probes, num_slots - lead_tokens, possible)
            probe_law = (tuple(int(token) for token in ranked[lead_tokens:]), probabilities)
            proxy = proxy_weight(weights, lead_tokens)
    return SlotPlan(
        tokens=tuple(int(token) for token in ranked),
        weights=tuple(weights),
        num_slots=num_slots,
        lead_tokens=num_slots if probe_law is None else lead_tokens,
        num_probes=num_probes,
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
    """The first probe's weight: min(q(x_m), z), z the mass behind the leads; for m = 0 q(x_1).

    The clamp into [q(x_{m+1}), q(x_m)] holds exactly anyway and guards the float sum z against its rounding.
    """
    ceiling = q[max(lead_tokens, 1) - 1]
    tail_mass = q[lead_tokens:].sum()
    return max(q[lead_tokens], min(ceiling, tail_mass))


def draw_probes(
    plan: SlotPlan, uniforms: Sequence[float], where: str = "", margins: list[Margin] | None = None
) -> tuple[int, ...]:
    """Draw the probes' tokens without replacement, each by inverse CDF in rank order; empty when there is no probe.

    Args:
        plan: the node's slots.
        uniforms: in [0, 1), one for each probe; further ones are ignored.
        where: how the margin records name the node.
        margins: receives the draws' margins.
    """
    drawn: tuple[int, ...] = ()
    for uniform in uniforms[: plan.num_probes]:
        token_ids, weights = plan.law_after(drawn)
        index, margin = inverse_cdf(weights, uniform)
        if margins is not None:
            margins.append(Margin("draw", margin, where))
        drawn = (*drawn, token_ids[index])
    return drawn

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
from reference.weights import lead_count


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
        weights: of each of them as a lead: q, or its chance by calibrated curves; in a static tree all 1.
        fill_weights: of each of them as a fill, before the cap at the probes'.
        masses: of each of them, what a proxy is made of: q.
        num_slots: min(K, number of ranked tokens); in a static tree no more than there are tokens to sample.
        lead_tokens: how many of the slots are leads; all of them when there is no probe.
        num_probes: how many of the slots are probes.
        probe_law: (token ids in rank order, q~), the law of the first probe; None when there is no probe.
        ceiling: what the first probe's weight may not exceed.
        promises: the probes' weights by calibrated curves, before the ceiling; None where they are proxies.
    """

    tokens: tuple[int, ...]
    weights: tuple[Number, ...]
    fill_weights: tuple[Number, ...]
    masses: tuple[Number, ...]
    num_slots: int
    lead_tokens: int
    num_probes: int
    probe_law: ProbeLaw | None
    ceiling: Number
    promises: tuple[Number, ...] | None

    @property
    def proxy(self) -> Number | None:
        """The first probe's weight in path scores; None when there is no probe."""
        return None if self.probe_law is None else self.probe_weight(())

    def slots(self, probe_tokens: Sequence[int] = ()) -> list[Slot]:
        """The node's slots in schedule order: leads, probes, fills.

        Args:
            probe_tokens: the ``num_probes`` tokens drawn, in drawing order.

        Raises:
            ValueError: another number of tokens.
        """
        if len(probe_tokens) != self.num_probes:
            raise ValueError(f"probe_tokens are {list(probe_tokens)}, but this node has {self.num_probes} probe(s)")
        m = self.lead_tokens
        leads = [Slot(token, weight, False) for token, weight in zip(self.tokens[:m], self.weights[:m], strict=True)]
        probes = [Slot(token, self.probe_weight(probe_tokens[:j]), True) for j, token in enumerate(probe_tokens)]
        # Whatever the last probe's token is, its fills come behind it.
        fills = [
            Slot(token, min(weight, probes[-1].weight) if probes else weight, False)
            for token, weight in zip(self.tokens[m:], self.fill_weights[m:], strict=True)
            if token not in probe_tokens
        ]
        return [*leads, *probes, *fills][: self.num_slots]

    def probe_weight(self, drawn: Sequence[int]) -> Number:
        """The weight of the probe that is drawn after the probes ``drawn``: a function of their tokens, not of its own.

        A proxy stands for the tail that they left, see ``proxy_weight``; by calibrated curves only their number counts.
        """
        ceiling = self.probe_weight(drawn[:-1]) if drawn else self.ceiling
        if self.promises is not None:
            return min(ceiling, self.promises[len(drawn)])
        tail = zip(self.tokens[self.lead_tokens :], self.masses[self.lead_tokens :], strict=True)
        return proxy_weight(np.array([mass for token, mass in tail if token not in drawn]), ceiling)

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


def plan_slots(
    config: RheoConfig,
    law: DraftLaw,
    slots: int | None = None,
    where: str = "",
    margins: list[Margin] | None = None,
    score: Number = 1,
) -> SlotPlan:
    """Plan the slots of one node (docs/algorithm.md, "Slots of one node").

    Args:
        config: the tree's shape.
        law: the draft's law at the node.
        slots: how many children a static tree gives the node; None is ``config.branching``.
        where: how the margin records name the node.
        margins: receives the margins of choosing m, where that is "auto".
        score: the node's path score.
    """

    def record(distance: float) -> None:
        if margins is not None:
            margins.append(Margin("order", distance, where))

    ranked = law.ranked_tokens()
    static = config.proposal == "static"
    q = law.construction[ranked]
    one = q[0] / q[0]
    num_slots = min(config.branching if slots is None else slots, ranked.size)
    lead_tokens = num_slots if config.lead_tokens == "auto" else config.lead_tokens
    if config.weights is None:
        masses = q / q if static else q
        weights = fill_weights = tuple(masses)
        promises: tuple[Number, ...] | None = None
        ceiling = masses[max(lead_tokens, 1) - 1 : max(lead_tokens, 1)].min(initial=one)
    else:
        curves = config.weights.at(0.0 if law.sampling is None else law.temperature)
        masses = q if law.sampling is None else law.sampling[ranked]
        weights, fill_weights = tuple(map(curves.lead, masses)), tuple(map(curves.fill, masses))
        ceiling = one
        if config.lead_tokens == "auto" and law.sampling is not None:
            drawable = [mass for mass in masses if mass > 0]
            lead_tokens = lead_count(curves, drawable, num_slots, score, config.node_price, record, config.probes)
        # rrsw verifies siblings in the total order, so there the leads have to stay before the probe.
        if config.verification == "rrsw" and lead_tokens:
            ceiling = min(weights[:lead_tokens])
        promises = tuple(curves.probes(sorted(masses[lead_tokens:], reverse=True)[: config.probes]))

    probe_law, num_probes = None, 0
    if config.proposal != "topk" and lead_tokens < num_slots:
        probabilities = tail_law(law, ranked[lead_tokens:])
        if probabilities is not None:
            possible = int((probabilities > 0).sum())
            num_slots = min(num_slots, possible) if static else num_slots
            num_probes = min(config.probes, num_slots - lead_tokens, possible)
            probe_law = (tuple(int(token) for token in ranked[lead_tokens:]), probabilities)
    return SlotPlan(
        tokens=tuple(int(token) for token in ranked),
        weights=weights,
        fill_weights=fill_weights,
        masses=tuple(masses),
        num_slots=num_slots,
        lead_tokens=num_slots if probe_law is None else lead_tokens,
        num_probes=num_probes,
        probe_law=probe_law,
        ceiling=ceiling,
        promises=promises,
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


def proxy_weight(tail: Vector, ceiling: Number) -> Number:
    """A probe's weight by the paper: min(q(x_m), z), z the mass of its tail; for later probes min(the one before, z).

    Args:
        tail: q of the tokens it may be, the best first.
        ceiling: q(x_m), for m = 0 q(x_1); for later probes the weight of the one before.

    The clamp below, at the best token's q, keeps every fill behind it.
    """
    return max(tail[0], min(ceiling, tail.sum()))


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

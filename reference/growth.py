"""Growth of one draft tree: level by level, the best of a level expanded, the best of all kept.

A static tree grows in the same way. Its weights are all 1, so the order is level by level; what is expanded is not the
best of a level but what the topology says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reference.api import DraftLaw, GrowthNoise, Margin, RheoConfig
from reference.numbers import Number, log
from reference.slots import SlotPlan, draw_probes, plan_slots
from reference.tree import DraftTree, ProbeLaw

Draft = Callable[[tuple[int, ...]], DraftLaw]  # path, the tokens below the root -> the draft's law after it
ChooseProbes = Callable[[SlotPlan, int, int], Sequence[int]]  # (plan, level it offers, rank in its beam) -> tokens


@dataclass(frozen=True, eq=False)
class OfferedNode:
    """A node offered somewhere in the tree, kept or not.

    Attributes:
        path: tokens below the root, itself included.
        parent: the offered node above it; None for the root.
        level: 1 for the root's children.
        parent_rank: the parent's rank in its beam.
        slot: place among the parent's slots.
        is_probe: whether its token was sampled.
        score: path score.
    """

    path: tuple[int, ...]
    parent: OfferedNode | None
    level: int
    parent_rank: int
    slot: int
    is_probe: bool
    score: Number

    @property
    def slot_path(self) -> tuple[int, ...]:
        """Slots from below the root, its own included: which node of a topology it is."""
        return (*(self.parent.slot_path if self.parent else ()), self.slot)


def order_key(node: OfferedNode) -> tuple[Number, int, int, int]:
    """The one strict total order, best first: score, then level, parent's rank, slot. Never the token id."""
    return (-node.score, node.level, node.parent_rank, node.slot)


def grow_tree(config: RheoConfig, draft: Draft, noise: GrowthNoise, margins: list[Margin] | None = None) -> DraftTree:
    """Grow one draft tree.

    Args:
        config: the tree's shape.
        draft: path below the root -> the draft's law there; called once per expanded node.
        noise: ``probe_uniforms`` of at least [depth, beam], or [depth, beam, probes].
        margins: when a list is given, receives one record per float decision.

    Returns:
        The tree of at most ``tree_size`` draft nodes, numbered by level, parent's rank, slot.

    Raises:
        ValueError: too few uniforms, or an invalid law.
    """
    have = noise.probe_uniforms.shape
    uniforms = noise.probe_uniforms if len(have) == 3 else noise.probe_uniforms[:, :, None]
    names, needed = ("depth", "beam", "probes"), (config.depth, config.beam_width, config.probes)
    if any(got < least for got, least in zip(uniforms.shape, needed, strict=True)):
        dims = len(have) if config.probes == 1 else 3
        listed = ", ".join(names[: dims - 1]) + f" and {names[dims - 1]}"
        raise ValueError(f"probe_uniforms has shape {have}; {listed} need at least {needed[:dims]}")

    def choose(plan: SlotPlan, level: int, rank: int) -> Sequence[int]:
        return draw_probes(plan, uniforms[level - 1, rank].tolist(), f"level {level} rank {rank}", margins)

    return grow_with_probes(config, draft, choose, margins)


def grow_with_probes(
    config: RheoConfig, draft: Draft, choose_probes: ChooseProbes, margins: list[Margin] | None = None
) -> DraftTree:
    """``grow_tree`` with the probes chosen by a function: what the proofs enumerate."""
    shape = config.shape
    offered: list[OfferedNode] = []
    probe_laws: dict[tuple[int, ...], ProbeLaw] = {}
    beam: dict[int, OfferedNode | None] = {0: None}  # by rank; the root
    for level in range(1, config.depth + 1):
        offered_here: list[OfferedNode] = []
        for rank, node in beam.items():
            path = node.path if node else ()
            children = shape.children[level - 1][rank] if shape else None
            score = node.score if node else 1
            plan = plan_slots(config, draft(path), children, f"level {level} rank {rank}", margins, score)
            slots = plan.slots(choose_probes(plan, level, rank))
            if plan.probe_law is not None:
                probe_laws[path] = plan.probe_law
            here = [
                OfferedNode((*path, slot.token_id), node, level, rank, index, slot.is_probe, score * slot.weight)
                for index, slot in enumerate(slots)
            ]
            if config.score_threshold > 0:
                _record_threshold(here, config.score_threshold, f"level {level} rank {rank}", margins)
            offered_here += [offered for offered in here if offered.score >= config.score_threshold]
        offered += offered_here
        if level == config.depth:
            break
        if shape:
            there = {node.slot_path: node for node in offered_here}
            beam = {rank: there[inner] for rank, inner in enumerate(shape.inner[level]) if inner in there}
        else:
            ranking = sorted(offered_here, key=order_key)
            if config.level_threshold > 0:
                _record_threshold(ranking[:1], config.level_threshold, f"best of level {level}", margins)
            if not ranking or ranking[0].score < config.level_threshold:
                break
            beam = dict(enumerate(ranking[: config.beam_width]))
            _record_order(ranking, range(1, config.beam_width + 1), f"beam of level {level}", margins)
    ranking = sorted(offered, key=order_key)
    _record_order(ranking, range(config.budget, config.budget + 1), "budget", margins)
    return build_tree(ranking[: config.budget], probe_laws)


def build_tree(kept: list[OfferedNode], probe_laws: dict[tuple[int, ...], ProbeLaw]) -> DraftTree:
    """Number the kept nodes level-major: level, parent's rank, slot."""
    nodes = sorted(kept, key=lambda node: (node.level, node.parent_rank, node.slot))
    row_of: dict[tuple[int, ...], int] = {(): 0} | {node.path: row for row, node in enumerate(nodes, start=1)}
    return DraftTree(
        token_ids=(-1, *(node.path[-1] for node in nodes)),
        parents=(-1, *(row_of[node.path[:-1]] for node in nodes)),
        depths=(0, *(node.level for node in nodes)),
        slots=(0, *(node.slot for node in nodes)),
        is_probe=(False, *(node.is_probe for node in nodes)),
        scores=(1, *(node.score for node in nodes)),
        probe_laws={row_of[node.path[:-1]]: probe_laws[node.path[:-1]] for node in nodes if node.is_probe},
    )


def _record_threshold(nodes: list[OfferedNode], threshold: Number, where: str, margins: list[Margin] | None) -> None:
    """Record how close each score is to the threshold."""
    if margins is not None:
        for node in nodes:
            distance = 0.0 if node.score == threshold else abs(log(node.score) - log(threshold))
            margins.append(Margin("order", distance, where))


def _record_order(ranking: list[OfferedNode], cuts: range, where: str, margins: list[Margin] | None) -> None:
    """Record how close the neighbours at each cut (between ranking[cut - 1] and ranking[cut]) are."""
    if margins is None:
        return
    for cut in cuts:
        if cut < len(ranking):
            better, worse = ranking[cut - 1].score, ranking[cut].score
            margins.append(Margin("order", 0.0 if better == worse else abs(log(better) - log(worse)), where))

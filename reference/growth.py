"""Growth of one draft tree: level by level, the best of a level expanded, the best of all kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reference.api import DraftLaw, GrowthNoise, Margin, RheoConfig
from reference.numbers import Number, log
from reference.slots import SlotPlan, draw_probe, plan_slots
from reference.tree import DraftTree, ProbeLaw

Draft = Callable[[tuple[int, ...]], DraftLaw]  # path, the tokens below the root -> the draft's law after it
ChooseProbe = Callable[[SlotPlan, int, int], int | None]  # (plan, level it offers, rank in its beam) -> token


@dataclass(frozen=True, eq=False)
class OfferedNode:
    """A node offered somewhere in the tree, kept or not.

    Attributes:
        path: tokens below the root, itself included.
        parent: the offered node above it; None for the root.
        level: 1 for the root's children.
        parent_rank: the parent's rank in its beam.
        slot: place among the parent's slots.
        is_probe: whether it is its parent's sampled token.
        score: path score.
    """

    path: tuple[int, ...]
    parent: OfferedNode | None
    level: int
    parent_rank: int
    slot: int
    is_probe: bool
    score: Number


def order_key(node: OfferedNode) -> tuple[Number, int, int, int]:
    """The one strict total order, best first: score, then level, parent's rank, slot. Never the token id."""
    return (-node.score, node.level, node.parent_rank, node.slot)


def grow_tree(config: RheoConfig, draft: Draft, noise: GrowthNoise, margins: list[Margin] | None = None) -> DraftTree:
    """Grow one draft tree.

    Args:
        config: the tree's shape.
        draft: path below the root -> the draft's law there; called once per expanded node.
        noise: ``probe_uniforms`` of at least [depth, beam].
        margins: when a list is given, receives one record per float decision.

    Returns:
        The tree of at most ``tree_size`` draft nodes, numbered by level, parent's rank, slot.

    Raises:
        ValueError: too few uniforms, or an invalid law.
    """
    needed = (config.depth, config.beam_width)
    have = noise.probe_uniforms.shape
    if have[0] < needed[0] or have[1] < needed[1]:
        raise ValueError(f"probe_uniforms has shape {have}; depth and beam need at least {needed}")

    def choose(plan: SlotPlan, level: int, rank: int) -> int | None:
        return draw_probe(plan, noise.probe_uniforms[level - 1, rank], f"level {level} rank {rank}", margins)

    return grow_with_probes(config, draft, choose, margins)


def grow_with_probes(
    config: RheoConfig, draft: Draft, choose_probe: ChooseProbe, margins: list[Margin] | None = None
) -> DraftTree:
    """``grow_tree`` with the probes chosen by a function: what the proofs enumerate."""
    offered: list[OfferedNode] = []
    probe_laws: dict[tuple[int, ...], ProbeLaw] = {}
    beam: list[OfferedNode | None] = [None]  # the root
    for level in range(1, config.depth + 1):
        offered_here: list[OfferedNode] = []
        for rank, node in enumerate(beam):
            path = node.path if node else ()
            plan = plan_slots(config, draft(path))
            slots = plan.slots(choose_probe(plan, level, rank))
            if plan.probe_law is not None:
                probe_laws[path] = plan.probe_law
            score = node.score if node else 1
            offered_here += [
                OfferedNode((*path, slot.token_id), node, level, rank, index, slot.is_probe, score * slot.weight)
                for index, slot in enumerate(slots)
            ]
        offered += offered_here
        if level < config.depth:
            ranking = sorted(offered_here, key=order_key)
            beam = list(ranking[: config.beam_width])
            _record_order(ranking, range(1, config.beam_width + 1), f"beam of level {level}", margins)
    ranking = sorted(offered, key=order_key)
    _record_order(ranking, range(config.tree_size, config.tree_size + 1), "budget", margins)
    return build_tree(ranking[: config.tree_size], probe_laws)


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


def _record_order(ranking: list[OfferedNode], cuts: range, where: str, margins: list[Margin] | None) -> None:
    """Record how close the neighbours at each cut (between ranking[cut - 1] and ranking[cut]) are."""
    if margins is None:
        return
    for cut in cuts:
        if cut < len(ranking):
            better, worse = ranking[cut - 1].score, ranking[cut].score
            margins.append(Margin("order", 0.0 if better == worse else abs(log(better) - log(worse)), where))

"""Growth of a batch of draft trees, one batched draft forward per level; ``reference.growth`` on tensors.

Offered nodes are laid out in the order (level, parent's rank, slot), so a *stable* descending sort of the path scores
is the total order of the specification. Shapes depend on the configuration alone and nothing is read back from the
device, unless a threshold may end growth: that saves work only where somebody looks. What a static tree expands is
known beforehand; all its scores are 1, so the same order goes level by level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.ranges import arange, constant, offers_of
from optimized.slots import LevelSlots, level_slots
from optimized.trees import LevelNodes, TreeBatch
from optimized.weighing import least_log_score
from reference.api import RheoConfig
from reference.topology import StaticShape

Expand = Callable[[LevelNodes], Tensor]


@dataclass(frozen=True, eq=False)
class Beam:
    """The best nodes that a level offers.

    Attributes:
        nodes: as the drafter wants them.
        offers: [batch, beam] long, ``rank of the parent * branching + slot`` of each.
        log_scores: [batch, beam] logarithm of the path score; -inf where not valid.
    """

    nodes: LevelNodes
    offers: Tensor
    log_scores: Tensor


def grow_trees(
    config: RheoConfig,
    root_logits: Tensor,
    expand: Expand,
    temperatures: Tensor,
    probe_uniforms: Tensor,
    vocab_map: Tensor | None = None,
    steps: GrowthSteps | None = None,
) -> TreeBatch:
    """Grow one draft tree per request.

    Args:
        config: the trees' shape, shared by the batch.
        root_logits: [batch, draft vocab] the draft's logits after the last committed token.
        expand: called for depth 1 .. ``config.depth - 1`` with the nodes to expand; returns their logits
            [batch, beam, draft vocab].
        temperatures: [batch] one per request.
        probe_uniforms: [batch, depth, beam] in [0, 1), or [batch, depth, beam, probes].
        vocab_map: [draft vocab] long, increasing, the target id of each draft id; None when they are the same.
        steps: a backend's own version of the three steps; None for those of this module.

    Raises:
        ValueError: shapes that do not fit together.
    """
    _check_shapes(config, root_logits, temperatures, probe_uniforms, vocab_map)
    steps = steps or TORCH_STEPS
    shape = config.shape
    uniforms = probe_uniforms.double()

    def slots_of(logits: Tensor, parent_scores: Tensor, level: int) -> LevelSlots:
        level_uniforms = uniforms[:, level, : logits.shape[1]]
        children = {"children": shape.children[level]} if shape else {}
        return steps.level_slots(config, logits, parent_scores, temperatures, level_uniforms, vocab_map, **children)

    root_score = torch.zeros(len(root_logits), 1, dtype=torch.float64, device=root_logits.device)
    levels, beams = [slots_of(root_logits.unsqueeze(1), root_score, 0)], []
    for depth in range(1, config.depth):
        beam = steps.select_beam(config, levels[-1], depth)
        if beam.offers.shape[1] == 0:  # no request goes on
            break
        logits = expand(beam.nodes)
        if logits.shape != (*beam.offers.shape, root_logits.shape[-1]):
            expected = [*beam.offers.shape, root_logits.shape[-1]]
            raise ValueError(f"expand returned logits of shape {list(logits.shape)} at depth {depth}, not {expected}")
        levels.append(slots_of(logits, beam.log_scores, depth))
        beams.append(beam)
    return steps.prune(config, levels, beams)


def select_beam(config: RheoConfig, slots: LevelSlots, depth: int) -> Beam:
    """The best ``config.beam_width`` nodes that a level offers (all of them if fewer); of a static tree the inner ones.

    Where a threshold may stop the trees, the beam is as wide as the widest of the batch: this is read from the device.

    Args:
        config: the trees' shape.
        slots: what the level offers.
        depth: the level, 1 for the root's children.
    """
    offered, device = slots.log_scores.flatten(1), slots.log_scores.device
    if config.shape is None:
        ranking = offered.sort(dim=1, descending=True, stable=True)
        width = min(config.beam_width, ranking.indices.shape[1])
        offers, log_scores = ranking.indices[:, :width], ranking.values[:, :width]
    else:
        offers = constant(_static_offers(config.shape, config.branching, depth), device).expand(len(offered), -1)
        log_scores = offered.gather(1, offers)
    valid = log_scores > -torch.inf
    if config.level_threshold > 0:
        valid = valid & (log_scores[:, :1] >= least_log_score(config.level_threshold))
        log_scores = log_scores.masked_fill(~valid, -torch.inf)
    if config.may_stop:
        width = int(valid.sum(dim=1).max())
        offers, log_scores, valid = offers[:, :width], log_scores[:, :width], valid[:, :width]
    nodes = LevelNodes(
        token_ids=torch.where(valid, slots.token_ids.flatten(1).gather(1, offers), 0),
        parents=torch.where(valid, offers // config.branching, 0),
        valid=valid,
        depth=depth,
    )
    return Beam(nodes, offers, log_scores)


def _static_offers(shape: StaticShape, branching: int, level: int) -> tuple[int, ...]:
    """Which of the nodes that a level offers are the topology's inner nodes there, by their place among them."""
    ranks = {inner: rank for rank, inner in enumerate(shape.inner[level - 1])}
    return tuple(ranks[inner[:-1]] * branching + inner[-1] for inner in shape.inner[level])


def prune(config: RheoConfig, levels: Sequence[LevelSlots], beams: Sequence[Beam]) -> TreeBatch:
    """Keep the best ``config.budget`` of all offered nodes and number them level-major.

    Where a threshold may stop the trees, there are as many rows as the largest needs: this is read from the device.

    Args:
        config: the trees' shape.
        levels: what each level offers.
        beams: which of each level's nodes were expanded to offer the next, one fewer than ``levels``.
    """
    batch, device = levels[0].failed.shape[0], levels[0].failed.device
    offered = torch.cat([slots.log_scores.flatten(1) for slots in levels], dim=1)
    count = offered.shape[1]
    size = min(config.budget, count)
    ranking = offered.sort(dim=1, descending=True, stable=True)
    kept = ranking.indices[:, :size]
    kept = torch.where(ranking.values[:, :size] > -torch.inf, kept, count).sort(dim=1).values
    if config.may_stop:
        kept = kept[:, : int((kept < count).sum(dim=1).max())]
    rows = kept.shape[1] + 1
    # Behind all offered nodes stands what is padding, and behind that the root.
    root = constant((count + 1,), device).expand(batch, -1)
    places = torch.cat([root, kept], dim=1)

    def pick(parts: Sequence[Tensor], of_padding: float, of_root: float) -> Tensor:
        ends = constant((of_padding, of_root), device, parts[0].dtype).expand(batch, -1)
        return torch.cat([*(part.flatten(1) for part in parts), ends], dim=1).gather(1, places)

    # An expanded node is known by its place among all expanded nodes; an offered one by its place among all offered.
    widths = [slots.token_ids.shape[1] for slots in levels]
    first_offered = [sum(widths[:level]) * config.branching for level in range(len(levels))]
    depths, slot_numbers, parent_expanded = offers_of(tuple(widths), config.branching, device)[:, places]
    offer_of_expanded = torch.cat(
        [root, *(beam.offers + first for beam, first in zip(beams, first_offered, strict=False))], dim=1
    )

    row_of = torch.zeros(batch, count + 2, dtype=torch.long, device=device)  # 0 for the root and for what is pruned
    row_of.scatter_(1, places, arange(rows, device).expand(batch, -1))
    parents = row_of.gather(1, offer_of_expanded.gather(1, parent_expanded)).masked_fill_(places >= count, -1)

    is_probe = pick([slots.is_probe for slots in levels], False, False)
    law_index = torch.full((batch, rows + 1), -1, device=device)
    law_index.scatter_(1, torch.where(is_probe, parents, rows), parent_expanded)

    return TreeBatch(
        token_ids=pick([slots.token_ids for slots in levels], 0, -1),
        parents=parents,
        depths=depths,
        slots=slot_numbers,
        is_probe=is_probe,
        log_scores=pick([offered], -torch.inf, 0.0),
        num_nodes=(kept < count).sum(dim=1) + 1,
        probe_law_ids=torch.cat([slots.law_ids for slots in levels], dim=1),
        probe_laws=torch.cat([slots.law for slots in levels], dim=1),
        law_index=law_index[:, :rows],
        draft_failed=any_failed(levels, beams),
        depth=len(levels),
        probes=min(config.probes, max(config.branching - config.fewest_leads, 1)),
        law_rows=None if config.weights is None else row_of.gather(1, offer_of_expanded) * _expanded(levels, beams),
        masses=None if config.weights is None else torch.cat([given_masses(slots) for slots in levels], dim=1),
    )


def given_masses(slots: LevelSlots) -> Tensor:
    """The masses of a level's slots, [batch, beam, support]; a backend that left them out is a bug."""
    if slots.masses is None:
        raise ValueError("a backend's slots came without the masses that calibrated weights are learned from")
    return slots.masses


def any_failed(levels: Sequence[LevelSlots], beams: Sequence[Beam]) -> Tensor:
    """[batch] whether the draft failed at a node that was really expanded."""
    failed = torch.cat([slots.failed for slots in levels], dim=1)
    return (failed & _expanded(levels, beams)).any(dim=1)


def _expanded(levels: Sequence[LevelSlots], beams: Sequence[Beam]) -> Tensor:
    """[batch, laws] which places among the expanded nodes are nodes, and not padding."""
    return torch.cat([torch.ones_like(levels[0].failed), *(beam.nodes.valid for beam in beams)], dim=1)


@dataclass(frozen=True)
class GrowthSteps:
    """The three steps of growth, which a backend may bring its own versions of."""

    level_slots: Callable[..., LevelSlots]  # as ``optimized.slots.level_slots``; ``children`` only for static trees
    select_beam: Callable[[RheoConfig, LevelSlots, int], Beam]
    prune: Callable[[RheoConfig, Sequence[LevelSlots], Sequence[Beam]], TreeBatch]


TORCH_STEPS = GrowthSteps(level_slots, select_beam, prune)


def _check_shapes(
    config: RheoConfig, root_logits: Tensor, temperatures: Tensor, probe_uniforms: Tensor, vocab_map: Tensor | None
) -> None:
    if root_logits.ndim != 2:
        raise ValueError(f"root_logits must be [batch, draft vocab], got shape {list(root_logits.shape)}")
    batch, vocab = root_logits.shape
    if temperatures.shape != (batch,):
        raise ValueError(f"temperatures must have shape [{batch}], got {list(temperatures.shape)}")
    shape, least = probe_uniforms.shape, [batch, config.depth, config.beam_width]
    if len(shape) == 4 or config.probes > 1:
        least.append(config.probes)
    if (
        len(shape) != len(least)
        or shape[0] != batch
        or any(have < need for have, need in zip(shape, least, strict=True))
    ):
        raise ValueError(f"probe_uniforms must be at least {least}, got {list(shape)}")
    if vocab_map is not None and vocab_map.shape != (vocab,):
        raise ValueError(f"vocab_map must have shape [{vocab}], got {list(vocab_map.shape)}")

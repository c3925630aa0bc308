"""The kernels behind the interfaces of growth and verification: the backends ``triton`` and ``cupy``.

Import this only where Triton is installed; CuPy is imported when a kernel of it is first launched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optimized.backends import Backend
from optimized.growth import TORCH_STEPS, Beam, GrowthSteps
from optimized.kernels import rows as row_kernels
from optimized.kernels import slots as slot_kernels
from optimized.kernels import tree as tree_kernels
from optimized.kernels.philox import step_uniforms
from optimized.kernels.rows import RowOutcomes
from optimized.ranges import arange
from optimized.slots import LevelSlots
from optimized.target_laws import TargetLaws
from optimized.trees import LevelNodes, TreeBatch
from optimized.verification import Step, VerifyBatch, WalkNoise, child_with, walk_trees
from reference.api import GREEDY_TEMPERATURE, RheoConfig, Verification


def level_slots(
    config: RheoConfig,
    logits: Tensor,
    parent_scores: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    vocab_map: Tensor | None = None,
) -> LevelSlots:
    """``optimized.slots.level_slots`` in Triton: scores and laws are float32."""
    slots = slot_kernels.level_slots(
        logits,
        parent_scores.float(),
        temperatures,
        uniforms,
        vocab_map,
        lead_tokens=config.lead_tokens,
        branching=config.branching,
        support=config.draft_support,
        proposal_is_rheo=config.proposal == "rheo",
        greedy_below=GREEDY_TEMPERATURE,
    )
    return LevelSlots(**slots._asdict())


def select_beam(config: RheoConfig, slots: LevelSlots, depth: int) -> Beam:
    """``optimized.growth.select_beam`` in CUDA C++."""
    found = tree_kernels.select_beam(
        slots.log_scores.flatten(1), slots.token_ids.flatten(1), beam=config.beam_width, branching=config.branching
    )
    nodes = LevelNodes(found.token_ids, found.parents, found.valid, depth)
    return Beam(nodes, found.best, found.best_scores)


def prune(config: RheoConfig, levels: Sequence[LevelSlots], beams: Sequence[Beam]) -> TreeBatch:
    """``optimized.growth.prune`` in CUDA C++."""
    batch, device = levels[0].failed.shape[0], levels[0].failed.device
    offers = [beam.offers for beam in beams] or [torch.zeros(batch, 0, dtype=torch.long, device=device)]
    tree = tree_kernels.prune_tree(
        torch.cat([slots.token_ids.flatten(1) for slots in levels], dim=1),
        torch.cat([slots.log_scores.flatten(1) for slots in levels], dim=1),
        torch.cat([slots.is_probe.flatten(1) for slots in levels], dim=1),
        torch.cat(offers, dim=1),
        torch.cat([slots.failed for slots in levels], dim=1),
        branching=config.branching,
        beam=config.beam_width,
        depth=config.depth,
        tree_size=config.budget,
    )
    fields = tree._asdict()
    return TreeBatch(
        **{name: value for name, value in fields.items() if name != "ancestors"},
        probe_law_ids=torch.cat([slots.law_ids for slots in levels], dim=1),
        probe_laws=torch.cat([slots.law for slots in levels], dim=1),
        depth=config.depth,
        ancestor_bits=tree.ancestors,
    )


def row_outcomes(
    trees: TreeBatch, probe_rows: Tensor, laws: TargetLaws, noise: WalkNoise, rule: Verification
) -> RowOutcomes:
    """What standing at each row of each tree would come to, in Triton: one pass over the target's logits."""
    return row_kernels.row_outcomes(
        laws.masked_logits(),
        laws.batch.temperatures,
        trees.token_ids,
        trees.parents,
        trees.num_nodes,
        probe_rows,
        trees.law_index,
        trees.probe_law_ids,
        trees.probe_laws.float(),
        noise.accept_uniforms,
        noise.residual_uniforms,
        noise.lead_uniforms,
        rule=rule,
        greedy_below=GREEDY_TEMPERATURE,
    )


def verify_with_torch_walk(
    trees: TreeBatch, laws: TargetLaws, noise: WalkNoise, rule: Verification = "rheo"
) -> VerifyBatch:
    """``optimized.verification.verify_trees``: outcomes in Triton, the walk in Torch."""
    probe_rows = trees.probe_rows()
    outcomes = row_outcomes(trees, probe_rows, laws, noise, rule)
    places = arange(trees.rows, probe_rows.device)

    def step_at(row: Tensor) -> Step:
        here = row.unsqueeze(1)

        def at(values: Tensor) -> Tensor:
            return values.gather(1, here).squeeze(1)

        probe = at(probe_rows)
        has_probe = probe > 0
        is_child = trees.parents == here
        token = at(outcomes.token)
        child = child_with(trees, is_child & ~trees.is_probe, token)
        accepts = has_probe & at(outcomes.accepts)
        if rule == "rrsw":
            lead_token = at(outcomes.lead_token)
            lead = child_with(trees, is_child & has_probe.unsqueeze(1) & (places < probe.unsqueeze(1)), lead_token)
            accepts = accepts & (lead == 0)
            token, child = torch.where(lead > 0, lead_token, token), torch.where(lead > 0, lead, child)
        return Step(
            token=torch.where(accepts, trees.token_ids.gather(1, probe.unsqueeze(1)).squeeze(1), token),
            child=torch.where(accepts, probe, child),
            probe_offered=has_probe,
            probe_accepted=accepts,
        )

    walk = walk_trees(trees, step_at)
    _record_failures(laws, outcomes, walk)
    return walk


def verify_with_cuda_walk(
    trees: TreeBatch, laws: TargetLaws, noise: WalkNoise, rule: Verification = "rheo"
) -> VerifyBatch:
    """``optimized.verification.verify_trees``: outcomes in Triton, the walk in CUDA C++."""
    probe_rows = trees.probe_rows()
    outcomes = row_outcomes(trees, probe_rows, laws, noise, rule)
    walked = tree_kernels.walk(
        trees.token_ids,
        trees.parents,
        probe_rows,
        outcomes.accepts,
        outcomes.token,
        outcomes.lead_token,
        depth=trees.depth,
        rule=rule,
    )
    walk = VerifyBatch(**walked._asdict())
    _record_failures(laws, outcomes, walk)
    return walk


def _record_failures(laws: TargetLaws, outcomes: RowOutcomes, walk: VerifyBatch) -> None:
    visited = walk.rows >= 0
    laws.bad |= (outcomes.failed.gather(1, walk.rows.clamp(min=0)) & visited).any(dim=1)


TRITON = Backend(
    "triton",
    GrowthSteps(level_slots, TORCH_STEPS.select_beam, TORCH_STEPS.prune),
    verify_with_torch_walk,
    step_uniforms,
)
CUPY = Backend("cupy", GrowthSteps(level_slots, select_beam, prune), verify_with_cuda_walk, step_uniforms)

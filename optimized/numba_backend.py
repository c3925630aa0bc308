"""The CPU kernels behind the interfaces of growth and verification: the backend ``numba``.

Import this only where Numba is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimized.backends import Backend
from optimized.growth import Beam, GrowthSteps, given_masses
from optimized.kernels.cpu import slots as slot_kernels
from optimized.kernels.cpu import tree as tree_kernels
from optimized.kernels.cpu import walk as walk_kernels
from optimized.slots import LevelSlots
from optimized.trees import LevelNodes, TreeBatch
from optimized.verification import TargetLaw, VerifyBatch, WalkNoise, check_walk
from optimized.weighing import LOWS, TIE, WIDTHS, band_of, curve_table, least_log_score, probe_shares
from reference.api import GREEDY_TEMPERATURE, RheoConfig, Verification
from reference.weights import KNOTS, LEAST, MOST_LEADS

SEGMENTS = np.array([KNOTS, LOWS, WIDTHS])
NO_CURVES = np.zeros((0, 6, len(KNOTS)))
NO_SHARES = np.zeros((0, 0))
NO_MAP = np.zeros(0, dtype=np.int64)


def level_slots(
    config: RheoConfig,
    logits: Tensor,
    parent_scores: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    vocab_map: Tensor | None = None,
) -> LevelSlots:
    """``optimized.slots.level_slots`` in Numba; not for static trees."""
    room = min(config.branching, config.draft_support, logits.shape[-1]) - config.fewest_leads
    of_request = _array(temperatures.double())
    draws = max(min(config.probes, room), 0) if config.proposal == "rheo" else 0
    values, shares = NO_CURVES, NO_SHARES
    if config.weights is not None:
        bands = band_of(temperatures).numpy()
        values = curve_table(config.weights, temperatures.device).numpy()[bands]
        shares = probe_shares(config.weights, config.probes, temperatures.device).numpy()[bands]
    *found, masses = slot_kernels.level_slots(
        _array(logits.float()),
        _array(parent_scores),
        of_request,
        _array(uniforms.double() if uniforms.ndim == 3 else uniforms.double().unsqueeze(2)),
        NO_MAP if vocab_map is None else _array(vocab_map.long()),
        slot_kernels.AUTO if config.lead_tokens == "auto" else config.lead_tokens,
        MOST_LEADS,
        config.branching,
        config.draft_support,
        draws,
        GREEDY_TEMPERATURE,
        least_log_score(config.score_threshold),
        values,
        shares,
        SEGMENTS,
        LEAST,
        config.verification == "rheo",
        float(config.node_price),
        TIE,
    )
    token_ids, log_scores, is_probe, law_ids, law, failed = map(torch.from_numpy, found)
    return LevelSlots(
        token_ids,
        log_scores,
        is_probe,
        law_ids,
        law,
        failed,
        masses=None if config.weights is None else torch.from_numpy(masses),
    )


def select_beam(config: RheoConfig, slots: LevelSlots, depth: int) -> Beam:
    """``optimized.growth.select_beam`` in Numba."""
    found = tree_kernels.select_beam(
        _array(slots.token_ids.flatten(1)),
        _array(slots.log_scores.flatten(1)),
        config.branching,
        config.beam_width,
        least_log_score(config.level_threshold),
        config.may_stop,
    )
    offers, log_scores, token_ids, parents, valid = map(torch.from_numpy, found)
    return Beam(LevelNodes(token_ids, parents, valid, depth), offers, log_scores)


def prune(config: RheoConfig, levels: Sequence[LevelSlots], beams: Sequence[Beam]) -> TreeBatch:
    """``optimized.growth.prune`` in Numba."""
    batch = len(levels[0].failed)
    *found, law_rows = tree_kernels.prune(
        np.concatenate([slots.token_ids.numpy() for slots in levels], axis=1),
        np.concatenate([slots.log_scores.numpy() for slots in levels], axis=1),
        np.concatenate([slots.is_probe.numpy() for slots in levels], axis=1),
        np.concatenate([slots.failed.numpy() for slots in levels], axis=1),
        np.concatenate([np.full((batch, 1), -1), *(beam.offers.numpy() for beam in beams)], axis=1),
        np.concatenate([np.ones((batch, 1), dtype=bool), *(beam.nodes.valid.numpy() for beam in beams)], axis=1),
        np.cumsum([slots.token_ids.shape[1] for slots in levels]),
        config.budget,
        config.may_stop,
    )
    token_ids, parents, depths, slot_numbers, is_probe, log_scores, num_nodes, law_index, draft_failed = map(
        torch.from_numpy, found
    )
    calibrated = config.weights is not None
    return TreeBatch(
        token_ids,
        parents,
        depths,
        slot_numbers,
        is_probe,
        log_scores,
        num_nodes,
        probe_law_ids=torch.cat([slots.law_ids for slots in levels], dim=1),
        probe_laws=torch.cat([slots.law for slots in levels], dim=1),
        law_index=law_index,
        draft_failed=draft_failed,
        depth=len(levels),
        probes=min(config.probes, max(config.branching - config.fewest_leads, 1)),
        law_rows=torch.from_numpy(law_rows) if calibrated else None,
        masses=torch.cat([given_masses(slots) for slots in levels], dim=1) if calibrated else None,
    )


def verify(
    trees: TreeBatch, target_probs: Tensor | TargetLaw, noise: WalkNoise, rule: Verification = "rheo"
) -> VerifyBatch:
    """``optimized.verification.verify_trees`` in Numba, the target's laws in Torch."""
    law_at = check_walk(trees, target_probs, noise, rule)
    shape = (trees.batch_size, trees.depth + 1)
    uniforms = noise.accept_uniforms if noise.accept_uniforms.ndim == 3 else noise.accept_uniforms.unsqueeze(2)
    given = (
        _array(trees.token_ids),
        _array(trees.parents),
        _array(trees.is_probe),
        _array(trees.law_index),
        _array(trees.probe_law_ids),
        _array(trees.probe_laws),
        _array(uniforms.double()),
        _array(noise.residual_uniforms.double()),
        _array(noise.lead_uniforms.double()),
        rule == "rrsw",
    )
    rows, emitted, counts = np.full(shape, -1), np.full(shape, -1), np.zeros(shape[0], dtype=np.int64)
    offered, accepted = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    walk = VerifyBatch(*map(torch.from_numpy, (emitted, rows, counts, offered, accepted)))
    rows[:, 0] = 0
    for level in range(shape[1]):
        law = law_at(walk.rows[:, level].clamp(min=0)).numpy()
        if not walk_kernels.step(level, law, *given, rows, emitted, offered, accepted, counts):
            break
    return walk


def _array(tensor: Tensor) -> NDArray[np.generic]:
    """The same numbers, row after row."""
    return np.ascontiguousarray(tensor.numpy())


NUMBA = Backend("numba", GrowthSteps(level_slots, select_beam, prune), verify)

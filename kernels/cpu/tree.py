"""Beam and pruning on a CPU: ``optimized.growth`` on arrays, one request after the other.

Offered nodes lie in the order (level, parent's rank, slot), so a stable descending sort of the path scores is the
specification's total order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from optimized.kernels.cpu.jit import FLAG, INTEGER, NUMBER, array, jit
from optimized.kernels.cpu.slots import Flags, Floats, Ints


class Beam(NamedTuple):
    """The nodes that are expanded, [batch, width] each, as ``optimized.growth.Beam`` and its nodes."""

    offers: Ints
    log_scores: Floats
    token_ids: Ints
    parents: Ints
    valid: Flags


class Pruned(NamedTuple):
    """The trees, named and shaped as in ``optimized.trees.TreeBatch``."""

    token_ids: Ints
    parents: Ints
    depths: Ints
    slots: Ints
    is_probe: Flags
    log_scores: Floats
    num_nodes: Ints
    law_index: Ints
    draft_failed: Flags
    law_rows: Ints


@jit(array(INTEGER, 2), array(NUMBER, 2), INTEGER, INTEGER, NUMBER, FLAG)
def select_beam(
    token_ids: Ints, log_scores: Floats, branching: int, beam: int, least_best: float, stopping: bool
) -> Beam:
    """The best nodes that a level offers.

    Args:
        token_ids, log_scores: [batch, offered].
        branching: K.
        beam: how many, at most.
        least_best: logarithm that the best score must reach for the request to go on; -inf for none.
        stopping: whether the beam is only as wide as the widest of the batch.
    """
    batch, offered = log_scores.shape
    most = min(beam, offered)
    found = Beam(
        np.zeros((batch, most), np.int64),
        np.full((batch, most), -np.inf),
        np.zeros((batch, most), np.int64),
        np.zeros((batch, most), np.int64),
        np.zeros((batch, most), np.bool_),
    )
    widest = 0
    for b in range(batch):
        order = np.argsort(-log_scores[b], kind="mergesort")
        for rank in range(most):
            offer = order[rank]
            found.offers[b, rank] = offer
            score = log_scores[b, offer]
            if score == -np.inf or log_scores[b, order[0]] < least_best:
                continue
            found.log_scores[b, rank] = score
            found.token_ids[b, rank] = token_ids[b, offer]
            found.parents[b, rank] = offer // branching
            found.valid[b, rank] = True
            widest = max(widest, rank + 1)
    if stopping and widest < most:
        return Beam(
            found.offers[:, :widest].copy(),
            found.log_scores[:, :widest].copy(),
            found.token_ids[:, :widest].copy(),
            found.parents[:, :widest].copy(),
            found.valid[:, :widest].copy(),
        )
    return found


@jit(
    array(INTEGER, 3),
    array(NUMBER, 3),
    array(FLAG, 3),
    array(FLAG, 2),
    array(INTEGER, 2),
    array(FLAG, 2),
    array(INTEGER, 1),
    INTEGER,
    FLAG,
)
def prune(
    token_ids: Ints,
    log_scores: Floats,
    is_probe: Flags,
    failed: Flags,
    offers: Ints,
    valid: Flags,
    level_ends: Ints,
    budget: int,
    stopping: bool,
) -> Pruned:
    """Keep the best of all offered nodes and number them level-major.

    Args:
        token_ids, log_scores, is_probe: [batch, expanded, branching] what the expanded nodes offer, level after level.
        failed: [batch, expanded] whether the draft failed there.
        offers: [batch, expanded] which of the nodes that its level offered each one is; not read for the root.
        valid: [batch, expanded] whether it is a node, and not padding.
        level_ends: [levels] how many nodes were expanded to offer all levels up to each.
        budget: how many are kept, at most.
        stopping: whether there are only as many rows as the largest tree needs.
    """
    batch, expanded, branching = log_scores.shape
    offered = expanded * branching
    size = min(budget, offered)
    kept = np.empty((batch, size), np.int64)
    counts = np.zeros(batch, np.int64)
    for b in range(batch):
        scores = log_scores[b].ravel()
        order = np.argsort(-scores, kind="mergesort")
        while counts[b] < size and scores[order[counts[b]]] > -np.inf:
            counts[b] += 1
        kept[b, : counts[b]] = np.sort(order[: counts[b]])
    rows = 1 + (counts.max() if stopping else size)
    trees = Pruned(
        np.zeros((batch, rows), np.int64),
        np.full((batch, rows), -1, np.int64),
        np.zeros((batch, rows), np.int64),
        np.zeros((batch, rows), np.int64),
        np.zeros((batch, rows), np.bool_),
        np.full((batch, rows), -np.inf),
        counts + 1,
        np.full((batch, rows), -1, np.int64),
        np.zeros(batch, np.bool_),
        np.zeros((batch, expanded), np.int64),
    )
    for b in range(batch):
        trees.token_ids[b, 0], trees.log_scores[b, 0] = -1, 0.0
        row_of = np.zeros(offered, np.int64)
        for index in range(counts[b]):
            row_of[kept[b, index]] = index + 1
        level = 0
        for node in range(expanded):
            if node == level_ends[level]:
                level += 1
            if valid[b, node]:
                trees.draft_failed[b] |= failed[b, node]
                if level > 0:
                    first = level_ends[level - 2] * branching if level > 1 else 0
                    trees.law_rows[b, node] = row_of[first + offers[b, node]]
        level = 0
        for index in range(counts[b]):
            parent, slot = divmod(kept[b, index], branching)  # the parent among the expanded nodes
            row = index + 1
            while parent >= level_ends[level]:
                level += 1
            trees.token_ids[b, row] = token_ids[b, parent, slot]
            trees.parents[b, row] = trees.law_rows[b, parent]
            trees.depths[b, row] = level + 1
            trees.slots[b, row] = slot
            trees.is_probe[b, row] = is_probe[b, parent, slot]
            trees.log_scores[b, row] = log_scores[b, parent, slot]
            if is_probe[b, parent, slot]:
                trees.law_index[b, trees.parents[b, row]] = parent
    return trees

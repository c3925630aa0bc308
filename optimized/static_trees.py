"""Topologies for static trees: the best one for given acceptance rates, files of them, and the rates from walks.

A static tree's worth is a sum over its nodes: a node is accepted when, at every node above it, the child on the way was
accepted and its earlier siblings were not. With one rate per child rank, the same everywhere, the best topology of a
size is found by dynamic programming (Sequoia: Chen et al., "Scalable, Robust, and Hardware-aware Speculative Decoding",
2024).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optimized.files import read_json
from optimized.models.embedded import embedded_head_dir
from optimized.outputs import TracedStep
from reference.topology import Ranks, Topology, canonical_topology
from reference.tree import DraftTree, law_without
from reference.verification import check_target, residual


def optimal_topology(acceptance: ArrayLike, size: int, depth: int) -> Topology:
    """The topology of ``size`` draft nodes and at most ``depth`` levels that accepts most tokens on average.

    Args:
        acceptance: [K] in [0, 1], the chance that a node's i-th sampled child is accepted when the earlier ones were
            not; a node has at most K children.
        size: draft nodes, the root not counted.
        depth: levels.

    Raises:
        ValueError: no such rates, or more nodes than K children on so many levels can be.
    """
    share = _shares(acceptance)
    branching = len(share)
    if size < 1 or depth < 1:
        raise ValueError(f"size and depth must be at least 1, got {size} and {depth}")
    room = sum(branching**level for level in range(1, depth + 1))
    if size > room:
        raise ValueError(f"{branching} children on {depth} level(s) make {room} nodes at most, not {size}")

    # best[n]: what a subtree of n nodes, its own root included, is worth, in accepted tokens; grown level by level.
    # rest[k, n]: what n nodes shared by the children k, k + 1, ... are worth; child k gets at least one of them.
    best = np.where(np.arange(size + 2) == 1, 1.0, -np.inf)
    splits: list[NDArray[np.int64]] = []  # per level: how many of the n nodes go to child k
    for _ in range(depth):
        rest = np.full((branching + 1, size + 1), -np.inf)
        rest[:, 0] = 0.0
        split = np.zeros((branching, size + 1), dtype=np.int64)
        for child in reversed(range(branching)):
            for nodes in range(1, size + 1):
                own = np.where(best[1 : nodes + 1] > 0, share[child] * best[1 : nodes + 1].clip(min=0), -np.inf)
                given = own + rest[child + 1, nodes - 1 :: -1][:nodes]
                split[child, nodes] = 1 + int(given.argmax())
                rest[child, nodes] = given.max()
        splits.append(split)
        best = np.concatenate([[-np.inf], 1.0 + rest[0]])

    def children(node: Ranks, nodes: int, level: int) -> list[Ranks]:
        paths: list[Ranks] = []
        for rank in range(branching):
            if nodes == 0:
                break
            own = int(splits[level][rank, nodes])
            paths += [(*node, rank), *children((*node, rank), own - 1, level - 1)]
            nodes -= own
        return paths

    return canonical_topology(children((), size, depth - 1))


def expected_length(topology: Sequence[Sequence[int]], acceptance: ArrayLike) -> float:
    """The tokens emitted per target pass, accepted and bonus, if every node accepts at these rates.

    Args:
        topology: paths of child ranks.
        acceptance: [K] as for ``optimal_topology``; K at least the children that a node of the topology has.
    """
    share = _shares(acceptance)
    return 1.0 + sum(float(np.prod(share[list(path)])) for path in canonical_topology(topology))


def _shares(acceptance: ArrayLike) -> NDArray[np.float64]:
    """[K] the chance that exactly the i-th child is accepted: its rate times what the earlier ones left."""
    rates = np.asarray(acceptance, dtype=np.float64)
    if rates.ndim != 1 or rates.size == 0 or not ((rates >= 0) & (rates <= 1)).all():
        raise ValueError(f"acceptance must be a non-empty vector of rates in [0, 1], got {acceptance!r}")
    return rates * np.concatenate([[1.0], np.cumprod(1.0 - rates)[:-1]])


@dataclass(frozen=True, eq=False)
class Acceptance:
    """How often sampled children were accepted, by child rank.

    Attributes:
        tested: [K] how often the i-th child was tested; a mean of counts where it is computed, not counted.
        accepted: [K] how often it was then accepted.
    """

    tested: NDArray[np.float64]
    accepted: NDArray[np.float64]

    @property
    def rates(self) -> NDArray[np.float64]:
        """[K] the vector that ``optimal_topology`` takes; 0 for a child that was never tested."""
        return np.divide(self.accepted, self.tested, out=np.zeros_like(self.tested), where=self.tested > 0)


def count_acceptance(steps: Iterable[TracedStep], children: int) -> Acceptance:
    """The acceptance of probes in steps that ``RheoDecoder.trace`` has seen.

    Args:
        steps: under the rule "rheo", or without leads.
        children: K, the length of the vectors; further children are left out.
    """
    tested, accepted = np.zeros(children), np.zeros(children)
    for tree, walk, _ in steps:
        stands = (0, *walk.accepted_nodes)
        for row, child in zip(stands, [*stands[1:], None], strict=True):
            probes = tree.probe_children(row)
            through = probes.index(child) if child in probes else len(probes)
            tested[: min(through + 1, len(probes))] += 1
            accepted[through : through + 1] += through < len(probes)
    return Acceptance(tested, accepted)


def measure_acceptance(trees: Iterable[tuple[DraftTree, ArrayLike]], children: int) -> Acceptance:
    """The acceptance of probes under the target's laws: ``count_acceptance`` averaged over the walk's uniforms.

    Args:
        trees: static trees, each with the target's laws [rows, vocab_size] after each row's path.
        children: K, the length of the vectors; further children are left out.

    Raises:
        ValueError: laws that do not fit the tree, or a tree with a child that was not sampled.
    """
    tested, accepted = np.zeros(children), np.zeros(children)
    for tree, target_probs in trees:
        if not all(tree.is_probe[1:]):
            raise ValueError(f"row {1 + tree.is_probe[1:].index(False)} was not sampled; a static tree has probes only")
        reached = np.zeros(len(tree))
        reached[0] = 1.0
        for row, law in enumerate(check_target(tree, np.asarray(target_probs))):
            still, probe_law = reached[row], tree.probe_laws.get(row)
            for rank, child in enumerate(tree.probe_children(row)):
                assert probe_law is not None
                token = tree.token_ids[child]
                chance = min(float(law[token] / probe_law[1][probe_law[0].index(token)]), 1.0)
                reached[child] = still * chance
                if rank < children:
                    tested[rank] += still
                    accepted[rank] += reached[child]
                still -= reached[child]
                law, probe_law = residual(law, probe_law), law_without(probe_law, token)
    return Acceptance(tested, accepted)


def embedded_topology(size: int, depth: int = 8) -> Topology:
    """The best topology of a size for the embedded pair, by the acceptance rates measured on it and kept beside it."""
    counts = read_json(embedded_head_dir() / "acceptance.json")
    return optimal_topology(np.array(counts["accepted"]) / np.array(counts["tested"]), size, depth)


def read_topology(path: str | Path) -> Topology:
    """Read a topology from a JSON file: a list of paths of child ranks, as in EAGLE's and Medusa's ``choices``.

    Args:
        path: of the file; or "embedded-N": the best topology of N nodes for the embedded pair.

    Raises:
        ValueError: no such file, no JSON, or no topology; the file is named.
    """
    named = re.fullmatch(r"embedded-([1-9]\d{0,3})", str(path))
    if named:
        return embedded_topology(int(named[1]))
    try:
        content = read_json(Path(path))
    except OSError as error:
        raise ValueError(f"cannot read the topology {path}: {error.strerror}") from error
    if not isinstance(content, list) or not all(isinstance(item, list) for item in content):
        raise ValueError(f"{path} must hold a list of paths of child ranks, such as [[0], [1], [0, 0]]")
    try:
        return canonical_topology(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write_topology(path: str | Path, topology: Sequence[Sequence[int]]) -> None:
    """Write a topology to a JSON file that ``read_topology`` and EAGLE's and Medusa's code read.

    Raises:
        ValueError: it is no topology.
    """
    paths = [list(ranks) for ranks in canonical_topology(topology)]
    Path(path).write_text(json.dumps(paths) + "\n", encoding="utf-8")

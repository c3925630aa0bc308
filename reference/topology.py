"""Topologies of static trees: which nodes there are, fixed before anything is drafted (docs/algorithm.md).

A topology is a tuple of paths of child ranks, the form of EAGLE's and Medusa's ``choices``: ``((0,), (1,), (0, 0))`` is
a root with two children, the first of which has one child.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Ranks = tuple[int, ...]  # child ranks from below the root
Topology = tuple[Ranks, ...]


def canonical_topology(topology: Sequence[Sequence[int]]) -> Topology:
    """The topology's paths in level-major order: by length, then lexicographically.

    Raises:
        ValueError: no paths, a path that is empty or holds no child ranks, one that comes twice, a missing parent, or
            a gap in the ranks of a node's children.
    """
    paths: set[Ranks] = set()
    for path in topology:
        if isinstance(path, str) or not isinstance(path, Sequence | np.ndarray) or len(path) == 0:
            raise ValueError(f"topology holds {path!r}; a path is a non-empty sequence of child ranks")
        for rank in path:
            if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 0:
                raise ValueError(f"topology path {tuple(path)} holds {rank!r}; child ranks are integers >= 0")
        ranks = tuple(int(rank) for rank in path)
        if ranks in paths:
            raise ValueError(f"topology holds the path {ranks} twice")
        paths.add(ranks)
    if not paths:
        raise ValueError("topology is empty; it needs at least the path (0,)")
    ordered = tuple(sorted(paths, key=lambda path: (len(path), path)))
    for path in ordered:
        if len(path) > 1 and path[:-1] not in paths:
            raise ValueError(f"topology holds the path {path} without its parent {path[:-1]}")
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in paths:
            raise ValueError(
                f"topology holds the path {path} without its sibling {(*path[:-1], path[-1] - 1)}: a node's children "
                "are ranked 0, 1, ... without gaps"
            )
    return ordered


@dataclass(frozen=True)
class StaticShape:
    """What a topology says about growth.

    Attributes:
        size: draft nodes, the root not counted.
        depth: levels.
        branching: the most children that a node has.
        inner: for each level 0 .. depth - 1 its inner nodes, the nodes that are expanded, in level-major order; a
            node's place among those of its level is its rank in the beam. The root is level 0.
        children: for each of these, how many children it has.
    """

    size: int
    depth: int
    branching: int
    inner: tuple[tuple[Ranks, ...], ...]
    children: tuple[tuple[int, ...], ...]

    @property
    def beam(self) -> int:
        """The most nodes that are expanded on one level."""
        return max(map(len, self.inner))


@lru_cache(maxsize=64)
def static_shape(topology: Topology) -> StaticShape:
    """The shape of a canonical topology."""
    depth = len(topology[-1])
    counts: dict[Ranks, int] = {}
    for path in topology:
        counts[path[:-1]] = counts.get(path[:-1], 0) + 1
    inner = tuple(tuple(sorted(path for path in counts if len(path) == level)) for level in range(depth))
    return StaticShape(
        size=len(topology),
        depth=depth,
        branching=max(counts.values()),
        inner=inner,
        children=tuple(tuple(counts[path] for path in level) for level in inner),
    )

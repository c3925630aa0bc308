"""Toy drafts and targets: laws that are functions of the path, for the reference and for the batched path alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimized.trees import LevelNodes
from reference.api import DraftLaw

Logits = Callable[[tuple[int, ...]], NDArray[np.float32]]  # path in target ids -> [draft vocab] logits


def rng_of(seed: int, path: tuple[int, ...]) -> np.random.Generator:
    """A generator that depends on nothing but its arguments."""
    return np.random.default_rng([seed, len(path), *path])


def random_topology(
    rng: np.random.Generator, most_nodes: int, depth: int, branching: int
) -> tuple[tuple[int, ...], ...]:
    """A topology of 1 .. ``most_nodes`` nodes, grown child by child at random places."""
    paths = [(0,)]
    for _ in range(rng.integers(most_nodes)):
        open_nodes = [node for node in [(), *paths] if len(node) < depth and (*node, branching - 1) not in paths]
        if not open_nodes:
            break
        node = open_nodes[rng.integers(len(open_nodes))]
        paths.append((*node, sum(path[:-1] == node for path in paths)))
    return tuple(paths)


def random_logits(seed: int, vocab: int, family: str) -> Logits:
    """Draft logits of one of several families.

    * ``normal``: no ties. * ``bfloat16``: normal, rounded to bfloat16, so that ties are common in large vocabularies.
    * ``tied``: integer multiples of a constant of the level; the same law after every path of a level, so whole
      subtrees tie exactly. * ``masked``: normal with a random part at -inf, often few tokens or a single one left.
    * ``peaked``: scaled up until most of the support underflows.
    """

    def logits(path: tuple[int, ...]) -> NDArray[np.float32]:
        rng = rng_of(seed, path)
        if family == "tied":
            level = np.random.default_rng([seed, len(path)])
            return (level.integers(-2, 2, size=vocab) * level.uniform(0.3, 1.2)).astype(np.float32)
        values = rng.normal(scale=2.0, size=vocab).astype(np.float32)
        if family == "bfloat16":
            return torch.from_numpy(values).bfloat16().float().numpy()
        if family == "peaked":
            return values * np.float32(60)
        if family == "masked":
            left = rng.integers(1, vocab + 1)
            values[rng.permutation(vocab)[left:]] = -np.inf
        return values

    return logits


class ToyDrafter:
    """The same path-dependent logits as the reference's ``draft`` and as ``grow_trees``'s ``expand``.

    Args:
        logits: one function per request.
        target_vocab: the reference's vocabulary.
        vocab_map: [draft vocab] increasing target ids; None for the identity.
    """

    def __init__(self, logits: Sequence[Logits], target_vocab: int, vocab_map: NDArray[np.int64] | None = None) -> None:
        self.logits, self.target_vocab, self.vocab_map = logits, target_vocab, vocab_map
        self._beam: list[list[tuple[int, ...]]] = []

    def law(self, request: int, temperature: float, support: int) -> Callable[[tuple[int, ...]], DraftLaw]:
        """The reference's draft of one request."""

        def draft(path: tuple[int, ...]) -> DraftLaw:
            values = self.logits[request](path).astype(np.float64)
            if self.vocab_map is not None:
                wide = np.full(self.target_vocab, -np.inf)
                wide[self.vocab_map] = values
                values = wide
            return DraftLaw.from_logits(values, temperature, support)

        return draft

    def root_logits(self) -> Tensor:
        """[batch, draft vocab] float32."""
        self._beam = [[()] for _ in self.logits]
        return torch.stack([torch.from_numpy(logits(())) for logits in self.logits])

    def expand(self, nodes: LevelNodes) -> Tensor:
        """[batch, beam, draft vocab] float32; padding gets NaN, which nobody may read."""
        rows, beams = [], []
        for b, logits in enumerate(self.logits):
            paths = [
                (*self._beam[b][parent], token) if valid else ()
                for token, parent, valid in zip(
                    nodes.token_ids[b].tolist(), nodes.parents[b].tolist(), nodes.valid[b].tolist(), strict=True
                )
            ]
            values = [
                torch.from_numpy(logits(path)) if path else torch.full((len(logits(())),), torch.nan) for path in paths
            ]
            rows.append(torch.stack(values))
            beams.append(paths)
        self._beam = beams
        return torch.stack(rows)

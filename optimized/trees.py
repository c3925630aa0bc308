"""A batch of draft trees as tensors of fixed shape, and the nodes of one level that a drafter expands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.ranges import arange
from reference.tree import DraftTree, ProbeLaw


@dataclass(frozen=True, eq=False)
class LevelNodes:
    """The nodes of one level that are expanded, best first.

    Attributes:
        token_ids: [batch, beam] long, target ids; 0 where not valid.
        parents: [batch, beam] long, the parent's rank in the beam one level up; all 0 at depth 1, under the root.
        valid: [batch, beam] bool; the others are padding, whatever is answered for them is ignored.
        depth: level of these nodes, 1 for the root's children.
    """

    token_ids: Tensor
    parents: Tensor
    valid: Tensor
    depth: int


@dataclass(frozen=True, eq=False)
class TreeBatch:
    """Draft trees of a batch of requests; the rows of each are those of ``reference.DraftTree``, padded at the end.

    Attributes:
        token_ids: [batch, rows] long, target ids; -1 for the root, 0 for padding.
        parents: [batch, rows] long, row of the parent; -1 for the root and for padding.
        depths: [batch, rows] long; 0 for the root and for padding.
        slots: [batch, rows] long, place among the parent's slots.
        is_probe: [batch, rows] bool.
        log_scores: [batch, rows] float64, natural logarithm of the path score; -inf for padding.
        num_nodes: [batch] long, rows in use, root included.
        probe_law_ids: [batch, laws, support] long, target ids in rank order, of every node that was expanded.
        probe_laws: [batch, laws, support] float64, q~ over them; 0 on leads and padding.
        law_index: [batch, rows] long, which of ``probe_laws`` drew the row's first probe; -1 where no probe is in the
            tree.
        draft_failed: [batch] bool, whether the draft's logits were NaN, +inf or all -inf at an expanded node.
        depth: the number of levels that were drafted, a bound on ``depths``.
        probes: a bound on how many probes a node has.
        law_rows: [batch, laws] long, the row of each expanded node; 0 for the root, which comes first, and for what
            was pruned. None without calibrated weights.
        masses: [batch, laws, support] float64, what the calibrated curves are read at; None likewise.
        ancestor_bits: [batch, rows, words] long, what ``ancestors`` says: column j is bit j % 64 of word j // 64; None
            where it has not been computed yet.
        probe_row: [batch, rows] long, what ``probe_rows`` returns; None likewise.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    slots: Tensor
    is_probe: Tensor
    log_scores: Tensor
    num_nodes: Tensor
    probe_law_ids: Tensor
    probe_laws: Tensor
    law_index: Tensor
    draft_failed: Tensor
    depth: int
    probes: int = 1
    law_rows: Tensor | None = None
    masses: Tensor | None = None
    ancestor_bits: Tensor | None = None
    probe_row: Tensor | None = None

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return self.token_ids.shape[0]

    @property
    def rows(self) -> int:
        """Rows per tree, padding included."""
        return self.token_ids.shape[1]

    def probe_rows(self) -> Tensor:
        """[batch, rows] long: the row of each row's probe; 0 where it has none in the tree."""
        if self.probe_row is not None:
            return self.probe_row
        places = arange(self.rows, self.parents.device).expand_as(self.parents)
        parents = torch.where(self.is_probe, self.parents, self.rows)  # one more column takes whatever is no probe
        found = torch.zeros(self.batch_size, self.rows + 1, dtype=torch.long, device=self.parents.device)
        return found.scatter_(1, parents, places)[:, :-1].contiguous()

    def ancestors(self) -> Tensor:
        """[batch, rows, rows] bool: whether column j is row i or its ancestor; padding sees itself and the root."""
        if self.ancestor_bits is not None:
            places = arange(64, self.parents.device)
            return ((self.ancestor_bits.unsqueeze(3) >> places) & 1).bool().flatten(2)[:, :, : self.rows]
        reach = torch.eye(self.rows, dtype=torch.bool, device=self.parents.device).repeat(self.batch_size, 1, 1)
        step = self.parents.clamp(min=0)
        climbing = step
        for _ in range(self.depth):
            reach.scatter_(2, climbing.unsqueeze(2), True)
            climbing = step.gather(1, climbing)
        return reach

    def to_tree(self, index: int) -> DraftTree:
        """The tree of one request as the reference's type; synchronises with the device.

        The probe laws keep the tokens of positive probability.
        """
        count = int(self.num_nodes[index])
        rows = {
            name: getattr(self, name)[index, :count].tolist() for name in ("token_ids", "parents", "depths", "slots")
        }
        probe_laws: dict[int, ProbeLaw] = {}
        for row, law in enumerate(self.law_index[index, :count].tolist()):
            if law >= 0:
                probabilities = self.probe_laws[index, law]
                kept = probabilities > 0
                probe_laws[row] = (
                    tuple(self.probe_law_ids[index, law][kept].tolist()),
                    probabilities[kept].cpu().numpy(),
                )
        return DraftTree(
            **rows,
            is_probe=tuple(self.is_probe[index, :count].tolist()),
            scores=tuple(self.log_scores[index, :count].exp().tolist()),
            probe_laws=probe_laws,
        )

    @classmethod
    def from_trees(cls, trees: Sequence[DraftTree], device: torch.device | str = "cpu") -> TreeBatch:
        """Pack trees of the reference's type (float scores), padding the smaller ones.

        Raises:
            ValueError: no trees.
        """
        if not trees:
            raise ValueError("from_trees needs at least one tree")
        rows = max(len(tree) for tree in trees)
        laws = max(1, *(len(tree.probe_laws) for tree in trees))
        support = max([1, *(len(ids) for tree in trees for ids, _ in tree.probe_laws.values())])

        def table(name: str, padding: int | bool) -> Tensor:
            return torch.tensor(
                [[*getattr(tree, name), *[padding] * (rows - len(tree))] for tree in trees], device=device
            )

        ids = torch.zeros(len(trees), laws, support, dtype=torch.long)
        probabilities = torch.zeros(len(trees), laws, support, dtype=torch.float64)
        law_index = torch.full((len(trees), rows), -1)
        log_scores = torch.full((len(trees), rows), -torch.inf, dtype=torch.float64)
        for b, tree in enumerate(trees):
            log_scores[b, : len(tree)] = torch.tensor([float(s) for s in tree.scores], dtype=torch.float64).log()
            for law, (row, (token_ids, q)) in enumerate(sorted(tree.probe_laws.items())):
                law_index[b, row] = law
                ids[b, law, : len(token_ids)] = torch.tensor(token_ids)
                probabilities[b, law, : len(token_ids)] = torch.tensor(
                    [float(value) for value in q], dtype=torch.float64
                )
        return cls(
            token_ids=table("token_ids", 0),
            parents=table("parents", -1),
            depths=table("depths", 0),
            slots=table("slots", 0),
            is_probe=table("is_probe", False),
            log_scores=log_scores.to(device),
            num_nodes=torch.tensor([len(tree) for tree in trees], device=device),
            probe_law_ids=ids.to(device),
            probe_laws=probabilities.to(device),
            law_index=law_index.to(device),
            draft_failed=torch.zeros(len(trees), dtype=torch.bool, device=device),
            depth=max(max(tree.depths) for tree in trees),
            probes=max(1, *(tree.most_probes for tree in trees)),
        )

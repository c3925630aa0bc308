"""The draft tree that growth returns and verification walks: one type for both implementations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from reference.numbers import Number, Vector, check_law

ProbeLaw = tuple[tuple[int, ...], Vector]  # token ids in rank order, and q~ over them


def law_without(law: ProbeLaw, token_id: int) -> ProbeLaw:
    """q~ once a token was drawn from it: what is left, renormalised by its sum; all zero when nothing is left."""
    token_ids, probabilities = law
    left = probabilities.copy()
    left[token_ids.index(token_id)] *= 0
    total = left.sum()
    return token_ids, left / total if total > 0 else left


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A draft tree, one row per node; row 0 is the root, the last committed token.

    Attributes:
        token_ids: [rows] target ids; -1 for the root.
        parents: [rows] row of the parent, always before the child; -1 for the root.
        depths: [rows] level of the node; 0 for the root.
        slots: [rows] place among the parent's slots in schedule order; 0 for the root.
        is_probe: [rows] whether the node is one of its parent's sampled tokens; these stand in drawing order.
        scores: [rows] path score, in (0, 1]; 1 for the root.
        probe_laws: for each row with a probe in the tree, ``(token_ids, q~)``: the law that drew the first probe, which
            is the law that verifies it. Each further probe has the law that the one before left (``law_without``).

    Raises:
        ValueError: naming the row and what is wrong with it.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    slots: tuple[int, ...]
    is_probe: tuple[bool, ...]
    scores: tuple[Number, ...]
    probe_laws: Mapping[int, ProbeLaw] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in (("token_ids", int), ("parents", int), ("depths", int), ("slots", int), ("is_probe", bool)):
            object.__setattr__(self, name, tuple(kind(value) for value in getattr(self, name)))
        object.__setattr__(self, "scores", tuple(self.scores))
        rows = len(self.token_ids)
        for name in ("parents", "depths", "slots", "is_probe", "scores"):
            if len(getattr(self, name)) != rows:
                raise ValueError(f"{name} has {len(getattr(self, name))} rows, token_ids has {rows}")
        if rows == 0:
            raise ValueError("a tree has at least its root, got 0 rows")
        root = (self.token_ids[0], self.parents[0], self.depths[0], self.is_probe[0], self.scores[0])
        if root != (-1, -1, 0, False, 1):
            raise ValueError(
                f"row 0 must be the root: token -1, parent -1, depth 0, no probe, score 1; got token {root[0]}, "
                f"parent {root[1]}, depth {root[2]}, is_probe {root[3]}, score {root[4]}"
            )
        check_parents(self.parents)
        self._check_rows()
        object.__setattr__(self, "probe_laws", self._checked_probe_laws())

    def _check_rows(self) -> None:
        seen_tokens: dict[tuple[int, int], int] = {}
        last_slot: dict[int, int] = {}
        last_probe: dict[int, int] = {}
        for row in range(1, len(self)):
            parent, token, slot, score = self.parents[row], self.token_ids[row], self.slots[row], self.scores[row]
            if token < 0:
                raise ValueError(f"row {row} has token {token}; token ids are not negative")
            if self.depths[row] != self.depths[parent] + 1:
                raise ValueError(
                    f"row {row} has depth {self.depths[row]}, its parent (row {parent}) has {self.depths[parent]}"
                )
            if (parent, token) in seen_tokens:
                raise ValueError(
                    f"rows {seen_tokens[parent, token]} and {row} are siblings with the same token {token}"
                )
            seen_tokens[parent, token] = row
            if slot < 0:
                raise ValueError(f"row {row} has slot {slot}; slots are not negative")
            if slot <= last_slot.get(parent, -1):
                raise ValueError(f"row {row} has slot {slot}, after a sibling with slot {last_slot[parent]}")
            last_slot[parent] = slot
            if not 0 <= score <= self.scores[parent]:
                raise ValueError(
                    f"row {row} has score {score}; it must lie between 0 and its parent's {self.scores[parent]}"
                )
            if self.is_probe[row]:
                before = last_probe.setdefault(parent, row)
                if before != row and self.slots[before] != slot - 1:
                    raise ValueError(
                        f"row {row} is a probe in slot {slot}, row {before} the probe before it in slot "
                        f"{self.slots[before]}; a node's probes have neighbouring slots"
                    )
                last_probe[parent] = row

    def _checked_probe_laws(self) -> dict[int, ProbeLaw]:
        with_probe = {self.parents[row] for row in range(1, len(self)) if self.is_probe[row]}
        if set(self.probe_laws) != with_probe:
            raise ValueError(
                f"probe_laws has rows {sorted(self.probe_laws)}; rows {sorted(with_probe)} have a probe in the tree"
            )
        checked: dict[int, ProbeLaw] = {}
        for parent, (ids, law) in self.probe_laws.items():
            token_ids = tuple(int(token) for token in ids)
            probabilities = check_law(law, f"probe_laws[{parent}]")
            if len(token_ids) != probabilities.size or len(set(token_ids)) != len(token_ids) or min(token_ids) < 0:
                raise ValueError(f"probe_laws[{parent}] needs one probability for each of distinct token ids >= 0")
            mass = dict(zip(token_ids, probabilities, strict=True))
            first = min(self.probe_children(parent))
            for child in self.children(parent):
                token = self.token_ids[child]
                if self.is_probe[child]:
                    if not mass.get(token, 0) > 0:
                        raise ValueError(
                            f"row {child} is a probe, but probe_laws[{parent}] gives its token {token} no mass"
                        )
                elif child < first and mass.get(token, 0) > 0:
                    raise ValueError(
                        f"row {child} stands before the probe, but probe_laws[{parent}] can draw its token {token}"
                    )
            checked[parent] = (token_ids, probabilities)
        return checked

    def __len__(self) -> int:
        return len(self.token_ids)

    def children(self, row: int) -> Iterator[int]:
        """Rows of the children of ``row``, in schedule order."""
        return (child for child in range(row + 1, len(self)) if self.parents[child] == row)

    def probe_children(self, row: int) -> tuple[int, ...]:
        """The rows of the probes of ``row`` that are in the tree, in drawing order."""
        return tuple(child for child in self.children(row) if self.is_probe[child])

    def probe_child(self, row: int) -> int | None:
        """The row of the first probe of ``row``, or None when it is not in the tree."""
        return next(iter(self.probe_children(row)), None)

    @property
    def most_probes(self) -> int:
        """The most probes that a node has in the tree."""
        parents = (parent for parent, is_probe in zip(self.parents, self.is_probe, strict=True) if is_probe)
        return max(Counter(parents).values(), default=0)

    def path(self, row: int) -> tuple[int, ...]:
        """Tokens from below the root down to ``row``, itself included; empty for the root."""
        tokens: list[int] = []
        while row > 0:
            tokens.append(self.token_ids[row])
            row = self.parents[row]
        return tuple(reversed(tokens))

    @property
    def key(self) -> tuple[tuple[int, int, int, bool], ...]:
        """What makes two trees the same equivalence class: (parent, slot, token, probe flag) of every draft node."""
        return tuple(zip(self.parents, self.slots, self.token_ids, self.is_probe, strict=True))[1:]


def check_parents(parents: Sequence[int]) -> None:
    """Check that ``parents`` describes one tree whose root is row 0 and whose parents precede their children.

    Raises:
        ValueError: an orphan (no such row), a cycle, or a child before its parent; the row is named.
    """
    rows = len(parents)
    for row in range(1, rows):
        parent = parents[row]
        if not 0 <= parent < rows:
            raise ValueError(f"row {row} is an orphan: its parent {parent} is not a row of the tree (0..{rows - 1})")
        if parent >= row:
            seen, step = {row}, parent
            while 0 < step < rows and step not in seen:
                seen.add(step)
                step = parents[step]
            if step == row or (step in seen and step != 0):
                raise ValueError(f"row {row} is part of a cycle: following its parents comes back to row {step}")
            raise ValueError(f"row {row} stands before its parent, row {parent}; parents precede their children")


def root_only() -> DraftTree:
    """The tree without draft nodes: verifying it draws one token from the target's law."""
    return DraftTree((-1,), (-1,), (0,), (0,), (False,), (np.float64(1.0),))

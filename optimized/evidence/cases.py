"""Hard cases for the exact proofs, written by hand: a draft and a target, both functions of the path below the root.

Everything is a Fraction, so laws compare with ``==`` and there is no tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from reference.api import DraftLaw

Path = tuple[int, ...]
Law = tuple[Fraction, ...]


def law(*weights: int | Fraction) -> Law:
    """The law proportional to ``weights``."""
    total = Fraction(sum(weights))
    return tuple(Fraction(weight) / total for weight in weights)


def one_hot(vocab_size: int, token: int) -> Law:
    """The law that is certain of ``token``."""
    return law(*(int(index == token) for index in range(vocab_size)))


def tempered(construction: Law, power: int) -> Law:
    """The sampling law at temperature 1 / ``power``."""
    return law(*(value**power for value in construction))


@dataclass(frozen=True)
class Case:
    """A draft and a target.

    Attributes:
        name: what makes it hard.
        construction: path -> q.
        sampling: (path, q) -> q_T, or None for a greedy request.
        target: path -> p.
        vocab_size: the target's.
    """

    name: str
    construction: Callable[[Path], Law]
    target: Callable[[Path], Law]
    vocab_size: int
    sampling: Callable[[Path, Law], Law | None] = lambda path, q: q

    def draft(self) -> Callable[[Path], DraftLaw]:
        """path -> DraftLaw, remembered."""

        def draft_law(path: Path) -> DraftLaw:
            q = self.construction(path)
            return DraftLaw(q, self.sampling(path, q))

        return cache(draft_law)


Q3, P3 = law(3, 2, 1), law(1, 2, 3)
Q4, P4 = law(4, 3, 2, 1), law(1, 5, 2, 4)


def turned(values: Law, path: Path) -> Law:
    """The law rotated by the path: every context another ranking."""
    shift = sum((index + 1) * (token + 1) for index, token in enumerate(path)) % len(values)
    return values[shift:] + values[:shift]


HARD_CASES: list[Case] = [
    Case("p equals q", lambda path: Q3, lambda path: Q3, 3),
    Case("opposite rankings", lambda path: Q3, lambda path: P3, 3),
    Case("disjoint supports", lambda path: law(2, 1, 0, 0), lambda path: law(0, 0, 1, 3), 4),
    Case("uniform draft, all ties", lambda path: law(1, 1, 1), lambda path: turned(P3, path), 3),
    Case("uniform draft of four", lambda path: law(1, 1, 1, 1), lambda path: turned(P4, path), 4),
    Case("ties at the proxy, q(x_1) = z", lambda path: law(2, 1, 1), lambda path: turned(law(0, 1, 3), path), 3),
    Case("one-hot draft, scores tie with the parent", lambda path: one_hot(3, 1), lambda path: turned(P3, path), 3),
    Case("one-hot target", lambda path: Q3, lambda path: one_hot(3, len(path) % 3), 3),
    Case("one-hot target where the draft has nothing", lambda path: law(2, 1, 0), lambda path: one_hot(3, 2), 3),
    Case("zeros in both", lambda path: turned(law(3, 0, 1, 2), path), lambda path: turned(law(0, 2, 3, 1), path), 4),
    Case("draft vocabulary smaller", lambda path: law(1, 2), lambda path: turned(P4, path), 4),
    Case("draft of ranked tokens fewer than slots", lambda path: law(0, 1, 2), lambda path: turned(P3, path), 3),
    Case("massless tail", lambda path: Q3, lambda path: P3, 3, lambda path, q: one_hot(3, 0)),
    Case("massless tail after some tokens", lambda path: Q3, lambda path: turned(P3, path), 3,
         lambda path, q: one_hot(3, 0) if path and path[-1] == 0 else q),
    Case("cold sampling law", lambda path: Q4, lambda path: turned(P4, path), 4, lambda path, q: tempered(q, 3)),
    Case("hot sampling law", lambda path: Q3, lambda path: turned(P3, path), 3,
         lambda path, q: law(*(int(value > 0) for value in q))),
    Case("reversed sampling law", lambda path: Q4, lambda path: turned(Q4, path), 4,
         lambda path, q: tuple(reversed(q))),
    Case("sampling law with holes", lambda path: Q4, lambda path: P4, 4, lambda path, q: law(0, 1, 0, 2)),
    Case("greedy request", lambda path: Q3, lambda path: turned(P3, path), 3, lambda path, q: None),
    Case("greedy after a token", lambda path: Q3, lambda path: turned(P3, path), 3,
         lambda path, q: None if path[-1:] == (0,) else q),
    Case("draft turns with the path", lambda path: turned(Q3, path), lambda path: turned(P3, path), 3),
    Case("target copies the last token", lambda path: Q3, lambda path: one_hot(3, path[-1]) if path else Q3, 3),
    Case("target never repeats", lambda path: turned(Q3, path),
         lambda path: law(*(int(token not in path[-1:]) for token in range(3))), 3),
    Case("draft is certain after a rare token", lambda path: one_hot(3, 2) if path[-1:] == (2,) else Q3,
         lambda path: turned(P3, path), 3),
    Case("tails of a child dwarf the fills", lambda path: law(9, 1, 1) if path else law(5, 4, 3), lambda path: P3, 3),
]  # fmt: skip
HARD_CASES_BY_NAME = {case.name: case for case in HARD_CASES}

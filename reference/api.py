"""The types that the reference and the optimized path share: configuration, laws, noise, results.

Plain dataclasses over NumPy; nothing here imports torch. Words and rules are those of docs/algorithm.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reference.numbers import Number, Vector, check_law, is_exact
from reference.topology import StaticShape, Topology, canonical_topology, static_shape
from reference.weights import Weights

Proposal = Literal["rheo", "topk", "static"]
Verification = Literal["rheo", "rrsw"]

MOST_NODES = 60  # of a tree whose size is "auto"
GREEDY_TEMPERATURE = 1e-5  # below it a request is greedy: in growth, in verification, everywhere


def is_greedy(temperature: float) -> bool:
    """The one cut-off between greedy and sampled requests."""
    return temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True)
class RheoConfig:
    """How trees are grown and verified.

    Attributes:
        lead_tokens: m, the rheostat: how many of the top tokens stand before the probe. m >= branching means no probe.
            "auto" takes at every node the m that promises most by ``weights`` (``reference.weights.lead_count``).
        branching: K, the slots of a node.
        depth: how many levels are drafted.
        tree_size: R, the budget: draft nodes kept after global pruning, root not counted. "auto" lets a decoder keep
            what pays on its machine, by thresholds that it sets before every step, and at most ``MOST_NODES``.
        beam: how many nodes of a level are expanded; None means ``branching``.
        draft_support: S, how many of the largest draft logits make a law.
        proposal: "rheo" offers probes, "topk" never does (EAGLE-2/3), "static" grows one fixed topology whose children
            are all probes (EAGLE-1, Medusa, Sequoia; a chain of them is plain speculative sampling).
        verification: "rheo" tests the probes first, "rrsw" takes siblings in their order in the tree.
        probes: how many tokens a node samples, without replacement; fewer where slots or tokens run out.
        topology: of a static tree, paths of child ranks in level-major order; None for the other proposals.
            ``RheoConfig.static`` derives everything else from it.
        weights: calibrated weights for path scores; None for the paper's, q and the proxy.
        score_threshold: in [0, 1]; a node with a smaller path score is not offered, so the tree may stay below
            ``tree_size``.
        level_threshold: in [0, 1]; below a level whose best node scores less, no further level is drafted, so the tree
            may stay below ``depth``.

    Raises:
        ValueError: an attribute is out of its range, or the topology is none or contradicts another attribute.
    """

    lead_tokens: int | Literal["auto"] = 1
    branching: int = 10
    depth: int = 8
    tree_size: int | Literal["auto"] = 60
    beam: int | None = None
    draft_support: int = 128
    proposal: Proposal = "rheo"
    verification: Verification = "rheo"
    probes: int = 1
    topology: Topology | None = None
    weights: Weights | None = None
    score_threshold: Number = 0
    level_threshold: Number = 0

    def __post_init__(self) -> None:
        counts = {"branching": 1, "depth": 1, "draft_support": 1, "probes": 1}
        if self.lead_tokens != "auto":
            counts["lead_tokens"] = 0
        if self.tree_size != "auto":
            counts["tree_size"] = 1
        for name, least in counts.items():
            _check_count(name, getattr(self, name), least)
            object.__setattr__(self, name, int(getattr(self, name)))  # NumPy's integers are welcome
        if self.weights is not None and not isinstance(self.weights, Weights):
            raise ValueError(
                f"weights must be Weights or None, got {type(self.weights).__name__}; load_weights reads a file"
            )
        if self.beam is not None:
            _check_count("beam", self.beam, 1)
            object.__setattr__(self, "beam", int(self.beam))
        for name, allowed in (("proposal", get_args(Proposal)), ("verification", get_args(Verification))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        for name in ("lead_tokens", "tree_size"):
            if getattr(self, name) == "auto" and self.weights is None:
                raise ValueError(
                    f'{name}="auto" goes by what nodes promise, so it needs weights; prior_weights() will do'
                )
        for name in ("score_threshold", "level_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        if self.proposal == "static" and (self.weights is not None or self.may_stop):
            raise ValueError("a static tree keeps its whole topology; it takes neither weights nor thresholds")
        self._check_topology()

    def _check_topology(self) -> None:
        if (self.topology is None) != (self.proposal != "static"):
            raise ValueError(
                f'proposal="static" and a topology go together, got {self.proposal!r} and {self.topology}; '
                "RheoConfig.static makes the configuration of a static tree"
            )
        if self.topology is None:
            return
        object.__setattr__(self, "topology", canonical_topology(self.topology))
        for name, value in _static_settings(static_shape(self.topology)).items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, the topology makes it {value}; RheoConfig.static sets it"
                )

    @classmethod
    def static(
        cls,
        topology: Sequence[Sequence[int]],
        draft_support: int = 128,
        verification: Verification = "rheo",
    ) -> RheoConfig:
        """The configuration of a static tree: every child sampled without replacement.

        Args:
            topology: paths of child ranks in any order, EAGLE's and Medusa's ``choices``.
            draft_support: how many of the largest draft logits make a law.
            verification: either rule; they agree where there are neither leads nor fills.

        Raises:
            ValueError: no topology (see ``reference.topology.canonical_topology``).
        """
        paths = canonical_topology(topology)
        return cls(
            draft_support=draft_support,
            proposal="static",
            verification=verification,
            topology=paths,
            **_static_settings(static_shape(paths)),
        )

    @property
    def beam_width(self) -> int:
        """How many nodes of a level are expanded, at most."""
        return self.branching if self.beam is None else self.beam

    @property
    def budget(self) -> int:
        """How many draft nodes a tree has, at most."""
        return MOST_NODES if self.tree_size == "auto" else self.tree_size

    @property
    def may_stop(self) -> bool:
        """Whether a threshold may end a tree's growth before its budget and depth do."""
        return self.score_threshold > 0 or self.level_threshold > 0

    @property
    def node_price(self) -> Number:
        """The path score that earns a place in the tree: the threshold, or about what the budget's last node has."""
        return self.score_threshold if self.score_threshold > 0 else Fraction(1, 2 * self.budget)

    @property
    def fewest_leads(self) -> int:
        """The least m that a node may have."""
        return 0 if self.lead_tokens == "auto" else self.lead_tokens

    @property
    def shape(self) -> StaticShape | None:
        """The topology's shape; None for a tree that is not static."""
        return None if self.topology is None else static_shape(self.topology)


def _static_settings(shape: StaticShape) -> dict[str, Any]:
    """What a topology makes of the other settings."""
    return {
        "lead_tokens": 0,
        "branching": shape.branching,
        "depth": shape.depth,
        "tree_size": shape.size,
        "beam": shape.beam,
        "probes": shape.branching,
    }


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


@dataclass(frozen=True, eq=False)
class DraftLaw:
    """The draft's law at one node, over the target vocabulary.

    Attributes:
        construction: [vocab_size] q, at temperature 1: ranks tokens and scores paths.
        sampling: [vocab_size] q_T, before leads are removed: draws and verifies the probe. None for a greedy request.
        kept_logits: [vocab_size] float64 logits, -inf outside the support; only for laws made by ``from_logits``, whose
            tail is then softmaxed from its own logits.
        temperature: the request's, which made ``sampling`` what it is.

    Both laws are float64, or exact when given as Fractions (see ``reference.numbers``).

    Raises:
        ValueError: NaN, negative, not summing to one, different lengths, or q_T > 0 where q = 0.
    """

    construction: Vector
    sampling: Vector | None
    kept_logits: NDArray[np.float64] | None = field(default=None, repr=False)
    temperature: float = 1.0

    def __init__(
        self,
        construction: Sequence[Number] | Vector,
        sampling: Sequence[Number] | Vector | None,
        temperature: float = 1.0,
    ) -> None:
        q = check_law(construction, "construction")
        q_t = None if sampling is None else check_law(sampling, "sampling")
        if q_t is not None:
            if q_t.size != q.size:
                raise ValueError(f"sampling has {q_t.size} entries and construction has {q.size}; they must agree")
            if is_exact(q_t) != is_exact(q):
                raise ValueError("construction and sampling must both be exact (Fractions) or both be floats")
            stray = np.flatnonzero((q_t > 0) & (q == 0))
            if stray.size:
                token = int(stray[0])
                raise ValueError(f"sampling[{token}] is {q_t[token]} where construction[{token}] is 0")
        object.__setattr__(self, "construction", q)
        object.__setattr__(self, "sampling", q_t)
        object.__setattr__(self, "kept_logits", None)
        object.__setattr__(self, "temperature", float(temperature))

    @classmethod
    def from_logits(cls, logits: ArrayLike, temperature: float = 1.0, draft_support: int = 128) -> DraftLaw:
        """The law of draft logits: the only place where logits become a law (docs/algorithm.md, "Slots of one node").

        Args:
            logits: [vocab_size] floats in target ids; -inf marks tokens that the draft cannot say.
            temperature: the request's; below ``GREEDY_TEMPERATURE`` the law has no sampling part.
            draft_support: how many of the largest logits are kept; ties at the cut go to the lower token id.

        Raises:
            ValueError: wrong shape, NaN, +inf, every logit -inf, a negative, infinite or NaN temperature, or no
                support.
        """
        values = np.asarray(logits, dtype=np.float64)
        if values.ndim != 1 or values.size == 0:
            raise ValueError(f"logits must be a non-empty vector, got shape {values.shape}")
        bad = np.flatnonzero(np.isnan(values) | np.isposinf(values))
        if bad.size:
            raise ValueError(f"logits[{int(bad[0])}] is {values[bad[0]]}; draft logits are finite or -inf")
        if np.isneginf(values).all():
            raise ValueError("logits are all -inf: no token is left")
        if not 0 <= temperature < np.inf:
            raise ValueError(f"temperature must be finite and >= 0, got {temperature}")
        _check_count("draft_support", draft_support, 1)

        kept = np.full(values.size, -np.inf)
        support = np.argsort(-values, kind="stable")[:draft_support]
        kept[support] = values[support]
        construction = softmax(kept)
        kept[construction == 0] = -np.inf  # a token that underflows has no rank, and no sampling mass either
        law = cls(construction, None if is_greedy(temperature) else softmax(kept / temperature), temperature)
        object.__setattr__(law, "kept_logits", kept)
        return law

    @property
    def vocab_size(self) -> int:
        """Length of both laws."""
        return int(self.construction.size)

    def ranked_tokens(self) -> NDArray[np.int64]:
        """x_1, x_2, ...: the tokens with q > 0, largest first, ties by lower token id."""
        key = self.construction if self.kept_logits is None else self.kept_logits
        order = np.argsort(-key, kind="stable")
        return order[self.construction[order] > 0]


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Softmax of a float64 vector with at least one finite entry; -inf gets 0."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _check_uniforms(name: str, values: ArrayLike, *ndims: int) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim not in ndims:
        expected = " or ".join(map(str, ndims))
        raise ValueError(f"{name} must have {expected} dimension(s), got shape {array.shape}")
    outside = np.argwhere(~((array >= 0) & (array < 1)))
    if outside.size:
        where = tuple(int(i) for i in outside[0])
        raise ValueError(f"{name}{list(where)} is {array[where]}; uniforms lie in [0, 1)")
    return array


@dataclass(frozen=True, eq=False)
class GrowthNoise:
    """Uniforms of the growth of one tree.

    Attributes:
        probe_uniforms: [depth, beam] or [depth, beam, probes] in [0, 1); entry [l-1, r, j] draws the probe j + 1 of the
            r-th node of the beam that offers level l, the root being [0, 0]. Two dimensions mean one probe. Entries
            nobody needs are ignored.
    """

    probe_uniforms: NDArray[np.float64]

    def __post_init__(self) -> None:
        object.__setattr__(self, "probe_uniforms", _check_uniforms("probe_uniforms", self.probe_uniforms, 2, 3))


@dataclass(frozen=True, eq=False)
class VerifyNoise:
    """Uniforms of one verification walk, by the tree row where the walk stands (leaves included).

    Attributes:
        accept_uniforms: [tree_size + 1] or [tree_size + 1, probes] in [0, 1), the acceptance of each probe in drawing
            order; one dimension means one probe.
        residual_uniforms: [tree_size + 1] in [0, 1), the draw of the recovered or bonus token.
        lead_uniforms: [tree_size + 1] in [0, 1), the draw over the leads; used by "rrsw" only.
    """

    accept_uniforms: NDArray[np.float64]
    residual_uniforms: NDArray[np.float64]
    lead_uniforms: NDArray[np.float64]

    def __post_init__(self) -> None:
        for item in fields(self):
            ndims = (1, 2) if item.name == "accept_uniforms" else (1,)
            object.__setattr__(self, item.name, _check_uniforms(item.name, getattr(self, item.name), *ndims))
        sizes = {item.name: len(getattr(self, item.name)) for item in fields(self)}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"the three arrays must have one length, got {sizes}")

    @property
    def accept_by_probe(self) -> NDArray[np.float64]:
        """[tree_size + 1, probes] ``accept_uniforms`` with their second dimension."""
        return self.accept_uniforms.reshape(len(self.accept_uniforms), -1)


@dataclass(frozen=True)
class VerifyResult:
    """What a verification walk emitted.

    Attributes:
        token_ids: the emitted tokens: the accepted ones, then the bonus (or recovered) token.
        accepted_nodes: the tree rows walked through, root excluded; one per accepted token.
    """

    token_ids: tuple[int, ...]
    accepted_nodes: tuple[int, ...]


@dataclass(frozen=True)
class Margin:
    """How far a float decision was from going the other way.

    Attributes:
        kind: "order" (neighbours in a ranking of path scores: |difference of logs|), "draw" (|cumulative - u * total|)
            or "accept" (|u q~ - p|).
        value: the distance; exactly 0 is a tie, which the rules decide.
        where: level and rank in growth, tree row in verification.
    """

    kind: Literal["order", "draw", "accept"]
    value: float
    where: str

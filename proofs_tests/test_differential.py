"""The batched Torch and Numba paths against the reference, same noise: equal trees and equal tokens.

A float decision may fall differently only where the reference reports a positive margin below ``MARGIN``; such cases
are counted. Exact ties are decided by the rules and never excused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from optimized import slots
from optimized.backends import TORCH, Backend, unsupported
from optimized.growth import grow_trees
from optimized.randomness import StepNoise, StepRandomness
from optimized.slots import rank_logits
from optimized.trees import TreeBatch
from proofs_tests.toy import ToyDrafter, random_logits, random_topology
from reference import DraftTree, GrowthNoise, Margin, RheoConfig, VerifyNoise, grow_tree, verify

# Both sides are float64; they differ by the order of sums and by the last bit of exp and log, some 1e-15 relative.
MARGIN = 1e-12
FAMILIES = ("normal", "bfloat16", "tied", "masked", "peaked")
TEMPERATURES = (0.0, 1e-6, 0.05, 0.3, 1.0, 1.7)
BATCH = 8


@dataclass
class Case:
    """A batch of requests that share one configuration."""

    config: RheoConfig
    drafter: ToyDrafter
    temperatures: NDArray[np.float64]
    noise: StepNoise

    def grow(self, backend: Backend = TORCH) -> TreeBatch:
        """By a backend, or by Torch what it has no kernels for."""
        steps = backend.growth if unsupported(backend.name, self.config) is None else TORCH.growth
        vocab_map = self.drafter.vocab_map
        return grow_trees(
            self.config,
            self.drafter.root_logits(),
            self.drafter.expand,
            torch.from_numpy(self.temperatures),
            self.noise.probe_uniforms,
            None if vocab_map is None else torch.from_numpy(vocab_map),
            steps,
        )

    def reference_tree(self, b: int, margins: list[Margin]) -> DraftTree:
        draft = self.drafter.law(b, self.temperatures[b], self.config.draft_support)
        return grow_tree(self.config, draft, GrowthNoise(self.noise.probe_uniforms[b].numpy()), margins)

    def reference_noise(self, b: int) -> VerifyNoise:
        return VerifyNoise(
            self.noise.accept_uniforms[b].numpy(),
            self.noise.residual_uniforms[b].numpy(),
            self.noise.lead_uniforms[b].numpy(),
        )


def random_case(seed: int, kind: str = "one probe") -> Case:
    """A batch of random shape: m = 0..K+1, beams below and above K, tiny and cut supports, small draft vocabularies.

    ``kind`` is "one probe", "several probes" (two to five, also more than there are slots) or "static".
    """
    rng = np.random.default_rng(seed)
    target_vocab = int(rng.choice([1, 2, 5, 9, 33, 130]))
    vocab_map = None
    draft_vocab = target_vocab
    if rng.random() < 0.3:
        draft_vocab = int(rng.integers(1, target_vocab + 1))
        vocab_map = np.sort(rng.permutation(target_vocab)[:draft_vocab]).astype(np.int64)
    branching = int(rng.integers(1, 6))
    config = RheoConfig(
        lead_tokens=int(rng.integers(0, branching + 2)),
        branching=branching,
        depth=int(rng.integers(1, 5)),
        tree_size=int(rng.integers(1, 25)),
        beam=[None, 1, 2, branching + 2][rng.integers(0, 4)],
        draft_support=int(rng.choice([1, 3, 7, 128])),
        proposal="rheo" if rng.random() < 0.85 else "topk",
        verification="rheo" if rng.random() < 0.5 else "rrsw",
    )
    if kind == "several probes":
        config = replace(config, probes=int(rng.integers(2, 6)))
    elif kind == "static":
        topology = random_topology(rng, most_nodes=16, depth=4, branching=6)
        config = RheoConfig.static(topology, config.draft_support, config.verification)
    logits = [random_logits(seed * BATCH + b, draft_vocab, FAMILIES[rng.integers(len(FAMILIES))]) for b in range(BATCH)]
    randomness = StepRandomness(
        rng.integers(0, 2**63, size=BATCH).tolist(),
        config.depth,
        config.beam_width,
        config.tree_size + 1,
        probes=config.probes,
    )
    return Case(
        config,
        ToyDrafter(logits, target_vocab, vocab_map),
        rng.choice(TEMPERATURES, size=BATCH),
        randomness.at(torch.from_numpy(rng.integers(0, 2**31, size=BATCH))),
    )


def random_target(rng: np.random.Generator, tree: DraftTree, rows: int, vocab: int) -> NDArray[np.float64]:
    """[rows, vocab] target laws: dense, sparse, one-hot (often on a child), and equal to the probe's own law."""
    laws = rng.dirichlet(np.full(vocab, 0.5), size=rows)
    for row in range(len(tree)):
        kind = rng.integers(0, 4)
        if kind == 1:
            laws[row, rng.random(vocab) < 0.5] = 0
            laws[row, rng.integers(vocab)] += 0.1
        elif kind == 2:
            children = [tree.token_ids[child] for child in tree.children(row)]
            laws[row] = 0
            laws[row, rng.choice(children) if children else rng.integers(vocab)] = 1
        elif kind == 3 and row in tree.probe_laws:
            laws[row] = 0
            laws[row, list(tree.probe_laws[row][0])] = tree.probe_laws[row][1]
        laws[row] /= laws[row].sum()
    return laws


def excused(margins: list[Margin]) -> bool:
    """Whether some float decision was close enough to fall either way, without being a tie."""
    return any(0 < margin.value < MARGIN for margin in margins)


KINDS = ["one probe", "several probes", "static"]


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        pytest.param(block, kind, marks=pytest.mark.deep if kind != "one probe" and block > 3 else [])
        for kind in KINDS
        for block in range(10)
    ],
)
def test_grow_and_verify_equal_the_reference(block: int, kind: str, backend: Backend) -> None:
    """3,200 trees and walks, 1,280 of the later kinds; at most a handful may be inside the margin, none was seen."""
    inside = 0
    for seed in range(block * 40, block * 40 + 40):
        case = random_case(seed, kind)
        trees = case.grow(backend)
        assert not trees.draft_failed.any()
        rng = np.random.default_rng([seed, 1])
        references, targets = [], []
        for b in range(BATCH):
            margins: list[Margin] = []
            expected = case.reference_tree(b, margins)
            actual = trees.to_tree(b)
            if expected.key != actual.key:
                assert excused(margins), f"case {seed} request {b}: {case.config}\n{expected.key}\n{actual.key}"
                inside += 1
                expected = actual
            np.testing.assert_allclose(np.array(expected.scores, dtype=float), actual.scores, rtol=1e-12)
            for row, (ids, law) in expected.probe_laws.items():
                positive = law > 0
                assert np.array(ids)[positive].tolist() == list(actual.probe_laws[row][0])
                np.testing.assert_allclose(law[positive], actual.probe_laws[row][1], rtol=1e-12)
            references.append(expected)
            targets.append(random_target(rng, expected, trees.rows, case.drafter.target_vocab))
        walks = backend.verify(trees, torch.from_numpy(np.stack(targets)), case.noise, case.config.verification)
        for b, (tree, target) in enumerate(zip(references, targets, strict=True)):
            margins = []
            expected_walk = verify(
                tree, target[: len(tree)], case.reference_noise(b), case.config.verification, margins
            )
            count = int(walks.counts[b])
            actual_walk = (tuple(walks.token_ids[b, :count].tolist()), tuple(walks.rows[b, 1:count].tolist()))
            if actual_walk != (expected_walk.token_ids, expected_walk.accepted_nodes):
                assert excused(margins), f"case {seed} request {b}: {expected_walk} against {actual_walk}"
                inside += 1
            assert (walks.token_ids[b, count:] == -1).all()
            assert walks.rows[b, 0] == 0
    assert inside <= 2


TIE_FAMILIES = ("uniform", "two values", "one-hot", "pairs")


def tie_cases(probes: int) -> list[tuple[str, RheoConfig]]:
    shapes = [(3, 3, None), (3, 2, 1), (4, 3, 2), (2, 4, 4)]
    return [
        (family, RheoConfig(lead_tokens=m, branching=k, depth=depth, tree_size=size, beam=beam, probes=probes))
        for family in TIE_FAMILIES
        for k, depth, beam in shapes
        for m in range(k + 1)
        for size in range(1, 2 * k * depth)
    ]


def static_tie_cases() -> list[tuple[str, RheoConfig]]:
    rng = np.random.default_rng(11)
    topologies = [random_topology(rng, most_nodes=20, depth=4, branching=5) for _ in range(40)]
    return [(family, RheoConfig.static(topology)) for family in TIE_FAMILIES for topology in topologies]


def golden_logits(family: str, vocab: int, path: tuple[int, ...]) -> NDArray[np.float32]:
    if family == "uniform":
        return np.zeros(vocab, dtype=np.float32)
    if family == "two values":
        return np.where(np.arange(vocab) % 2 == len(path) % 2, 1.0, 0.0).astype(np.float32)
    if family == "pairs":
        return (-(np.arange(vocab) // 2)).astype(np.float32)
    hot = (3 * len(path) + (path[-1] if path else 1)) % vocab
    return np.where(np.arange(vocab) == hot, 0.0, -np.inf).astype(np.float32)


@pytest.mark.parametrize("probes", [1, 2, pytest.param(3, marks=pytest.mark.deep), "static"])
def test_golden_trees_full_of_ties_are_equal_to_the_last_node(probes: int | str, backend: Backend) -> None:
    """Every budget of trees in which nearly every comparison is an exact tie; nothing is excused."""
    vocab = 5
    ties = 0
    cases = static_tie_cases() if isinstance(probes, str) else tie_cases(probes)
    if unsupported(backend.name, cases[0][1]) is not None:
        pytest.skip("static trees run in Torch")
    for index, (family, config) in enumerate(cases):
        drafter = ToyDrafter([lambda path, family=family: golden_logits(family, vocab, path)], vocab)
        rows = config.tree_size + 1
        noise = StepRandomness([index], config.depth, config.beam_width, rows, probes=config.probes)
        case = Case(config, drafter, np.array([1.0]), noise.at(torch.tensor([0])))
        margins: list[Margin] = []
        expected = case.reference_tree(0, margins)
        actual = case.grow(backend).to_tree(0)
        assert actual.key == expected.key, f"{family} {config}"
        ties += sum(margin.value == 0 for margin in margins)
    assert ties > 1000 or probes == "static", "a static tree ranks nothing"


def test_golden_tree_of_several_probes_by_hand(backend: Backend) -> None:
    """q = (1/2, 1/4, 1/8, 1/8), m = 1, K = 4: the probes' weights are min(1/2, z), what they leave, and so on."""
    config = RheoConfig(lead_tokens=1, branching=4, depth=1, tree_size=4, probes=2)
    logits = np.log(np.array([4, 2, 1, 1], dtype=np.float32))
    drafter = ToyDrafter([lambda path: logits], 4)
    # q~ = (1/2, 1/4, 1/4) over tokens 1, 2, 3. 0.6 draws 2; what is left are 1/2 and 1/4, and 0.7 of 3/4 draws 3.
    uniforms = torch.tensor([[[[0.6, 0.7]] * 4]], dtype=torch.float64)
    trees = grow_trees(config, drafter.root_logits(), drafter.expand, torch.ones(1), uniforms, steps=backend.growth)
    tree = trees.to_tree(0)
    assert tree.key == ((0, 0, 0, False), (0, 1, 2, True), (0, 2, 3, True), (0, 3, 1, False))
    # z = 1/2 is the first probe's; it leaves 3/8 of it; the fill has its own.
    np.testing.assert_allclose(tree.scores, [1, 1 / 2, 1 / 2, 3 / 8, 1 / 4])
    # p = (0, 1/6, 1/2, 1/3): 0.999 q~(2) = 0.25 < 1/2 accepts the first probe.
    target = torch.tensor([[0, 1 / 6, 1 / 2, 1 / 3]], dtype=torch.float64).expand(1, 5, 4).clone()
    high, middle = torch.full((1, 5, 2), 0.999, dtype=torch.float64), torch.full((1, 5), 0.5, dtype=torch.float64)
    walk = backend.verify(TreeBatch.from_trees([tree]), target, StepNoise(uniforms, high, middle, middle))
    assert walk.rows[0].tolist() == [0, 2]
    # p = (0, 1/2, 0, 1/2): it is turned down, the residual is (0, 0, 0, 1/4) / (1/4), and the second probe accepted.
    target[:, 0] = torch.tensor([0, 1 / 2, 0, 1 / 2])
    walk = backend.verify(TreeBatch.from_trees([tree]), target, StepNoise(uniforms, high, middle, middle))
    assert walk.rows[0].tolist() == [0, 3]
    # p = (0, 1, 0, 0): both are turned down and the fill is what is left.
    target[:, 0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    walk = backend.verify(TreeBatch.from_trees([tree]), target, StepNoise(uniforms, high, middle, middle))
    assert walk.rows[0].tolist() == [0, 4]
    assert walk.probes_offered[0].tolist() == [True, False]
    assert walk.probes_accepted[0].tolist() == [False, False]


def test_golden_static_tree_by_hand() -> None:
    """The root has two children, its second child has two; after token 1 the draft is certain of token 2."""
    config = RheoConfig.static([(0,), (1,), (1, 0), (1, 1)])
    assert (config.branching, config.depth, config.tree_size, config.beam, config.probes) == (2, 2, 4, 1, 2)
    certain = np.array([-np.inf, -np.inf, 0.0], dtype=np.float32)
    drafter = ToyDrafter([lambda path: certain if path == (1,) else np.zeros(3, dtype=np.float32)], 3)
    uniforms = torch.tensor([[[[0.9, 0.6]], [[0.9, 0.5]]]], dtype=torch.float64)
    tree = grow_trees(config, drafter.root_logits(), drafter.expand, torch.ones(1), uniforms).to_tree(0)
    # 0.9 draws 2 of three equal tokens, 0.6 draws 1 of the two left; after 1 only token 2 is offered, once.
    assert tree.key == ((0, 0, 2, True), (0, 1, 1, True), (2, 0, 2, True))
    assert tree.scores == (1, 1, 1, 1)
    greedy = grow_trees(config, drafter.root_logits(), drafter.expand, torch.zeros(1), uniforms).to_tree(0)
    assert greedy.key == ((0, 0, 0, False), (0, 1, 1, False), (2, 0, 2, False))


def test_golden_tree_by_hand(backend: Backend) -> None:
    """Uniform law over four tokens, K = 3, m = 1: every weight is 1/4, so level, rank and slot alone decide."""
    config = RheoConfig(lead_tokens=1, branching=3, depth=2, tree_size=5, beam=2)
    drafter = ToyDrafter([lambda path: np.zeros(4, dtype=np.float32)], 4)
    uniforms = torch.tensor([[[0.7, 0.0], [0.4, 0.9]]], dtype=torch.float64)
    trees = grow_trees(config, drafter.root_logits(), drafter.expand, torch.ones(1), uniforms, steps=backend.growth)
    # Root: lead 0; u = 0.7 over tokens 1, 2, 3 of mass 1/3 each draws 3; the fill is 1.
    # The beam holds the lead and the probe. Under the lead u = 0.4 draws 2: slots 0, 2, 1, of which two fit.
    assert trees.to_tree(0).key == (
        (0, 0, 0, False),
        (0, 1, 3, True),
        (0, 2, 1, False),
        (1, 0, 0, False),
        (1, 1, 2, True),
    )


def test_ranking_breaks_ties_by_the_lower_id_at_the_cut_and_within() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0, -0.0]])
    assert rank_logits(logits, 4)[1].tolist() == [[1, 3, 2, 4]]
    assert rank_logits(logits, 6)[1].tolist() == [[1, 3, 2, 4, 5, 0]]
    assert rank_logits(torch.zeros(1, 500), 128)[1].tolist() == [list(range(128))]


@pytest.mark.parametrize("select", ["_candidates", "_largest"])  # the CPU's way and the device's, both run here
@pytest.mark.parametrize("vocab", [1, 3, 1023, 1024, 1025, 8192, 49152])
@pytest.mark.parametrize("support", [1, 7, 128])
def test_ranking_keeps_the_largest_of_any_row(
    select: str, vocab: int, support: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coarse, all equal, nearly or all masked, sorted either way, one outlier in a group: against a stable sort."""
    monkeypatch.setattr(slots, "_candidates", getattr(slots, select))
    rng = np.random.default_rng([vocab, support])
    rows = rng.normal(size=(8, vocab)).astype(np.float32)
    rows[1] = 0
    rows[2, rng.random(vocab) < 0.99] = -np.inf
    rows[3].sort()
    rows[4] = np.sort(rows[4])[::-1]
    rows[5] = np.where(np.arange(vocab) % 64 == 0, 5, rows[5])
    rows[6] = -np.inf
    logits = torch.from_numpy(rows).bfloat16()
    expected = np.argsort(-logits.float().numpy(), axis=1, kind="stable")[:, :support]
    values, ids = rank_logits(logits.view(1, 8, vocab), support)
    assert (values[0].numpy() == np.take_along_axis(logits.float().numpy(), expected, axis=1)).all()
    assert ((ids[0].numpy() == expected) | values[0].isneginf().numpy()).all()
    if select == "_candidates":
        rows[7, rng.integers(vocab)] = np.nan
        assert torch.isnan(rank_logits(torch.from_numpy(rows), support)[0][7, 0])


def test_a_row_without_a_draft_costs_the_others_nothing() -> None:
    """A request that is not drafted for has logits of -inf; its mates' candidates stay few."""
    logits = torch.randn(1, 2, 8192, generator=torch.Generator().manual_seed(0))
    few = slots._candidates(logits, 32)[0].shape[-1]
    logits[0, 1] = -torch.inf
    assert slots._candidates(logits, 32)[0].shape[-1] <= few < 200


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "all -inf"])
def test_a_failing_draft_is_reported_for_its_own_request_only(bad: float | str, backend: Backend) -> None:
    config = RheoConfig(branching=2, depth=2, tree_size=4)
    root = torch.zeros(3, 5)
    root[1] = torch.full((5,), -torch.inf) if bad == "all -inf" else root[1]
    if bad != "all -inf":
        root[1, 3] = bad  # type: ignore[assignment]
    uniforms = torch.zeros(3, 2, 2)
    trees = grow_trees(config, root, lambda nodes: torch.zeros(3, 2, 5), torch.ones(3), uniforms, steps=backend.growth)
    assert trees.draft_failed.tolist() == [False, True, False]
    assert trees.to_tree(0).key == trees.to_tree(2).key
    assert len(trees.to_tree(1)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_trees_survive_the_round_trip(kind: str, backend: Backend) -> None:
    """Packed again with laws of different lengths: equal nodes, scores, laws, ancestors, and equal walks."""
    probes = 0
    for seed in range(40):
        case = random_case(seed, kind)
        trees = case.grow(backend)
        originals = [trees.to_tree(b) for b in range(BATCH)]
        packed = TreeBatch.from_trees(originals)
        assert packed.probes <= trees.probes
        for b, tree in enumerate(originals):
            back = packed.to_tree(b)
            assert back.key == tree.key
            np.testing.assert_allclose(np.array(back.scores, float), np.array(tree.scores, float), rtol=1e-14)
            assert {row: ids for row, (ids, _) in back.probe_laws.items()} == {
                row: ids for row, (ids, _) in tree.probe_laws.items()
            }
            for row, (_, law) in tree.probe_laws.items():
                np.testing.assert_array_equal(back.probe_laws[row][1], law)
            probes += len(tree.probe_laws)
            reach = packed.ancestors()[b]
            for row in range(len(tree)):
                climbed = [row]
                while climbed[-1] > 0:
                    climbed.append(tree.parents[climbed[-1]])
                assert sorted(climbed) == torch.flatten(reach[row].nonzero()).tolist()
        rng = np.random.default_rng([seed, 2])
        targets = [random_target(rng, tree, trees.rows, case.drafter.target_vocab) for tree in originals]
        target = torch.from_numpy(np.stack(targets))
        walks = backend.verify(trees, target, case.noise, case.config.verification)
        again = backend.verify(packed, target[:, : packed.rows], case.noise, case.config.verification)
        width = again.token_ids.shape[1]
        assert torch.equal(walks.token_ids[:, :width], again.token_ids)
        assert torch.equal(walks.rows[:, :width], again.rows)
    assert probes > 100


def test_a_residual_is_right_where_packing_padded_the_probes_law(backend: Backend) -> None:
    """Two laws of different length, token 0 in the shorter: its residual must lose q~(0) however padding is written."""
    short = DraftTree((-1, 2), (-1, 0), (0, 1), (0, 0), (False, True), (1.0, 0.5), {0: ((2, 0), np.array([0.4, 0.6]))})
    long = DraftTree(
        (-1, 1), (-1, 0), (0, 1), (0, 0), (False, True), (1.0, 0.5), {0: ((1, 0, 2), np.array([0.5, 0.25, 0.25]))}
    )
    target = torch.tensor([[0.5, 0.3, 0.2]] * 2, dtype=torch.float64).expand(2, 2, 3)
    for uniform in np.linspace(0, 0.999, 50):
        rows = torch.full((2, 2), uniform, dtype=torch.float64)
        noise = StepNoise(rows, torch.full_like(rows, 0.999), rows, rows)  # the probe is turned down
        walk = backend.verify(TreeBatch.from_trees([short, long]), target, noise)
        assert int(walk.token_ids[0, 0]) == 1  # max(0, p - q~) = (0, .3, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"root_logits": torch.zeros(5)}, "root_logits must be"),
        ({"temperatures": torch.ones(2)}, "temperatures must have shape"),
        ({"probe_uniforms": torch.zeros(3, 1, 2)}, "probe_uniforms must be at least"),
        ({"probe_uniforms": torch.zeros(3, 2, 2, 0)}, r"probe_uniforms must be at least \[3, 2, 2, 1\]"),
        ({"vocab_map": torch.arange(4)}, "vocab_map must have shape"),
        ({"expand": lambda nodes: torch.zeros(3, 1, 5)}, "expand returned logits of shape"),
    ],
)
def test_grow_trees_says_which_shape_is_wrong(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "root_logits": torch.zeros(3, 5),
        "expand": lambda nodes: torch.zeros(3, 2, 5),
        "temperatures": torch.ones(3),
        "probe_uniforms": torch.zeros(3, 2, 2),
    }
    with pytest.raises(ValueError, match=message):
        grow_trees(RheoConfig(branching=2, depth=2), **(arguments | change))  # type: ignore[arg-type]


def test_several_probes_need_a_uniform_each(backend: Backend) -> None:
    config = RheoConfig(branching=3, depth=2, tree_size=4, probes=2)
    root = torch.zeros(3, 5)

    def grow(uniforms: torch.Tensor) -> TreeBatch:
        return grow_trees(
            config, root, lambda nodes: torch.zeros(3, 3, 5), torch.ones(3), uniforms, steps=backend.growth
        )

    with pytest.raises(ValueError, match=r"probe_uniforms must be at least \[3, 2, 3, 2\], got \[3, 2, 3\]"):
        grow(torch.zeros(3, 2, 3))
    trees = grow(torch.zeros(3, 2, 3, 2))
    rows = torch.zeros(3, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"accept_uniforms must be at least \[3, 5, 2\], got \[3, 5\]"):
        backend.verify(trees, torch.full((3, 5, 5), 0.2), StepNoise(rows, rows, rows, rows))
    tree = trees.to_tree(0)
    with pytest.raises(ValueError, match=r"accept_uniforms has 1 column\(s\), the tree has a node with 2 probes"):
        verify(tree, np.full((5, 5), 0.2), VerifyNoise(np.zeros(5), np.zeros(5), np.zeros(5)))
    draft = ToyDrafter([lambda path: np.zeros(5, dtype=np.float32)], 5).law(0, 1.0, 128)
    with pytest.raises(ValueError, match=r"depth, beam and probes need at least \(2, 3, 2\)"):
        grow_tree(config, draft, GrowthNoise(np.zeros((2, 3))))

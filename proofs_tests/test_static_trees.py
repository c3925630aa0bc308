"""Topologies: what is one, the best one for given rates, files, and rates measured on walks."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from optimized.evidence.cases import HARD_CASES_BY_NAME
from optimized.models.embedded import embedded_head_dir
from optimized.outputs import TracedStep
from optimized.static_trees import (
    count_acceptance,
    expected_length,
    measure_acceptance,
    optimal_topology,
    read_topology,
    write_topology,
)
from proofs_tests.toy import random_topology
from reference import DraftLaw, GrowthNoise, RheoConfig, VerifyNoise, grow_tree, verify
from reference.exact import tree_classes
from reference.lengths import expected_acceptance_length
from reference.topology import canonical_topology, static_shape


def test_canonical_order_is_level_major_whatever_the_order_given() -> None:
    paths = [(0, 0), (1,), [0, 1], np.array([0]), (1, 0)]
    assert canonical_topology(paths) == ((0,), (1,), (0, 0), (0, 1), (1, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ((), r"topology is empty; it needs at least the path \(0,\)"),
        (((),), r"topology holds \(\); a path is a non-empty sequence of child ranks"),
        (("0",), "topology holds '0'; a path is a non-empty sequence"),
        ((3,), "topology holds 3; a path is a non-empty sequence"),
        (((0,), (-1,)), r"topology path \(-1,\) holds -1; child ranks are integers >= 0"),
        (((0,), (1.0,)), r"topology path \(1.0,\) holds 1.0; child ranks are integers >= 0"),
        (((0,), (True,)), r"topology path \(True,\) holds True"),
        (((0,), (0,)), r"topology holds the path \(0,\) twice"),
        (((0,), (1, 0)), r"topology holds the path \(1, 0\) without its parent \(1,\)"),
        (((1,),), r"topology holds the path \(1,\) without its sibling \(0,\)"),
        (((0,), (0, 0), (0, 2)), r"topology holds the path \(0, 2\) without its sibling \(0, 1\)"),
    ],
)
def test_what_is_no_topology_is_refused(topology: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RheoConfig.static(topology)  # type: ignore[arg-type]


def test_a_topology_sets_the_other_settings() -> None:
    config = RheoConfig.static([(0,), (1,), (2,), (1, 0), (1, 1), (2, 0), (1, 1, 0)], draft_support=7)
    assert config == RheoConfig(0, 3, 3, 7, 2, 7, "static", "rheo", 3, config.topology)
    assert config.shape is not None
    assert config.shape.inner == (((),), ((1,), (2,)), ((1, 1),))
    assert config.shape.children == ((3,), (2, 1), (1,))
    assert hash(config) == hash(replace(config, topology=tuple(reversed(config.topology or ()))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topology": None}, "proposal=\"static\" and a topology go together, got 'static' and None"),
        ({"proposal": "rheo"}, "proposal=\"static\" and a topology go together, got 'rheo'"),
        ({"lead_tokens": 1}, "lead_tokens is 1, the topology makes it 0; RheoConfig.static sets it"),
        ({"branching": 3}, "branching is 3, the topology makes it 2"),
        ({"depth": 3}, "depth is 3, the topology makes it 2"),
        ({"tree_size": 4}, "tree_size is 4, the topology makes it 3"),
        ({"beam": None}, "beam is None, the topology makes it 1"),
        ({"probes": 1}, "probes is 1, the topology makes it 2"),
        ({"topology": ((0,),)}, "branching is 2, the topology makes it 1"),
    ],
)
def test_settings_that_contradict_the_topology_are_refused(change: dict[str, object], message: str) -> None:
    config = RheoConfig.static(((0,), (1,), (0, 0)))
    with pytest.raises(ValueError, match=message):
        replace(config, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("probes", [0, -1, 1.5, True])
def test_probes_are_counted(probes: object) -> None:
    with pytest.raises(ValueError, match="probes must be an integer >= 1"):
        RheoConfig(probes=probes)  # type: ignore[arg-type]


def all_topologies(size: int, depth: int, branching: int) -> list[tuple[tuple[int, ...], ...]]:
    """Every topology of a size, built child by child."""
    found: set[tuple[tuple[int, ...], ...]] = {((0,),)}
    for _ in range(size - 1):
        grown = set()
        for paths in found:
            for node in [(), *paths]:
                count = sum(path[:-1] == node for path in paths)
                if len(node) < depth and count < branching:
                    grown.add(canonical_topology([*paths, (*node, count)]))
        found = grown
    return sorted(found)


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_no_topology_beats_the_optimal_one(depth: int) -> None:
    """Against every topology of up to six nodes, also with rates that grow along the siblings."""
    rng = np.random.default_rng(depth)
    for branching in (1, 2, 3):
        for trial in range(6):
            rates = np.sort(rng.random(branching))[:: 1 if trial % 2 else -1]
            if trial == 4:
                rates = np.array([0.5, 0.0, 0.3][:branching])
            if trial == 5:
                rates = np.array([0.05, 0.9, 0.5][:branching])
            for size in range(1, 7):
                every = all_topologies(size, depth, branching)
                if not every:
                    with pytest.raises(ValueError, match="nodes at most, not"):
                        optimal_topology(rates, size, depth)
                    continue
                best = optimal_topology(rates, size, depth)
                assert len(best) == size
                assert static_shape(best).depth <= depth
                assert static_shape(best).branching <= branching
                worth = max(expected_length(topology, rates) for topology in every)
                assert expected_length(best, rates) == pytest.approx(worth, rel=1e-12)


def test_optimal_topologies_by_hand() -> None:
    assert optimal_topology([0.9, 0.0], 3, 5) == ((0,), (0, 0), (0, 0, 0))
    assert optimal_topology([0.5, 0.5, 0.5], 3, 1) == ((0,), (1,), (2,))
    # 0.6; then the second child, 0.4 * 0.7 = 0.28, or the grandchild, 0.36
    assert optimal_topology([0.6, 0.7], 2, 2) == ((0,), (0, 0))
    assert expected_length([(0,), (1,), (0, 0)], [0.6, 0.7]) == pytest.approx(1 + 0.6 + 0.28 + 0.36)
    assert len(optimal_topology(np.linspace(0.6, 0.1, 16), 128, 12)) == 128


@pytest.mark.parametrize("rates", [[], [[0.5]], [1.5], [-0.1], [float("nan")]])
def test_what_are_no_rates_is_refused(rates: list[float]) -> None:
    with pytest.raises(ValueError, match="acceptance must be a non-empty vector of rates"):
        optimal_topology(rates, 1, 1)


def test_files_come_back_as_they_were(tmp_path) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        topology = random_topology(rng, most_nodes=30, depth=5, branching=4)
        write_topology(tmp_path / "tree.json", topology)
        assert read_topology(tmp_path / "tree.json") == canonical_topology(topology)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[0], [1", "tree.json is not valid JSON"),
        ('{"choices": [[0]]}', r"tree.json must hold a list of paths of child ranks, such as \[\[0\]"),
        ("[0, 1]", "tree.json must hold a list of paths"),
        ("[[0], [2]]", r"tree.json: topology holds the path \(2,\) without its sibling \(1,\)"),
        ("[]", "tree.json: topology is empty"),
    ],
)
def test_files_that_hold_no_topology_are_refused(tmp_path, content: str, message: str) -> None:
    (tmp_path / "tree.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_topology(tmp_path / "tree.json")
    with pytest.raises(ValueError, match=r"cannot read the topology .*none.json: No such file"):
        read_topology(tmp_path / "none.json")


def test_measured_acceptance_is_exact_and_is_what_walks_count() -> None:
    """The nodes' rates, weighted by how often the walk tests them; counted on walks they agree with the computed."""
    case = HARD_CASES_BY_NAME["opposite rankings"]
    config = RheoConfig.static([(0,), (1,), (0, 0), (1, 0), (1, 1)])
    classes = list(tree_classes(config, case.draft()))
    for tree, _ in classes:
        laws = [np.array(case.target(tree.path(row)), dtype=float) for row in range(len(tree))]
        found = measure_acceptance([(tree, np.stack(laws))], 2)
        length = float(expected_acceptance_length(tree, [case.target(tree.path(row)) for row in range(len(tree))]))
        assert 1 + found.accepted.sum() == pytest.approx(length, rel=1e-12)
        assert found.tested[0] >= 1

    q = np.array([float(value) for value in case.construction(())])
    target = np.array([float(value) for value in case.target(())])
    rng = np.random.default_rng(0)
    walks, trees = [], []
    for _ in range(1500):
        tree = grow_tree(config, lambda path: DraftLaw(q, q), GrowthNoise(rng.random((2, 2, 2))))
        laws = np.tile(target, (len(tree), 1))
        noise = VerifyNoise(rng.random((len(tree), 2)), rng.random(len(tree)), rng.random(len(tree)))
        walks.append(TracedStep(tree, verify(tree, laws, noise), 0))
        trees.append((tree, laws))
    counted, computed = count_acceptance(walks, 3), measure_acceptance(trees, 3)
    assert counted.tested[0] == sum(
        bool(tree.probe_children(row)) for tree, walk, _ in walks for row in (0, *walk.accepted_nodes)
    )
    assert counted.accepted.sum() == sum(len(walk.accepted_nodes) for _, walk, _ in walks)
    np.testing.assert_allclose(counted.rates[:2], computed.rates[:2], atol=0.06)
    assert counted.rates[2] == computed.rates[2] == 0


def test_measured_acceptance_refuses_a_tree_with_fills() -> None:
    q = np.array([0.5, 0.3, 0.2])
    tree = grow_tree(
        RheoConfig(lead_tokens=0, branching=2, depth=1, tree_size=2),
        lambda path: DraftLaw(q, q),
        GrowthNoise(np.zeros((1, 2))),
    )
    with pytest.raises(ValueError, match="row 2 was not sampled; a static tree has probes only"):
        measure_acceptance([(tree, np.full((3, 3), 1 / 3))], 2)


@pytest.mark.parametrize("size", [1, 8, 60])
def test_the_embedded_pair_has_a_topology_of_every_size(size: int) -> None:
    topology = read_topology(f"embedded-{size}")
    assert len(topology) == size
    assert RheoConfig.static(topology).tree_size == size
    worth = expected_length(topology, embedded_rates())
    chain = tuple((0,) * (level + 1) for level in range(min(size, 8)))
    assert worth >= expected_length(chain, embedded_rates())


def embedded_rates() -> list[float]:
    counts = json.loads((embedded_head_dir() / "acceptance.json").read_text())
    return [a / b for a, b in zip(counts["accepted"], counts["tested"], strict=True)]

"""The CUDA kernels of the tree against the Torch path and the reference: equal results, bit for bit.

Scores are inputs here, so there is nothing to round and no margin: a tie is decided by the rules. Every test runs the
kernels on the CPU behind ``cuda_shim`` (threads in changing orders, blocks of changing sizes), and through the real
launchers where there is a CUDA device with CuPy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from optimized.growth import TORCH_STEPS, Beam, GrowthSteps, grow_trees
from optimized.kernels import tree as kernels
from optimized.kernels.tree import PrunedTree, Walk, prune_tree, select_beam, walk
from optimized.randomness import StepRandomness
from optimized.slots import LevelSlots
from optimized.trees import LevelNodes, TreeBatch
from proofs_tests.cuda_cases import (
    Offers,
    random_offers,
    reference_outcomes,
)
from proofs_tests.cuda_checks import (
    Executor,
    check_tree,
    check_walk,
    run_beams,
    run_case,
    run_prune,
    run_signed_zeros,
    run_walk,
)
from proofs_tests.cuda_shim import Shim, compile_kernels
from proofs_tests.test_differential import BATCH, Case, excused, golden_logits, random_case, random_target, tie_cases
from proofs_tests.toy import ToyDrafter
from reference import DraftTree, Margin, RheoConfig, verify
from reference.tree import root_only


@pytest.fixture(scope="session")
def shim_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_kernels(tmp_path_factory.mktemp("shim"), "tree.so", "-O1")


@pytest.fixture(params=["shim", "device"])
def executor(request: pytest.FixtureRequest) -> Executor:
    if request.param == "shim":
        return Executor(Shim(request.getfixturevalue("shim_library")))
    lack = kernels.missing()
    if lack is not None:
        pytest.skip(lack)
    return Executor(None)


def test_roots_alone_are_walked(executor: Executor) -> None:
    """What a decoder verifies behind its prompts."""
    roots = TreeBatch.from_trees([root_only()] * 3, executor.device)
    drawn = torch.tensor([[4], [5], [6]], device=executor.device)
    places = (roots.token_ids, roots.parents, roots.probe_rows())
    walked = walk(*places, drawn < 0, drawn, drawn, depth=0, rule="rheo", launch=executor.vary(0))
    assert walked.token_ids.tolist() == drawn.tolist()
    assert walked.rows.tolist() == [[0]] * 3
    assert walked.counts.tolist() == [1, 1, 1]


@pytest.mark.parametrize("block", range(4))
def test_beams_trees_and_walks_equal_the_torch_path(executor: Executor, block: int) -> None:
    """3,200 requests through each kernel."""
    for seed in range(block * 50, block * 50 + 50):
        run_case(seed, executor)


@pytest.mark.deep
@pytest.mark.parametrize("block", range(10))
def test_beams_trees_and_walks_equal_the_torch_path_at_length(executor: Executor, block: int) -> None:
    """24,000 requests through each kernel."""
    for seed in range(1000 + block * 150, 1000 + block * 150 + 150):
        run_case(seed, executor)


def grow_with(executor: Executor, launch: kernels.Launch, case: Case) -> TreeBatch:
    """``grow_trees`` with the slots in Torch and the tree in CUDA, as float64 as the reference."""

    def beam(config: RheoConfig, slots: LevelSlots, depth: int) -> Beam:
        scores, tokens = (values.to(executor.device).flatten(1) for values in (slots.log_scores, slots.token_ids))
        found = select_beam(scores, tokens, beam=config.beam_width, branching=config.branching, launch=launch)
        best, best_scores, token_ids, parents, valid = (values.cpu() for values in found)
        return Beam(LevelNodes(token_ids, parents, valid, depth), best, best_scores)

    def prune(config: RheoConfig, levels: Sequence[LevelSlots], beams: Sequence[Beam]) -> TreeBatch:
        tree = prune_tree(**Offers(config, list(levels), list(beams)).arguments(executor.device), launch=launch)
        fields: dict[str, Any] = {name: values.cpu() for name, values in tree._asdict().items()}
        del fields["ancestors"], fields["probe_row"]  # for the tests to find anew from the parents
        return TreeBatch(
            **fields,
            probe_law_ids=torch.cat([slots.law_ids for slots in levels], dim=1),
            probe_laws=torch.cat([slots.law for slots in levels], dim=1),
            depth=config.depth,
        )

    steps = GrowthSteps(TORCH_STEPS.level_slots, beam, prune)
    vocab_map = case.drafter.vocab_map
    return grow_trees(
        case.config,
        case.drafter.root_logits(),
        case.drafter.expand,
        torch.from_numpy(case.temperatures),
        case.noise.probe_uniforms,
        None if vocab_map is None else torch.from_numpy(vocab_map),
        steps,
    )


def check_against_reference(seeds: range, executor: Executor) -> None:
    """At most a handful of trees may stand inside the margin of the slots, which are Torch's; none was seen to."""
    inside = 0
    for seed in seeds:
        case, launch = random_case(seed), executor.vary(seed)
        trees, rule = grow_with(executor, launch, case), case.config.verification
        rng = np.random.default_rng([seed, 1])
        references: list[DraftTree] = []
        targets = []
        for b in range(BATCH):
            margins: list[Margin] = []
            expected, actual = case.reference_tree(b, margins), trees.to_tree(b)
            if expected.key != actual.key:
                assert excused(margins), f"case {seed} request {b}: {case.config}\n{expected.key}\n{actual.key}"
                inside += 1
            references.append(actual)
            targets.append(random_target(rng, actual, trees.rows, case.drafter.target_vocab))
        noises = [case.reference_noise(b) for b in range(BATCH)]
        outcomes = reference_outcomes(references, targets, noises, rule, trees.rows)
        result = run_walk(trees, outcomes, rule, launch, executor.device)
        for b, (tree, target) in enumerate(zip(references, targets, strict=True)):
            count = int(result.counts[b])
            emitted, rows = result.token_ids[b].tolist(), result.rows[b].tolist()
            expected_walk = verify(tree, target[: len(tree)], noises[b], rule)
            assert tuple(emitted[:count]) == expected_walk.token_ids, f"case {seed} request {b}"
            assert tuple(rows[:count]) == (0, *expected_walk.accepted_nodes), f"case {seed} request {b}"
            assert set(emitted[count:]) | set(rows[count:]) <= {-1}
    print(f"{inside} of {len(seeds) * BATCH} trees inside the margin")
    assert inside <= 2


@pytest.mark.parametrize("block", range(2))
def test_trees_and_walks_equal_the_reference(executor: Executor, block: int) -> None:
    """640 requests, grown and verified with the reference's own laws and decisions."""
    check_against_reference(range(block * 40, block * 40 + 40), executor)


@pytest.mark.deep
@pytest.mark.parametrize("block", range(10))
def test_trees_and_walks_equal_the_reference_at_length(executor: Executor, block: int) -> None:
    """20,000 requests."""
    check_against_reference(range(1000 + block * 250, 1000 + block * 250 + 250), executor)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.deep) for part in (1, 2, 3))])
def test_golden_trees_full_of_ties_are_equal_to_the_last_node(executor: Executor, part: int) -> None:
    """Trees in which nearly every comparison is an exact tie, a quarter of all budgets each; nothing is excused."""
    vocab = 5
    for index, (family, config) in list(enumerate(tie_cases(probes=1)))[part::4]:
        drafter = ToyDrafter([partial(golden_logits, family, vocab)], vocab)
        noise = StepRandomness([index], config.depth, config.beam_width, config.tree_size + 1).at(torch.tensor([0]))
        case = Case(config, drafter, np.array([1.0]), noise)
        expected = case.reference_tree(0, [])
        assert grow_with(executor, executor.vary(index), case).to_tree(0).key == expected.key, f"{family} {config}"


EDGES = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)


@pytest.mark.parametrize("offered", [*EDGES, 1023, 1024, 1025, 8191, 8192])
def test_one_level_of_any_size(executor: Executor, offered: int) -> None:
    """Edges of warps and blocks in the offered nodes, the beam and the rows."""
    rng = torch.Generator().manual_seed(offered)
    for size in sorted({1, 31, 32, 63, 64, 65, 127, offered - 1, offered, offered + 1} & set(range(1, 1024))):
        config = RheoConfig(branching=offered, depth=1, tree_size=size, beam=size)
        offers = random_offers(config, 2, rng)
        if offered > 1024 and size not in (1, 64):  # a thread with eight nodes is the point here, not the budget
            continue
        run_beams(offers, executor.vary(size), executor.device)
        run_prune(offers, executor.vary(size), executor.device)
        if offered <= 257:
            check_walk(offers, rng, executor.vary(size), executor.device)


@pytest.mark.parametrize(
    ("branching", "depth", "beam", "tree_size"),
    [
        (10, 8, 10, 60),  # the default: 710 nodes offered
        (16, 5, 16, 1023),  # 1040 offered, the most rows
        (1, 64, 1, 64),  # a chain, the deepest
        (128, 2, 63, 1023),  # 8192 offered, the most
        (8, 3, 64, 500),
    ],
)
def test_the_largest_trees(executor: Executor, branching: int, depth: int, beam: int, tree_size: int) -> None:
    rng = torch.Generator().manual_seed(depth)
    config = RheoConfig(branching=branching, depth=depth, beam=beam, tree_size=tree_size, lead_tokens=1)
    offers = random_offers(config, 5, rng)
    run_beams(offers, executor.vary(0), executor.device)
    tree = run_prune(offers, executor.vary(0), executor.device)
    assert tree.token_ids.shape[1] == min(tree_size, offers.arguments("cpu")["token_ids"].shape[1]) + 1
    check_walk(offers, rng, executor.vary(0), executor.device)


def test_a_tree_without_draft_nodes(executor: Executor) -> None:
    """A greedy failure at the root: nothing is offered, the walk emits one token."""
    config = RheoConfig(branching=3, depth=2, tree_size=4)
    offers = random_offers(config, 2, torch.Generator().manual_seed(0))
    for slots in offers.levels:
        slots.log_scores.fill_(-torch.inf)
    for beam in offers.beams:
        beam.log_scores.fill_(-torch.inf)
        beam.nodes.valid.fill_(False)
        beam.offers.copy_(torch.arange(3))
    offers.levels[0].failed[1] = True
    tree = run_prune(offers, executor.vary(0), executor.device)
    assert tree.num_nodes.tolist() == [1, 1]
    assert tree.draft_failed.tolist() == [bool(offers.levels[0].failed[0]), True]
    one = torch.full((2, 1), 5, device=executor.device)
    none = torch.zeros_like(one)
    result = walk(none - 1, none - 1, none, none.bool(), one, none, depth=2, rule="rheo", launch=executor.vary(0))
    assert result.token_ids.tolist() == [[5, -1, -1]] * 2
    assert result.rows.tolist() == [[0, -1, -1]] * 2
    assert result.counts.tolist() == [1, 1]


def test_no_requests_are_no_launch(executor: Executor) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("launched")

    empty = torch.zeros(0, 4, dtype=torch.int64)
    assert select_beam(empty.float(), empty, beam=2, branching=2, launch=refuse).best.shape == (0, 2)
    assert walk(empty, empty, empty, empty.bool(), empty, empty, depth=3, rule="rheo", launch=refuse).rows.shape == (
        0,
        4,
    )


def test_zeros_of_either_sign_tie(executor: Executor) -> None:
    run_signed_zeros(executor)


def good_arguments(function: str) -> dict[str, object]:
    config = RheoConfig(branching=3, depth=2, tree_size=4)
    offers = random_offers(config, 2, torch.Generator().manual_seed(0))
    if function == "prune_tree":
        return offers.arguments("cpu")
    if function == "select_beam":
        slots = offers.levels[0]
        return {
            "scores": slots.log_scores.flatten(1),
            "token_ids": slots.token_ids.flatten(1).contiguous(),
            "beam": 3,
            "branching": 3,
        }
    names = ("token_ids", "parents", "probe_row", "accepts", "drawn", "lead_drawn")
    tables: dict[str, object] = {name: torch.zeros(2, 5, dtype=torch.int64) for name in names}
    return tables | {"accepts": torch.zeros(2, 5, dtype=torch.bool), "depth": 2, "rule": "rheo"}


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        ("select_beam", {"scores": torch.zeros(3)}, r"scores must have shape \[any, any\], got \[3\]"),
        ("select_beam", {"scores": torch.zeros(2, 3).half()}, "scores must be torch.float32 or torch.float64"),
        ("select_beam", {"scores": torch.zeros(3, 2).T}, "scores must be contiguous within each row"),
        ("select_beam", {"token_ids": torch.zeros(2, 4).long()}, r"token_ids must have shape \[2, 3\], got \[2, 4\]"),
        ("select_beam", {"beam": 0}, "beam must be at least 1, got 0"),
        ("select_beam", {"branching": 0}, "branching must be at least 1, got 0"),
        ("select_beam", {"best": torch.zeros(2, 2).long()}, r"best must have shape \[2, 3\]"),
        (
            "select_beam",
            {"scores": torch.zeros(1, 8193), "token_ids": torch.zeros(1, 8193).long()},
            "offered nodes of a level must be between 1 and 8192, got 8193",
        ),
        (
            "select_beam",
            {"scores": torch.zeros(1, 1025), "token_ids": torch.zeros(1, 1025).long(), "beam": 2000},
            r"min\(beam, offered nodes\) must be between 1 and 1024, got 1025",
        ),
        ("prune_tree", {"depth": 65}, "depth must be between 1 and 64, got 65"),
        ("prune_tree", {"branching": 3000, "beam": 2}, "offered nodes must be between 1 and 8192, got 9000"),
        (
            "prune_tree",
            {"branching": 1024, "depth": 1, "tree_size": 1024},
            r"min\(tree_size, offered nodes\) must be between 1 and 1023, got 1024",
        ),
        ("prune_tree", {"token_ids": torch.zeros(2, 11).long()}, r"token_ids must have shape \[any, 12\]"),
        ("prune_tree", {"is_probe": torch.zeros(2, 12)}, "is_probe must be torch.bool, got torch.float32"),
        ("prune_tree", {"log_scores": torch.zeros(12, 2).T}, "log_scores must be contiguous, got strides"),
        ("prune_tree", {"failed": torch.zeros(2, 3).bool()}, r"failed must have shape \[2, 4\]"),
        ("prune_tree", {"tree_size": 0}, "tree_size must be at least 1, got 0"),
        ("walk", {"rule": "topk"}, "rule must be 'rheo' or 'rrsw', got 'topk'"),
        ("walk", {"token_ids": torch.zeros(2, 1025).long()}, "number of rows must be between 1 and 1024, got 1025"),
        ("walk", {"drawn": torch.zeros(2, 5)}, "drawn must be torch.int64, got torch.float32"),
        ("walk", {"parents": torch.zeros(2, 5, device="meta").long()}, "parents is on meta, the other tensors are on"),
    ],
)
def test_launchers_say_what_is_wrong(function: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(kernels, function)(**(good_arguments(function) | change))


@pytest.mark.parametrize("function", ["select_beam", "prune_tree", "walk"])
def test_without_a_device_the_launchers_say_what_is_missing(function: str) -> None:
    lack = kernels.missing()
    expected = "runs on a CUDA device, its tensors are on cpu" if lack is None else f"cannot run: {lack}"
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        getattr(kernels, function)(**good_arguments(function))


def test_the_limits_are_those_of_the_kernels() -> None:
    source = kernels.SOURCE.read_text()
    for name in ("MAX_THREADS", "MAX_BEAM", "MAX_ROWS", "MAX_DEPTH"):
        assert f"constexpr int {name} = {getattr(kernels, name)};" in source
    per_thread = int(re.findall(r"MAX_PER_THREAD = (\d+);", source)[0])
    assert per_thread * kernels.MAX_THREADS == kernels.MAX_OFFERED


def test_a_captured_graph_replays_with_new_inputs() -> None:
    """Beam, tree and walk in one CUDA graph: nothing in them waits for the host."""
    lack = kernels.missing()
    if lack is not None:
        pytest.skip(lack)
    config = RheoConfig(lead_tokens=1, branching=4, depth=3, tree_size=20, verification="rrsw")
    rng = torch.Generator().manual_seed(1)
    first, second = (random_offers(config, 3, rng) for _ in range(2))
    inputs = first.arguments("cuda")
    level = first.levels[1].log_scores.flatten(1).cuda()
    tokens = first.levels[1].token_ids.flatten(1).cuda()

    def step() -> tuple[PrunedTree, Walk, Tensor]:
        beam = select_beam(level, tokens, beam=4, branching=4)
        tree = prune_tree(**inputs)
        drawn = tree.token_ids.roll(-1, 1)  # something to walk along
        return tree, walk(*tree[:2], tree.probe_row, tree.is_probe, drawn, drawn, depth=3, rule="rrsw"), beam.best

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for offers in (second, first):
        for name, value in offers.arguments("cuda").items():
            if isinstance(value, Tensor):
                inputs[name].copy_(value)
        level.copy_(offers.levels[1].log_scores.flatten(1))
        tokens.copy_(offers.levels[1].token_ids.flatten(1))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [values.clone() for values in (*captured[0], *captured[1], captured[2])]
        check_tree(offers.torch_tree(), captured[0])
        tree, result, best = step()
        for have, want in zip(replayed, (*tree, *result, best), strict=True):
            assert torch.equal(have, want)

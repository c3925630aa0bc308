"""Runs the tree kernels, behind the shim or on the device, and compares every field of what they write."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from optimized.growth import select_beam as torch_select_beam
from optimized.kernels import tree as kernels
from optimized.kernels.tree import BeamNodes, PrunedTree, Walk, prune_tree, select_beam, walk
from optimized.trees import TreeBatch
from optimized.verification import verify_trees
from proofs_tests.cuda_cases import (
    Offers,
    Outcomes,
    arbitrary_outcomes,
    random_config,
    random_noise,
    random_offers,
    random_targets,
    row_outcomes,
    walk_by_hand,
)
from proofs_tests.cuda_shim import Shim

REQUESTS = 16


@dataclass
class Executor:
    """Where the kernels run: behind the shim, or on the device when there is no shim."""

    shim: Shim | None

    @property
    def device(self) -> str:
        return "cpu" if self.shim else "cuda"

    def vary(self, seed: int) -> kernels.Launch:
        """The launch of one case: behind the shim, its order of threads and its size of blocks."""
        if self.shim is None:
            return kernels.launch_on_device
        self.shim.schedule = seed % 5
        self.shim.fewer_threads = (1, 4, 8)[seed % 3]
        return self.shim


def check_beam(offers: Offers, level: int, nodes: BeamNodes) -> None:
    """That these are the nodes that the Torch path expands of what ``level`` (from 1) offers; every field and place."""
    beam = torch_select_beam(offers.config, offers.levels[level - 1], level)
    expected = BeamNodes(beam.offers, beam.log_scores, beam.nodes.token_ids, beam.nodes.parents, beam.nodes.valid)
    for name, want, have in zip(BeamNodes._fields, expected, nodes, strict=True):
        assert have.dtype == want.dtype, name
        assert torch.equal(have.cpu().nan_to_num(7e9), want.nan_to_num(7e9)), name


def check_tree(expected: TreeBatch, tree: PrunedTree) -> None:
    """Every field of the Torch path's trees, its ancestors as bits, and the probes' rows."""
    for name in PrunedTree._fields:
        if name in ("ancestors", "probe_row"):
            continue
        assert torch.equal(getattr(tree, name).cpu(), getattr(expected, name)), name
    rows = torch.arange(expected.rows)
    bits = (tree.ancestors.cpu()[:, :, rows // 64] >> (rows % 64)) & 1
    assert torch.equal(bits.bool(), expected.ancestors()), "ancestors"
    last = tree.ancestors.cpu()[:, :, -1]
    if expected.rows % 64:
        assert (last >> (expected.rows % 64) == 0).all(), "bits beyond the last row"
    assert torch.equal(tree.probe_row.cpu(), expected.probe_rows()), "probe_row"


def run_beam(offers: Offers, level: int, launch: kernels.Launch, device: str) -> None:
    """Select the beam of a level and compare; the result lands in columns of a wider tensor."""
    config, slots = offers.config, offers.levels[level - 1]
    scores, tokens = (values.to(device).flatten(1) for values in (slots.log_scores, slots.token_ids))
    wide = torch.full((len(scores), min(config.beam_width, scores.shape[1]) + 3), -7, device=device)
    best = wide[:, 2:-1]
    nodes = select_beam(scores, tokens, beam=config.beam_width, branching=config.branching, best=best, launch=launch)
    check_beam(offers, level, nodes)
    assert (wide[:, [0, 1, -1]] == -7).all(), "written beside the columns that were given"


def run_beams(offers: Offers, launch: kernels.Launch, device: str) -> None:
    for level in range(1, offers.config.depth + 1):
        run_beam(offers, level, launch, device)


def run_prune(offers: Offers, launch: kernels.Launch, device: str) -> PrunedTree:
    tree = prune_tree(**offers.arguments(device), launch=launch)
    check_tree(offers.torch_tree(), tree)
    return tree


def run_walk(trees: TreeBatch, outcomes: Outcomes, rule: str, launch: kernels.Launch, device: str) -> Walk:
    tables = (
        trees.token_ids,
        trees.parents,
        trees.probe_rows().contiguous(),
        outcomes.accepts,
        outcomes.drawn,
        outcomes.lead_drawn,
    )
    return walk(*(table.to(device) for table in tables), depth=trees.depth, rule=rule, launch=launch)


def check_walk(offers: Offers, rng: torch.Generator, launch: kernels.Launch, device: str) -> None:
    """Random target laws; every field of what the Torch path's walk says."""
    trees, rule = offers.torch_tree(), offers.config.verification
    laws = random_targets(trees, offers.levels[0].law.shape[2], rng)
    noise = random_noise(trees, rng)
    expected = verify_trees(trees, laws, noise, rule)
    result = run_walk(trees, row_outcomes(trees, laws, noise, rule), rule, launch, device)
    for name, values in zip(Walk._fields, result, strict=True):
        assert torch.equal(values.cpu(), getattr(expected, name)), name


def check_arbitrary_walk(offers: Offers, rng: torch.Generator, launch: kernels.Launch, device: str) -> None:
    trees, rule = offers.torch_tree(), offers.config.verification
    outcomes = arbitrary_outcomes(trees, rng)
    result = run_walk(trees, outcomes, rule, launch, device)
    for b in range(trees.batch_size):
        steps = walk_by_hand(trees, outcomes, rule, b)
        count, end = len(steps), trees.depth + 1 - len(steps)
        rows, tokens, offered, accepted = (list(column) for column in zip(*steps, strict=True))
        assert result.counts[b] == count
        assert result.rows[b].tolist() == rows + [-1] * end
        assert result.token_ids[b].tolist() == tokens + [-1] * end
        assert result.probes_offered[b].tolist() == offered + [False] * end
        assert result.probes_accepted[b].tolist() == accepted + [False] * end


def run_case(seed: int, executor: Executor) -> None:
    rng = torch.Generator().manual_seed(seed)
    config = random_config(rng)
    dtype = torch.float64 if seed % 4 == 0 else torch.float32
    offers = random_offers(config, REQUESTS, rng, dtype, not_a_number=seed % 7 == 0)
    launch = executor.vary(seed)
    try:
        run_beams(offers, launch, executor.device)
        run_prune(offers, launch, executor.device)
        check_walk(offers, rng, launch, executor.device)
        check_arbitrary_walk(offers, rng, launch, executor.device)
    except AssertionError as error:
        raise AssertionError(f"case {seed}: {config}, {dtype}") from error


def run_signed_zeros(executor: Executor) -> None:
    scores = torch.tensor([[-1.0, 0.0, -0.0, 0.0, -0.0]], device=executor.device)
    tokens = torch.arange(5, device=executor.device).view(1, 5)
    for dtype in (torch.float32, torch.float64):
        nodes = select_beam(scores.to(dtype), tokens, beam=4, branching=5, launch=executor.vary(0))
        assert nodes.best.tolist() == [[1, 2, 3, 4]]

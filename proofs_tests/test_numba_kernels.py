"""The parts of the CPU kernels by themselves, and at sizes at which the reference takes too long.

Whole trees and walks are compared with the reference in test_differential, test_weights and test_chi_square.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optimized.backends import TORCH, Backend, choose_backend
from optimized.calibration import prior_weights
from optimized.growth import grow_trees
from optimized.kernels.cpu import jit, slots, walk
from optimized.randomness import StepRandomness
from optimized.trees import TreeBatch
from reference.api import RheoConfig
from reference.numbers import inverse_cdf

CPU = torch.device("cpu")
SIZES = (1, 2, walk.TILE - 1, walk.TILE, walk.TILE + 1, 3 * walk.TILE, 8191)


@pytest.fixture
def numba() -> Backend:
    return choose_backend("numba", CPU, RheoConfig())


@pytest.mark.parametrize("vocab", [1, 3, 1023, 1024, 1025, 8192, 49152])
@pytest.mark.parametrize("support", [1, 7, 128])
def test_ranking_keeps_the_largest_of_any_row(vocab: int, support: int) -> None:
    """Coarse, all equal, nearly all masked, sorted either way, one outlier in a group, zeros of both signs."""
    rng = np.random.default_rng([vocab, support])
    rows = rng.normal(size=(7, vocab)).astype(np.float32)
    rows[1] = 0
    rows[2, rng.permutation(vocab)[rng.integers(1, vocab + 1) :]] = -np.inf
    rows[3].sort()
    rows[4] = np.sort(rows[4])[::-1]
    rows[5] = np.where(np.arange(vocab) % 64 == 0, 5, rows[5])
    rows[6] = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    for row in torch.from_numpy(rows).bfloat16().float().numpy():
        kept, ids = np.full(min(support, vocab), np.nan), np.full(min(support, vocab), -1)
        expected = np.argsort(-row, kind="stable")[: len(ids)]
        expected = expected[row[expected] > -np.inf]
        count = slots.rank(row, kept, ids)
        assert ids[:count].tolist() == expected.tolist()
        assert (kept[:count] == row[expected]).all()
    for bad in (np.nan, np.inf):
        damaged = rows[0].copy()
        damaged[rng.integers(vocab)] = bad
        assert slots.rank(damaged, kept, ids) == 0
    assert slots.rank(np.full(vocab, -np.inf, np.float32), kept, ids) == 0


@pytest.mark.parametrize("vocab", SIZES)
def test_draws_are_the_references(vocab: int) -> None:
    """Dense, sparse and one-hot laws; uniforms that are 0, nearly 1, and at the ends of the tiles, to the last bit."""
    rng = np.random.default_rng(vocab)
    tiles = np.empty(-(-vocab // walk.TILE))
    for kind in range(30):
        # Multiples of 2**-20: every sum is exact, so that nothing is excused.
        weights = rng.integers(0, 2**10, size=vocab) / 2.0**20
        if kind % 3 == 1:
            weights[rng.random(vocab) < 0.95] = 0
        elif kind % 3 == 2:
            weights[:] = 0
        weights[rng.integers(vocab)] = 2.0**-10
        total = walk.total_of(weights, tiles)
        assert total == weights.sum()
        ends = np.cumsum(weights)[walk.TILE - 1 :: walk.TILE] / total
        for uniform in (0.0, 1 - 2.0**-53, *rng.random(5), *ends[ends < 1]):
            assert walk.draw(weights, uniform, total, tiles) == inverse_cdf(weights, uniform)[0]


def test_a_draw_that_rounding_leaves_without_a_token_takes_the_last_with_weight() -> None:
    """A point beyond all that there is, by hand: the total is given, and larger than the sum."""
    weights = np.zeros(3 * walk.TILE)
    weights[[5, walk.TILE + 7]] = 0.5
    tiles = np.empty(3)
    assert walk.total_of(weights, tiles) == 1.0
    assert walk.draw(weights, 0.9, 2.0, tiles) == walk.TILE + 7


SHAPES = [
    RheoConfig(),
    RheoConfig(branching=4, depth=2, tree_size=5, draft_support=1024),
    RheoConfig(lead_tokens=2, branching=6, depth=4, tree_size=16, beam=3, probes=2, verification="rrsw"),
    RheoConfig(lead_tokens="auto", weights=prior_weights(), score_threshold=0.02, level_threshold=0.05),
    RheoConfig(lead_tokens=0, weights=prior_weights(), verification="rrsw"),
    RheoConfig(proposal="topk", tree_size=30),
    RheoConfig(branching=3, depth=1, tree_size=3),
]


@pytest.mark.parametrize("config", SHAPES, ids=lambda config: f"{config.branching}x{config.depth}")
def test_a_large_vocabulary_gives_the_torch_path_s_trees_and_walks(config: RheoConfig, numba: Backend) -> None:
    """8192 draft tokens, 49152 target tokens, bfloat16, with all fields that a later step reads."""
    rng = torch.Generator().manual_seed(config.branching)
    batch, vocab, target_vocab = 5, 8192, 49152
    vocab_map = torch.randperm(target_vocab, generator=rng)[:vocab].sort().values
    temperatures = torch.tensor([1.0, 0.6, 0.0, 1.3, 1.0], dtype=torch.float64)
    noise = StepRandomness(
        list(range(batch)), config.depth, config.beam_width, config.budget + 1, probes=config.probes
    ).at(torch.full((batch,), 3))
    tables = 2.5 * torch.randn(config.depth, 64, vocab, generator=rng)
    tables[:, ::2] *= 3  # some nodes are nearly certain

    def grow(backend: Backend) -> TreeBatch:
        return grow_trees(
            config,
            tables[0, :batch].bfloat16(),
            lambda nodes: tables[nodes.depth][nodes.token_ids % 64].bfloat16(),
            temperatures,
            noise.probe_uniforms,
            vocab_map,
            backend.growth,
        )

    expected, actual = grow(TORCH), grow(numba)
    expanded = (actual.probe_law_ids > 0).any(dim=-1)  # behind that is padding, where Torch computes something as well
    assert expanded.sum() > batch or config.depth == 1
    for name, value in vars(expected).items():
        found = getattr(actual, name)
        if name in ("probe_law_ids", "probe_laws", "masses") and value is not None:
            found, value = found[expanded], value[expanded]
        if name == "probe_law_ids":  # what has no mass is no particular token
            found, value = (ids * (tree.probe_laws[expanded] > 0) for ids, tree in ((found, actual), (value, expected)))
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-300, msg=name)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found, value), name
        else:
            assert found == value, name
    laws = torch.softmax(4 * torch.randn(batch, expected.rows, target_vocab, generator=rng).double(), dim=-1)
    for row in range(1, expected.rows):  # most of a parent's mass lies on its children
        there = torch.arange(batch)[expected.parents[:, row] >= 0]
        laws[there, expected.parents[there, row], expected.token_ids[there, row]] += 1
    laws /= laws.sum(dim=-1, keepdim=True)
    one, other = (backend.verify(expected, laws, noise, config.verification) for backend in (TORCH, numba))
    for name, value in vars(one).items():
        assert torch.equal(getattr(other, name), value), name
    assert one.counts.max() > 1


def test_other_types_are_refused_and_not_compiled_for() -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        walk.step(0, np.zeros((1, 3), np.float32), *[np.zeros((1, 1))] * 15)


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same() -> None:
    """Numba refuses to cache a function that comes from no file."""
    made: dict[str, object] = {}
    exec("def double(x):\n    return 2 * x\n", made)
    assert jit.jit()(made["double"])(4) == 8  # type: ignore[arg-type]

"""The Triton slots against the reference, same noise: equal ranking, equal probe, equal slots.

Ranking is exact. The probe's draw alone may differ, and only where the point falls within ``DRAW_MARGIN`` of the other
token's interval: the kernel draws from q~ rounded to float32, half an ulp per token, 2**-24 of the cumulative sum, and
as much again of the total.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from optimized.kernels.slots import SlotTensors, level_slots
from proofs_tests.triton_cases import DEVICE, DTYPES, FAMILIES, TEMPERATURES, poisoned, random_row, widened
from reference import RheoConfig
from reference.api import DraftLaw
from reference.slots import plan_slots

DRAW_MARGIN = 2.0**-23
LAW_RTOL = 2.0**-23  # rounding to float32, and the last bits of two float64 softmaxes
SCORE_RTOL = 2.0**-23  # one rounding to float32 of a sum computed in float64
TINY = 2.0**-148  # two of the smallest float32


@dataclass
class Level:
    """One launch: a level of a few requests."""

    config: RheoConfig
    logits: torch.Tensor  # [batch, width, draft vocab], on the device
    parent_scores: torch.Tensor
    temperatures: torch.Tensor
    uniforms: torch.Tensor
    vocab_map: torch.Tensor | None
    target_vocab: int
    tile: int | None

    def run(self) -> SlotTensors:
        with poisoned():
            slots = level_slots(
                self.logits,
                self.parent_scores.to(DEVICE),
                self.temperatures.to(DEVICE),
                self.uniforms.to(DEVICE),
                None if self.vocab_map is None else self.vocab_map.to(DEVICE),
                lead_tokens=self.config.lead_tokens,
                branching=self.config.branching,
                support=self.config.draft_support,
                proposal_is_rheo=self.config.proposal == "rheo",
                tile=self.tile,
            )
        return SlotTensors(*(values.cpu() for values in slots))

    def check(self) -> tuple[int, int]:
        """Nodes compared, and how many of their probes fell inside the margin."""
        slots = self.run()
        wide = np.full((*self.logits.shape[:2], self.target_vocab), -np.inf)
        wide[..., slice(None) if self.vocab_map is None else self.vocab_map.numpy()] = widened(self.logits)
        inside = 0
        for b in range(wide.shape[0]):
            for w in range(wide.shape[1]):
                inside += self.check_node(slots, b, w, wide[b, w])
        return wide.shape[0] * wide.shape[1], inside

    def check_node(self, slots: SlotTensors, b: int, w: int, logits: NDArray[np.float64]) -> bool:
        config, law = self.config, slots.law[b, w].double().numpy()
        ids = slots.law_ids[b, w].tolist()
        assert len(ids) == min(config.draft_support, self.logits.shape[2])
        if not np.isfinite(logits.max()):
            assert slots.failed[b, w]
            assert (slots.log_scores[b, w] == -torch.inf).all()
            assert not slots.token_ids[b, w].any()
            assert not slots.is_probe[b, w].any()
            assert not law.any()
            return False
        assert not slots.failed[b, w]
        plan = plan_slots(config, DraftLaw.from_logits(logits, float(self.temperatures[b]), config.draft_support))
        assert tuple(ids[: len(plan.tokens)]) == plan.tokens
        assert len(set(ids)) == len(ids)

        differs = False
        probe_token = None
        if plan.probe_law is None:
            assert not law.any()
        else:
            m, tokens = config.lead_tokens, plan.probe_law[0]
            q = plan.probe_law[1]
            np.testing.assert_allclose(law[m : m + len(tokens)], q, rtol=LAW_RTOL, atol=TINY)
            assert not law[:m].any()
            assert not law[m + len(tokens) :].any()
            at = np.flatnonzero(slots.is_probe[b, w].numpy())
            assert at.tolist() == [m]
            probe_token = int(slots.token_ids[b, w, m])
            # The stored law draws, and exactly so; the reference's own law only within the margin.
            stored = np.cumsum(law)
            point = float(self.uniforms[b, w]) * stored[-1]
            assert probe_token == ids[int(np.flatnonzero(stored > point)[0])]
            cumulative = np.cumsum(q)
            place = tokens.index(probe_token)
            point = float(self.uniforms[b, w]) * cumulative[-1]
            below = cumulative[place] - q[place] if place == 0 else cumulative[place - 1]
            differs = not below <= point < cumulative[place]
            if differs:
                assert max(below - point, point - cumulative[place]) <= DRAW_MARGIN
        expected = plan.slots(() if probe_token is None else (probe_token,))
        count = len(expected)
        assert slots.token_ids[b, w, :count].tolist() == [slot.token_id for slot in expected]
        assert slots.is_probe[b, w, :count].tolist() == [slot.is_probe for slot in expected]
        weights = np.array([float(slot.weight) for slot in expected])
        scores = float(self.parent_scores[b, w]) + np.log(weights)
        actual = slots.log_scores[b, w, :count].double().numpy()
        if np.isneginf(scores).all():
            assert np.isneginf(actual).all()
        else:  # where a weight is denormal its own last bit is what the logarithm shows
            limit = SCORE_RTOL * np.maximum(np.abs(scores), 1) + 2.0**-1073 / weights
            assert (np.abs(actual - scores) <= limit).all()
        assert (slots.log_scores[b, w, count:] == -torch.inf).all()
        assert not slots.token_ids[b, w, count:].any()
        assert not slots.is_probe[b, w, count:].any()
        return differs


def random_level(seed: int, batch: int = 3, width: int = 5) -> Level:
    """A level of small, odd size: one to a few tiles of 16 or 64, supports below and above them, m = 0..K+1."""
    rng = np.random.default_rng([seed, 7])
    tile = int(rng.choice([16, 64]))
    edges = [tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile, 2 * tile + 1, 3 * tile + 5]
    vocab = int(rng.choice([1, 2, 5, 13, 130, *edges]))
    target_vocab, vocab_map = vocab, None
    if rng.random() < 0.3:
        target_vocab = vocab + int(rng.integers(0, 40))
        vocab_map = torch.from_numpy(np.sort(rng.permutation(target_vocab)[:vocab]))
    branching = int(rng.integers(1, 8))
    config = RheoConfig(
        lead_tokens=int(rng.integers(0, branching + 2)),
        branching=branching,
        draft_support=int(rng.choice([1, 3, 8, 33, 128])),
        proposal="rheo" if rng.random() < 0.85 else "topk",
    )
    dtype = DTYPES[rng.integers(len(DTYPES))]
    rows = np.stack([random_row(rng, vocab, FAMILIES[rng.integers(len(FAMILIES))]) for _ in range(batch * width)])
    # Rows of a wider tensor, every other one: only the last dimension is contiguous.
    storage = torch.full((batch, 2 * width, vocab + 3), torch.nan, dtype=dtype, device=DEVICE)
    logits = storage[:, ::2, 1 : vocab + 1]
    logits.copy_(torch.from_numpy(rows).view(batch, width, vocab))
    parents = rng.uniform(-20, 0, size=(batch, width)).astype(np.float32)
    parents[rng.random((batch, width)) < 0.1] = -np.inf
    return Level(
        config=config,
        logits=logits,
        parent_scores=torch.from_numpy(parents),
        temperatures=torch.from_numpy(rng.choice(TEMPERATURES, size=batch)),
        uniforms=torch.from_numpy(rng.integers(0, 2**24, size=(batch, width)) / 2.0**24),
        vocab_map=vocab_map,
        target_vocab=target_vocab,
        tile=tile,
    )


def check_levels(seeds: range) -> tuple[int, int]:
    checks = [random_level(seed).check() for seed in seeds]
    nodes, inside = (sum(column) for column in zip(*checks, strict=True))
    print(f"{nodes} nodes, {inside} probes inside the margin")
    return nodes, inside


def test_slots_equal_the_reference() -> None:
    nodes, inside = check_levels(range(60))
    assert nodes == 900
    assert inside == 0


@pytest.mark.deep
@pytest.mark.parametrize("block", range(10))
def test_slots_equal_the_reference_at_length(block: int) -> None:
    """Ten times 2,100 nodes."""
    nodes, inside = check_levels(range(1000 + 140 * block, 1000 + 140 * (block + 1)))
    assert nodes == 2100
    assert inside <= 1


LARGE = [
    (49152, 4, torch.bfloat16, "normal"),
    (151936, 2, torch.bfloat16, "tied"),
    (262144, 1, torch.bfloat16, "normal"),
]
LARGE_DEEP = [
    (vocab, 2, dtype, family)
    for vocab in (4095, 4096, 4097, 32000, 49152, 128256, 151936, 262144)
    for dtype in DTYPES[:3]
    for family in ("normal", "tied", "flat", "masked", "uniform")
]


def check_large(vocab: int, width: int, dtype: torch.dtype, family: str) -> None:
    rng = np.random.default_rng(vocab)
    logits = torch.stack([torch.from_numpy(random_row(rng, vocab, family)) for _ in range(width)]).unsqueeze(0)
    config = RheoConfig(lead_tokens=1, branching=10)
    uniforms = torch.from_numpy(rng.integers(0, 2**24, size=(1, width)) / 2.0**24)
    level = Level(
        config, logits.to(DEVICE, dtype), torch.zeros(1, width), torch.ones(1), uniforms, None, vocab, tile=None
    )
    assert level.check() == (width, 0)


@pytest.mark.parametrize(("vocab", "width", "dtype", "family"), LARGE)
def test_real_vocabularies(vocab: int, width: int, dtype: torch.dtype, family: str) -> None:
    check_large(vocab, width, dtype, family)


@pytest.mark.deep
@pytest.mark.parametrize(("vocab", "width", "dtype", "family"), LARGE_DEEP)
def test_real_vocabularies_at_length(vocab: int, width: int, dtype: torch.dtype, family: str) -> None:
    check_large(vocab, width, dtype, family)


@pytest.mark.parametrize("support", [1000, 1024])
def test_a_support_of_a_thousand(support: int) -> None:
    rng = np.random.default_rng(support)
    logits = torch.from_numpy(np.stack([random_row(rng, 20000, family) for family in ("normal", "flat")]))
    uniforms = torch.tensor([[0.3, 0.99]], dtype=torch.float64)
    config = RheoConfig(lead_tokens=2, branching=10, draft_support=support)
    level = Level(
        config, logits.unsqueeze(0).to(DEVICE), torch.zeros(1, 2), torch.ones(1), uniforms, None, 20000, tile=None
    )
    assert level.check() == (2, 0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "all -inf"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_bad_row_fails_alone(bad: float | str, seed: int) -> None:
    """Its neighbours are what they are without it; a NaN with its sign bit set fails too."""
    level = random_level(seed, batch=2, width=2)
    if bad == "all -inf":
        level.logits[1, 0] = -torch.inf
    else:
        value = torch.tensor(bad, dtype=level.logits.dtype)
        level.logits[1, 0, -1] = value if bad == torch.inf else value.copysign(torch.tensor(-1.0))
        assert level.logits[1, 0, -1].signbit() == (bad != torch.inf)
    assert level.run().failed.tolist() == [[False, False], [True, False]]
    level.check()


def test_exact_ties_at_the_draw_go_to_the_next_token() -> None:
    """q~ = 1/4 each: a uniform of k/4 is the very end of an interval, and draws the token behind it."""
    logits = torch.zeros(1, 8, 5, device=DEVICE)
    uniforms = torch.tensor([[0, 0.25, 0.5, 0.75, 0.25 - 2**-24, 0.5 - 2**-24, 0.75 - 2**-24, 1 - 2**-24]])
    level = Level(
        RheoConfig(lead_tokens=1, branching=3),
        logits,
        torch.zeros(1, 8),
        torch.ones(1),
        uniforms.double(),
        None,
        5,
        tile=None,
    )
    assert level.run().token_ids[0, :, 1].tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
    assert level.check() == (8, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3, 5)}, r"logits must be \[batch, width, vocab\]"),
        ({"logits": torch.zeros(3, 2, 5, dtype=torch.long)}, "must be of one of the types"),
        ({"parent_scores": torch.zeros(3, 1)}, "parent_scores must be"),
        ({"temperatures": torch.ones(2)}, "temperatures must be"),
        ({"uniforms": torch.zeros(2, 2)}, "uniforms must be"),
        ({"vocab_map": torch.arange(4)}, "vocab_map must be"),
        ({"lead_tokens": -1}, "lead_tokens must be"),
        ({"tile": 48}, "tile must be a power of two"),
        ({"logits": torch.zeros(3, 2, 40000), "tile": 32768}, "tile must be at most 16384, got 32768"),
        ({"logits": torch.zeros(3, 2, 2000), "support": 1025}, "support must be at most 1024"),
        ({"logits": torch.zeros(3, 2, 20000), "support": 1000, "tile": 16}, "take a smaller support or wider tiles"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "logits": torch.zeros(3, 2, 5),
        "parent_scores": torch.zeros(3, 2),
        "temperatures": torch.ones(3),
        "uniforms": torch.zeros(3, 2),
        "lead_tokens": 1,
        "branching": 3,
    }
    with pytest.raises(ValueError, match=message):
        level_slots(**(arguments | change))  # type: ignore[arg-type]

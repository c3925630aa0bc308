"""The Triton verification rows against the reference, same noise: equal acceptance, equal tokens, at every row.

A decision may differ only inside ``MARGIN``: the kernel's laws come from float32 weights. Exact ties are decided by the
rules and never excused. Nearly all that do differ are draws with a uniform of exactly 0, of which the cases have many:
the first token with any mass is then another one where the first one's, below 1e-38, underflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from optimized.kernels import row_draws
from optimized.kernels.rows import RowOutcomes, row_outcomes
from proofs_tests.triton_cases import DEVICE, DTYPES, FAMILIES, TEMPERATURES, poisoned, random_row, widened
from reference import DraftTree, GrowthNoise, Margin, RheoConfig, VerifyNoise, grow_tree, verify
from reference.api import DraftLaw, is_greedy, softmax
from reference.numbers import inverse_cdf
from reference.verification import accepts, residual, without_tokens

# A law moves by at most 1.6e-6 in total variation (kernels/rows.py): so much for a sum of probabilities, and twice that
# for the total of a residual. Where a law was divided by what is left of it, so is the margin.
MARGIN = 3.2e-6
LAW_TV = 1e-6

Laws = NDArray[np.float64]


@dataclass
class Case:
    """One launch: trees of a few requests, the target's logits at their rows, the noise."""

    trees: list[DraftTree]
    logits: torch.Tensor  # [batch, rows, vocab], on the device
    temperatures: NDArray[np.float64]
    uniforms: NDArray[np.float64]  # [3, batch, more than rows]: accept, residual, lead
    rule: Literal["rheo", "rrsw"]
    tile: int | None
    support: int

    def run(self) -> RowOutcomes:
        batch, rows = self.logits.shape[:2]
        laws = max(1, *(len(tree.probe_laws) for tree in self.trees)) if self.trees else 1
        # Whatever stands behind a tree's nodes is not read; only where there are none, zeros stand for "no probe".
        token_ids, parents = np.full((batch, rows), 2**40), np.full((batch, rows), 2**40)
        probe_rows, law_index = np.full((batch, rows), 2**40), np.full((batch, rows), -1)
        law_ids, law = np.zeros((batch, laws, self.support), np.int64), np.zeros((batch, laws, self.support))
        for b, tree in enumerate(self.trees):
            token_ids[b, : len(tree)] = tree.token_ids
            parents[b, : len(tree)] = tree.parents
            probe_rows[b, : len(tree)] = [tree.probe_child(row) or 0 for row in range(len(tree))]
            for index, (row, (ids, q)) in enumerate(tree.probe_laws.items()):
                law_index[b, row] = index
                law_ids[b, index, : len(ids)] = ids
                law[b, index, : len(ids)] = q
        accept, residuals, leads = (torch.from_numpy(values).to(DEVICE) for values in self.uniforms)
        arguments = (token_ids, parents, np.array([len(tree) for tree in self.trees]), probe_rows, law_index, law_ids)
        with poisoned():
            outcomes = row_outcomes(
                self.logits,
                torch.from_numpy(self.temperatures).to(DEVICE),
                *(torch.from_numpy(values).to(DEVICE) for values in arguments),
                torch.from_numpy(law).float().to(DEVICE),
                accept,
                residuals,
                leads,
                rule=self.rule,
                tile=self.tile,
            )
        return RowOutcomes(*(values.cpu() for values in outcomes))

    def target(self, b: int, row: int) -> Laws:
        return tempered(widened(self.logits[b, row]), self.temperatures[b])

    def check(self, outcomes: RowOutcomes | None = None) -> tuple[int, int]:
        """Rows compared, and decisions that fell inside the margin."""
        outcomes = outcomes or self.run()
        inside = 0
        for b, tree in enumerate(self.trees):
            for row in range(len(tree)):
                inside += self.check_row(outcomes, b, row)
            padding = slice(len(tree), None)
            assert not outcomes.accepts[b, padding].any()
            assert not outcomes.failed[b, padding].any()
            assert (outcomes.token[b, padding] == 0).all()
            assert (outcomes.lead_token[b, padding] == -1).all()
        return sum(len(tree) for tree in self.trees), inside

    def check_row(self, outcomes: RowOutcomes, b: int, row: int) -> int:
        tree = self.trees[b]
        accepted, token, lead_token, failed = (values[b, row].item() for values in outcomes)
        logits = widened(self.logits[b, row])
        if not np.isfinite(logits.max()):
            assert (accepted, token, lead_token, failed) == (False, 0, -1, True)
            return 0
        assert not failed
        law = self.target(b, row)
        accept_uniform, residual_uniform, lead_uniform = self.uniforms[:, b, row]
        inside = 0
        scale = 1.0
        probe = tree.probe_child(row)
        leads = [] if probe is None else [child for child in tree.children(row) if child < probe]
        if self.rule == "rrsw" and leads:
            inside += drawn_inside_margin(law, lead_uniform, lead_token, MARGIN)
            lead_ids = [tree.token_ids[lead] for lead in leads]
            left = 1 - law[lead_ids].sum()
            scale = 1 / max(left, 1e-300)
            law = without_tokens(law, lead_ids)
        else:
            assert lead_token == -1
        if MARGIN * scale > 1e-2:
            return inside  # the leads are all but everything: what is left is known to no more than its rounding
        if probe is None:
            assert not accepted
        else:
            ids, q = tree.probe_laws[row]
            q_probe = q[ids.index(tree.token_ids[probe])]
            if accepted != accepts(accept_uniform, q_probe, law[tree.token_ids[probe]]):
                margin = abs(accept_uniform * q_probe - law[tree.token_ids[probe]])
                assert 0 < margin <= MARGIN * scale, f"request {b} row {row}: margin {margin}"
                inside += 1
            rest = law.copy()
            rest[list(ids)] = np.maximum(rest[list(ids)] - q, 0)
            if rest.sum() < 100 * MARGIN * scale and np.count_nonzero(law) > 1:
                return inside  # p and q~ agree but for their rounding
            law = residual(law, (ids, q))
            scale /= rest.sum() or 1.0
        possible = self.target(b, row)[token] > 0
        return inside + drawn_inside_margin(law, residual_uniform, token, MARGIN * scale, possible)

    def walk(self, outcomes: RowOutcomes, b: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The walk that the outcomes of its rows make: emitted tokens, accepted rows."""
        tree, row = self.trees[b], 0
        tokens: list[int] = []
        walked: list[int] = []
        while True:
            children = {tree.token_ids[child]: child for child in tree.children(row)}
            probe = tree.probe_child(row)
            child = None
            token = int(outcomes.lead_token[b, row])
            if self.rule == "rrsw" and probe is not None and children.get(token, probe) < probe:
                child = children[token]
            elif probe is not None and outcomes.accepts[b, row]:
                token, child = tree.token_ids[probe], probe
            else:
                token = int(outcomes.token[b, row])
                child = children.get(token)
                assert child is None or child != probe
            tokens.append(token)
            if child is None:
                return tuple(tokens), tuple(walked)
            walked.append(child)
            row = child


def tempered(logits: Laws, temperature: float) -> Laws:
    """The target's law in float64."""
    if is_greedy(temperature):
        return np.where(np.arange(logits.size) == np.argmax(logits), 1.0, 0.0)
    return softmax(logits / temperature)


def drawn_inside_margin(law: Laws, uniform: float, token: int, margin: float, possible: bool = False) -> bool:
    """Whether the token differs from the law's own draw; fails where the point is beyond the margin of its interval.

    Args:
        law: the reference's.
        uniform: the draw's.
        token: the kernel's.
        margin: how far the point may be from the token's interval.
        possible: whether a token without mass may have been drawn: a residual of 0 in the reference may be one of some
            1e-7 p in the kernel.
    """
    expected, _ = inverse_cdf(law, uniform)
    if token == expected:
        return False
    assert 0 <= token < law.size
    cumulative = np.cumsum(law)
    point = uniform * cumulative[-1]
    below = cumulative[token - 1] if token else 0.0
    distance = max(below - point, point - cumulative[token])
    assert distance <= margin, f"drew {token} instead of {expected}, {distance} from its interval"
    assert distance > 0 or (possible and law[token] == 0), f"drew {token} instead of {expected} at an exact tie"
    return True


def random_tree(
    rng: np.random.Generator, config: RheoConfig, vocab: int, temperature: float, families: Sequence[str] = FAMILIES
) -> DraftTree:
    """A grown tree whose laws are rounded to float32, as the kernels keep them."""
    families = [families[rng.integers(len(families))] for _ in range(3)]
    seed = int(rng.integers(2**31))

    def draft(path: tuple[int, ...]) -> DraftLaw:
        own = np.random.default_rng([seed, *path])
        logits = random_row(own, vocab, families[len(path) % 3]).astype(np.float64)
        return DraftLaw.from_logits(logits, temperature, config.draft_support)

    noise = GrowthNoise(rng.integers(0, 2**24, size=(config.depth, config.beam_width)) / 2.0**24)
    tree = grow_tree(config, draft, noise)
    laws = {row: (ids, q.astype(np.float32).astype(np.float64)) for row, (ids, q) in tree.probe_laws.items()}
    return replace(tree, probe_laws=laws)


def target_row(rng: np.random.Generator, tree: DraftTree, row: int, vocab: int, temperature: float) -> Laws:
    """Logits of a family, or made from q~: p all but equal to it, disjoint from it, or one-hot on a child."""
    logits = random_row(rng, vocab, FAMILIES[rng.integers(len(FAMILIES))]).astype(np.float64)
    kind = rng.integers(0, 6)
    if row < len(tree) and row in tree.probe_laws:
        ids, q = list(tree.probe_laws[row][0]), tree.probe_laws[row][1]
        if kind == 0:
            logits[:] = -np.inf
            with np.errstate(divide="ignore"):
                logits[ids] = temperature * np.log(q)
        elif kind == 1 and len(ids) < vocab:
            logits[ids] = -np.inf
        elif kind == 2:
            logits[ids] += rng.uniform(0, 3)
    if kind == 3 and row < len(tree) and (children := [tree.token_ids[child] for child in tree.children(row)]):
        logits[rng.choice(children)] += 40
    return logits if np.isfinite(logits.max()) else np.zeros(vocab)


def random_case(seed: int, batch: int = 3) -> Case:
    """Trees of small, odd sizes; vocabularies of one to a few tiles of 16 or 64."""
    rng = np.random.default_rng([seed, 11])
    tile = int(rng.choice([16, 64]))
    vocab = int(rng.choice([1, 2, 5, 13, tile - 1, tile, tile + 1, 2 * tile, 2 * tile + 1, 3 * tile + 5]))
    branching = int(rng.integers(1, 5))
    config = RheoConfig(
        lead_tokens=int(rng.integers(0, branching + 1)),
        branching=branching,
        depth=int(rng.integers(1, 4)),
        tree_size=int(rng.integers(1, 10)),
        beam=[None, 1, 2][rng.integers(3)],
        draft_support=int(rng.choice([1, 3, 8, 70, 128])),
    )
    temperatures = rng.choice(TEMPERATURES, size=batch)
    # Growth sees a greedy request as such; now and then its trees have probes all the same.
    trees = [random_tree(rng, config, vocab, t if rng.random() < 0.5 else max(t, 0.3)) for t in temperatures]
    rows = config.tree_size + 1
    storage = torch.full((batch, 2 * rows, vocab + 3), torch.nan, dtype=DTYPES[rng.integers(4)], device=DEVICE)
    logits = storage[:, ::2, 1 : vocab + 1]  # only the last dimension is contiguous
    for b, tree in enumerate(trees):
        for row in range(len(tree)):
            logits[b, row] = torch.from_numpy(target_row(rng, tree, row, vocab, temperatures[b]))
    uniforms = rng.integers(0, 2**53, size=(3, batch, rows + 2)) / 2.0**53
    uniforms[0] = np.floor(uniforms[0] * 2**24) / 2.0**24
    uniforms[:, rng.random((batch, rows + 2)) < 0.05] = 0
    rule: Literal["rheo", "rrsw"] = "rheo" if rng.random() < 0.5 else "rrsw"
    return Case(trees, logits, temperatures, uniforms, rule, tile, config.draft_support)


def check_cases(seeds: range) -> tuple[int, int]:
    checks = [random_case(seed).check() for seed in seeds]
    rows, inside = (sum(column) for column in zip(*checks, strict=True))
    print(f"{rows} rows, {inside} decisions inside the margin")
    return rows, inside


def test_rows_equal_the_reference() -> None:
    rows, inside = check_cases(range(50))
    assert rows > 500
    assert inside <= rows // 100


@pytest.mark.deep
@pytest.mark.parametrize("block", range(10))
def test_rows_equal_the_reference_at_length(block: int) -> None:
    """Ten times more than 2,000 rows."""
    rows, inside = check_cases(range(1000 + block * 200, 1000 + (block + 1) * 200))
    assert rows > 2000
    assert inside <= rows // 100


def test_walks_equal_the_reference() -> None:
    """Outcomes put together to walks, against ``reference.verify``; excused where one of its margins is small."""
    inside = walks = 0
    for seed in range(500, 516):
        case = random_case(seed)
        outcomes = case.run()
        for b, tree in enumerate(case.trees):
            laws = np.stack([case.target(b, row) for row in range(len(tree))])
            margins: list[Margin] = []
            expected = verify(tree, laws, VerifyNoise(*case.uniforms[:, b]), case.rule, margins)
            walks += 1
            if case.walk(outcomes, b) != (expected.token_ids, expected.accepted_nodes):
                assert any(0 < margin.value < 1e-4 for margin in margins), f"case {seed} request {b}"
                inside += 1
    assert walks == 48
    assert inside <= 1


def large_case(vocab: int, dtype: torch.dtype, family: str, rule: Literal["rheo", "rrsw"]) -> Case:
    """A root, two leads and a probe over a real vocabulary, with a support of 128."""
    rng = np.random.default_rng(vocab)
    config = RheoConfig(lead_tokens=2, branching=3, depth=1, tree_size=3)
    tree = random_tree(rng, config, vocab, 1.0, ["normal"])
    logits = np.stack([random_row(rng, vocab, family) for _ in range(2)])
    logits[0, list(tree.probe_laws[0][0])] += 3
    logits = np.concatenate([logits, np.zeros((2, vocab), np.float32)])
    uniforms = rng.integers(0, 2**53, size=(3, 1, 4)) / 2.0**53
    uniforms[0] = np.floor(uniforms[0] * 2**24) / 2.0**24
    return Case([tree], torch.from_numpy(logits)[None].to(DEVICE, dtype), np.ones(1), uniforms, rule, None, 128)


@pytest.mark.parametrize(
    ("vocab", "dtype", "family", "rule"),
    [
        (49152, torch.bfloat16, "normal", "rheo"),
        (151936, torch.float32, "flat", "rheo"),
        (262144, torch.bfloat16, "normal", "rrsw"),
    ],
)
def test_real_vocabularies(vocab: int, dtype: torch.dtype, family: str, rule: Literal["rheo", "rrsw"]) -> None:
    rows, inside = large_case(vocab, dtype, family, rule).check()
    assert rows == 4
    assert inside <= 1  # a flat law's intervals are as narrow as the margin is wide


@pytest.mark.deep
@pytest.mark.parametrize("vocab", [4095, 4096, 4097, 32000, 49152, 128256, 151936, 262144])
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("rule", ["rheo", "rrsw"])
def test_real_vocabularies_at_length(vocab: int, dtype: torch.dtype, rule: Literal["rheo", "rrsw"]) -> None:
    inside = 0
    for family in ("normal", "tied", "flat", "masked", "peaked"):
        inside += large_case(vocab, dtype, family, rule).check()[1]
    print(f"20 rows, {inside} decisions inside the margin")
    assert inside <= 3


def dyadic_case(rule: Literal["rheo", "rrsw"], logits: NDArray[np.float64], uniforms: NDArray[np.float64]) -> Case:
    """One tree per uniform: a root with lead 0 and probe 2, q~ = 1/4 each on tokens 1 to 4."""
    law = ((1, 2, 3, 4), np.full(4, 0.25))
    tree = DraftTree((-1, 0, 2), (-1, 0, 0), (0, 1, 1), (0, 0, 1), (False, False, True), (1.0, 0.5, 0.5), {0: law})
    count = len(uniforms)
    rows = torch.from_numpy(logits).float().expand(count, 3, -1).to(DEVICE)
    noise = np.repeat(uniforms[None, :, None], 3, axis=0).repeat(3, axis=2)
    return Case([tree] * count, rows, np.ones(count), noise, rule, 16, 4)


def test_ties_are_exact() -> None:
    """Dyadic laws, uniforms at the very ends of intervals: nothing is excused, and the reference agrees."""
    ends = np.array([0, 0.25, 0.5, 0.75])
    uniforms = np.concatenate([ends, ends[1:] - 2.0**-24, [1 - 2.0**-24]])
    inf = -np.inf
    drawn: dict[str, list[int]] = {}
    for name, logits in {
        "p = q~": [inf, 0, 0, 0, 0, inf],  # always accepted; no residual, so p draws
        "disjoint": [0, inf, inf, inf, inf, 0],  # never accepted, by a uniform of 0 neither
        "half": [0, 0, 0, 0, inf, inf],  # p = 1/4 each on tokens 0 to 3
        "one-hot": [inf, inf, 5, inf, inf, inf],
    }.items():
        for rule in ("rheo", "rrsw"):
            case = dyadic_case(rule, np.array(logits, dtype=np.float64), uniforms)  # type: ignore[arg-type]
            outcomes = case.run()
            for b in range(len(uniforms)):
                margins: list[Margin] = []
                laws = np.stack([case.target(b, row) for row in range(3)])
                expected = verify(case.trees[b], laws, VerifyNoise(*case.uniforms[:, b]), case.rule, margins)
                assert case.walk(outcomes, b) == (expected.token_ids, expected.accepted_nodes), (name, rule, b)
            assert case.check(outcomes) == (3 * len(uniforms), 0)
            drawn[f"{name} {rule}"] = outcomes.token[:4, 1].tolist()
            if name == "p = q~":
                assert outcomes.accepts[:, 0].all()
            if name == "disjoint":
                assert not outcomes.accepts.any()
    assert drawn["p = q~ rheo"] == [1, 2, 3, 4]
    assert drawn["half rrsw"] == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "all -inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_fails_alone(bad: float | str, temperature: float) -> None:
    logits = np.zeros(40)
    case = dyadic_case("rrsw", logits, np.array([0.25, 0.5]))
    case.temperatures[:] = temperature
    case.logits = case.logits.clone()
    if bad == "all -inf":
        case.logits[1, 1] = -torch.inf
    else:
        case.logits[1, 1, 39] = bad
    outcomes = case.run()
    assert outcomes.failed.tolist() == [[False, False, False], [False, True, False]]
    assert case.check(outcomes) == (6, 0)


@triton.jit
def _weights_of_a_row(logits, temperature, top, out, vocab, TILE: tl.constexpr):
    first = tl.program_id(0) * TILE
    ids = first + tl.arange(0, TILE)
    tile_top = tl.max(tl.load(logits + ids, mask=ids < vocab, other=float("-inf")), axis=0)
    t, largest = tl.load(temperature), tl.load(top)
    weights = row_draws.weights_from(first, logits, vocab, tile_top, largest, 0, t, TILE, 1e-5)
    tl.store(out + ids, weights, mask=ids < vocab)


def test_a_law_moves_by_less_than_a_millionth() -> None:
    """The kernels' own weights, in total variation, over the laws whose logits are spread the most."""
    rng = np.random.default_rng(0)
    vocab, worst = 262144, 0.0
    for share in (0.02, 0.3):
        for temperature in (1e-4, 0.7, 2.0):
            # A mode of this share, the rest spread over everything else.
            rest = rng.normal(scale=0.5, size=vocab)
            rest += np.log((1 - share) / share) - np.log(np.exp(rest).sum())
            rest[rng.integers(vocab)] = 0.0
            logits = ((rest + 3.0) * temperature).astype(np.float32)
            expected = softmax(logits.astype(np.float64) / temperature)
            weights = torch.empty(vocab, dtype=torch.float64, device=DEVICE)
            row = torch.from_numpy(logits).to(DEVICE)
            t = torch.tensor([temperature], dtype=torch.float64, device=DEVICE)
            _weights_of_a_row[(triton.cdiv(vocab, 4096),)](
                row, t, row.max().double().view(1), weights, vocab, TILE=4096
            )
            actual = weights.cpu().numpy()
            worst = max(worst, 0.5 * np.abs(actual / actual.sum() - expected).sum())
    print(f"largest total variation {worst:.1e}")
    assert worst < LAW_TV


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "magic"}, "rule must be one of"),
        ({"logits": torch.zeros(2, 5)}, r"logits must be \[batch, rows, vocab\]"),
        ({"token_ids": torch.zeros(2, 4, dtype=torch.long)}, "token_ids must be"),
        ({"law": torch.zeros(2, 1)}, "law must be"),
        ({"law_ids": torch.zeros(2, 1, 5, dtype=torch.long)}, "law_ids must be"),
        ({"lead_uniforms": torch.zeros(2, 2)}, "lead_uniforms must be at least"),
        ({"tile": 16, "logits": torch.zeros(2, 3, 16 * 1025)}, "take wider tiles"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    whole = torch.zeros(2, 3, dtype=torch.long)
    arguments: dict[str, object] = {
        "logits": torch.zeros(2, 3, 5),
        "temperatures": torch.ones(2),
        "token_ids": whole,
        "parents": whole,
        "num_nodes": torch.ones(2, dtype=torch.long),
        "probe_rows": whole,
        "law_index": whole,
        "law_ids": torch.zeros(2, 1, 4, dtype=torch.long),
        "law": torch.zeros(2, 1, 4),
        "accept_uniforms": torch.zeros(2, 3),
        "residual_uniforms": torch.zeros(2, 3),
        "lead_uniforms": torch.zeros(2, 3),
    }
    with pytest.raises(ValueError, match=message):
        row_outcomes(**(arguments | change))  # type: ignore[arg-type]

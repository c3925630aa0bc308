"""TargetLaws against transformers' own LogitsProcessorList, node by node, and by hand where a rule has an edge."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMixin

from optimized import target_laws
from optimized.sampling_params import SamplingParams
from optimized.target_laws import SamplingBatch, TargetLaws

# Both sides compute in float64 on at most 152k tokens; sums in another order differ by a few 1e-16.
LAW_TOLERANCE = 1e-12
MASKED_TOLERANCE = 1e-4  # masked logits are float32: 2e-7 of a logit of up to 20, divided by T >= 0.1


@dataclass
class Paths:
    """The part of a TreeBatch that the laws read."""

    token_ids: Tensor
    parents: Tensor

    @property
    def depths(self) -> Tensor:
        return self.ancestors().sum(-1) - 1

    def ancestors(self) -> Tensor:
        batch, rows = self.parents.shape
        visible = torch.zeros(batch, rows, rows, dtype=torch.bool)
        for b in range(batch):
            for row in range(rows):
                if row:
                    visible[b, row] = visible[b, self.parents[b, row]]
                visible[b, row, row] = True
        return visible

    def path(self, b: int, row: int) -> list[int]:
        tokens = [int(self.token_ids[b, j]) for j in range(1, row + 1) if self.ancestors()[b, row, j]]
        return tokens


class Generator(GenerationMixin):
    """Just enough of a model for ``generate`` to build its processors."""

    config = SimpleNamespace(is_encoder_decoder=False)


def expected_law(params: SamplingParams, text: list[int], prompt_length: int, logits: Tensor, eos: list[int]) -> Tensor:
    """The law that transformers' generate would sample the next token from, in float64."""
    config = GenerationConfig(
        do_sample=not params.greedy,
        temperature=params.temperature if not params.greedy else None,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_new_tokens,
        sequence_bias={(token,): value for token, value in params.logit_bias.items()} if params.logit_bias else None,
    )
    ends = [*eos, *params.stop_token_ids]
    config._eos_token_tensor = torch.tensor(ends) if ends else None
    processors = Generator()._get_logits_processor(config, input_ids_seq_length=prompt_length, device="cpu")
    scores = processors(torch.tensor([text], dtype=torch.int64), logits.to(torch.float64)[None].clone())[0]
    if params.greedy:
        return torch.nn.functional.one_hot(scores.argmax(), scores.numel()).to(torch.float64)
    return scores.softmax(-1)


@pytest.fixture
def lower_ids_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give transformers' top-p, whose torch.sort is not stable, a sort in which the higher of tied ids comes first."""

    def sort(scores: Tensor, descending: bool = False) -> tuple[Tensor, Tensor]:
        assert not descending
        values, flipped = torch.Tensor.sort(scores.flip(-1), dim=-1, stable=True)
        return values, scores.shape[-1] - 1 - flipped

    monkeypatch.setattr(torch, "sort", sort)


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    def maybe(value: object, off: object, chance: float = 0.5) -> object:
        return value if rng.random() < chance else off

    # Biases are multiples of 1/8, because transformers stores them in float32.
    bias = {int(token): float(rng.integers(-40, 40)) / 8 for token in rng.integers(0, vocab_size, 3)}
    return SamplingParams(
        temperature=maybe(float(rng.uniform(0.1, 2)), maybe(0.0, 1.0, 0.3)),  # type: ignore[arg-type]
        top_k=maybe(int(rng.integers(1, min(vocab_size + 5, 80))), 0),  # type: ignore[arg-type]
        top_p=maybe(float(rng.uniform(0.02, 1)), 1.0),  # type: ignore[arg-type]
        min_p=maybe(float(rng.uniform(0, 0.4)), 0.0, 0.3),  # type: ignore[arg-type]
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0, 0.4),  # type: ignore[arg-type]
        logit_bias=maybe(bias, None, 0.3),  # type: ignore[arg-type]
        min_new_tokens=maybe(int(rng.integers(1, 8)), 0, 0.3),  # type: ignore[arg-type]
        stop_token_ids=maybe([int(rng.integers(0, vocab_size))], [], 0.3),  # type: ignore[arg-type]
    )


def random_paths(rng: np.random.Generator, batch: int, rows: int, vocab_size: int) -> Paths:
    parents = torch.tensor([[-1] + [int(rng.integers(0, row)) for row in range(1, rows)] for _ in range(batch)])
    token_ids = torch.tensor(rng.integers(0, vocab_size, (batch, rows)))
    token_ids[:, 0] = -1
    return Paths(token_ids, parents)


def law_of_masked(masked: Tensor, params: SamplingParams) -> Tensor:
    """What the kernels make of a masked row; a greedy law is one-hot, which needs no mask but the tokens forbidden."""
    if params.greedy:
        return torch.nn.functional.one_hot(masked.argmax(), masked.numel()).double()
    return (masked / params.temperature).softmax(-1)


def assert_laws_agree(
    params: list[SamplingParams], paths: Paths, logits: Tensor, rng: np.random.Generator, eos: list[int]
) -> int:
    """Compare every row of every request after a random text; returns how many laws were compared."""
    batch_size, rows, vocab_size = logits.shape
    prompts = [rng.integers(0, vocab_size, rng.integers(1, 9)).tolist() for _ in params]
    batch = SamplingBatch.from_params(params, prompts, vocab_size, eos)
    texts = [list(prompt) for prompt in prompts]
    for _ in range(2):
        counts = rng.integers(1, 4, batch_size)
        emitted = rng.integers(0, vocab_size, (batch_size, 3))
        batch.observe(torch.tensor(emitted), torch.tensor(counts))
        for b, text in enumerate(texts):
            text.extend(emitted[b, : counts[b]].tolist())
    laws = TargetLaws(logits, batch, paths)
    masked = laws.masked_logits().double()
    for row in range(rows):
        actual = laws(torch.full((batch_size,), row))
        assert actual.dtype == torch.float64
        for b in range(batch_size):
            from_mask = law_of_masked(masked[b, row], params[b])
            assert torch.equal(from_mask > 0, actual[b] > 0), (params[b], b, row)
            assert (from_mask - actual[b]).abs().max() <= MASKED_TOLERANCE, (params[b], b, row)
            text = texts[b] + paths.path(b, row)
            expected = expected_law(params[b], text, len(prompts[b]), logits[b, row], eos)
            assert torch.equal(expected > 0, actual[b] > 0), (params[b], b, row)
            assert (expected - actual[b]).abs().max() <= LAW_TOLERANCE, (params[b], b, row)
    assert not laws.bad.any()
    return batch_size * rows


@pytest.mark.usefixtures("lower_ids_stay")
@pytest.mark.parametrize("kind", ["float64", "tied"])
def test_laws_are_those_of_transformers_along_every_path(kind: str) -> None:
    rng = np.random.default_rng(20260)
    compared = 0
    for case in range(100):
        vocab_size = (2, 63, 500)[case % 3]
        batch_size, rows = int(rng.integers(1, 5)), int(rng.integers(1, 7))
        params = [random_params(rng, vocab_size) for _ in range(batch_size)]
        if vocab_size == 2:  # EOS, a stop token or a bias could leave nothing
            params = [SamplingParams(temperature=p.temperature, top_k=p.top_k, top_p=p.top_p) for p in params]
        logits = torch.tensor(rng.normal(0, 3, (batch_size, rows, vocab_size)))
        if kind == "tied":
            logits = logits.round()
        paths = random_paths(rng, batch_size, rows, vocab_size)
        compared += assert_laws_agree(params, paths, logits, rng, [int(rng.integers(0, vocab_size))])
    assert compared > 700


@pytest.mark.usefixtures("lower_ids_stay")
@pytest.mark.parametrize("vocab_size", [49152, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_laws_are_those_of_transformers_on_real_vocabularies(vocab_size: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab_size)
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(temperature=1.3, top_k=50, top_p=0.95, min_new_tokens=4),
        SamplingParams(temperature=0, logit_bias={5: 3.0}),
        SamplingParams(top_p=0.99, min_p=0.05),
    ]
    logits = torch.tensor(rng.normal(0, 3, (len(params), 2, vocab_size))).to(dtype)
    paths = random_paths(rng, len(params), 2, vocab_size)
    assert_laws_agree(params, paths, logits, rng, [2])


def one_law(probabilities: list[float], **params: object) -> list[float]:
    """The law of one request at the root, for logits that are the logarithms of ``probabilities``."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log()[None, None]
    batch = SamplingBatch.from_params([SamplingParams(**params)], [[0]], len(probabilities))  # type: ignore[arg-type]
    return TargetLaws(logits, batch)(torch.zeros(1, dtype=torch.int64))[0].tolist()


def test_top_k_keeps_every_token_tied_with_the_last() -> None:
    assert one_law([0.4, 0.3, 0.3, 0.0], top_k=2) == pytest.approx([0.4, 0.3, 0.3, 0.0], abs=1e-15)
    assert one_law([0.4, 0.3, 0.2, 0.1], top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=1e-15)
    assert one_law([0.4, 0.6, 0.0], top_k=9) == pytest.approx([0.4, 0.6, 0], abs=1e-15)


def test_top_p_keeps_the_lower_ids_of_a_tie() -> None:
    # Ascending: the four 1/8, then 1/2. Cumulative 1/8, 2/8 <= 1 - 0.7 < 3/8: two of the tied go, ids 4 and 3.
    eighth = 0.125
    expected = [1 / 6, 2 / 3, 1 / 6, 0.0, 0.0]
    assert one_law([eighth, 0.5, eighth, eighth, eighth], top_p=0.7) == pytest.approx(expected, abs=1e-15)


def test_top_p_always_keeps_the_most_likely_token() -> None:
    assert one_law([0.2, 0.5, 0.3], top_p=1e-9) == [0, 1, 0]
    assert one_law([0.25, 0.25, 0.25, 0.25], top_p=0.2) == [1, 0, 0, 0]


def test_top_p_removes_what_reaches_the_complement_exactly() -> None:
    assert one_law([1.0, 1.0, 1.0, 1.0], top_p=0.5) == [0.5, 0.5, 0, 0]  # logits 0: cumulative 1/4, 1/2 exactly


def test_min_p_compares_with_the_most_likely_token() -> None:
    assert one_law([0.5, 0.26, 0.24], min_p=0.5) == pytest.approx([50 / 76, 26 / 76, 0], abs=1e-15)
    assert one_law([0.4, 0.4, 0.2], min_p=1.0) == pytest.approx([0.5, 0.5, 0], abs=1e-15)


def test_greedy_is_one_hot_at_the_lowest_id_whatever_else_is_asked() -> None:
    assert one_law([0.2, 0.4, 0.4], temperature=0, top_k=1, top_p=0.1, min_p=0.9) == [0, 1, 0]
    assert one_law([0.2, 0.4, 0.4], temperature=9e-6) == [0, 1, 0]
    # Bias and repetition penalty come before the argmax: token 0 was seen, so log(0.6) doubles.
    assert one_law([0.6, 0.4], temperature=0, repetition_penalty=2.0) == [0, 1]
    assert one_law([0.6, 0.4], temperature=0, logit_bias={1: 1.0}) == [0, 1]


def test_a_bias_of_minus_infinity_bans_a_token() -> None:
    assert one_law([0.5, 0.25, 0.25], logit_bias={0: -math.inf}) == pytest.approx([0, 0.5, 0.5], abs=1e-15)


def test_one_token_vocabulary() -> None:
    for params in ({}, {"top_k": 1, "top_p": 0.5, "min_p": 0.5}, {"temperature": 0}, {"repetition_penalty": 3.0}):
        assert one_law([1.0], **params) == [1.0]


def test_penalty_and_minimum_length_follow_the_path_of_the_node() -> None:
    # Root 0; 1 and 2 are its children, 3 is a child of 1. Token 0 ends the text, token 9 is out of every path.
    paths = Paths(torch.tensor([[-1, 4, 5, 6]]), torch.tensor([[-1, 0, 0, 1]]))
    params = SamplingParams(repetition_penalty=2.0, min_new_tokens=3)
    batch = SamplingBatch.from_params([params], [[7]], 10, [0])
    batch.observe(torch.tensor([[8, 9]]), torch.tensor([1]))  # 9 stands behind the count: not emitted
    laws = TargetLaws(torch.ones(1, 4, 10), batch, paths)
    penalised = {0: {7, 8}, 1: {7, 8, 4}, 2: {7, 8, 5}, 3: {7, 8, 4, 6}}
    for row, tokens in penalised.items():
        law = laws(torch.tensor([row]))[0]
        plain = float(law[9])
        assert {t for t in range(10) if 0 < law[t] < plain} == tokens
        # One token generated before the root's children: EOS is allowed only from depth 2 on.
        assert (law[0] == plain) if row == 3 else (law[0] == 0)


def test_fp16_extremes_at_the_lowest_sampling_temperature_do_not_overflow() -> None:
    logits = torch.full((2, 1, 500), -6e4, dtype=torch.float16)
    logits[0, 0, 7] = 6e4
    logits[1] = 6e4
    batch = SamplingBatch.from_params([SamplingParams(temperature=1e-4, top_p=0.9)] * 2, [[0], [0]], 500)
    laws = TargetLaws(logits, batch)
    law = laws(torch.zeros(2, dtype=torch.int64))
    assert law[0].tolist() == torch.nn.functional.one_hot(torch.tensor(7), 500).tolist()
    # Uniform law: a tenth goes, up to rounding of the cumulative sum at the tenth itself; the lower ids stay.
    kept = int((law[1] > 0).sum())
    assert kept in (450, 451)
    assert bool((law[1, :kept] > 0).all())
    assert not laws.bad.any()


def test_large_logits_keep_their_digits_at_a_small_temperature() -> None:
    logits = torch.tensor([[[6e4, 6e4 - 2.0**-8]]], dtype=torch.float32)
    batch = SamplingBatch.from_params([SamplingParams(temperature=1e-3)], [[0]], 2)
    law = TargetLaws(logits, batch)(torch.zeros(1, dtype=torch.int64))[0]
    # Dividing first would leave an error of 6e7 * 2**-53, about 7e-9.
    assert float(law[1]) == pytest.approx(1 / (1 + math.exp(2.0**-8 / 1e-3)), rel=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", ["nan", "+inf", "all -inf"])
def test_an_unusable_row_is_recorded_and_poisons_nobody(poison: str, temperature: float) -> None:
    rng = np.random.default_rng(5)
    logits = torch.tensor(rng.normal(0, 2, (3, 2, 63)))
    clean = logits.clone()
    if poison == "all -inf":
        logits[1, 1] = -math.inf
    else:
        logits[1, 1, 40] = float(poison)
    params = [SamplingParams(temperature=temperature, top_k=20, top_p=0.8, min_p=0.01, repetition_penalty=1.3)] * 3
    paths = random_paths(rng, 3, 2, 63)

    def laws_of(values: Tensor) -> TargetLaws:
        return TargetLaws(values, SamplingBatch.from_params(params, [[1], [2], [3]], 63), paths)

    laws, expected = laws_of(logits), laws_of(clean)
    assert torch.equal(laws(torch.tensor([0, 0, 0])), expected(torch.tensor([0, 0, 0])))
    assert laws.bad.tolist() == [False] * 3  # the row has not been asked for
    law = laws(torch.tensor([1, 1, 1]))
    assert laws.bad.tolist() == [False, True, False]
    assert law[1].tolist() == [1.0] + [0.0] * 62
    assert torch.equal(law[[0, 2]], expected(torch.tensor([1, 1, 1]))[[0, 2]])
    laws(torch.tensor([0, 0, 0]))
    assert laws.bad.tolist() == [False, True, False]  # once bad, always bad


def test_a_request_that_forbids_every_token_is_recorded() -> None:
    batch = SamplingBatch.from_params([SamplingParams(min_new_tokens=1, stop_token_ids=[0])], [[0]], 2, [1])
    laws = TargetLaws(torch.zeros(1, 1, 2), batch)
    assert laws(torch.tensor([0])).tolist() == [[1.0, 0.0]]
    assert laws.bad.tolist() == [True]


def test_stages_that_nobody_asked_for_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a stage ran that nobody asked for")

    for owner in (torch, torch.Tensor):
        for name in ("sort", "topk", "argsort", "cumsum", "argmax"):
            monkeypatch.setattr(owner, name, refuse)
    for name in ("_sorted_rows", "_keep_top_p", "_keep_min_p"):
        monkeypatch.setattr(target_laws, name, refuse)
    monkeypatch.setattr(TargetLaws, "_seen", refuse)
    monkeypatch.setattr(TargetLaws, "_keep_top_k", refuse)
    params = [SamplingParams(temperature=0.5), SamplingParams(top_p=1.0, logit_bias={1: 1.0})]
    batch = SamplingBatch.from_params(params, [[0], [1]], 63)
    assert batch.seen is None
    law = TargetLaws(torch.zeros(2, 1, 63), batch)(torch.zeros(2, dtype=torch.int64))
    assert law.sum(-1).tolist() == pytest.approx([1, 1])


def test_only_the_requests_that_ask_for_top_p_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_shapes = []
    original = target_laws._sorted_rows

    def record(law: Tensor) -> Tensor:
        sorted_shapes.append(tuple(law.shape))
        return original(law)

    monkeypatch.setattr(target_laws, "_sorted_rows", record)
    params = [
        SamplingParams(),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=3),
        SamplingParams(temperature=0, top_p=0.5),
    ]
    batch = SamplingBatch.from_params(params, [[0]] * 4, 63)
    TargetLaws(torch.zeros(4, 1, 63), batch)(torch.zeros(4, dtype=torch.int64))
    assert sorted_shapes == [(1, 1, 63)]


@pytest.mark.parametrize("vocab_size", [63, 49152])
def test_a_law_is_the_same_to_the_bit_whoever_is_in_the_batch(vocab_size: int) -> None:
    rng = np.random.default_rng(17)
    params = [random_params(rng, vocab_size) for _ in range(8)]
    logits = torch.tensor(rng.normal(0, 3, (8, 1, vocab_size)), dtype=torch.float32)
    prompts = [[int(token)] for token in rng.integers(0, vocab_size, 8)]
    together = TargetLaws(logits, SamplingBatch.from_params(params, prompts, vocab_size, [1]))(torch.zeros(8).long())
    for b in range(8):
        alone = SamplingBatch.from_params(params[b : b + 1], prompts[b : b + 1], vocab_size, [1])
        assert torch.equal(TargetLaws(logits[b : b + 1], alone)(torch.zeros(1).long())[0], together[b]), params[b]


def test_a_law_that_is_just_a_softmax_is_the_same_to_the_bit_beside_a_request_that_asks_for_more() -> None:
    """Alone such laws come without the stages and without a search for unusable logits, on a CPU."""
    logits = torch.tensor(np.random.default_rng(23).normal(0, 3, (6, 1, 4099))).bfloat16()
    for row, value in ((1, math.nan), (2, math.inf)):
        logits[row, 0, 4000] = value
    logits[3] = -math.inf
    plain, asking = [SamplingParams()] * 5, SamplingParams(temperature=0.7, top_k=5)
    batch = SamplingBatch.from_params([*plain, asking], [[0]] * 6, 4099)
    assert not batch.plain
    together = TargetLaws(logits, batch)
    expected = together(torch.zeros(6).long())
    for rows in ([0, 4], [1], [2], [3], [0, 1, 2, 3, 4]):
        batch = SamplingBatch.from_params([plain[row] for row in rows], [[0]] * len(rows), 4099)
        assert batch.plain
        laws = TargetLaws(logits[rows], batch)
        assert torch.equal(laws(torch.zeros(len(rows)).long()), expected[rows])
        assert torch.equal(laws.bad, together.bad[rows])
    assert together.bad.tolist() == [False, True, True, True, False, False]


def test_select_keeps_each_request_with_its_history() -> None:
    rng = np.random.default_rng(11)
    params = [
        SamplingParams(repetition_penalty=1.5, top_p=0.8),
        SamplingParams(top_k=4, min_new_tokens=2),
        SamplingParams(temperature=0.3, logit_bias={3: 2.0}),
        SamplingParams(temperature=0),
    ]
    prompts = [[1, 2], [3], [4, 5], [6]]
    logits = torch.tensor(rng.normal(0, 2, (4, 1, 63)))
    logits[:, 0, 0] = 5.0  # EOS, which the second request must not say yet
    batch = SamplingBatch.from_params(params, prompts, 63, [0])
    batch.observe(torch.tensor([[7, 8], [9, 10], [11, 12], [13, 14]]), torch.tensor([2, 1, 2, 1]))
    rows = torch.zeros(4, dtype=torch.int64)
    expected = TargetLaws(logits, batch)(rows)
    for keep in ([3, 0, 1], torch.tensor([2, 0]), [1]):
        kept = list(map(int, keep))
        expected, logits = expected[kept], logits[kept]
        batch.select(keep)
        assert torch.equal(TargetLaws(logits, batch)(rows[: len(kept)]), expected)
    assert batch.seen is None  # the last request has no penalty


def test_logprobs_are_those_of_the_raw_logits() -> None:
    rng = np.random.default_rng(3)
    logits = torch.tensor(rng.normal(0, 2, (2, 3, 63)), dtype=torch.float32)
    batch = SamplingBatch.from_params([SamplingParams(temperature=0, top_k=1, logit_bias={0: 9.0})] * 2, [[0], [0]], 63)
    laws = TargetLaws(logits, batch, random_paths(rng, 2, 3, 63))
    rows, tokens = torch.tensor([[0, 2], [1, 0]]), torch.tensor([[5, 62], [0, 1]])
    chosen, top_ids, top = laws.logprobs(rows, tokens, 4)
    for b in range(2):
        for i in range(2):
            expected = logits[b, rows[b, i]].double().log_softmax(-1)
            assert float(chosen[b, i]) == pytest.approx(float(expected[tokens[b, i]]), abs=1e-5)
            best = expected.argsort(descending=True)[:4]
            assert top_ids[b, i].tolist() == best.tolist()
            assert top[b, i].tolist() == pytest.approx(expected[best].tolist(), abs=1e-5)
    chosen_only, no_ids, nothing = laws.logprobs(rows, tokens, 0)
    assert torch.equal(chosen_only, chosen)
    assert no_ids.shape == nothing.shape == (2, 2, 0)


def test_wrong_shapes_and_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="one prompt per request"):
        SamplingBatch.from_params([SamplingParams()], [], 10)
    with pytest.raises(ValueError, match="token 10"):
        SamplingBatch.from_params([SamplingParams(logit_bias={10: 1.0})], [[0]], 10)
    batch = SamplingBatch.from_params([SamplingParams()], [[0]], 10)
    with pytest.raises(ValueError, match=r"\[1, 1, 10\], got \[1, 2, 10\]"):
        TargetLaws(torch.zeros(1, 2, 10), batch)


def test_ignored_ends_of_text_keep_their_chance_below_the_least_length() -> None:
    """Stop tokens do not: they can still end the text."""
    logits = torch.zeros(1, 1, 4)
    for ignored, allowed in ((False, [0, 3]), (True, [0, 2, 3])):
        params = SamplingParams(min_new_tokens=5, max_new_tokens=9, ignore_eos=ignored, stop_token_ids=[1])
        batch = SamplingBatch.from_params([params], [[0]], 4, [2], torch.device("cpu"))
        law = TargetLaws(logits, batch)(torch.zeros(1, dtype=torch.long))[0]
        assert law.nonzero()[:, 0].tolist() == allowed

"""Metrics, results and the error that keeps finished results."""

import math
import pickle

import pytest

from optimized.outputs import GenerationError, GenerationResult, Metrics, TokenLogprobs


def measured() -> Metrics:
    metrics = Metrics(generated_tokens=5, target_seconds=1.0, total_seconds=2.0)
    metrics.record_pass(accepted=2, offered=4, probe_offered=2, probe_accepted=1)
    metrics.record_pass(accepted=0, offered=3, probe_offered=1)
    return metrics


def result(token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] | None) -> GenerationResult:
    return GenerationResult(
        index=0,
        prompt_token_ids=(1,),
        token_ids=token_ids,
        text="x",
        finish_reason="length",
        logprobs=logprobs,
        seed=0,
        metrics=Metrics(),
    )


def test_record_pass_keeps_the_identity_of_accepted_passes_and_emitted() -> None:
    metrics = measured()
    assert metrics.offered_per_level == [2, 2, 2, 1]
    assert metrics.accepted_per_level == [1, 1, 0, 0]
    assert (metrics.target_passes, metrics.emitted_tokens, metrics.tau) == (2, 4, 2.0)
    assert sum(metrics.accepted_per_level) + metrics.target_passes == metrics.emitted_tokens
    assert metrics.acceptance_rates == [0.5, 0.5, 0.0, 0.0]
    assert metrics.probe_acceptance_rate == 1 / 3
    assert metrics.tokens_per_second == 2.5


@pytest.mark.parametrize("counts", [(3, 2, 0, 0), (-1, 2, 0, 0), (1, 2, 1, 2), (0, 2, 1, 1)])
def test_record_pass_refuses_more_accepted_than_offered(counts: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="cannot accept"):
        Metrics().record_pass(*counts)


def test_merge_adds_counts_and_adds_seconds_only_of_what_ran_one_after_another() -> None:
    one, two = measured(), measured()
    two.record_pass(accepted=5, offered=5)
    two.total_seconds = 3.0
    in_turn, together = Metrics.merge([one, two]), Metrics.merge([one, two], concurrent=True)
    assert in_turn.offered_per_level == [5, 5, 5, 3, 1]
    assert in_turn.accepted_per_level == [3, 3, 1, 1, 1]
    assert (in_turn.requests, in_turn.target_passes, in_turn.emitted_tokens) == (2, 5, 14)
    assert (in_turn.total_seconds, together.total_seconds) == (5.0, 3.0)
    assert together.tokens_per_second == 10 / 3
    assert Metrics.merge([]).requests == 0


def test_rates_without_data_are_nan_and_the_table_still_prints() -> None:
    empty = Metrics()
    assert math.isnan(empty.tau)
    assert math.isnan(empty.tokens_per_second)
    assert "none offered" in str(empty)
    assert "level 2 accepted       1 of 2 (50 %)" in str(measured())


def test_a_result_has_one_logprob_per_token() -> None:
    with pytest.raises(ValueError, match="one entry for each"):
        result((2, 3), (TokenLogprobs(2, -0.1),))


def test_generation_error_names_the_failures_and_keeps_the_results() -> None:
    done = result((2,), None)
    error = pickle.loads(pickle.dumps(GenerationError({2: "NaN logits"}, [done, done, None])))
    assert isinstance(error, RuntimeError)
    assert error.failures == {2: "NaN logits"}
    assert error.results == [done, done, None]
    assert str(error).startswith("1 of 3 requests failed (request 2: NaN logits); the 2 finished results")

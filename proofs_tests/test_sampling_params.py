"""SamplingParams: every range is checked where the request is made, and the message says what would be right."""

import dataclasses
import math

import numpy as np
import pytest

from optimized.sampling_params import SamplingParams


def test_defaults_are_plain_sampling() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (1, 0, 1, 0, 1)
    assert params.logit_bias is None
    assert params.seed is None
    assert (params.max_new_tokens, params.min_new_tokens, params.stop, params.stop_token_ids) == (128, 0, (), ())
    assert params.logprobs is None
    assert not params.greedy


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("temperature", -0.1, ">= 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", True, "number"),
        ("temperature", "1", "number"),
        ("top_p", 0.0, r"\(0, 1\]"),
        ("top_p", 1.0000001, r"\(0, 1\]"),
        ("top_p", -0.5, r"\(0, 1\]"),
        ("top_p", math.nan, r"\(0, 1\]"),
        ("top_k", -1, "0 turns it off"),
        ("top_k", 1.0, "integer"),
        ("top_k", True, "integer"),
        ("min_p", -1e-9, r"\[0, 1\]"),
        ("min_p", 1.5, r"\[0, 1\]"),
        ("min_p", math.nan, r"\[0, 1\]"),
        ("repetition_penalty", 0.0, "> 0"),
        ("repetition_penalty", -1.0, "> 0"),
        ("repetition_penalty", math.inf, "finite"),
        ("seed", -1, r"2\*\*64"),
        ("seed", 2**64, r"2\*\*64"),
        ("seed", 1.0, r"2\*\*64"),
        ("seed", False, r"2\*\*64"),
        ("max_new_tokens", 0, ">= 1"),
        ("max_new_tokens", -3, ">= 1"),
        ("max_new_tokens", True, "integer"),
        ("max_new_tokens", None, "integer"),
        ("min_new_tokens", -1, ">= 0"),
        ("min_new_tokens", 129, "max_new_tokens"),
        ("stop", "", "non-empty"),
        ("stop", ["a", ""], "non-empty"),
        ("stop", [1], "strings"),
        ("stop", b"a", "string"),
        ("stop", 7, "string"),
        ("stop_token_ids", [-1], ">= 0"),
        ("stop_token_ids", [True], "integers"),
        ("stop_token_ids", [2.0], "integers"),
        ("stop_token_ids", 2, "sequence"),
        ("stop_token_ids", "2", "sequence"),
        ("logprobs", -1, ">= 0"),
        ("logprobs", True, "integer"),
        ("logit_bias", [(1, 2.0)], "map"),
        ("logit_bias", {-1: 1.0}, ">= 0"),
        ("logit_bias", {True: 1.0}, "integers"),
        ("logit_bias", {1: math.nan}, "finite"),
        ("logit_bias", {1: math.inf}, "finite"),
        ("logit_bias", {1: "2"}, "finite"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert name in str(caught.value)


def test_edges_are_accepted_and_stored_as_plain_python() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        top_p=1,
        min_p=1,
        logit_bias={np.int64(4): np.float32(-2), 5: -math.inf},
        seed=2**64 - 1,
        max_new_tokens=1,
        min_new_tokens=1,
        stop="end",
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        logprobs=0,
    )
    assert params.stop == params.stop_strings == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {4: -2.0, 5: -math.inf}
    for value in (params.temperature, params.top_p, params.min_p):
        assert type(value) is float
    assert type(params.top_k) is int
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_the_bias_is_a_copy_and_the_request_is_frozen() -> None:
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 9.0
    assert params.logit_bias == {1: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    assert dataclasses.replace(params, stop=["a"]).stop == ("a",)


def test_greedy_has_one_cut_off() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=9.99e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_resolved_seed_keeps_a_given_seed_and_draws_a_fresh_one_otherwise() -> None:
    assert SamplingParams(seed=0).resolved_seed() == 0
    fresh = {SamplingParams().resolved_seed() for _ in range(8)}
    assert len(fresh) == 8  # a repeat has probability 28 / 2**64
    assert all(0 <= seed < 2**64 for seed in fresh)


def test_check_vocab() -> None:
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9], logprobs=10).check_vocab(10)
    with pytest.raises(ValueError, match=r"logit_bias names token 10; .* 0\.\.9"):
        SamplingParams(logit_bias={10: 1.0}).check_vocab(10)
    with pytest.raises(ValueError, match="stop_token_ids names token 11"):
        SamplingParams(stop_token_ids=[3, 11]).check_vocab(10)
    with pytest.raises(ValueError, match="logprobs is 11"):
        SamplingParams(logprobs=11).check_vocab(10)

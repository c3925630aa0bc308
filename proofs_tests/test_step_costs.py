"""What a step costs: measured once, read in between, and what becomes of steps that cannot be measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optimized.decoder import RheoDecoder
from optimized.sampling_params import SamplingParams
from optimized.sizing import StepCosts
from optimized.step_costs import CostTable, _shapes
from proofs_tests.test_sizing import AUTO, COSTS
from proofs_tests.tiny_pairs import MAKERS
from proofs_tests.toy import random_logits
from proofs_tests.toy_models import PathDrafter, PathTarget


def test_costs_are_measured_once_and_read_in_between() -> None:
    asked: list[int] = []

    def measure(batch: int) -> StepCosts:
        asked.append(batch)
        return StepCosts(1.0 * batch, 2.0 * batch, 0.1 * batch, 0.5)

    table = CostTable(measure)
    table.cover(4)
    table.cover(2)
    table.cover(4)
    assert asked == [1, 4]
    assert table(2) == StepCosts(2.0, 4.0, 0.2, 0.5)
    table.cover(8)
    assert asked == [1, 4, 8]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_decoder_measures_its_steps_and_keeps_greedy_texts(kind: str, one_thread: None) -> None:
    params, prompts = SamplingParams(temperature=0, max_new_tokens=40), [[5, 6, 7], [8, 9], [11]]
    sized = MAKERS[kind](AUTO)
    plain = RheoDecoder(sized.target, None).generate(prompts, params)
    assert [r.token_ids for r in sized.generate(prompts, params)] == [r.token_ids for r in plain]
    for batch in (1, 2, 3):
        costs = sized._costs(batch)
        assert all(0 < value < 10 for value in vars(costs).values()), costs
    assert sized._costs(3).base > sized._costs(3).node
    assert sized.sizer is not None
    assert sized.sizer.requests == 3


def test_a_context_too_short_to_measure_in_is_told() -> None:
    target, drafter = PathTarget(6, random_logits(5, 6, "normal")), PathDrafter(6)
    drafter.max_positions = 6  # type: ignore[assignment]
    decoder = RheoDecoder(target, drafter, None, AUTO)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"in a context of 6 tokens trees of 3 levels leave no room .* number of nodes"
    ):
        decoder.generate([[1, 2]], SamplingParams(seed=1, max_new_tokens=3))


def test_steps_that_cannot_be_measured_are_an_error() -> None:
    target = PathTarget(5, lambda path: np.full(5, np.nan, dtype=np.float32))
    decoder = RheoDecoder(target, PathDrafter(5), None, AUTO)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no step could be measured: the target's logits were NaN"):
        decoder.generate([[1, 2]], SamplingParams(seed=1, max_new_tokens=5))


def test_a_larger_batch_that_cannot_be_measured_goes_by_the_largest_that_could() -> None:
    def measure(batch: int) -> StepCosts:
        if batch > 1:
            raise RuntimeError("out of memory")
        return COSTS

    table = CostTable(measure)
    table.cover(8)
    assert table(8) == COSTS


def test_costs_are_those_of_trees_as_large_as_they_are_said_to_be() -> None:
    shapes = _shapes(replace(AUTO, score_threshold=0.05, level_threshold=0.1), batch=2)
    assert shapes[0] is None
    assert len(shapes) == 5
    assert not any(shape.score_threshold or shape.level_threshold for shape in shapes if shape is not None)

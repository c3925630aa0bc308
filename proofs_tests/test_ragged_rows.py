"""Padding is left out of passes over ragged batches, and what is in use comes out as with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optimized.models import ragged_rows
from optimized.models.ragged_rows import RowsInUse, first_rows, pack, unpack
from optimized.models.target import TargetModel
from optimized.trees import LevelNodes
from proofs_tests.tiny_pairs import VOCAB, causal_decoder, eagle_decoder, llama

CPU = torch.device("cpu")
LENGTHS = [3, 9, 1, 5]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of every embedding of tokens, how many they were."""
    seen: list[int] = []
    forward = torch.nn.Embedding.forward

    def watched(embedding: torch.nn.Embedding, token_ids: Tensor) -> Tensor:
        seen.append(token_ids.numel())
        return forward(embedding, token_ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", watched)
    return seen


def with_and_without(work: Callable[[], list[Tensor]], passed: list[int]) -> tuple[list[int], list[int]]:
    """How many rows went through in each pass, packed and padded; what came out must be the same."""
    packed, rows = work(), passed.copy()
    passed.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_rows, "LEAST_SAVED", 10**9)
        padded = work()
    for left, right in zip(packed, padded, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
    return rows, passed


def test_pack_and_unpack() -> None:
    in_use = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])
    rows = RowsInUse.of(in_use, CPU)
    assert rows is not None
    values = torch.arange(18).view(3, 3, 2)
    packed = pack(values, rows)
    assert packed.tolist() == [values[in_use].tolist()]
    back = unpack(packed, rows)
    assert back.shape == values.shape
    assert torch.equal(back[in_use], values[in_use])


def test_nothing_is_packed_where_that_would_not_pay() -> None:
    full = torch.ones(2, 4, dtype=torch.bool)
    assert RowsInUse.of(None, CPU) is None
    assert RowsInUse.of(full, CPU) is None
    assert RowsInUse.of(first_rows(torch.tensor([4, 2]), 4), CPU) is None
    assert RowsInUse.of(first_rows(torch.tensor([4, 1]), 4), CPU) is not None
    assert RowsInUse.of(first_rows(torch.tensor([4, 1]), 4), torch.device("cuda")) is None
    assert RowsInUse.of(~full, CPU) is None
    assert pack(full, None) is full
    assert unpack(full, None) is full


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_a_target_reads_prompts_and_trees(key_heads: int, passed: list[int]) -> None:
    target = TargetModel(llama(num_key_value_heads=key_heads).double(), (1, 2, 3))
    counts = torch.tensor([1, 4, 2, 1])
    in_use = first_rows(counts, 4)

    def work() -> list[Tensor]:
        torch.manual_seed(1)
        logits, features = target.prefill([torch.randint(VOCAB, (length,)).tolist() for length in LENGTHS])
        assert features is not None
        out = [logits, features[first_rows(torch.tensor(LENGTHS), max(LENGTHS))]]
        for _ in range(2):  # the second tree stands behind what was committed of the first
            chain = torch.ones(4, 4, dtype=torch.bool).tril().expand(4, -1, -1)
            tokens, depths = torch.randint(VOCAB, (4, 4)), torch.arange(4).expand(4, -1)
            logits, features = target.forward_tree(tokens, depths, chain, counts=counts)
            assert features is not None
            out += [logits[in_use], features[in_use]]
            target.commit(torch.arange(4).expand(4, -1), counts)
        return out

    assert with_and_without(work, passed) == ([sum(LENGTHS), 8, 8], [4 * max(LENGTHS), 16, 16])


@pytest.mark.parametrize("decoder", [eagle_decoder, causal_decoder])
def test_drafters_read_texts_and_expand_levels(decoder: Callable, passed: list[int]) -> None:
    made = decoder(model=llama().double())
    drafter, width = made.drafter, 3 * made.target.hidden_size
    for module in vars(drafter).values():
        if isinstance(module, torch.nn.Module):
            module.double()
    valid = torch.tensor([[True, True, True], [True, False, False], [False, False, False], [True, False, False]])
    # A causal draft reads the token at position 0 as well, with the first texts.
    first = 0 if drafter.feature_layers else len(LENGTHS)

    def work() -> list[Tensor]:
        torch.manual_seed(2)
        drafter.reset(torch.randint(VOCAB, (4,)))
        out = []
        for lengths in (torch.tensor(LENGTHS), torch.tensor([1, 3, 2, 1])):
            most = int(lengths.max())
            features = torch.randn(4, most, width, dtype=torch.float64) if drafter.feature_layers else None
            out.append(drafter.advance(torch.randint(VOCAB, (4, most)), lengths, features))
            for depth in (1, 2):
                parents = torch.zeros(4, 3, dtype=torch.long)
                level = LevelNodes(torch.randint(VOCAB, (4, 3)) * valid, parents, valid, depth)
                out.append(drafter.expand(level)[valid])
        return out

    packed, padded = with_and_without(work, passed)
    assert packed == [sum(LENGTHS) + first, 5, 5, 7, 5, 5]
    assert padded == [4 * max(LENGTHS) + first, 12, 12, 12, 12, 12]

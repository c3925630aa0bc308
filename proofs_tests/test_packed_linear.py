"""PackedLinear against the layer it stands for, also behind every kind of change of its weight."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from optimized.models.packed_linear import PackedLinear, pack_linears, packed_dtypes
from proofs_tests.test_target import llama, plain, run_steps

packs = pytest.mark.skipif(not packed_dtypes(), reason="this build of torch has no oneDNN")


@packs
@pytest.mark.parametrize("rows", [1, 2, 17, 63])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_equals_linear(rows, bias):
    torch.manual_seed(rows)
    linear = nn.Linear(67, 131, bias=bias)
    packed = PackedLinear(linear)
    inputs = torch.randn(1, rows, 67)
    with torch.no_grad():
        torch.testing.assert_close(packed(inputs), linear(inputs), atol=1e-4, rtol=0)
    assert packed.weight is linear.weight


def used_pack(bias=True):
    """A packed layer that has packed its weight already."""
    torch.manual_seed(1)
    layer = PackedLinear(nn.Linear(67, 131, bias=bias).requires_grad_(False))
    assert_one_layer(layer)
    assert layer._packed is not None
    return layer


def assert_one_layer(layer, atol=1e-4):
    """Several rows, single rows and the formula agree on what the layer is now."""
    inputs = torch.linspace(-1, 1, 5 * layer.in_features, dtype=layer.weight.dtype).view(5, -1)
    bias = 0 if layer.bias is None else layer.bias
    expected = inputs @ layer.weight.T + bias
    with torch.no_grad():
        torch.testing.assert_close(layer(inputs), expected, atol=atol, rtol=0)
        torch.testing.assert_close(torch.cat([layer(row[None]) for row in inputs]), expected, atol=atol, rtol=0)


def _replace(layer):
    layer.weight = nn.Parameter(layer.weight + 0.5)


def _assign(layer):
    layer.load_state_dict({name: tensor + 0.5 for name, tensor in layer.state_dict().items()}, assign=True)


def _merge_through_data(layer):
    generator = torch.Generator().manual_seed(2)
    layer.weight.data += torch.randn(131, 2, generator=generator) @ torch.randn(2, 67, generator=generator)


@torch.inference_mode()
def _in_inference_mode(layer):
    layer.weight.mul_(2)


@torch.inference_mode()
def _replace_in_inference_mode(layer):
    layer.weight = nn.Parameter(torch.randn(131, 67), requires_grad=False)


UPDATES = {
    "in place": lambda layer: layer.weight.add_(1),
    "one entry": lambda layer: layer.weight[3, 5].fill_(7),
    "load_state_dict": lambda layer: layer.load_state_dict(nn.Linear(67, 131).state_dict()),
    "load_state_dict, assign": _assign,
    "another parameter": _replace,
    "other data": lambda layer: setattr(layer.weight, "data", layer.weight + 1),
    "merged through data": _merge_through_data,
    "in inference mode": _in_inference_mode,
    "replaced in inference mode": _replace_in_inference_mode,
    "not in rows": lambda layer: setattr(layer.weight, "data", torch.randn(67, 131).T),
    "bias": lambda layer: layer.bias.add_(1),
}


@packs
@pytest.mark.parametrize("update", UPDATES)
def test_packed_linear_follows_an_update_of_the_weight(update):
    layer = used_pack()
    before = layer.weight.clone(), layer.bias.clone()
    UPDATES[update](layer)
    assert not all(torch.equal(*pair) for pair in zip(before, (layer.weight, layer.bias), strict=True))
    assert_one_layer(layer)


@packs
def test_packed_linear_follows_a_view_of_its_own_memory():
    """Fewer rows, as when a vocabulary is cut; the same rows turned, as when a square layer is transposed."""
    layer = used_pack(bias=False)
    layer.weight.data = layer.weight.data[:32]
    assert_one_layer(layer)
    square = PackedLinear(nn.Linear(64, 64, bias=False).requires_grad_(False))
    assert_one_layer(square)
    square.weight.data = square.weight.data.T
    assert_one_layer(square)


@packs
def test_packed_linear_changed_in_inference_mode_again_and_again():
    layer = used_pack()
    _replace_in_inference_mode(layer)
    for _ in range(2):
        with torch.inference_mode():
            assert_one_layer(layer)
            layer.weight[0, 0] += 1  # nothing counts this
            assert_one_layer(layer)


@packs
def test_packed_linear_packed_in_inference_mode_serves_outside():
    layer = PackedLinear(nn.Linear(67, 131).requires_grad_(False))
    with torch.inference_mode():
        assert_one_layer(layer)
    packed = layer._packed
    assert_one_layer(layer)
    assert packed is not None
    assert layer._packed is packed


@packs
@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_packed_linear_copies_and_pickles(clone):
    layer = used_pack()
    packed, other = layer._packed, clone(layer)
    assert layer._packed is packed
    assert type(other) is PackedLinear
    assert torch.equal(other.weight, layer.weight)
    assert_one_layer(other)
    other.weight.add_(1)  # the copy's own, or shared by both
    assert_one_layer(other)
    assert_one_layer(layer)


@packs
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_packed_linear_moved_to_another_dtype(dtype):
    layer = used_pack().to(dtype)
    assert layer._packed is None  # frees the memory
    assert_one_layer(layer, atol=1e-9 if dtype == torch.float64 else 0.05)
    assert (layer._packed is None) == (dtype not in packed_dtypes())
    layer.float()
    assert_one_layer(layer)
    assert layer._packed is not None


@packs
def test_pack_linears_keeps_the_model_and_its_tied_embedding():
    model = llama(tie_word_embeddings=True)
    expected, _ = plain(model, [1, 2, 3, 4])
    embedding = model.get_input_embeddings().weight
    assert pack_linears(model) == 0  # all of them are too small to gain
    assert pack_linears(model, min_weights=1) == 3 * 7 + 1
    assert model.get_input_embeddings().weight is embedding
    assert model.get_output_embeddings().weight is embedding
    torch.testing.assert_close(plain(model, [1, 2, 3, 4])[0], expected, atol=1e-4, rtol=0)
    run_steps(model, [[3], [11, 12]], feature_layers=(1,), steps=2)


@pytest.mark.skipif(torch.bfloat16 not in packed_dtypes(), reason="this processor has no products in bfloat16")
def test_packed_linear_in_bfloat16():
    torch.manual_seed(0)
    linear = nn.Linear(67, 131).bfloat16().requires_grad_(False)
    layer = PackedLinear(linear)
    for rows in (1, 2, 17):
        inputs = torch.randn(1, rows, 67).bfloat16()
        exact = inputs.double() @ linear.weight.double().T + linear.bias.double()
        torch.testing.assert_close(layer(inputs).double(), exact, atol=0.02, rtol=0)
    packed = layer._packed
    assert packed is not None
    layer.weight.add_(1)
    assert_one_layer(layer, atol=0.3)  # sums of 67 numbers near 1, rounded to 8 bits
    assert layer._packed is not packed


def test_pack_linears_leaves_other_dtypes_alone():
    assert pack_linears(llama().double(), min_weights=1) == 0
    assert pack_linears(llama().half(), min_weights=1) == 0

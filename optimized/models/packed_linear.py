"""Linear layers with weights prepacked for a few rows at a time, on CPUs.

A tree pass multiplies 2 to 64 rows with every weight. The default GEMM packs the weight anew in each call, which costs
about as much as the product itself at these sizes; oneDNN packs once, and again where a weight was changed. A single
row gains as well: the packed weight is read in the order in which it lies.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

ROWS_HINT = 16  # the packed layout is chosen for this many rows; 16 was fastest, or close to it, from 2 to 200 rows
MIN_WEIGHTS = 2**16  # smaller layers stay plain: they gain little
SAMPLE = 17  # entries of a weight that are compared in each pass; a prime, so that they lie in different columns


@cache
def packed_dtypes() -> frozenset[torch.dtype]:
    """What this build of torch can prepack on this processor: float32, and bfloat16 where oneDNN multiplies it."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return frozenset()
    half = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)()
    return frozenset({torch.float32, torch.bfloat16} if half else {torch.float32})


def can_pack(weight: Tensor) -> bool:
    """Whether a weight is of such a dtype, on a CPU, contiguous, and no inference tensor: these count no changes."""
    plain = weight.dtype in packed_dtypes() and weight.is_cpu and weight.is_contiguous()
    return plain and not weight.is_inference()


class _Packed(NamedTuple):
    """A packed copy, and what the weight was when it was made.

    Attributes:
        copy: opaque, for oneDNN.
        place: address, shape and strides of the weight in memory.
        version: how often the weight had been changed in place; changes through ``weight.data`` do not count, and that
            is how adapters are merged.
        sample: array of about ``SAMPLE`` entries of the weight, where such changes show. It looks into the weight's
            memory, and so keeps another weight from getting the same address.
        values: the bytes of the sample.
    """

    copy: Tensor
    place: tuple[int, torch.Size, tuple[int, ...]]
    version: int
    sample: Any
    values: bytes

    @classmethod
    def of(cls, weight: Tensor) -> _Packed:
        weight = weight.detach()
        bits = torch.int16 if weight.dtype is torch.bfloat16 else torch.int32
        sample = weight.view(-1)[:: max(1, weight.numel() // SAMPLE)].view(bits).numpy()
        copy = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        return cls(copy, _place(weight), weight._version, sample, sample.tobytes())

    def is_of(self, weight: Tensor) -> bool:
        return _place(weight) == self.place and weight._version == self.version and self.sample.tobytes() == self.values


def _place(weight: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return weight.data_ptr(), weight.shape, weight.stride()


class PackedLinear(nn.Linear):
    """``nn.Linear`` for inference on a CPU; same result up to rounding.

    It shares the weight of the layer it replaces and holds a packed copy beside it. The first pass packs, and so does
    the first one behind a change of the weight: another tensor, or one changed in place. Changes through
    ``weight.data`` are noticed if they reach one of some ``SAMPLE`` entries, as a merged adapter does. With a weight
    that cannot be packed, say of another dtype or on another device, this is an ``nn.Linear``. Copies and pickles are
    made without the packed copy.

    Args:
        linear: the layer to replace.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self._packed: _Packed | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] of the weight's dtype -> [..., out_features]."""
        weight, packed = self.weight, self._packed
        if packed is None or not packed.is_of(weight):
            self._packed = packed = _Packed.of(weight) if can_pack(weight) else None
        if packed is None:
            return super().forward(inputs)
        return torch.ops.mkldnn._linear_pointwise(inputs, packed.copy, self.bias, "none", [], "")

    def _apply(self, *args: Any, **kwargs: Any) -> PackedLinear:
        self._packed = None  # the weight moves; the copy would only take memory
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}  # opaque: torch can neither copy nor store it


def pack_linears(model: nn.Module, min_weights: int = MIN_WEIGHTS) -> int:
    """Replace, in place, the ``nn.Linear`` layers on the CPU; the model is for inference only afterwards.

    Layers of other than ``packed_dtypes`` are left alone. The packed copies, made at the first pass, take as much
    memory again as the layers they are of.

    Args:
        model: in evaluation mode, frozen.
        min_weights: layers with fewer weights stay as they are.

    Returns:
        How many layers were replaced; 0 where this build of torch cannot pack.
    """
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            # The exact class: a subclass may compute something else.
            if type(child) is not nn.Linear or child.weight.numel() < min_weights:
                continue
            if can_pack(child.weight):
                setattr(module, name, PackedLinear(child).train(child.training))
                replaced += 1
    return replaced

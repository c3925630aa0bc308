"""Linear layers with weights prepacked for a few rows at a time, on CPUs in float32.

A tree pass multiplies 2 to 64 rows with every weight. The default GEMM packs the weight anew in each call, which costs
about as much as the product itself at these sizes; oneDNN packs once, at load time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS_HINT = 16  # the packed layout is chosen for this many rows; 16 was fastest, or close to it, from 2 to 200 rows
MIN_WEIGHTS = 2**18  # smaller layers stay plain: they gain nothing


def packing_available() -> bool:
    """Whether this build of torch can prepack linear layers."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class PackedLinear(nn.Linear):
    """``nn.Linear`` for inference in float32 on a CPU; same result up to rounding.

    It shares the weight of the layer it replaces and holds a packed copy beside it: a single row is a matrix-vector
    product, which reads the plain weight faster.

    Args:
        linear: the layer to replace.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] float32 -> [..., out_features]."""
        if inputs.numel() == self.in_features:
            return super().forward(inputs)
        return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")


def pack_linears(model: nn.Module, min_weights: int = MIN_WEIGHTS) -> int:
    """Replace, in place, the float32 ``nn.Linear`` layers on the CPU; the model is for inference only afterwards.

    Other dtypes are left alone: oneDNN packs bfloat16 only for CPUs with AVX-512 or AVX-NE-CONVERT. The packed copies
    take as much memory again as the layers they are of.

    Args:
        model: in evaluation mode, frozen.
        min_weights: layers with fewer weights stay as they are.

    Returns:
        How many layers were replaced; 0 where this build of torch cannot pack.
    """
    if not packing_available():
        return 0
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            # The exact class: a subclass may compute something else.
            if type(child) is not nn.Linear or child.weight.numel() < min_weights:
                continue
            if child.weight.device.type == "cpu" and child.weight.dtype == torch.float32:
                setattr(module, name, PackedLinear(child).train(child.training))
                replaced += 1
    return replaced

"""Linear layers with weights prepacked for a few rows at a time, on CPUs in float32.

A tree pass multiplies 2 to 64 rows with every weight. The default GEMM packs the weight anew in each call, which costs
as much as the product itself at these sizes; oneDNN packs once, at load time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS_HINT = 16  # the packed layout is chosen for this many rows; 16 was fastest, or close to it, from 2 to 200 rows


def packing_available() -> bool:
    """Whether this build of torch can prepack linear layers."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class PackedLinear(nn.Module):
    """``nn.Linear`` for inference in float32 on a CPU; same result up to rounding.

    The packed weight replaces the plain one, so memory does not grow (a weight tied to an embedding stays in the
    embedding, and the packed copy comes on top).

    Args:
        linear: the layer to replace.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features] float32, unpacked anew at every access."""
        return self.packed.to_dense()

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] float32 -> [..., out_features]."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        """As ``nn.Linear`` shows itself."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_linears(model: nn.Module) -> int:
    """Replace, in place, every float32 ``nn.Linear`` on the CPU; the model is for inference only afterwards.

    Other dtypes are left alone: oneDNN packs bfloat16 only for CPUs with AVX-512 or AVX-NE-CONVERT.

    Returns:
        How many layers were replaced; 0 where this build of torch cannot pack.
    """
    if not packing_available():
        return 0
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            # The exact class: a subclass may compute something else.
            if type(child) is nn.Linear and child.weight.device.type == "cpu" and child.weight.dtype == torch.float32:
                setattr(module, name, PackedLinear(child).train(child.training))
                replaced += 1
    return replaced

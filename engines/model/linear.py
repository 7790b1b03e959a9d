"""A linear layer whose weight is packed once.

On x86 it is our own product (kernels.cpu.linear), which reads a weight at the speed of the memory for few
rows, keeps up with the libraries for many, and gives every row bits of its own. Without a compiler it is
oneDNN's packed product: the plain one packs the weight again in every call, and changes a row's bits below 4
rows (one thread) or 12 (two). engines.model.invariance checks at every start what the products here do."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels.cpu.linear import WAYS, CppLinear, packable


class Linear:
    """y = x W^T + b over rows: x [n, in] -> [n, out]. kind: who multiplies."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False) -> None:
        """weight [out, in]. The weight is copied when it is packed; the caller may drop its own. gated: W
        holds gate above up and y is silu(gate) * up, [n, out / 2]; only where `fuses_gate` says so."""
        self.out_features, self.in_features = weight.shape
        self.gated = gated
        self._apply: Callable[[torch.Tensor], torch.Tensor]
        self.own: CppLinear | None = None
        if packable(weight):
            self._apply = self.own = own = CppLinear(weight, bias, gated)
            self.kind = f"cpp {WAYS[own.way]}"
        elif gated:
            raise ValueError("gated: only where fuses_gate says so")
        elif can_pack(weight):
            self._apply, self.kind = _onednn(weight, bias), "onednn"
        else:
            self._apply, self.kind = lambda x: F.linear(x, weight, bias), "torch"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply(x)


def fuses_gate(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the gate's activation can be part of the product."""
    return bias is None and packable(weight)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN takes this weight: on a CPU, float32, or bfloat16 where the processor has it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

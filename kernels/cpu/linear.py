"""The matrix product of a linear layer in C++ (kernels/cpu/linear.cpp): checks the tensors, passes their
addresses."""

from __future__ import annotations

import platform

import torch

from kernels.cpu.arena import Arena
from kernels.cpu.library import DTYPES, Library, available, best

WAYS = {0: "fp32", 1: "bf16 widened", 2: "avx512_bf16", 3: "amx"}

_arena = Arena()


class CppLinear:
    """y = x W^T + b over rows, float32 or bfloat16 on the CPU, sums in float32: x [n, in] -> [n, out]. With
    `gated` W holds gate above up, and y is silu(gate) * up: [n, out / 2]. A row's bits do not depend on n,
    on its neighbours or on the number of threads (torch.get_num_threads())."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gated: bool = False,
        library: Library | None = None,
        way: int | None = None,
    ) -> None:
        """weight [out, in] contiguous. It is copied in packed form, padded to whole vectors; the caller may
        drop its own. library, way: for tests, else the best ones here. Raises ValueError for tensors that do
        not fit."""
        self.out_features, self.in_features = weight.shape
        self.gated = gated
        self.dtype, self._bias = weight.dtype, bias
        if not packable(weight) or not weight.is_contiguous():
            raise ValueError(
                "weight: needs contiguous float32 or bfloat16 [out, in] on the CPU, in even for bfloat16; "
                f"got {weight.dtype} {tuple(weight.shape)} on {weight.device}"
            )
        if gated and (self.out_features % 2 or bias is not None):
            raise ValueError("gated: needs an even number of outputs and no bias")
        if bias is not None and (
            bias.dtype is not weight.dtype or bias.shape != (self.out_features,) or not bias.is_contiguous()
        ):
            raise ValueError(
                f"bias: needs {weight.dtype} [{self.out_features}]; got {bias.dtype} {tuple(bias.shape)}"
            )
        compiled, is_bf16 = (library or best()).functions, weight.dtype is torch.bfloat16
        self._run = compiled.bm_linear
        self.way = compiled.bm_linear_way(is_bf16) if way is None else way
        size = compiled.bm_linear_size(self.out_features, self.in_features, gated)
        self._packed = _arena.empty(size, weight.dtype)
        compiled.bm_linear_pack(is_bf16, weight.data_ptr(), *weight.shape, gated, self._packed.data_ptr())
        self._columns = self.out_features // 2 if gated else self.out_features
        self.addresses = self._packed.data_ptr(), None if bias is None else bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        row_stride, stride = x.stride()
        if (
            x.dtype is not self.dtype
            or width != self.in_features
            or (stride != 1 and width > 1)
            or not x.is_cpu
        ):
            raise ValueError(
                f"x: needs {self.dtype} [n, {self.in_features}] with contiguous rows on the CPU; "
                f"got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
        out = x.new_empty(rows, self._columns)
        self._run(
            self.way,
            x.data_ptr(),
            row_stride,
            *self.addresses,
            out.data_ptr(),
            self._columns,
            rows,
            self.out_features,
            self.in_features,
            self.gated,
            torch.get_num_threads(),
        )
        return out


def packable(weight: torch.Tensor) -> bool:
    """Whether the C++ product takes this weight. On x86 alone, where it was measured against the others."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in DTYPES
        and (weight.dtype is torch.float32 or weight.shape[1] % 2 == 0)
        and platform.machine() in ("x86_64", "AMD64")
        and available()
    )

"""The fused operations in C++ (shapes and meaning: kernels.fused). Checks the tensors, passes their
addresses."""

from __future__ import annotations

import torch

from kernels.cpu.backend import ERRORS, check_caches, check_heads, check_index
from kernels.cpu.library import DTYPES, library


class CppOps:
    """Float32 and bfloat16 on the CPU, on torch.get_num_threads() threads. Raises ValueError for other
    tensors."""

    name = "cpp"

    def __init__(self) -> None:
        compiled = library()
        self._rms_norm, self._silu_mul = compiled.bm_rms_norm, compiled.bm_silu_mul
        self._rope_write_kv = compiled.bm_rope_write_kv

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._norm(x, None, weight, eps, out)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if x.dim() != 2 or residual.dtype is not x.dtype or residual.shape != x.shape:
            raise ValueError(f"residual: needs the shape [T, H] and dtype of x; got {tuple(residual.shape)}")
        return self._norm(x, residual, weight, eps, out)

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        dtype, shape = x.dtype, x.shape
        rows, heads, x_row, x_head = _rows("x", x)
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        elif out.dtype is not dtype or out.shape != shape:
            raise ValueError("out: needs the shape and dtype of x")
        *_, out_row, out_head = _rows("out", out)
        n = shape[-1]
        if (
            weight.dtype is not dtype
            or weight.shape != (n,)
            or not weight.is_contiguous()
            or not weight.is_cpu
        ):
            raise ValueError(f"weight: needs {dtype} [{n}]; got {weight.dtype} {tuple(weight.shape)}")
        self._rms_norm(
            dtype is torch.bfloat16,
            x.data_ptr(),
            x_row,
            x_head,
            None if residual is None else residual.data_ptr(),
            0 if residual is None else _rows("residual", residual)[2],
            weight.data_ptr(),
            out.data_ptr(),
            out_row,
            out_head,
            rows,
            heads,
            n,
            eps,
            torch.get_num_threads(),
        )
        return out

    def rope_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot: torch.Tensor,
    ) -> None:
        blocks, kv_heads, dim, block_size, paired = check_caches(k_cache, v_cache)
        dtype = k_cache.dtype
        tokens, heads, _ = q.shape
        q_stride = check_heads("q", q, dtype, tokens, heads, dim)
        k_stride = check_heads("k", k, dtype, tokens, kv_heads, dim)
        v_stride = check_heads("v", v, dtype, tokens, kv_heads, dim)
        if dim % 2:
            raise ValueError(f"q: the rotary embedding needs an even head size, not {dim}")
        for table in (cos, sin):
            if (
                table.dtype is not torch.float32
                or table.shape != (len(cos), dim)
                or not table.is_contiguous()
                or not table.is_cpu
            ):
                raise ValueError(f"cos, sin: need contiguous float32 [max_pos, {dim}] on the CPU")
        check_index("positions", positions, torch.int64, tokens)
        check_index("slot", slot, torch.int64, tokens)
        status = self._rope_write_kv(
            dtype is torch.bfloat16,
            q.data_ptr(),
            q_stride,
            k.data_ptr(),
            k_stride,
            v.data_ptr(),
            v_stride,
            cos.data_ptr(),
            sin.data_ptr(),
            len(cos),
            positions.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slot.data_ptr(),
            tokens,
            heads,
            kv_heads,
            dim,
            block_size,
            blocks,
            paired,
            torch.get_num_threads(),
        )
        if status:
            raise ValueError(ERRORS[status])

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        dtype = gate_up.dtype
        rows, width = gate_up.shape
        row_stride, stride = gate_up.stride()
        if dtype not in DTYPES or stride != 1 or width % 2 or not gate_up.is_cpu:
            raise ValueError("gate_up: needs float32 or bfloat16 [T, 2 I] with contiguous rows on the CPU")
        if out is None:
            out = torch.empty((rows, width // 2), dtype=dtype)
        elif out.dtype is not dtype or out.shape != (rows, width // 2) or not out.is_contiguous():
            raise ValueError(f"out: needs contiguous {dtype} [{rows}, {width // 2}]")
        self._silu_mul(
            dtype is torch.bfloat16,
            gate_up.data_ptr(),
            row_stride,
            out.data_ptr(),
            rows,
            width // 2,
            torch.get_num_threads(),
        )
        return out


def argmax(x: torch.Tensor) -> torch.Tensor:
    """x [R, n] -> ids [R] int64: of each row the first of the highest, or of the NaNs, as torch.argmax."""
    rows, _, row_stride, _ = _rows("x", x)
    if x.dim() != 2 or not x.shape[1]:
        raise ValueError(f"x: needs [R, n]; got {tuple(x.shape)}")
    ids = torch.empty(rows, dtype=torch.int64)
    library().bm_argmax(
        x.dtype is torch.bfloat16,
        x.data_ptr(),
        row_stride,
        ids.data_ptr(),
        rows,
        x.shape[1],
        torch.get_num_threads(),
    )
    return ids


def _rows(name: str, x: torch.Tensor) -> tuple[int, int, int, int]:
    """x [T, H] or [T, heads, H] as (rows, heads, stride of a row, stride of a head). Raises ValueError."""
    strides = x.stride()
    if x.dtype not in DTYPES or not x.is_cpu or len(strides) not in (2, 3) or strides[-1] != 1:
        raise ValueError(
            f"{name}: needs float32 or bfloat16 [T, H] or [T, heads, H] with contiguous H on the CPU; "
            f"got {x.dtype} {tuple(x.shape)} on {x.device}"
        )
    if len(strides) == 2:
        return x.shape[0], 1, strides[0], 0
    return x.shape[0], x.shape[1], strides[0], strides[1]

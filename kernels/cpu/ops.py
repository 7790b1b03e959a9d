"""The fused operations in C++ (shapes and meaning: kernels.fused). Checks the tensors, passes their
addresses."""

from __future__ import annotations

import torch

from kernels.cpu.backend import ERRORS, check, check_caches, check_heads
from kernels.cpu.library import DTYPES, library


class CppOps:
    """Float32 and bfloat16 on the CPU, on torch.get_num_threads() threads. Raises ValueError for other
    tensors."""

    name = "cpp"

    def __init__(self) -> None:
        self._library = library()

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
        check(
            x.dim() == 2
            and residual.shape == x.shape
            and residual.dtype == x.dtype
            and residual.stride(1) == 1
            and residual.device.type == "cpu",
            "residual: needs the shape [T, H] and dtype of x",
        )
        return self._norm(x, residual, weight, eps, out)

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype)
        check(
            weight.shape == x.shape[-1:] and weight.dtype == x.dtype and weight.is_contiguous(),
            f"weight: needs {x.dtype} [{x.shape[-1]}]; got {weight.dtype} {tuple(weight.shape)}",
        )
        check(out.shape == x.shape and out.dtype == x.dtype, "out: needs the shape and dtype of x")
        rows, heads, x_row, x_head = _rows("x", x)
        *_, out_row, out_head = _rows("out", out)
        self._library.bm_rms_norm(
            x.dtype == torch.bfloat16,
            x.data_ptr(),
            x_row,
            x_head,
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            out_row,
            out_head,
            rows,
            heads,
            x.shape[-1],
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
        blocks, kv_heads, dim, block_size = check_caches(k_cache, v_cache)
        heads, tokens = q.shape[1], len(q)
        check_heads("q", q, k_cache.dtype, heads, dim)
        check_heads("k", k, k_cache.dtype, kv_heads, dim)
        check_heads("v", v, k_cache.dtype, kv_heads, dim)
        check(dim % 2 == 0, f"q: the rotary embedding needs an even head size, not {dim}")
        check(
            cos.dtype == sin.dtype == torch.float32
            and cos.shape == sin.shape == (len(cos), dim)
            and cos.is_contiguous()
            and sin.is_contiguous(),
            f"cos, sin: need contiguous float32 [max_pos, {dim}]",
        )
        for name, x in (("positions", positions), ("slot", slot)):
            check(
                x.dtype == torch.int64 and x.is_contiguous() and len(x) == tokens, f"{name}: needs int64 [T]"
            )
        check(len(k) == len(v) == tokens, "k, v: need as many tokens as q")
        status = self._library.bm_rope_write_kv(
            q.dtype == torch.bfloat16,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
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
            torch.get_num_threads(),
        )
        check(status == 0, ERRORS.get(status, ""))

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows, width = gate_up.shape
        if out is None:
            out = torch.empty(rows, width // 2, dtype=gate_up.dtype)
        check(
            gate_up.dtype in DTYPES
            and gate_up.stride(1) == 1
            and width % 2 == 0
            and gate_up.device.type == "cpu",
            "gate_up: needs float32 or bfloat16 [T, 2 I] with contiguous rows on the CPU",
        )
        check(
            out.shape == (rows, width // 2) and out.dtype == gate_up.dtype and out.is_contiguous(),
            "out: needs contiguous [T, I] of gate_up's dtype",
        )
        self._library.bm_silu_mul(
            gate_up.dtype == torch.bfloat16,
            gate_up.data_ptr(),
            gate_up.stride(0),
            out.data_ptr(),
            rows,
            width // 2,
            torch.get_num_threads(),
        )
        return out


def _rows(name: str, x: torch.Tensor) -> tuple[int, int, int, int]:
    """x as [rows, heads, H]: the counts, then the strides. Tensors of 1 or above 3 dimensions must be
    contiguous."""
    check(
        x.dtype in DTYPES and x.device.type == "cpu" and x.stride(-1) == 1,
        f"{name}: needs float32 or bfloat16 with a contiguous last dimension on the CPU, not {x.dtype}",
    )
    if x.dim() == 3:
        return x.shape[0], x.shape[1], x.stride(0), x.stride(1)
    if x.dim() == 2:
        return x.shape[0], 1, x.stride(0), 0
    check(x.is_contiguous(), f"{name}: needs to be contiguous")
    return x.numel() // x.shape[-1], 1, x.shape[-1], 0

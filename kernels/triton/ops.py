"""The fused operations in Triton (shapes and meaning: kernels.fused). Checks the tensors, launches the
kernels."""

from __future__ import annotations

import torch

from kernels.triton import cache, rows
from kernels.triton.checks import check_caches, check_heads, check_index, check_like, check_rows


class TritonOps:
    """float32, bfloat16 and float16 on CUDA. Raises ValueError for other tensors."""

    name = "triton"

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
        if x.dim() != 2:
            raise ValueError(f"x: add_rms_norm needs [T, H]; got {list(x.shape)}")
        check_rows("residual", residual)
        check_like("residual", residual, tuple(x.shape), x)
        return self._norm(x, residual, weight, eps, out)

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        check_rows("x", x)
        check_like("weight", weight, (x.shape[-1],), x)
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        else:
            check_rows("out", out)
            check_like("out", out, tuple(x.shape), x)
        rows.rms_norm(out, x, residual, weight.contiguous(), eps)
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
        kv_heads, dim, _ = check_caches(k_cache, v_cache)
        tokens, heads, _ = q.shape
        device = k_cache.device
        if dim % 2:
            raise ValueError(f"q: the rotary embedding needs an even head size, not {dim}")
        if heads % kv_heads:
            raise ValueError(f"q: {heads} heads are not a multiple of the cache's {kv_heads}")
        check_heads("q", q, k_cache, tokens, heads, dim)
        check_heads("k", k, k_cache, tokens, kv_heads, dim)
        check_heads("v", v, k_cache, tokens, kv_heads, dim)
        for name, table in (("cos", cos), ("sin", sin)):
            check_index(name, table, torch.float32, (len(cos), dim), device)
        check_index("positions", positions, torch.int64, (tokens,), device)
        check_index("slot", slot, torch.int64, (tokens,), device)
        cache.rope_write_kv(q, k, v, cos, sin, positions, k_cache, v_cache, slot)

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        check_rows("gate_up", gate_up)
        if gate_up.dim() != 2 or gate_up.shape[1] % 2:
            raise ValueError(f"gate_up: needs [T, 2 I]; got {list(gate_up.shape)}")
        shape = (gate_up.shape[0], gate_up.shape[1] // 2)
        if out is None:
            out = torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
        else:
            check_like("out", out, shape, gate_up)
            if not out.is_contiguous():
                raise ValueError("out: silu_mul needs it contiguous")
        rows.silu_mul(out, gate_up)
        return out

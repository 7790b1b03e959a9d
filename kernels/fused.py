"""The small operations between the matrix products, one call each: in C++ on the CPU where it builds,
in Triton on CUDA, else in torch.

`ops(device, dtype)` gives an object with these methods. T tokens, H hidden size, I intermediate size, Hq
/ Hk query / key-value heads, D head size. x is float32 or bfloat16 (Triton: also
float16; torch: any); arithmetic is in
float32; every row's bits are independent of the other rows.

    rms_norm(x, weight, eps, out=None) -> out
        x [T, H] or [T, heads, H], last dimension contiguous; weight [H]. out may be x itself. Llama's
        order: the normalised value is rounded to x.dtype, then multiplied by the weight. On [T, heads, D]
        it is the per-head norm of Qwen3.
    add_rms_norm(x, residual, weight, eps, out=None) -> out
        x, residual [T, H]. residual += x in place, then the norm of residual. out may be x itself.
    rope_write_kv(q, k, v, cos, sin, positions, k_cache, v_cache, slot) -> None
        q [T, Hq, D], k and v [T, Hk, D]: views with contiguous heads are fine (slices of one fused qkv
        projection). Rotates q and k in place (Hugging Face Llama's rotate_half: component i pairs with i
        + D/2), then stores the rotated k and v in the caches as AttentionBackend.write_kv does. cos, sin
        [max_pos, D] float32; positions [T] int64 in [0, max_pos); slot [T] int64, < 0: not written.
    silu_mul(gate_up, out=None) -> out
        gate_up [T, 2 I] -> [T, I]: silu(gate_up[:, :I]) * gate_up[:, I:].

`argmax(logits)` is the greedy choice of every row.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from kernels import triton
from kernels.cpu import ops as cpp
from kernels.cpu.library import DTYPES, available
from kernels.reference import TorchBackend


class FusedOps(Protocol):
    """See the module docstring for shapes."""

    name: str

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

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
    ) -> None: ...

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


class TorchOps:
    """The torch fallback and the oracle of the other versions."""

    name = "torch"

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return _into(out, normed.to(x.dtype) * weight)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps, out)

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
        c, s = cos[positions][:, None, :], sin[positions][:, None, :]
        for x in (q, k):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            half = x.shape[-1] // 2
            turned = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
            x.copy_(wide * c + turned * s)
        TorchBackend().write_kv(k, v, k_cache, v_cache, slot)

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
        return _into(out, (F.silu(gate) * up).to(gate_up.dtype))


def ops(device: torch.device | str, dtype: torch.dtype) -> FusedOps:
    """The fastest operations that run here, chosen as kernels.get_backend chooses the attention."""
    device = torch.device(device)
    if device.type == "cpu" and dtype in DTYPES and available():
        return cpp.CppOps()
    if device.type == "cuda" and triton.available(device, dtype):
        from kernels.triton.ops import TritonOps  # only here: it imports triton

        return TritonOps()
    return TorchOps()


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """logits [R, vocab] -> ids [R] int64: the largest of each row, ties the lowest id."""
    if logits.is_cpu and logits.dtype in DTYPES and logits.stride(-1) == 1 and available():
        return cpp.argmax(logits)
    return torch.argmax(logits, dim=-1)


def _into(out: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    return value if out is None else out.copy_(value)

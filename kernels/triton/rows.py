"""RMSNorm and SiLU-and-multiply in Triton: one launch and one pass over memory each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.launch import row_warps

_SILU_BLOCK = 1024


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    out_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    rows,
    out_stride,
    out_head_stride,
    x_stride,
    x_head_stride,
    residual_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    """A program takes ROWS rows; row r is head r % HEADS of token r // HEADS."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = (r // HEADS)[:, None]
    head = (r % HEADS)[:, None]
    i = tl.arange(0, WIDTH_PAD)
    held = (r < rows)[:, None] & (i < WIDTH)[None, :]
    x = tl.load(x_ptr + token * x_stride + head * x_head_stride + i[None, :], mask=held, other=0.0)
    x = x.to(tl.float32)
    if ADD:
        at = residual_ptr + token * residual_stride + i[None, :]
        summed = (x + tl.load(at, mask=held, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(at, summed, mask=held)
        x = summed.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / WIDTH + eps)
    # Llama's order: rounded to the dtype, then multiplied by the weight.
    normed = (x * scale[:, None]).to(out_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    out = (normed * weight[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_stride + head * out_head_stride + i[None, :], out, mask=held)


@triton.jit
def silu_mul_kernel(out_ptr, gate_up_ptr, gate_up_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = gate_up_ptr + row * gate_up_stride + i
    gate = tl.load(at, mask=i < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=i < WIDTH, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * WIDTH + i, value.to(out_ptr.dtype.element_ty), mask=i < WIDTH)


def rms_norm(
    out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> None:
    """Launch; shapes as in kernels.fused. With a residual it is add_rms_norm."""
    width = x.shape[-1]
    tokens, heads = x.shape[0], x.shape[1] if x.dim() == 3 else 1
    if tokens * heads == 0:
        return
    width_pad = triton.next_power_of_2(width)
    rows = max(1, 512 // width_pad)  # the short rows of a norm per head share a program
    rms_norm_kernel[(triton.cdiv(tokens * heads, rows),)](
        out,
        x,
        x if residual is None else residual,
        weight,
        tokens * heads,
        out.stride(0),
        out.stride(1) if x.dim() == 3 else 0,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        0 if residual is None else residual.stride(0),
        eps,
        HEADS=heads,
        WIDTH=width,
        WIDTH_PAD=width_pad,
        ROWS=rows,
        ADD=residual is not None,
        num_warps=row_warps(width_pad),
    )


def silu_mul(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """Launch; out [T, I] contiguous, gate_up [T, 2 I]."""
    tokens, width = out.shape
    if tokens == 0:
        return
    silu_mul_kernel[(tokens, triton.cdiv(width, _SILU_BLOCK))](
        out, gate_up, gate_up.stride(0), WIDTH=width, BLOCK=_SILU_BLOCK, num_warps=4
    )

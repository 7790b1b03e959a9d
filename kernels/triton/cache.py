"""Storing keys and values in the paged cache, alone and together with the rotary embedding, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS = 4  # a program's: few enough that a batch of decodes spreads over the chip


@triton.jit
def _store_kv(
    k_cache_ptr, v_cache_ptr, slot, head, d, k, v, kept, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """k and v [tokens, components d] of one head into slots [tokens]; keys column-major inside a block."""
    page = (slot // BLOCK_SIZE * KV_HEADS + head)[:, None] * (DIM * BLOCK_SIZE)
    offset = (slot % BLOCK_SIZE)[:, None]
    tl.store(k_cache_ptr + page + d[None, :] * BLOCK_SIZE + offset, k, mask=kept)
    tl.store(v_cache_ptr + page + offset * DIM + d[None, :], v, mask=kept)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slot_ptr"])
def write_kv_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    k_stride,
    v_stride,
    tokens,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, DIM_PAD)
    slot = tl.load(slot_ptr + t, mask=t < tokens, other=-1)
    kept = (slot >= 0)[:, None] & (d < DIM)[None, :]
    k = tl.load(k_ptr + t[:, None] * k_stride + head * DIM + d[None, :], mask=kept)
    v = tl.load(v_ptr + t[:, None] * v_stride + head * DIM + d[None, :], mask=kept)
    _store_kv(k_cache_ptr, v_cache_ptr, slot, head, d, k, v, kept, KV_HEADS, DIM, BLOCK_SIZE)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions_ptr", "slot_ptr"])
def rope_write_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    q_stride,
    k_stride,
    v_stride,
    tokens,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """A program takes TOKENS tokens of one key/value head and of the query heads that share it."""
    HALF: tl.constexpr = DIM // 2
    head = tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    real = t < tokens
    h = tl.arange(0, HALF_PAD)
    held = real[:, None] & (h < HALF)[None, :]
    at = tl.load(positions_ptr + t, mask=real, other=0)[:, None] * DIM + h[None, :]
    cos_low = tl.load(cos_ptr + at, mask=held, other=0.0)
    cos_high = tl.load(cos_ptr + at + HALF, mask=held, other=0.0)
    sin_low = tl.load(sin_ptr + at, mask=held, other=0.0)
    sin_high = tl.load(sin_ptr + at + HALF, mask=held, other=0.0)

    g = tl.arange(0, GROUP_PAD)
    heads = (head * GROUP + g)[None, :, None] * DIM + h[None, None, :]
    q_at = q_ptr + t[:, None, None] * q_stride + heads
    turned = held[:, None, :] & (g < GROUP)[None, :, None]
    low = tl.load(q_at, mask=turned, other=0.0).to(tl.float32)
    high = tl.load(q_at + HALF, mask=turned, other=0.0).to(tl.float32)
    out_low = low * cos_low[:, None, :] - high * sin_low[:, None, :]
    out_high = high * cos_high[:, None, :] + low * sin_high[:, None, :]
    tl.store(q_at, out_low.to(q_ptr.dtype.element_ty), mask=turned)
    tl.store(q_at + HALF, out_high.to(q_ptr.dtype.element_ty), mask=turned)

    k_at = k_ptr + t[:, None] * k_stride + head * DIM + h[None, :]
    k_low = tl.load(k_at, mask=held, other=0.0).to(tl.float32)
    k_high = tl.load(k_at + HALF, mask=held, other=0.0).to(tl.float32)
    turned_low = (k_low * cos_low - k_high * sin_low).to(k_ptr.dtype.element_ty)
    turned_high = (k_high * cos_high + k_low * sin_high).to(k_ptr.dtype.element_ty)
    tl.store(k_at, turned_low, mask=held)
    tl.store(k_at + HALF, turned_high, mask=held)

    slot = tl.load(slot_ptr + t, mask=real, other=-1)
    kept = held & (slot >= 0)[:, None]
    v_at = v_ptr + t[:, None] * v_stride + head * DIM + h[None, :]
    v_low = tl.load(v_at, mask=kept)
    v_high = tl.load(v_at + HALF, mask=kept)
    _store_kv(k_cache_ptr, v_cache_ptr, slot, head, h, turned_low, v_low, kept, KV_HEADS, DIM, BLOCK_SIZE)
    _store_kv(
        k_cache_ptr, v_cache_ptr, slot, head, h + HALF, turned_high, v_high, kept, KV_HEADS, DIM, BLOCK_SIZE
    )


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot: torch.Tensor
) -> None:
    """Launch; shapes as in kernels.interface."""
    tokens, kv_heads, dim = k.shape
    if tokens == 0:
        return
    write_kv_kernel[(triton.cdiv(tokens, _TOKENS), kv_heads)](
        k,
        v,
        k_cache,
        v_cache,
        slot,
        k.stride(0),
        v.stride(0),
        tokens,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        BLOCK_SIZE=k_cache.shape[3],
        TOKENS=_TOKENS,
        num_warps=2,
    )


def rope_write_kv(
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
    """Launch; shapes as in kernels.fused."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    if tokens == 0:
        return
    group = heads // kv_heads
    rope_write_kv_kernel[(triton.cdiv(tokens, _TOKENS), kv_heads)](
        q,
        k,
        v,
        cos,
        sin,
        positions,
        k_cache,
        v_cache,
        slot,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        tokens,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=triton.next_power_of_2(group),
        DIM=dim,
        HALF_PAD=triton.next_power_of_2(dim // 2),
        BLOCK_SIZE=k_cache.shape[3],
        TOKENS=_TOKENS,
        num_warps=4,
    )

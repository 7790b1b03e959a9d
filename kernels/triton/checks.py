"""What the Triton kernels ask of tensors. Shapes, dtypes and strides only: to look into a tensor would make
the host wait for the device. What they hold (block table, slots, positions, cu_q) is the caller's promise;
the C++ backend checks the same batches to the last index."""

from __future__ import annotations

import torch

from kernels.triton import DTYPES


def check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, int, int]:
    """(Hk, D, bs) of a layer's caches. Raises ValueError."""
    blocks, heads, dim, block_size = k_cache.shape
    dtype = k_cache.dtype
    if not (
        dtype in DTYPES
        and v_cache.dtype is dtype
        and v_cache.shape == (blocks, heads, block_size, dim)
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and v_cache.device == k_cache.device
    ):
        raise ValueError(
            "caches: need contiguous float32, bfloat16 or float16 [N, Hk, D, bs] and [N, Hk, bs, D] on one "
            f"device; got {dtype} {tuple(k_cache.shape)} on {k_cache.device} and {v_cache.dtype} "
            f"{tuple(v_cache.shape)} on {v_cache.device}"
        )
    return heads, dim, block_size


def check_heads(name: str, x: torch.Tensor, like: torch.Tensor, tokens: int, heads: int, dim: int) -> None:
    """x must be [tokens, heads, dim] of the dtype and device of `like`, with contiguous heads. Raises
    ValueError."""
    strides = x.stride()
    if (
        x.shape != (tokens, heads, dim)
        or x.dtype is not like.dtype
        or x.device != like.device
        or (strides[2] != 1 and dim > 1)
        or (strides[1] != dim and heads > 1)
    ):
        raise ValueError(
            f"{name}: needs {like.dtype} [{tokens}, {heads}, {dim}] with contiguous heads on {like.device}; "
            f"got {x.dtype} {tuple(x.shape)} with strides {strides} on {x.device}"
        )


def check_rows(name: str, x: torch.Tensor) -> None:
    """x must be [T, H] or [T, heads, H] with contiguous H. Raises ValueError."""
    if x.dtype not in DTYPES or x.dim() not in (2, 3) or (x.stride(-1) != 1 and x.shape[-1] > 1):
        raise ValueError(
            f"{name}: needs float32, bfloat16 or float16 [T, H] or [T, heads, H] with contiguous H; "
            f"got {x.dtype} {tuple(x.shape)} with strides {x.stride()}"
        )


def check_like(name: str, x: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    """x must have that shape and the dtype and device of `like`. Raises ValueError."""
    if x.shape != shape or x.dtype is not like.dtype or x.device != like.device:
        raise ValueError(
            f"{name}: needs {like.dtype} {list(shape)} on {like.device}; "
            f"got {x.dtype} {list(x.shape)} on {x.device}"
        )


def check_index(
    name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """x must be contiguous integers of that shape. Raises ValueError."""
    if x.dtype is not dtype or x.shape != shape or x.device != device or not x.is_contiguous():
        raise ValueError(
            f"{name}: needs contiguous {dtype} {list(shape)} on {device}; "
            f"got {x.dtype} {list(x.shape)} on {x.device}"
        )

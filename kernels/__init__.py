"""Paged attention and the small fused operations: one interface (kernels.interface), several backends."""

from __future__ import annotations

import os

# Read when torch loads its OpenMP runtime, for whoever comes here first (engines.runner says why).
for _name, _value in (("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "50000"), ("KMP_BLOCKTIME", "1")):
    os.environ.setdefault(_name, _value)

import torch  # noqa: E402

from kernels import triton  # noqa: E402
from kernels.cpu.backend import CppBackend  # noqa: E402
from kernels.cpu.library import DTYPES, available  # noqa: E402
from kernels.cpu.memory import advise_huge_pages  # noqa: E402
from kernels.interface import AttentionBackend  # noqa: E402
from kernels.reference import TorchBackend  # noqa: E402
from kernels.varlen import VarlenBackend  # noqa: E402
from kernels.varlen import unusable as varlen_unusable  # noqa: E402

__all__ = ["BACKENDS", "AttentionBackend", "allocate_kv", "get_backend", "kv_shapes"]

BACKENDS = ("auto", "cpp", "triton", "varlen", "torch")


def get_backend(
    name: str = "auto", device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> AttentionBackend:
    """The attention backend called `name` for tensors of `dtype` on `device`.

    `auto` is the C++ kernel on the CPU when it builds and the Triton one on CUDA when it runs there, else
    torch with one warning that says why. Raises ValueError for a name that does not exist or cannot run
    there, and BuildError when `cpp` is named and does not build."""
    if name not in BACKENDS:
        raise ValueError(f"attention={name}: choose from {', '.join(BACKENDS)}")
    kind = torch.device(device).type
    if name == "cpp":
        if kind != "cpu" or dtype not in DTYPES:
            raise ValueError(f"attention=cpp: runs float32 and bfloat16 on cpu, not {dtype} on {kind}")
        return CppBackend()
    if name == "triton" and (reason := triton.unusable(device, dtype)):
        raise ValueError(f"attention=triton: {reason}")
    on_cuda = name == "auto" and kind == "cuda" and triton.available(torch.device(device), dtype)
    if name == "triton" or on_cuda:
        from kernels.triton.backend import TritonBackend  # only here: it imports triton

        return TritonBackend(device)
    if name == "varlen":
        if reason := varlen_unusable(device, dtype):
            raise ValueError(f"attention=varlen: {reason}")
        return VarlenBackend()
    if name == "auto" and kind == "cpu" and dtype in DTYPES and available():
        return CppBackend()
    return TorchBackend()


def kv_shapes(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    backend: AttentionBackend | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of one layer's keys and values, as the backend wants them; plain without one (kernels.interface)."""
    key: tuple[int, ...] = (head_dim, block_size)
    value: tuple[int, ...] = (block_size, head_dim)
    if backend is not None and backend.pairs(dtype, head_dim, block_size):
        key, value = (head_dim // 2, block_size, 2), (block_size // 2, head_dim, 2)
    return (num_blocks, num_kv_heads, *key), (num_blocks, num_kv_heads, *value)


def allocate_kv(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: AttentionBackend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's caches of keys and values, of kv_shapes.

    Zero-filled, because pad rows read block 0, which nothing writes: their outputs must stay finite."""
    shapes = kv_shapes(num_blocks, block_size, num_kv_heads, head_dim, dtype, backend)
    k_cache, v_cache = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
    for cache in (k_cache, v_cache):
        if cache.is_cpu:
            advise_huge_pages(cache)
        cache.zero_()
    return k_cache, v_cache

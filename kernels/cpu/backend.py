"""The C++ attention backend: checks the tensors, passes their addresses."""

from __future__ import annotations

import torch

from kernels.cpu.library import DTYPES, library

ERRORS = {
    1: "cu_q must rise from 0 to the number of tokens",
    2: "block_table names a block outside the cache, or is too short for kv_len",
    3: "out of memory",
    4: "slot lies outside the cache",
    5: "positions lie outside the cos and sin tables",
}


class CppBackend:
    """Float32 and bfloat16 on the CPU, any head size and block size. Runs on torch.get_num_threads()
    threads."""

    name = "cpp"

    def __init__(self) -> None:
        self._library = library()

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot: torch.Tensor,
    ) -> None:
        """Store keys and values [T, Hk, D] into slots [T]; a negative slot is skipped. Raises ValueError."""
        blocks, heads, dim, block_size = check_caches(k_cache, v_cache)
        for name, x in (("k", k), ("v", v)):
            check_heads(name, x, k_cache.dtype, heads, dim)
        check(
            slot.dtype == torch.int64 and slot.is_contiguous() and len(slot) == len(k) == len(v),
            "slot: needs int64 [T]",
        )
        status = self._library.bm_write_kv(
            k_cache.dtype == torch.bfloat16,
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slot.data_ptr(),
            len(slot),
            heads,
            dim,
            block_size,
            blocks,
        )
        check(status == 0, ERRORS.get(status, ""))

    def paged_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cu_q: torch.Tensor,
        kv_len: torch.Tensor,
        block_table: torch.Tensor,
        scale: float,
        max_q_len: int,
        out: torch.Tensor,
    ) -> None:
        """Causal attention over the paged cache, written into out. Raises ValueError before it reads out
        of bounds."""
        blocks, kv_heads, dim, block_size = check_caches(k_cache, v_cache)
        heads = q.shape[1]
        check_heads("q", q, k_cache.dtype, heads, dim)
        check_heads("out", out, k_cache.dtype, heads, dim)
        check(heads % kv_heads == 0 and out.shape == q.shape, "q: needs Hq % Hk == 0 and the shape of out")
        check(cu_q.dtype == torch.int32 and cu_q.is_contiguous(), "cu_q: needs int32 [S+1]")
        check(
            kv_len.dtype == torch.int32 and kv_len.is_contiguous() and len(kv_len) == len(cu_q) - 1,
            "kv_len: needs int32 [S]",
        )
        check(
            block_table.dtype == torch.int32
            and block_table.dim() == 2
            and len(block_table) == len(kv_len)
            and (block_table.stride(1) == 1 or block_table.shape[1] == 1),
            "block_table: needs int32 [S, max_blocks]",
        )
        status = self._library.bm_paged_attention(
            q.dtype == torch.bfloat16,
            q.data_ptr(),
            q.stride(0),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            cu_q.data_ptr(),
            kv_len.data_ptr(),
            block_table.data_ptr(),
            block_table.stride(0),
            block_table.shape[1],
            out.data_ptr(),
            out.stride(0),
            len(q),
            len(kv_len),
            heads,
            kv_heads,
            dim,
            block_size,
            blocks,
            scale,
            torch.get_num_threads(),
        )
        check(status == 0, ERRORS.get(status, ""))


def check(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)


def check_heads(name: str, x: torch.Tensor, dtype: torch.dtype, heads: int, dim: int) -> None:
    """x must be [T, heads, dim] of `dtype` on the CPU with contiguous heads; tokens may be strided."""
    if (
        x.dtype != dtype
        or x.dim() != 3
        or x.shape[1:] != (heads, dim)
        or x.device.type != "cpu"
        or x.stride(2) != 1
        or (heads > 1 and x.stride(1) != dim)
    ):
        raise ValueError(
            f"{name}: needs {dtype} [T, {heads}, {dim}] with contiguous heads on the CPU; "
            f"got {x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}"
        )


def check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, int, int, int]:
    """(N, Hk, D, bs) of a layer's caches, or ValueError."""
    blocks, heads, dim, block_size = k_cache.shape
    check(
        k_cache.dtype in DTYPES
        and k_cache.dtype == v_cache.dtype
        and v_cache.shape == (blocks, heads, block_size, dim)
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and k_cache.device.type == v_cache.device.type == "cpu",
        "caches: need contiguous float32 or bfloat16 [N, Hk, D, bs] and [N, Hk, bs, D] on the CPU",
    )
    return blocks, heads, dim, block_size

"""The C++ attention backend: checks the tensors, passes their addresses.

The checks run once per layer and iteration, so their messages are only put together when one fails.
"""

from __future__ import annotations

import torch

from kernels.cpu.library import DTYPES, best, load

VECTOR = 16
"""Elements that the widest vector holds: a paired cache has heads and blocks of whole vectors."""
ERRORS = {
    1: "cu_q must rise from 0 to the number of tokens",
    2: "block_table names a block outside the cache, or is too short for kv_len",
    3: "out of memory",
    4: "slot lies outside the cache",
    5: "positions lie outside the cos and sin tables",
    6: "kv_len is negative",
}


class CppBackend:
    """Float32 and bfloat16 on the CPU, any head size and block size. Runs on torch.get_num_threads()
    threads."""

    name = "cpp"

    def __init__(self, isa: str | None = None) -> None:
        compiled = best() if isa is None else load(isa)
        self.isa = compiled.isa  # one of kernels.cpu.isa.ISAS
        self._write = compiled.functions.bm_write_kv
        self._attend = compiled.functions.bm_paged_attention

    def pairs(self, dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
        return dtype is torch.bfloat16 and head_dim % VECTOR == 0 and block_size % VECTOR == 0

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot: torch.Tensor,
    ) -> None:
        """Store keys and values [T, Hk, D] into slots [T]; a negative slot is skipped. Raises ValueError."""
        blocks, heads, dim, block_size, paired = check_caches(k_cache, v_cache)
        dtype, tokens = k_cache.dtype, k.shape[0]
        k_stride = check_heads("k", k, dtype, tokens, heads, dim)
        v_stride = check_heads("v", v, dtype, tokens, heads, dim)
        check_index("slot", slot, torch.int64, tokens)
        status = self._write(
            dtype is torch.bfloat16,
            k.data_ptr(),
            k_stride,
            v.data_ptr(),
            v_stride,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            slot.data_ptr(),
            tokens,
            heads,
            dim,
            block_size,
            blocks,
            paired,
        )
        if status:
            raise ValueError(ERRORS[status])

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
        *,
        window: int = 0,
    ) -> None:
        """Causal attention over the paged cache, written into out. Raises ValueError before any read out of
        bounds."""
        blocks, kv_heads, dim, block_size, paired = check_caches(k_cache, v_cache)
        dtype = k_cache.dtype
        tokens, heads, _ = q.shape
        if heads % kv_heads:
            raise ValueError(f"q: {heads} heads are not a multiple of the cache's {kv_heads}")
        q_stride = check_heads("q", q, dtype, tokens, heads, dim)
        out_stride = check_heads("out", out, dtype, tokens, heads, dim)
        rows, width = block_table.shape
        check_batch(cu_q, kv_len, block_table)
        if window < 0:
            raise ValueError(f"window={window}: needs 0 (none) or a number of tokens")
        status = self._attend(
            dtype is torch.bfloat16,
            q.data_ptr(),
            q_stride,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            cu_q.data_ptr(),
            kv_len.data_ptr(),
            block_table.data_ptr(),
            width,
            out.data_ptr(),
            out_stride,
            tokens,
            rows,
            heads,
            kv_heads,
            dim,
            block_size,
            blocks,
            scale,
            min(window, 2**31 - 1),
            paired,
            torch.get_num_threads(),
        )
        if status:
            raise ValueError(ERRORS[status])


def check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, int, int, int, bool]:
    """(N, Hk, D, bs, paired) of a layer's caches. Raises ValueError."""
    dtype, paired = k_cache.dtype, k_cache.dim() == 5
    if paired:
        blocks, heads, pairs, block_size, two = k_cache.shape
        dim = 2 * pairs
        values: tuple[int, ...] = (blocks, heads, block_size // 2, dim, 2)
        usual = two == 2 and dtype is torch.bfloat16 and dim % VECTOR == block_size % VECTOR == 0
    else:
        blocks, heads, dim, block_size = k_cache.shape
        values, usual = (blocks, heads, block_size, dim), True
    if not (
        usual
        and dtype in DTYPES
        and v_cache.dtype is dtype
        and v_cache.shape == values
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and k_cache.is_cpu
        and v_cache.is_cpu
    ):
        raise ValueError(
            "caches: need contiguous float32 or bfloat16 [N, Hk, D, bs] and [N, Hk, bs, D] on the CPU, or "
            f"paired bfloat16; got {dtype} {tuple(k_cache.shape)} and {v_cache.dtype} {tuple(v_cache.shape)} "
            f"on {k_cache.device}"
        )
    return blocks, heads, dim, block_size, paired


def check_heads(name: str, x: torch.Tensor, dtype: torch.dtype, tokens: int, heads: int, dim: int) -> int:
    """x must be [tokens, heads, dim] on the CPU with contiguous heads; returns the stride of a token. Raises
    ValueError."""
    token_stride, head_stride, stride = x.stride()
    if (
        x.dtype is not dtype
        or x.shape != (tokens, heads, dim)
        or not x.is_cpu
        or (stride != 1 and dim > 1)
        or (head_stride != dim and heads > 1)
    ):
        raise ValueError(
            f"{name}: needs {dtype} [{tokens}, {heads}, {dim}] with contiguous heads on the CPU; "
            f"got {x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}"
        )
    return token_stride


def check_index(name: str, x: torch.Tensor, dtype: torch.dtype, length: int) -> None:
    """x must be a contiguous vector of `length` integers on the CPU. Raises ValueError."""
    if x.dtype is not dtype or x.shape != (length,) or not x.is_cpu or not x.is_contiguous():
        raise ValueError(
            f"{name}: needs contiguous {dtype} [{length}] on the CPU; "
            f"got {x.dtype} {tuple(x.shape)} on {x.device}"
        )


def check_batch(cu_q: torch.Tensor, kv_len: torch.Tensor, block_table: torch.Tensor) -> None:
    """What says which keys belong to whom (kernels.interface). Raises ValueError."""
    rows = block_table.shape[0]
    check_index("kv_len", kv_len, torch.int32, rows)
    check_index("cu_q", cu_q, torch.int32, rows + 1)
    if block_table.dtype is not torch.int32 or not block_table.is_cpu or not block_table.is_contiguous():
        raise ValueError("block_table: needs contiguous int32 [S, max_blocks] on the CPU")

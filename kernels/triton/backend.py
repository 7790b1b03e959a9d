"""The Triton attention backend: checks the tensors, launches the kernels. No call waits for the device."""

from __future__ import annotations

import torch

from kernels.triton import attention, cache
from kernels.triton.checks import check_caches, check_heads, check_index

LARGEST_HEAD = 256
WAVES = 2  # splitting pays while rows times heads do not fill the multiprocessors this many times


class TritonBackend:
    """float32, bfloat16 and float16 on CUDA (with TRITON_INTERPRET=1 on the CPU); head sizes up to 256, any
    block size, also in a CUDA graph: every launch depends on shapes and on max_q_len alone."""

    name = "triton"

    def pairs(self, dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
        return False

    def __init__(self, device: torch.device | str = "cuda", *, split_programs: int | None = None) -> None:
        """split_programs: decodes are split over their keys where rows times key/value heads are no more
        than this; 0 never splits, so that a row's bits cannot depend on how many rows are beside it. Default:
        twice the device's multiprocessors. Raises ValueError for a CUDA device that is not the current one,
        on which Triton would launch."""
        device = torch.device(device)
        if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
            current = torch.cuda.current_device()
            raise ValueError(f"device={device}: attention=triton runs on the current device, cuda:{current}")
        if split_programs is None:
            split_programs = 2
            if device.type == "cuda":
                properties = torch.cuda.get_device_properties(device)
                split_programs = WAVES * properties.multi_processor_count
        self._split_programs = split_programs

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot: torch.Tensor,
    ) -> None:
        """Store keys and values [T, Hk, D] into slots [T]; a negative slot is skipped. Raises ValueError."""
        heads, dim, _ = check_caches(k_cache, v_cache)
        tokens = k.shape[0]
        check_heads("k", k, k_cache, tokens, heads, dim)
        check_heads("v", v, k_cache, tokens, heads, dim)
        check_index("slot", slot, torch.int64, (tokens,), k_cache.device)
        cache.write_kv(k, v, k_cache, v_cache, slot)

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
        """Causal attention over the paged cache, written into out; rows of q behind cu_q[-1] are left alone.
        max_q_len: no row has more queries; with 1 the kernel for decodes runs. Raises ValueError."""
        kv_heads, dim, _ = check_caches(k_cache, v_cache)
        tokens, heads, _ = q.shape
        if heads % kv_heads:
            raise ValueError(f"q: {heads} heads are not a multiple of the cache's {kv_heads}")
        if dim > LARGEST_HEAD:
            raise ValueError(f"q: head size {dim}, but attention=triton goes up to {LARGEST_HEAD}")
        if window < 0:
            raise ValueError(f"window={window}: needs 0 (none) or a number of tokens")
        if block_table.dim() != 2:
            raise ValueError(f"block_table: needs [S, max_blocks]; got {list(block_table.shape)}")
        rows, device = block_table.shape[0], k_cache.device
        check_heads("q", q, k_cache, tokens, heads, dim)
        check_heads("out", out, k_cache, tokens, heads, dim)
        check_index("block_table", block_table, torch.int32, tuple(block_table.shape), device)
        check_index("kv_len", kv_len, torch.int32, (rows,), device)
        check_index("cu_q", cu_q, torch.int32, (rows + 1,), device)
        attention.paged_attention(
            q,
            k_cache,
            v_cache,
            cu_q,
            kv_len,
            block_table,
            scale,
            max_q_len,
            out,
            window,
            split_programs=self._split_programs,
        )

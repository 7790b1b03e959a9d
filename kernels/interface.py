"""The one paged-attention interface. Every backend (torch reference, C++, Triton) implements these two
functions over one cache layout, so that they can be swapped for and compared with each other.

Shapes: T tokens of this iteration, S rows, Hq query heads, Hk key/value heads (Hq % Hk == 0), D head size,
bs tokens in a block, N blocks.

Cache layout:
    k_cache [N, Hk, D, bs]   column-major inside a block: one load reads the same component of bs neighbours
    v_cache [N, Hk, bs, D]
A backend that pairs keeps neighbours along the sum side by side, as matrix units want them:
    k_cache [N, Hk, D/2, bs, 2]
    v_cache [N, Hk, bs/2, D, 2]
"""

from __future__ import annotations

from typing import Protocol

import torch


class AttentionBackend(Protocol):
    name: str

    def pairs(self, dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
        """Whether its caches are the paired ones. Those that do read both."""

    def write_kv(
        self,
        k: torch.Tensor,  # [T, Hk, D]
        v: torch.Tensor,  # [T, Hk, D]
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot: torch.Tensor,  # [T] int64: block * bs + offset; < 0: skipped
    ) -> None:
        """Store this iteration's keys and values into their slots."""

    def paged_attention(
        self,
        q: torch.Tensor,  # [T, Hq, D]
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cu_q: torch.Tensor,  # [S+1] int32: row s owns queries cu_q[s]:cu_q[s+1]
        kv_len: torch.Tensor,  # [S] int32, this iteration's tokens included
        block_table: torch.Tensor,  # [S, max_blocks] int32
        scale: float,
        max_q_len: int,
        out: torch.Tensor,  # [T, Hq, D], written in place
        *,
        window: int = 0,  # sliding window in tokens; 0: none
    ) -> None:
        """Causal attention over the paged cache: query i of row s sits at position p = kv_len[s] - qlen[s] +
        i and sees the keys j <= p; with a window (Mistral's) only those with p - window < j. Blocks that no
        query of the row can see are not read, nor are their table entries."""

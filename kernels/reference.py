"""Paged attention in plain torch: the oracle that the fast backends are held to, and the fallback where
none runs.

Correct first: every row gathers its own blocks, so that a slot it does not own is never read. Scores and
softmax are computed in float32 (float64 for float64 inputs) on any device. The queries that share a
key/value head are packed into the rows of one matrix product instead of repeating the keys.
"""

from __future__ import annotations

import torch

_QUERY_CHUNK = 512  # bounds the score matrix of a long prompt: [Hk, 512 * group, kv_len]


class TorchBackend:
    """The reference. Any device, any floating dtype."""

    name = "torch"

    def pairs(self, dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
        return False

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot: torch.Tensor,
    ) -> None:
        """Store keys and values [T, Hk, D] into slots [T]; a negative slot is skipped."""
        block_size = k_cache.shape[3]
        keep = slot >= 0
        owned = slot[keep]
        block = torch.div(owned, block_size, rounding_mode="floor")
        offset = owned - block * block_size
        # Indices separated by slices: the indexed dimension comes first, so both sides are [T', Hk, D].
        k_cache[block, :, :, offset] = k[keep].to(k_cache.dtype)
        v_cache[block, :, offset, :] = v[keep].to(v_cache.dtype)

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
        """Causal attention over the paged cache, written into out [T, Hq, D]. A query that sees no key
        gets zeros. Raises ValueError for a negative window."""
        if window < 0:
            raise ValueError(f"window={window}: needs 0 (none) or a number of tokens")
        bounds, lengths = cu_q.tolist(), kv_len.tolist()
        block_size = k_cache.shape[3]
        for row, length in enumerate(lengths):
            start, end = bounds[row], bounds[row + 1]
            if start == end:
                continue
            if length <= 0:
                out[start:end] = 0
                continue
            lowest = max(0, length - (end - start) - window + 1) if window else 0  # that the first query sees
            skipped = lowest // block_size
            blocks = block_table[row, skipped : -(-length // block_size)].long()
            keys, values = _gather(k_cache, v_cache, blocks, lowest - skipped * block_size, length - lowest)
            for first in range(start, end, _QUERY_CHUNK):
                last = min(first + _QUERY_CHUNK, end)
                position = length - (end - first) - lowest
                out[first:last] = _attend(q[first:last], keys, values, position, scale, window).to(out.dtype)


def _gather(
    k_cache: torch.Tensor, v_cache: torch.Tensor, blocks: torch.Tensor, offset: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`length` keys [Hk, D, L] and values [Hk, L, D] from `offset` of the first block, in the dtype of
    the arithmetic."""
    heads, dim = k_cache.shape[1], k_cache.shape[2]
    dtype = torch.promote_types(k_cache.dtype, torch.float32)
    keys = k_cache[blocks].permute(1, 2, 0, 3).reshape(heads, dim, -1)[:, :, offset : offset + length]
    values = v_cache[blocks].transpose(0, 1).reshape(heads, -1, dim)[:, offset : offset + length]
    return keys.to(dtype), values.to(dtype)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, scale: float, window: int
) -> torch.Tensor:
    """Attention of queries [n, Hq, D], the first of which sits at `position` of the keys."""
    n, query_heads, dim = q.shape
    heads, _, length = keys.shape
    group = query_heads // heads
    packed = q.to(keys.dtype).reshape(n, heads, group, dim).transpose(0, 1).reshape(heads, n * group, dim)
    scores = (packed @ keys).mul_(scale).reshape(heads, n, group, length)
    positions = torch.arange(position, position + n, device=q.device)
    columns = torch.arange(length, device=q.device)
    seen = columns <= positions[:, None]
    if window:
        seen &= columns > positions[:, None] - window
    scores.masked_fill_(~seen[:, None, :], float("-inf"))
    # A query at a negative position sees nothing: softmax over nothing is NaN, its output is 0.
    weights = torch.softmax(scores, dim=-1).masked_fill_(~seen[:, None, :], 0.0)
    result = weights.reshape(heads, n * group, length) @ values
    return result.reshape(heads, n, group, dim).transpose(0, 1).reshape(n, query_heads, dim)

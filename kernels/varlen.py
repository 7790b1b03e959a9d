"""Paged attention through torch.nn.attention.varlen (FlashAttention, Dao et al. 2022; torch 2.13): a second
CUDA backend, and an oracle that shares no code with ours.

It wants pages [pages, tokens, Hk, D]; ours are [N, Hk, D, bs] for keys, and 16 tokens long where
FlashAttention 2 asks for multiples of 256. So every call gathers the blocks of its rows into pages of its own
and hands those over with a block table. That copies all keys and values once more than attention reads them:
it is right, and not fast. Shapes alone decide what is launched, so CUDA graphs can record it.

It cannot do: the CPU, float32 and float64, head sizes above 256 or not a multiple of 8, GPUs before sm_80."""

from __future__ import annotations

import torch

PAGE = 256
DTYPES = (torch.float16, torch.bfloat16)


def unusable(device: torch.device | str, dtype: torch.dtype) -> str | None:
    """Why it cannot run there; None: it can."""
    kind = torch.device(device).type
    if kind != "cuda" or dtype not in DTYPES:
        return f"runs float16 and bfloat16 on cuda, not {str(dtype).removeprefix('torch.')} on {kind}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of sm_80 or later"
    try:
        from torch.nn.attention.varlen import varlen_attn_out  # noqa: F401
    except ImportError:
        return f"needs torch 2.13 or later, this is {torch.__version__}"
    return None


class VarlenBackend:
    """Any block size; see the module docstring for what it cannot do."""

    name = "varlen"

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
        """Store keys and values [T, Hk, D] into slots [T]. A token with a negative slot writes what is in the
        null block back to where it is: how many there are is not known on the host, and must not be asked."""
        block_size = k_cache.shape[3]
        keep, owned = (slot >= 0)[:, None, None], slot.clamp(min=0)
        block = torch.div(owned, block_size, rounding_mode="floor")
        offset = owned - block * block_size
        for new, cache, index in (
            (k, k_cache, (block, slice(None), slice(None), offset)),
            (v, v_cache, (block, slice(None), offset, slice(None))),
        ):
            cache[index] = torch.where(keep, new.to(cache.dtype), cache[index])

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
        """Causal attention over the paged cache, written into out [T, Hq, D]."""
        from torch.nn.attention.varlen import varlen_attn_out

        keys, values, table = pages(k_cache, v_cache, block_table)
        cu_k = torch.zeros_like(cu_q)
        torch.cumsum(kv_len, 0, out=cu_k[1:])
        varlen_attn_out(
            out,
            q,
            keys,
            values,
            cu_q,
            cu_k,
            max_q_len,
            table.shape[1] * PAGE,
            scale=scale,
            window_size=(window - 1 if window else -1, 0),
            enable_gqa=True,
            seqused_k=kv_len,
            block_table=table,
        )


def pages(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The blocks of the rows as pages [S * P, PAGE, Hk, D] of keys and of values, and their table [S, P].
    What lies behind the last block of a row is zero."""
    rows, width = block_table.shape
    _, heads, dim, block_size = k_cache.shape
    per_row = -(-width * block_size // PAGE)
    found = []
    for cache, order in ((k_cache, (0, 1, 4, 2, 3)), (v_cache, (0, 1, 3, 2, 4))):
        made = cache.new_zeros(rows, per_row * PAGE, heads, dim)
        gathered = cache[block_table.long()].permute(order)  # [S, W, bs, Hk, D]
        made[:, : width * block_size] = gathered.reshape(rows, width * block_size, heads, dim)
        found.append(made.view(rows * per_row, PAGE, heads, dim))
    table = torch.arange(rows * per_row, dtype=torch.int32, device=block_table.device)
    return found[0], found[1], table.view(rows, per_row)

"""The varlen backend's pages, arguments and writes, against a stand-in for FlashAttention that reads them as
its documentation says. Its own result needs a GPU: engines.gpu_check."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernels
from kernels.reference import TorchBackend
from kernels.varlen import PAGE, VarlenBackend, pages


def documented(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> None:
    """varlen_attn_out over pages [pages, page, Hk, D]; a window (left, 0) is aligned to the last key."""
    assert (enable_gqa, window_size[1], key.shape[1] % 256) == (True, 0, 0)
    assert block_table.dtype == seqused_k.dtype == cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    group = query.shape[1] // key.shape[2]
    for row, used in enumerate(seqused_k.tolist()):
        own = slice(int(cu_seq_q[row]), int(cu_seq_q[row + 1]))
        n = own.stop - own.start
        assert (n <= max_q, used <= max_k) == (True, True)
        k, v = (
            cache[block_table[row].long()].flatten(0, 1)[:used].repeat_interleave(group, 1).float()
            for cache in (key, value)
        )
        position, j = torch.arange(used - n, used)[:, None], torch.arange(used)
        seen = (j <= position) & (j >= position - window_size[0] if window_size[0] >= 0 else True)
        scores = torch.einsum("qhd,khd->hqk", query[own].float(), k) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[own] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)


@pytest.mark.parametrize("block_size", [16, 7, 256])
@pytest.mark.parametrize("window", [0, 1, 50])
def test_it_is_asked_for_what_the_reference_gives(
    block_size: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn_out", documented)
    torch.manual_seed(0)
    heads, kv_heads, dim = 6, 2, 16
    queries, contexts = [1, 5, 1, 90], [300, 5, 1, 257]
    widths = [-(-n // block_size) for n in contexts]
    caches = [
        torch.randn(c.shape)
        for c in kernels.allocate_kv(200, block_size, kv_heads, dim, torch.float32, "cpu")
    ]
    table = torch.zeros(4, max(widths), dtype=torch.int32)
    blocks = (torch.randperm(199) + 1).int()
    for row, (width, own) in enumerate(zip(widths, blocks[: sum(widths)].split(widths), strict=True)):
        table[row, :width] = own
    q = torch.randn(sum(queries), heads, dim)
    args: tuple[Any, ...] = (
        torch.tensor([0, *queries]).cumsum(0).int(),
        torch.tensor(contexts).int(),
        table,
        dim**-0.5,
        max(queries),
    )
    found, expected = torch.empty_like(q), torch.empty_like(q)
    VarlenBackend().paged_attention(q, caches[0], caches[1], *args, found, window=window)
    TorchBackend().paged_attention(q, caches[0], caches[1], *args, expected, window=window)
    torch.testing.assert_close(found, expected)


def test_pages_hold_the_tokens_in_order() -> None:
    k_cache = torch.arange(5 * 2 * 3 * 4.0).view(5, 2, 3, 4)
    v_cache = k_cache.transpose(2, 3).contiguous()
    keys, values, table = pages(k_cache, v_cache, torch.tensor([[3, 1], [2, 0]], dtype=torch.int32))
    assert keys.shape == (2, PAGE, 2, 3)
    assert table.tolist() == [[0], [1]]
    assert torch.equal(keys, values)
    assert torch.equal(keys[0, 5], k_cache[1, :, :, 1])
    assert torch.equal(keys[1, 3], k_cache[2, :, :, 3])
    assert not keys[:, 8:].any()


def test_writing_skips_negative_slots_without_asking_how_many() -> None:
    torch.manual_seed(0)
    k, v, slot = torch.randn(5, 2, 3), torch.randn(5, 2, 3), torch.tensor([9, -1, 4, -1, 15])
    mine, theirs = ([torch.randn(4, 2, 3, 4), torch.randn(4, 2, 4, 3)] for _ in range(2))
    for a, b in zip(mine, theirs, strict=True):
        a.copy_(b)
    VarlenBackend().write_kv(k, v, *mine, slot)
    TorchBackend().write_kv(k, v, *theirs, slot)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_where_it_cannot_run_it_says_so() -> None:
    with pytest.raises(ValueError, match="attention=varlen: runs float16 and bfloat16 on cuda"):
        kernels.get_backend("varlen", "cpu", torch.float32)

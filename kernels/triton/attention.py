"""Paged attention as one Triton kernel over the ragged batch: prompts, chunks and decodes alike.

A program owns a tile of BLOCK_M rows for one key/value head. Its rows are (query, head of the group) pairs,
so the keys are read once for the whole group. BLOCK_Q = BLOCK_M // GROUP queries fit; the BLOCK_M - BLOCK_Q *
GROUP rows that are left over belong to nobody and are never stored: the next tile has those queries. Keys are
taken TILE at a time, whatever the block size, with an online softmax in float32 (Milakov, Gimelshein 2018).

The grid is an upper bound made of array sizes alone, so the host reads nothing from the device and a CUDA
graph can hold the launch: each tile finds its row by a binary search in cu_q, and surplus programs return.

Long decodes are split over the keys (flash decoding, Dao et al. 2023): the positions are cut into segments
of SEGMENT keys, lane i takes the segments i, i + lanes, ..., and a second kernel puts the lanes together.
The result depends on positions alone, neither on the other rows nor on how long the longest of them is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.launch import attention_launch

SEGMENT = 256  # keys of a segment; a multiple of every tile
MAX_LANES = 64  # bounds the memory of the partial results
NO_WINDOW = 1 << 30
_REDUCED = tl.constexpr(16)  # lanes that the second kernel adds at a time


@triton.jit
def _row_of_tile(cu_q_ptr, tile, rows, BLOCK_Q: tl.constexpr):
    """The last row whose tiles begin at or before `tile`. Row i begins at cu_q[i] // BLOCK_Q + i, which
    leaves every row at least the tiles that it needs."""
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_q_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _fold_tiles(
    acc,  # [BLOCK_M, DIM_PAD] sum of weighted values
    peak,  # [BLOCK_M] largest score so far, in powers of two
    total,  # [BLOCK_M] sum of weights
    q,  # [BLOCK_M, DIM_PAD]
    position,  # [BLOCK_M]
    k_ptr,  # of this head
    v_ptr,
    table_ptr,  # of this row
    first,
    last,  # tiles [first, last) of those that this program counts
    begin,
    end,  # no row sees a key outside [begin, end)
    lane,
    lanes,
    scale,
    window,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILES_OF_SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees every key of these tiles
):
    BLOCK_STRIDE: tl.constexpr = KV_HEADS * DIM * BLOCK_SIZE
    # Neighbours in a block lie side by side, from a multiple of RUN on. The compiler cannot see that through
    # the block table, and without it would load key by key.
    RUN: tl.constexpr = min(BLOCK_SIZE & -BLOCK_SIZE, TILE)
    first_slot = begin // BLOCK_SIZE * BLOCK_SIZE
    last_slot = (end + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    d = tl.arange(0, DIM_PAD)
    for i in range(first, last):
        tile = i
        if SPLIT:
            tile = (i // TILES_OF_SEGMENT * lanes + lane) * TILES_OF_SEGMENT + i % TILES_OF_SEGMENT
        j = tile * TILE + tl.arange(0, TILE)
        offset = j % BLOCK_SIZE
        if RUN > 1:
            offset = tl.max_contiguous(tl.multiple_of(offset, RUN), RUN)
        if MASKED:
            # Keys by whole blocks, which keeps the loads wide; what they bring from slots that nobody wrote
            # is hidden below. Values by the slot: 0 times NaN would be NaN.
            in_blocks = (j >= first_slot) & (j < last_slot)
            written = (j >= begin) & (j < end)
            block = tl.load(table_ptr + j // BLOCK_SIZE, mask=in_blocks, other=0)
        else:
            block = tl.load(table_ptr + j // BLOCK_SIZE)
        if RUN > 1:
            block = tl.max_constancy(block, RUN)
        base = block.to(tl.int64) * BLOCK_STRIDE
        keys = k_ptr + base[None, :] + (d[:, None] * BLOCK_SIZE + offset[None, :])
        values = v_ptr + base[:, None] + (offset[:, None] * DIM + d[None, :])
        if MASKED:
            k = tl.load(keys, mask=in_blocks[None, :] & (d < DIM)[:, None], other=0.0)
            v = tl.load(values, mask=written[:, None] & (d < DIM)[None, :], other=0.0)
        elif DIM < DIM_PAD:
            k = tl.load(keys, mask=(d < DIM)[:, None], other=0.0)
            v = tl.load(values, mask=(d < DIM)[None, :], other=0.0)
        else:
            k = tl.load(keys)
            v = tl.load(values)
        scores = tl.dot(q, k, input_precision="tf32x3") * scale
        if MASKED:
            age = position[:, None] - j[None, :]
            scores = tl.where((age >= 0) & (age < window), scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen no key yet has no peak: weights of 0 instead of exp(-inf + inf).
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
        peak = higher
    return acc, peak, total


# Sizes that change from step to step must not make a new variant, compiled in the middle of serving, where
# they are 1 or a multiple of 16; neither must index arrays that are slices of one staging buffer.
@triton.jit(
    do_not_specialize=["table_stride", "rows", "tiles", "lanes", "window"],
    do_not_specialize_on_alignment=["cu_q_ptr", "kv_len_ptr", "table_ptr"],
)
def attention_kernel(
    out_ptr,
    acc_ptr,  # SPLIT: [T, Hq, lanes, D] float32
    stats_ptr,  # SPLIT: [T, Hq, lanes, 2] float32: peak, total
    q_ptr,
    k_ptr,
    v_ptr,
    cu_q_ptr,
    kv_len_ptr,
    table_ptr,
    q_stride,
    out_stride,
    table_stride,
    rows,
    tiles,
    lanes,
    scale,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    TILES_OF_SEGMENT: tl.constexpr,
    ONE_QUERY: tl.constexpr,  # no row has more than one: program i is row i
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(1)
    lane = tl.program_id(2)
    if ONE_QUERY:
        row = tl.program_id(0)
        first_query = 0
    else:
        # From the end: the last tiles of a prompt see the most keys, and the longest work should start first.
        tile = tiles - 1 - tl.program_id(0)
        row = _row_of_tile(cu_q_ptr, tile, rows, BLOCK_Q)
        first_query = (tile - tl.load(cu_q_ptr + row) // BLOCK_Q - row) * BLOCK_Q
    start = tl.load(cu_q_ptr + row)
    queries = tl.load(cu_q_ptr + row + 1) - start
    if first_query >= queries:
        return
    context = tl.load(kv_len_ptr + row) - queries

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_PAD)
    query = first_query + m // GROUP
    owned = (m // GROUP < BLOCK_Q) & (query < queries)
    token = (start + query).to(tl.int64)
    query_head = head * GROUP + m % GROUP
    stored = owned[:, None] & (d < DIM)[None, :]
    q = tl.load(
        q_ptr + token[:, None] * q_stride + (query_head[:, None] * DIM + d[None, :]), mask=stored, other=0.0
    )
    position = context + query
    lowest = context + first_query
    highest = context + min(first_query + BLOCK_Q, queries) - 1
    end = max(highest + 1, 0)
    begin = max(lowest - window + 1, 0)

    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_ptr += head * DIM * BLOCK_SIZE
    v_ptr += head * BLOCK_SIZE * DIM
    table_ptr += row.to(tl.int64) * table_stride
    if SPLIT:
        SEGMENT_KEYS: tl.constexpr = TILES_OF_SEGMENT * TILE
        # This lane's segments [first, last), counted in its own.
        first = tl.cdiv(max(begin // SEGMENT_KEYS - lane, 0), lanes)
        last = tl.cdiv(max(tl.cdiv(end, SEGMENT_KEYS) - lane, 0), lanes)
        # Tiles of its last segment that begin behind the end are left out.
        beyond = max(((last - 1) * lanes + lane + 1) * SEGMENT_KEYS - end, 0) // TILE
        first_tile = first * TILES_OF_SEGMENT
        last_tile = last * TILES_OF_SEGMENT - beyond
    else:
        first_tile = begin // TILE
        last_tile = tl.cdiv(end, TILE)
    if ONE_QUERY:
        acc, peak, total = _fold_tiles(
            acc, peak, total, q, position, k_ptr, v_ptr, table_ptr, first_tile, last_tile, begin, end, lane,
            lanes, scale, window, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, TILE, TILES_OF_SEGMENT, SPLIT, True,
        )  # fmt: skip
    else:
        # Only tiles at the edge of what is visible need masks; the ones between them are most of the work.
        inner = first_tile
        if WINDOWED:
            inner = min(max(tl.cdiv(max(highest - window + 1, 0), TILE), first_tile), last_tile)
            acc, peak, total = _fold_tiles(
                acc, peak, total, q, position, k_ptr, v_ptr, table_ptr, first_tile, inner, begin, end, lane,
                lanes, scale, window, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, TILE, TILES_OF_SEGMENT, SPLIT, True,
            )  # fmt: skip
        edge = max(max(lowest + 1, 0) // TILE, inner)
        acc, peak, total = _fold_tiles(
            acc, peak, total, q, position, k_ptr, v_ptr, table_ptr, inner, edge, begin, end, lane,
            lanes, scale, window, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, TILE, TILES_OF_SEGMENT, SPLIT, False,
        )  # fmt: skip
        acc, peak, total = _fold_tiles(
            acc, peak, total, q, position, k_ptr, v_ptr, table_ptr, edge, last_tile, begin, end, lane,
            lanes, scale, window, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, TILE, TILES_OF_SEGMENT, SPLIT, True,
        )  # fmt: skip

    if SPLIT:
        part = (token * (KV_HEADS * GROUP) + query_head) * lanes + lane
        tl.store(acc_ptr + part[:, None] * DIM + d[None, :], acc, mask=stored)
        tl.store(stats_ptr + part * 2, peak, mask=owned)
        tl.store(stats_ptr + part * 2 + 1, total, mask=owned)
    else:
        # No key: 0. A NaN in the query stays visible.
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out = out_ptr + token[:, None] * out_stride + (query_head[:, None] * DIM + d[None, :])
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["lanes"], do_not_specialize_on_alignment=["cu_q_ptr", "kv_len_ptr"])
def reduce_kernel(
    out_ptr,
    acc_ptr,
    stats_ptr,
    cu_q_ptr,
    kv_len_ptr,
    out_stride,
    lanes,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SEGMENT_KEYS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(cu_q_ptr + row).to(tl.int64)
    if tl.load(cu_q_ptr + row + 1) <= token:
        return
    used = min(lanes, tl.cdiv(max(tl.load(kv_len_ptr + row), 0), SEGMENT_KEYS))
    d = tl.arange(0, DIM_PAD)
    acc = tl.zeros([DIM_PAD], tl.float32)
    peak = float("-inf")
    total = 0.0
    # So many at a time, in their order: the sum is the same however many lanes the launch has.
    for first in range(0, used, _REDUCED):
        lane = first + tl.arange(0, _REDUCED)
        part = (token * HEADS + head) * lanes + lane
        peaks = tl.load(stats_ptr + part * 2, mask=lane < used, other=float("-inf"))
        totals = tl.load(stats_ptr + part * 2 + 1, mask=lane < used, other=0.0)
        held = (lane < used)[:, None] & (d < DIM)[None, :]
        accs = tl.load(acc_ptr + part[:, None] * DIM + d[None, :], mask=held, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(peaks - shift)
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(totals * weights, 0)
        acc = acc * shrink + tl.sum(accs * weights[:, None], 0)
        peak = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + token * out_stride + head * DIM + d, acc.to(out_ptr.dtype.element_ty), mask=d < DIM)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_q: torch.Tensor,
    kv_len: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    max_q_len: int,
    out: torch.Tensor,
    window: int,
    *,
    split_programs: int,
) -> None:
    """Launch the kernels; shapes as in kernels.interface, tensors as kernels.triton.backend checks them.

    split_programs: decodes are split over the keys where rows times key/value heads
    are no more than this. Every choice is made of sizes, never of what is in the tensors."""
    tokens, heads, dim = q.shape
    _, kv_heads, _, block_size = k_cache.shape
    rows, width = block_table.shape
    if tokens == 0 or rows == 0:
        return
    group, one_query = heads // kv_heads, max_q_len == 1
    launch = attention_launch(dim, q.dtype, one_query=one_query)
    block_m = max(launch.block_m, triton.next_power_of_2(group))
    tiles = rows if one_query else tokens // (block_m // group) + rows
    lanes = min(MAX_LANES, triton.cdiv(width * block_size, SEGMENT))
    split = one_query and lanes > 1 and rows * kv_heads <= split_programs
    lanes = lanes if split else 1
    acc = stats = out  # not touched unless split
    if split:
        acc = torch.empty((tokens, heads, lanes, dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((tokens, heads, lanes, 2), dtype=torch.float32, device=q.device)
    dim_pad = triton.next_power_of_2(dim)
    attention_kernel[(tiles, kv_heads, lanes)](
        out,
        acc,
        stats,
        q,
        k_cache,
        v_cache,
        cu_q,
        kv_len,
        block_table,
        q.stride(0),
        out.stride(0),
        width,
        rows,
        tiles,
        lanes,
        scale * 1.4426950408889634,  # log2(e): the softmax works in powers of two
        window or NO_WINDOW,
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        TILE=launch.tile,
        TILES_OF_SEGMENT=SEGMENT // launch.tile,
        ONE_QUERY=one_query,
        WINDOWED=window > 0,
        SPLIT=split,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if split:
        reduce_kernel[(rows, heads)](
            out,
            acc,
            stats,
            cu_q,
            kv_len,
            out.stride(0),
            lanes,
            HEADS=heads,
            DIM=dim,
            DIM_PAD=dim_pad,
            SEGMENT_KEYS=SEGMENT,
            num_warps=4,
        )

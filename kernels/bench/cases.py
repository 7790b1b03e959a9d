"""What is timed: ragged batches over head shapes, and over so much KV that no cache holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import kernels
from kernels.interface import AttentionBackend

SEED_ELEMENTS = 2**22
"""Random values that the pool is tiled with: drawing a whole one would take longer than the bench."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Query heads, key/value heads, head size."""

    name: str
    heads: int
    kv_heads: int
    dim: int

    def __str__(self) -> str:
        return f"{self.name} ({self.heads}, {self.kv_heads}, {self.dim})"


SHAPES = {
    "smollm2": Shape("smollm2", 9, 3, 64),
    "qwen3-0.6b": Shape("qwen3-0.6b", 16, 8, 128),
    "llama-8b": Shape("llama-8b", 32, 8, 128),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A ragged batch: (queries, context with them) of every row."""

    name: str
    rows: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(length for _, length in self.rows)

    def flops(self, shape: Shape) -> int:
        """4 D for every (query, key that it sees, head)."""
        visible = sum(n * length - n * (n - 1) // 2 for n, length in self.rows)
        return 4 * shape.heads * shape.dim * visible

    def kv_bytes(self, shape: Shape, itemsize: int) -> int:
        """Keys and values that the rows see, once."""
        return 2 * shape.kv_heads * shape.dim * itemsize * self.tokens


DECODE, PREFILL = "decode 16 x 1024", "prefill 1 x 1024"
CASES = (
    Case("decode 1 x 1024", ((1, 1024),)),
    Case(DECODE, ((1, 1024),) * 16),
    Case("decode 32 x 256", ((1, 256),) * 32),
    Case(PREFILL, ((1024, 1024),)),
    Case("mixed 15 + 512 of 2048", ((1, 1024),) * 15 + ((512, 2048),)),
)


def pool_bytes(shape: Shape, block_size: int, size: int, dtype: torch.dtype) -> int:
    """Of a Pool of `size` bytes, which is larger where a batch needs more."""
    return (1 + _pool_blocks(shape, block_size, size, dtype)) * _block_bytes(shape, block_size, dtype)


def _block_bytes(shape: Shape, block_size: int, dtype: torch.dtype) -> int:
    return 2 * shape.kv_heads * shape.dim * block_size * dtype.itemsize


def _pool_blocks(shape: Shape, block_size: int, size: int, dtype: torch.dtype) -> int:
    most = max(sum(-(-length // block_size) for _, length in case.rows) for case in CASES)
    return max(most, -(-size // _block_bytes(shape, block_size, dtype)))


class Pool:
    """One layer's KV cache of `size` bytes, and the batches of a case over ever other parts of it. Blocks are
    scattered, as after some minutes of service. What a contiguous attention reads is the same memory, taken
    for [.., tokens, D]: the values are random anyway."""

    def __init__(
        self, shape: Shape, block_size: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.block_size, self.dtype, self.device = shape, block_size, dtype, device
        self.blocks = _pool_blocks(shape, block_size, size, dtype)
        self.caches = kernels.allocate_kv(
            1 + self.blocks, block_size, shape.kv_heads, shape.dim, dtype, device
        )
        random = torch.Generator().manual_seed(0)
        values = torch.randn(SEED_ELEMENTS, generator=random).to(dtype).to(device)
        for cache in self.caches:
            flat = cache.view(-1)
            for start in range(0, flat.numel(), SEED_ELEMENTS):
                part = flat[start : start + SEED_ELEMENTS]
                part.copy_(values[: part.numel()])
        self._order = (torch.randperm(self.blocks, generator=random) + 1).int()

    def views(self, backend: AttentionBackend) -> list[torch.Tensor]:
        """The caches as the backend wants them, over the same memory."""
        shapes = kernels.kv_shapes(
            1 + self.blocks, self.block_size, self.shape.kv_heads, self.shape.dim, self.dtype, backend
        )
        return [cache.view(shape) for cache, shape in zip(self.caches, shapes, strict=True)]

    def queries(self, case: Case) -> torch.Tensor:
        """The same at every call: [T, Hq, D]."""
        count = sum(n for n, _ in case.rows)
        random = torch.Generator().manual_seed(count)
        q = torch.randn(count, self.shape.heads, self.shape.dim, generator=random)
        return q.to(self.dtype).to(self.device)

    def tables(self, case: Case) -> list[torch.Tensor]:
        """Block tables of as many batches as the pool holds side by side."""
        widths = [-(-length // self.block_size) for _, length in case.rows]
        tables = []
        for first in range(0, self.blocks - sum(widths) + 1, sum(widths)):
            table = torch.zeros(len(widths), max(widths), dtype=torch.int32)
            at = first
            for row, width in enumerate(widths):
                table[row, :width] = self._order[at : at + width]
                at += width
            tables.append(table.to(self.device))
        return tables

    def contiguous(self, case: Case) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """For as many batches, the keys and values [Hk, tokens, D] of every row."""
        heads, dim = self.shape.kv_heads, self.shape.dim
        flat = [cache.view(-1) for cache in self.caches]
        batches, at = [], 0
        while at + case.tokens * heads * dim <= flat[0].numel():
            rows = []
            for _, length in case.rows:
                end = at + length * heads * dim
                k, v = (part[at:end].view(heads, length, dim) for part in flat)
                rows.append((k, v))
                at = end
            batches.append(rows)
        return batches


def paged(backend: AttentionBackend, pool: Pool, case: Case) -> list[Callable[[], torch.Tensor]]:
    """One call for each batch that the pool holds."""
    return _paged(backend, pool, case, pool.views(backend), pool.tables(case))


def checked(backend: AttentionBackend, pool: Pool, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The first batch's result, and that of the torch reference over the same keys and values in a plain
    cache: [T, Hq, D] both."""
    found = paged(backend, pool, case)[0]()
    table = pool.tables(case)[0]
    blocks = table.flatten().long()
    plain = [cache[blocks] for cache in pool.views(backend)]
    plain = [c.permute(0, 1, 2, 4, 3).flatten(2, 3) if c.dim() == 5 else c for c in plain]
    here = torch.arange(blocks.numel(), dtype=torch.int32, device=pool.device).view(table.shape)
    reference = kernels.get_backend("torch", pool.device, pool.dtype)
    return found, _paged(reference, pool, case, plain, [here])[0]()


def _paged(
    backend: AttentionBackend,
    pool: Pool,
    case: Case,
    caches: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
) -> list[Callable[[], torch.Tensor]]:
    q, (k_cache, v_cache) = pool.queries(case), caches
    queries = [n for n, _ in case.rows]
    out = torch.empty_like(q)
    cu_q = torch.tensor([0, *queries]).cumsum(0).int().to(pool.device)
    kv_len = torch.tensor([length for _, length in case.rows]).int().to(pool.device)
    scale, longest = pool.shape.dim**-0.5, max(queries)

    def call(table: torch.Tensor) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            backend.paged_attention(q, k_cache, v_cache, cu_q, kv_len, table, scale, longest, out)
            return out

        return run

    return [call(table) for table in tables]


def gathered(pool: Pool, case: Case) -> list[Callable[[], object]]:
    """Gather each row's blocks, then torch's SDPA: a tensor [1, .., D] for each row. The keys are taken for
    row-major, as values are: a cache that is made for gathering would have them so."""
    shape = (1 + pool.blocks, pool.shape.kv_heads, pool.block_size, pool.shape.dim)
    caches = [cache.view(shape) for cache in pool.caches]
    heads, dim = pool.shape.kv_heads, pool.shape.dim
    attend = _attend_rows(pool, case)

    def call(table: torch.Tensor) -> Callable[[], object]:
        blocks = [
            table[row, : -(-length // pool.block_size)].long() for row, (_, length) in enumerate(case.rows)
        ]

        def joined(row: int) -> list[torch.Tensor]:
            length = case.rows[row][1]
            return [
                cache[blocks[row]].transpose(0, 1).reshape(heads, -1, dim)[:, :length] for cache in caches
            ]

        return lambda: [attend(row, *joined(row)) for row in range(len(case.rows))]

    return [call(table) for table in pool.tables(case)]


def contiguous(pool: Pool, case: Case) -> list[Callable[[], object]]:
    """torch's SDPA without any paging: equal decodes in one call, other rows one by one."""
    attend = _attend_rows(pool, case)
    equal = len(set(case.rows)) == 1 and case.rows[0][0] == 1
    shape, length = pool.shape, case.rows[0][1]
    group = shape.heads // shape.kv_heads
    q = pool.queries(case).view(-1, shape.kv_heads, group, shape.dim) if equal else None

    def call(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], object]:
        if q is not None:
            size = (len(rows), shape.kv_heads, length, shape.dim)
            stride = (shape.kv_heads * length * shape.dim, length * shape.dim, shape.dim, 1)
            keys, values = (part.as_strided(size, stride) for part in rows[0])
            return lambda: F.scaled_dot_product_attention(q, keys, values)

        return lambda: [attend(row, k, v) for row, (k, v) in enumerate(rows)]

    return [call(rows) for rows in pool.contiguous(case)]


def _attend_rows(pool: Pool, case: Case) -> Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]:
    """SDPA of one row over k, v [Hk, L, D], in its quickest form: the group packed into query rows for a
    decode (enable_gqa repeats the keys), `is_causal` for a whole prompt, a mask for a chunk."""
    shape = pool.shape
    group = shape.heads // shape.kv_heads
    q = pool.queries(case).split([n for n, _ in case.rows])
    packed = [part.view(len(part), shape.kv_heads, group, shape.dim).permute(1, 2, 0, 3) for part in q]
    whole = [part.transpose(0, 1)[None] for part in q]
    masks = {
        (n, length): torch.ones(n, length, dtype=torch.bool, device=pool.device).tril(length - n)
        for n, length in case.rows
        if 1 < n < length
    }

    def attend(row: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n, length = case.rows[row]
        if n == 1:
            return F.scaled_dot_product_attention(packed[row][None, :, :, 0], k[None], v[None])
        mask = masks.get((n, length))
        return F.scaled_dot_product_attention(
            whole[row], k[None], v[None], attn_mask=mask, is_causal=mask is None, enable_gqa=group > 1
        )

    return attend

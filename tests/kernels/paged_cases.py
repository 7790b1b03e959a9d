"""Random ragged batches over a paged cache, in which every slot that a row does not own is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import kernels
from kernels.cpu.backend import CppBackend
from kernels.cpu.isa import NATIVE, runnable
from kernels.interface import AttentionBackend

CPP = [CppBackend(isa) for isa in runnable() if isa != NATIVE] or [
    CppBackend()
]  # all that this CPU can execute


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32


@dataclass
class Sequence:
    """A whole sequence: `length` positions, of which a call computes some."""

    q: torch.Tensor  # [length, Hq, D]
    k: torch.Tensor  # [length, Hk, D]
    v: torch.Tensor  # [length, Hk, D]
    blocks: list[int]


class Cache:
    """One layer's cache with NaN everywhere except in the null block, and sequences with blocks of their
    own."""

    def __init__(
        self, shape: Shape, lengths: list[int], seed: int, backend: AttentionBackend | None = None
    ) -> None:
        """Plain, or as the backend wants it."""
        self.shape = shape
        random = torch.Generator().manual_seed(seed)
        needed = [-(-length // shape.block_size) for length in lengths]
        count = sum(needed) + 3  # the null block and some that belong to nobody
        self.k, self.v = kernels.allocate_kv(
            count, shape.block_size, shape.kv_heads, shape.dim, shape.dtype, "cpu", backend
        )
        self.k[1:] = float("nan")
        self.v[1:] = float("nan")
        free = (torch.randperm(count - 1, generator=random) + 1).tolist()
        self.sequences = []
        for length, blocks in zip(lengths, needed, strict=True):
            draw = [
                torch.randn(length, heads, shape.dim, generator=random).to(shape.dtype)
                for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
            ]
            self.sequences.append(Sequence(*draw, blocks=[free.pop() for _ in range(blocks)]))
        self.unowned = free

    def slots(self, sequence: Sequence, start: int, end: int) -> torch.Tensor:
        size = self.shape.block_size
        return torch.tensor([sequence.blocks[i // size] * size + i % size for i in range(start, end)])

    def write(self, backend: AttentionBackend, sequence: Sequence, start: int, end: int) -> None:
        backend.write_kv(
            sequence.k[start:end],
            sequence.v[start:end],
            self.k,
            self.v,
            self.slots(sequence, start, end),
        )


def attend(
    backend: AttentionBackend,
    cache: Cache,
    rows: list[tuple[Sequence, int, int]],
    scale: float | None = None,
    window: int = 0,
) -> list[torch.Tensor]:
    """One call over rows (sequence, first position, end position); the outputs row by row."""
    cu_q = torch.tensor([0] + [end - start for _, start, end in rows], dtype=torch.int32).cumsum(
        0, dtype=torch.int32
    )
    width = max(len(sequence.blocks) for sequence, _, _ in rows)
    table = torch.zeros(len(rows), width, dtype=torch.int32)
    for i, (sequence, _, _) in enumerate(rows):
        table[i, : len(sequence.blocks)] = torch.tensor(sequence.blocks, dtype=torch.int32)
    q = torch.cat([sequence.q[start:end] for sequence, start, end in rows])
    out = torch.full_like(q, float("nan"))
    backend.paged_attention(
        q,
        cache.k,
        cache.v,
        cu_q,
        torch.tensor([end for _, _, end in rows], dtype=torch.int32),
        table,
        cache.shape.dim**-0.5 if scale is None else scale,
        max(end - start for _, start, end in rows),
        out,
        window=window,
    )
    return list(out.split([end - start for _, start, end in rows]))


def exact(
    sequence: Sequence, start: int, end: int, scale: float | None = None, window: int = 0
) -> torch.Tensor:
    """The same rows in float64 without any paging."""
    q, k, v = (x.double() for x in (sequence.q[start:end], sequence.k[:end], sequence.v[:end]))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    age = torch.arange(start, end)[:, None] - torch.arange(end)
    hidden = (age < 0) | (age >= window) if window else age < 0
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)

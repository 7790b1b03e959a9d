"""Memory for what is read whole in every step. On Linux in huge pages where the system gives them (2 MiB
instead of 4 KiB): a stream of weights then reads 1.3 to 1.5 times as fast, since it looks up an address 500
times less often and the processor's prefetcher, which stops at the end of a page, hardly ever stops."""

from __future__ import annotations

import mmap

import torch

_CHUNK = 32 << 20
_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64


class Arena:
    """Hands out tensors from large pieces of memory. A piece lives as long as a tensor in it."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """[count] elements, zero, aligned to a cache line."""
        size = max(count, 1) * dtype.itemsize
        if self._chunk is None or self._used + size > len(self._chunk):
            self._chunk, self._used = _map(max(_CHUNK, size)), 0
        tensor = torch.frombuffer(self._chunk, dtype=dtype, count=max(count, 1), offset=self._used)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return tensor[:count]


def _map(size: int) -> mmap.mmap:
    """Whole huge pages. Pages that nobody touches take no memory."""
    size = -(-size // _HUGE_PAGE) * _HUGE_PAGE
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk

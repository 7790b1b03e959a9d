"""Launch parameters, chosen by reasoning and by what the compiler reports, never by timing at serving time.

What decides: a variant must spill no more than a few registers, at the edge of the 255 that there are, must
fit the shared memory of its GPU with keys and values buffered twice (the copy of the next tile runs under the
arithmetic of this one), and must read 16 bytes at a time.
`python -m kernels.triton.aot --all` prints registers, spills and shared memory of every variant.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Launch:
    block_m: int  # rows of a tile: (query, head of the group) pairs
    tile: int  # keys at a time
    num_warps: int
    num_stages: int  # the block table is a load before the load, so 5 stages are what buffers keys twice


# By the largest head size that they are meant for. Head sizes between powers of two are padded.
#
# Prompts: 128 rows use a tile of keys often enough to keep the tensor cores busy (Hopper's wgmma needs 64);
# with 256 components the accumulator of 64 rows fills the registers of 8 warps.
_PROMPTS_16_BIT = {
    64: Launch(128, 64, 8, 5),
    128: Launch(128, 64, 8, 5),
    256: Launch(64, 32, 8, 5),
}
# Decodes are bound by memory: the least rows that a matrix instruction takes, and 32 KiB of keys and values
# under way in each program. An H100 needs about 20 KiB under way on each multiprocessor (25 bytes/ns of its
# share, some 800 ns of latency), and a small batch gives it only one program.
_DECODES_16_BIT = {64: Launch(16, 64, 4, 5), 128: Launch(16, 64, 4, 5), 256: Launch(16, 32, 4, 5)}
# float32 is there to check the others against: three TF32 products for one need three times the registers.
_PROMPTS_32_BIT = {64: Launch(32, 32, 8, 3), 128: Launch(32, 32, 4, 3), 256: Launch(16, 32, 8, 3)}
_DECODES_32_BIT = {64: Launch(16, 32, 4, 5), 128: Launch(16, 32, 4, 5), 256: Launch(16, 32, 8, 3)}


@functools.cache
def attention_launch(dim: int, dtype: torch.dtype, *, one_query: bool) -> Launch:
    """The same for every capability so far: what fits sm_80 without spills fits sm_90. Raises ValueError for
    a head size above 256."""
    if dtype.itemsize == 2:
        table = _DECODES_16_BIT if one_query else _PROMPTS_16_BIT
    else:
        table = _DECODES_32_BIT if one_query else _PROMPTS_32_BIT
    for largest, launch in table.items():
        if dim <= largest:
            return launch
    raise ValueError(f"head size {dim}: attention=triton goes up to 256; attention=torch takes any")


def row_warps(width: int) -> int:
    """Warps for a kernel that holds rows of `width` elements: 16 elements a thread, so that 16-bit rows are
    loaded in two 16-byte pieces."""
    return max(1, min(16, width // 512))

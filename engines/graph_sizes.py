"""Which decode batches CUDA graphs are captured for, and which one a batch takes: arithmetic, no device.

A graph replays a recorded sequence of kernels over fixed shapes and addresses, so a batch is padded up to the
next size that was recorded. (vLLM and SGLang capture the same ladder of sizes.)"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from engines.batch import RaggedBatch

SMALL = (1, 2, 4)
STEP = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the arrays of a pass are, pads included."""

    tokens: int  # T
    rows: int  # S
    samples: int  # R
    width: int  # blocks in a row of the table


def ladder(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, ... and max_num_seqs, with which a full batch of decodes runs."""
    sizes = {size for size in SMALL if size <= max_num_seqs}
    return tuple(sorted(sizes | {*range(STEP, max_num_seqs + 1, STEP), max_num_seqs}))


def size_for(sizes: Sequence[int], rows: int) -> int | None:
    """The smallest of the ascending `sizes` that holds so many rows; None: it is larger than all."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else None


def only_decodes(batch: RaggedBatch) -> bool:
    """Whether every row is one token that is sampled: such a batch has the shape of a graph. A chunk of one
    token in the middle of a prompt is not sampled; a row of left pads is not either."""
    return len(batch.token_ids) == len(batch.kv_len) == len(batch.sample_rows)


def decode_shape(size: int, width: int) -> Shape:
    return Shape(tokens=size, rows=size, samples=size, width=width)

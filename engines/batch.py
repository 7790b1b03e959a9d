"""What the runner is given and what it gives back: arrays, never requests.

T is the number of tokens of the iteration, S the number of rows (sequences, or pad rows of a static batch),
R the number of tokens that are sampled. All arrays are numpy and live on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NULL_BLOCK = 0
"""Block 0 belongs to nobody: pad rows read it, nothing writes it. Usable blocks are num_kv_blocks - 1."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the R sampled tokens are drawn. A row with temperature 0 is greedy; the others draw from a stream
    that (seed, step) names, so that a result depends on neither the neighbours nor on preemption."""

    temperature: NDArray[np.float32]  # [R]
    top_p: NDArray[np.float32]  # [R]
    seed: NDArray[np.int64]  # [R]
    step: NDArray[np.int64]  # [R] index of the token in its answer


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """One iteration: chunks of prompts and decodes side by side, in one pass.

    Row s owns tokens cu_q[s]:cu_q[s+1]; its last token sits at position kv_len[s]-1 and sees keys
    0..kv_len[s]-1 through block_table[s]. A pad row has slot -1 and a block table of NULL_BLOCK."""

    token_ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    slot_mapping: NDArray[np.int64]  # [T] block * block_size + offset; < 0: not written
    cu_q: NDArray[np.int32]  # [S+1]
    kv_len: NDArray[np.int32]  # [S] context length including this iteration's tokens
    block_table: NDArray[np.int32]  # [S, max_blocks] padded with NULL_BLOCK
    sample_rows: NDArray[np.int64]  # [R] indices into T
    sampling: Sampling | None = None  # None: all greedy


@dataclass(frozen=True, slots=True)
class Copies:
    """KV blocks that change places before a pass: first all of `out`, in any order, then all of `back`."""

    out: tuple[tuple[int, int], ...]  # device block to host block
    back: tuple[tuple[int, int], ...]  # host block to device block


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one pass produced."""

    token_ids: NDArray[np.int64]  # [R], in the order of sample_rows
    backend_pad_rows: int = 0  # rows added for graphs or determinism

"""From a plan to arrays: the ragged batch of one pass."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engines.batch import NULL_BLOCK, RaggedBatch, Sampling
from engines.plan import ENDED, Entry, Plan
from engines.request import SamplingParams
from engines.sequence import Sequence

_NO_BLOCKS = array("i")
"""Of a row of pads."""

Tokens = Callable[[Sequence], "array[int]"]
"""Prompt and answer so far of a sequence, as array('q')."""


def ended_position(seq: Sequence, block_size: int, max_model_len: int) -> int:
    """Where the next token of an ended row goes. It moves on as in generate(), but never past the KV that it
    was given: there it writes its last slot again, unless that is a token of its answer."""
    room = min(len(seq.block_table) * block_size, max_model_len)
    return min(seq.num_computed + seq.num_padded, room - 1)


def assemble(
    plan: Plan, tokens: Tokens, block_size: int, max_model_len: int
) -> tuple[RaggedBatch, list[Entry]]:
    """The batch, without its sampling, and the entries whose next token it yields, in the order of
    sample_rows.

    A row for every entry in the plan's order, and in front of it a row of pads where it is left-padded. Ended
    rows are sampled as well, since generate() pays for that too; their token is for nobody."""
    q_len: list[int] = []
    start: list[int] = []
    tables: list[array[int]] = []
    ids = array("q")
    sampled: list[Entry] = []
    sample_rows: list[int] = []
    full: list[int] = []  # tokens that are computed and not written
    for entry in plan.entries:
        seq, n, kind, left_pad = entry
        if left_pad:
            q_len.append(left_pad)
            start.append(0)
            tables.append(_NO_BLOCKS)
            ids.extend([0] * left_pad)
        known = tokens(seq)
        if kind is ENDED:  # generate() feeds it pads; what it is fed costs the same
            first = ended_position(seq, block_size, max_model_len)
            ids.append(known[-1])
            if first < seq.num_computed:  # its KV is full, and may be shared
                full.append(len(ids) - 1)
        else:
            first = seq.num_computed
            if n == 1:
                ids.append(known[first])
            else:
                ids.extend(known[first : first + n])
        q_len.append(n)
        start.append(first)
        tables.append(seq.block_table)
        if kind is ENDED or first + n == seq.num_tokens:
            sampled.append(entry)
            sample_rows.append(len(ids) - 1)

    lens = np.array(q_len, dtype=np.int32)
    starts = np.array(start, dtype=np.int32)
    cu_q = np.zeros(len(q_len) + 1, dtype=np.int32)
    np.cumsum(lens, out=cu_q[1:])
    kv_len = starts + lens

    width = -(-int(kv_len.max()) // block_size)
    used = np.array([len(table) for table in tables])
    block_table = np.full((len(q_len), width), NULL_BLOCK, dtype=np.int32)
    blocks = array("i")  # of all rows, one after the other: numpy takes a row in half a microsecond
    for table in tables:
        blocks.extend(table if len(table) <= width else table[:width])  # a reservation may be ahead
    block_table[np.arange(width) < used[:, None]] = np.frombuffer(blocks, dtype=np.int32)

    rows = np.repeat(np.arange(len(q_len)), lens)
    positions = np.arange(len(ids), dtype=np.int64) - np.repeat(cu_q[:-1] - starts, lens)
    slots = block_table[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    slots[used[rows] == 0] = -1
    slots[full] = -1
    batch = RaggedBatch(
        token_ids=np.frombuffer(ids, dtype=np.int64),
        positions=positions,
        slot_mapping=slots,
        cu_q=cu_q,
        kv_len=kv_len,
        block_table=block_table,
        sample_rows=np.array(sample_rows, dtype=np.int64),
    )
    return batch, sampled


def sampling_arrays(params: list[SamplingParams], seeds: list[int], steps: list[int]) -> Sampling | None:
    """How the sampled tokens are drawn; None when all of them are greedy."""
    if all(p.temperature == 0 for p in params):
        return None
    column: NDArray[np.float32] = np.array([p.temperature for p in params], dtype=np.float32)
    return Sampling(
        temperature=column,
        top_p=np.array([p.top_p for p in params], dtype=np.float32),
        seed=np.array(seeds, dtype=np.int64),
        step=np.array(steps, dtype=np.int64),
    )

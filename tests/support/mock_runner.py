"""A model whose answers are a function of its own KV: the next token hashes every token read through the
block table.

If KV of two sequences crosses, if a block is lost, overwritten or read before it is written, the answer
changes or the run raises. `next_token` is the same function without a cache: the oracle."""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from engines.batch import NULL_BLOCK, Copies, RaggedBatch, StepResult

Tokens = NDArray[np.int64]
VOCAB = 1000
EMPTY = -1


def next_token(tokens: Seq[int], salt: int = 0) -> int:
    return zlib.crc32(np.asarray(tokens, dtype=np.int64).tobytes(), salt) % VOCAB


def answer(prompt: Seq[int], num_tokens: int) -> list[int]:
    """What a correct engine answers, greedily."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class MockRunner:
    """Raises AssertionError when the batch breaks the contract of RaggedBatch. `fail_at` are passes that
    raise."""

    def __init__(self, num_blocks: int, block_size: int, fail_at: Seq[int] = ()) -> None:
        self.block_size = block_size
        self.tokens = np.full(num_blocks * block_size, EMPTY, dtype=np.int64)
        self.positions = np.full(num_blocks * block_size, EMPTY, dtype=np.int64)
        self.host: dict[int, tuple[Tokens, Tokens]] = {}
        self.batches: list[RaggedBatch] = []
        self.fail_at = set(fail_at)

    def copy(self, copies: Copies) -> None:
        assert len({host for _, host in copies.out}) == len(copies.out), "two blocks go to one of the host"
        assert len({block for _, block in copies.back}) == len(copies.back), "two blocks come to one"
        for block, host in copies.out:
            self.host[host] = (
                self.tokens[self._slots(block)].copy(),
                self.positions[self._slots(block)].copy(),
            )
        for host, block in copies.back:
            self.tokens[self._slots(block)], self.positions[self._slots(block)] = self.host.pop(host)

    def _slots(self, block: int) -> slice:
        assert block != NULL_BLOCK, "the null block is copied"
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def run(self, batch: RaggedBatch) -> StepResult:
        self.batches.append(batch)
        self._check_shapes(batch)
        written = batch.slot_mapping >= 0
        slots = batch.slot_mapping[written]
        assert len(np.unique(slots)) == len(slots), "two tokens share a slot"
        assert not (slots // self.block_size == NULL_BLOCK).any(), "the null block was written"
        if len(self.batches) - 1 in self.fail_at:
            raise RuntimeError("the device is on fire")
        self.tokens[slots] = batch.token_ids[written]
        self.positions[slots] = batch.positions[written]

        last = {int(batch.cu_q[row + 1]) - 1: row for row in range(len(batch.kv_len))}
        out = [self._next(batch, last[int(token)], i) for i, token in enumerate(batch.sample_rows)]
        return StepResult(np.array(out, dtype=np.int64))

    def _next(self, batch: RaggedBatch, row: int, i: int) -> int:
        positions = np.arange(int(batch.kv_len[row]))
        blocks = batch.block_table[row, positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + positions % self.block_size
        assert (blocks != NULL_BLOCK).all(), "a sequence reads the null block"
        assert (self.positions[slots] == positions).all(), "a slot holds another position, or nothing"
        sampling = batch.sampling
        salt = 0
        if sampling is not None and sampling.temperature[i] > 0:
            salt = int(sampling.seed[i] * 31 + sampling.step[i]) & 0xFFFF_FFFF
        return next_token(self.tokens[slots], salt)

    def _check_shapes(self, batch: RaggedBatch) -> None:
        total, rows = len(batch.token_ids), len(batch.kv_len)
        assert total > 0, "an empty pass"
        assert batch.cu_q[0] == 0
        assert batch.cu_q[-1] == total
        assert (np.diff(batch.cu_q) > 0).all()
        assert len(batch.positions) == len(batch.slot_mapping) == total
        assert batch.block_table.shape[0] == rows == len(batch.cu_q) - 1
        assert batch.token_ids.dtype == batch.positions.dtype == batch.slot_mapping.dtype == np.int64
        assert batch.cu_q.dtype == batch.kv_len.dtype == batch.block_table.dtype == np.int32
        for row in range(rows):
            own = slice(int(batch.cu_q[row]), int(batch.cu_q[row + 1]))
            length = int(batch.kv_len[row])
            positions, slots = batch.positions[own], batch.slot_mapping[own]
            assert (positions == np.arange(length - len(positions), length)).all()
            if (slots < 0).all() and own.stop - 1 not in batch.sample_rows:  # else an ended row, not a pad
                assert (batch.block_table[row] == NULL_BLOCK).all(), "a pad row reads a live block"
            elif (slots >= 0).any():
                blocks = batch.block_table[row, positions // self.block_size].astype(np.int64)
                assert (slots == blocks * self.block_size + positions % self.block_size).all()

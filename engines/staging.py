"""The arrays of one pass in one buffer: packed on the host, brought to the device in one copy, read there as
views.

A CUDA device is given one transfer from pinned memory instead of eight from pageable memory, each of which
would wait for the device. On the CPU the same packing runs, and the views are of the host's buffer itself.
Where things lie depends on the `Shape` alone, so a pass of a given shape always reads the same addresses:
what a CUDA graph needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engines.batch import NULL_BLOCK, RaggedBatch
from engines.graph_sizes import Shape

_ALIGNED = 2  # words of 8 bytes: every array begins at a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class Inputs:
    """Views on the device. Shapes as in RaggedBatch, with T and R padded; `source` see `Carried`."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot: torch.Tensor  # [T] int64
    source: torch.Tensor  # [T] int64
    sample_rows: torch.Tensor  # [R] int64
    cu_q: torch.Tensor  # [S+1] int32
    kv_len: torch.Tensor  # [S] int32
    block_table: torch.Tensor  # [S, W] int32


@dataclass(frozen=True, slots=True)
class Carried:
    """Tokens that the host does not know yet: the newest ones of the pass before, which may still be running.
    Token i of the batch is ids[source[i]] where source[i] >= 0."""

    source: np.ndarray  # [T] int64
    ids: torch.Tensor  # int64, on the device


class Staging:
    """Two host buffers taken in turn, since the copy out of one may still be under way while the next pass is
    packed, and one buffer on the device, where the order of the stream keeps them apart."""

    def __init__(self, device: torch.device, words: int = 0) -> None:
        self._device = device
        self._words = 0
        self._turn = 0
        self._grow(max(words, 1024))

    def _grow(self, words: int) -> None:
        self._words = words
        on_cuda = self._device.type == "cuda"
        self._hosts = [torch.zeros(words, dtype=torch.int64, pin_memory=on_cuda) for _ in range(1 + on_cuda)]
        self._copied = [torch.cuda.Event() if on_cuda else None for _ in self._hosts]
        self._buffer = self._hosts[0]
        if on_cuda:
            self._buffer = torch.zeros(words, dtype=torch.int64, device=self._device)

    def views(self, shape: Shape) -> Inputs:
        """Of the device's buffer."""
        return _views(self._buffer, shape)

    def stage(self, batch: RaggedBatch, shape: Shape, carried: Carried | None = None) -> Inputs:
        """The batch on the device, padded to `shape`. Tokens behind the real ones have slot -1, so nothing of
        them is written. Rows behind the real ones have one such token each and see one key of the null block,
        which holds zeros; samples behind the real ones repeat token 0."""
        words = words_of(shape)
        if words > self._words:
            self._synchronise()
            self._grow(max(words, 2 * self._words))
        self._turn = (self._turn + 1) % len(self._hosts)
        host, copied = self._hosts[self._turn], self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        _pack(batch, shape, None if carried is None else carried.source, _views(host, shape))
        if copied is not None:
            self._buffer[:words].copy_(host[:words], non_blocking=True)
            copied.record()
        inputs = _views(self._buffer, shape)
        if carried is not None:
            take_carried(inputs, carried.ids)
        return inputs

    def _synchronise(self) -> None:
        for event in self._copied:
            if event is not None:
                event.synchronize()


def take_carried(inputs: Inputs, ids: torch.Tensor) -> None:
    known = inputs.source < 0
    inputs.token_ids.copy_(torch.where(known, inputs.token_ids, ids[inputs.source.clamp(min=0)]))


def words_of(shape: Shape) -> int:
    """Size of the buffer in words of 8 bytes."""
    return _offsets(shape)[-1]


def _offsets(shape: Shape) -> list[int]:
    """Where the arrays begin, in words, in the order of Inputs, and where the last one ends."""
    int32 = [shape.rows + 1, shape.rows, shape.rows * shape.width]
    sizes = [shape.tokens] * 4 + [shape.samples] + [-(-n // 2) for n in int32]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // _ALIGNED) * _ALIGNED)
    return offsets


def _views(buffer: torch.Tensor, shape: Shape) -> Inputs:
    at, narrow = _offsets(shape), buffer.view(torch.int32)
    token_ids, positions, slot, source = (buffer[start : start + shape.tokens] for start in at[:4])
    table = narrow[2 * at[7] : 2 * at[7] + shape.rows * shape.width]
    return Inputs(
        token_ids=token_ids,
        positions=positions,
        slot=slot,
        source=source,
        sample_rows=buffer[at[4] : at[4] + shape.samples],
        cu_q=narrow[2 * at[5] : 2 * at[5] + shape.rows + 1],
        kv_len=narrow[2 * at[6] : 2 * at[6] + shape.rows],
        block_table=table.view(shape.rows, shape.width),
    )


def _pack(batch: RaggedBatch, shape: Shape, source: np.ndarray | None, into: Inputs) -> None:
    tokens, rows, samples = len(batch.token_ids), len(batch.kv_len), len(batch.sample_rows)
    for view, values, pad in (
        (into.token_ids, batch.token_ids, 0),
        (into.positions, batch.positions, 0),
        (into.slot, batch.slot_mapping, -1),
        (into.sample_rows, batch.sample_rows, 0),
        (into.kv_len, batch.kv_len, 1),
    ):
        array = view.numpy()
        array[: len(values)] = values
        array[len(values) :] = pad
    if source is not None:
        array = into.source.numpy()
        array[:tokens] = source
        array[tokens:] = -1
    cu_q = into.cu_q.numpy()
    cu_q[: rows + 1] = batch.cu_q
    cu_q[rows + 1 :] = np.arange(tokens + 1, tokens + 1 + shape.rows - rows)
    table, width = into.block_table.numpy(), batch.block_table.shape[1]
    table[:rows, :width] = batch.block_table
    table[:rows, width:] = NULL_BLOCK
    table[rows:] = NULL_BLOCK
    assert samples <= shape.samples

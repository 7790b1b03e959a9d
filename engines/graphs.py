"""Decode passes as CUDA graphs: recorded once for a ladder of batch sizes, then replayed with one call in the
place of some hundred launches.

A batch is padded up to the next size. Its pad rows are computed like the others, but write nothing (slot -1),
read only the null block, which belongs to nobody, and never leave this file. What depends on the values of a
batch happens outside: the copy of its arrays before, the draw of sampled tokens after. All sizes share one
pool of memory, the largest first, so that the smaller ones find room in what it left. A batch with a prompt
in it, or larger than the largest size, runs without a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from engines.batch import RaggedBatch
from engines.config import ConfigError, EngineConfig
from engines.graph_sizes import Shape, decode_shape, only_decodes, size_for
from engines.staging import Carried, Inputs, Staging, words_of

CAPTURABLE = ("triton", "varlen")
"""Attention backends whose launches depend on shapes alone, and never wait for the device."""

Recorded = Callable[[], None]
Recorder = Callable[[Callable[[], None]], Recorded]
"""Takes work over fixed tensors and gives back what does it again."""


class DecodeGraphs:
    """`forward` gives the logits [R, vocab] of inputs on the device, one token a row, to which every row is
    real. `record` is `cuda_recorder()`; tests pass the identity, which runs the same padded passes
    anywhere."""

    def __init__(
        self,
        forward: Callable[[Inputs], torch.Tensor],
        sizes: Sequence[int],
        width: int,
        vocab: int,
        dtype: torch.dtype,
        device: torch.device,
        record: Recorder,
    ) -> None:
        self.sizes = tuple(sorted(sizes))
        self.passes = self.replayed = 0
        self._width = width
        largest = self.sizes[-1]
        self._staging = Staging(device, words_of(decode_shape(largest, width)))
        # Results of all sizes go to one place: each holds as many rows of logits as it has, of a vocabulary.
        self._logits = torch.zeros(largest, vocab, dtype=dtype, device=device)
        self._ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._recorded: dict[int, Recorded] = {}
        for size in reversed(self.sizes):
            self._staging.stage(_nobody(), decode_shape(size, width))  # recording runs it, over pad rows
            self._recorded[size] = record(self._work(forward, size))

    def _work(self, forward: Callable[[Inputs], torch.Tensor], size: int) -> Callable[[], None]:
        inputs = self._staging.views(decode_shape(size, self._width))
        logits, ids = self._logits[:size], self._ids[:size]

        def work() -> None:
            logits.copy_(forward(inputs))
            torch.argmax(logits, dim=-1, out=ids)

        return work

    def shape_for(self, batch: RaggedBatch) -> Shape | None:
        """What the batch would be padded to; None: it runs without a graph."""
        if not only_decodes(batch) or batch.block_table.shape[1] > self._width:
            return None
        size = size_for(self.sizes, len(batch.kv_len))
        return None if size is None else decode_shape(size, self._width)

    def run(
        self, batch: RaggedBatch, carried: Carried | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """Logits [R, vocab] and greedy ids [R] of the real rows, on the device until the next pass, and how
        many rows were added; None: not with a graph."""
        self.passes += 1
        shape = self.shape_for(batch)
        if shape is None:
            return None
        self.replayed += 1
        self._staging.stage(batch, shape, carried)
        self._recorded[shape.rows]()
        rows = len(batch.kv_len)
        return self._logits[:rows], self._ids[:rows], shape.rows - rows

    def info(self) -> dict[str, Any]:
        return {"on": True, "sizes": list(self.sizes), "passes": self.passes, "replayed": self.replayed}


def why_no_graphs(engine: EngineConfig, device: torch.device, attention: str) -> str | None:
    """Why decodes run without graphs; None: they can have them. Raises ConfigError where they are asked for
    and cannot be."""
    if engine.cuda_graphs is False:
        return "engine.cuda_graphs=false"
    why = None
    if device.type != "cuda":
        why = f"device={device.type} has none; needs device=cuda"
    elif attention not in CAPTURABLE:
        why = f"attention={attention} waits for the device; needs {' or '.join(CAPTURABLE)}"
    if why is not None and engine.cuda_graphs:
        raise ConfigError(f"engine.cuda_graphs=true: {why}, or engine.cuda_graphs=false")
    return why


def cuda_recorder(device: torch.device) -> Recorder:
    """Records on a stream of its own, after two runs in which libraries set themselves up."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)

    def record(work: Callable[[], None]) -> Recorded:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            work()
            work()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            work()
        return graph.replay

    return record


def _nobody() -> RaggedBatch:
    """A batch without rows."""
    long, narrow = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return RaggedBatch(long, long, long, np.zeros(1, np.int32), narrow, np.zeros((0, 1), np.int32), long)

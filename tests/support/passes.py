"""Drives a ModelRunner by hand: sequences, their blocks, and passes over any mixture of their chunks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engines.batch import RaggedBatch, Sampling
from engines.config import EngineConfig
from engines.model.base import DecoderModel, ForwardContext
from engines.runner import ModelRunner


def engine_config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "name": "test",
        "scheduler": "chunked",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 128,
        "block_size": 4,
        "num_kv_blocks": 200,
        "threads": 1,
    }
    return EngineConfig(**{**values, **changes})


class Recorder:
    """Stands before a model and keeps every pass's logits."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self.logits: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        logits = self._model.forward(token_ids, positions, ctx)
        self.logits.append(logits.clone())
        return logits


def record(runner: ModelRunner) -> Recorder:
    recorder = Recorder(runner.loaded.model)
    runner.loaded = dataclasses.replace(runner.loaded, model=recorder)
    return recorder


@dataclass
class Seq:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    answer: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    temperature: float = 0.0
    seed: int = 0

    @property
    def waiting(self) -> int:
        """Tokens that no pass has seen."""
        return len(self.tokens) - self.computed


class Passes:
    """Takes blocks in a scattered order, and never twice unless they are given back."""

    def __init__(self, runner: ModelRunner, block_size: int = 4, seed: int = 0) -> None:
        self.runner, self.block_size = runner, block_size
        self.recorder = record(runner)
        free = np.random.default_rng(seed).permutation(np.arange(1, runner.num_kv_blocks))
        self.free = [int(b) for b in free]
        self.pad_rows = 0

    def step(self, work: list[tuple[Seq, int]]) -> None:
        """One pass over the next n tokens of each sequence; samples where that leaves no token waiting."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cu_q, samples, sampled = [0], [], []
        for seq, n in work:
            first = seq.computed
            last = first + n
            while len(seq.blocks) * self.block_size < last:
                seq.blocks.append(self.free.pop())
            ids += seq.tokens[first:last]
            positions += range(first, last)
            slots += [
                seq.blocks[p // self.block_size] * self.block_size + p % self.block_size
                for p in range(first, last)
            ]
            cu_q.append(len(ids))
            seq.computed = last
            if seq.waiting == 0:
                samples.append(len(ids) - 1)
                sampled.append(seq)
        table = np.zeros((len(work), max(len(s.blocks) for s, _ in work)), np.int32)
        for row, (seq, _) in enumerate(work):
            table[row, : len(seq.blocks)] = seq.blocks
        sampling = Sampling(
            np.array([s.temperature for s in sampled], np.float32),
            np.ones(len(sampled), np.float32),
            np.array([s.seed for s in sampled], np.int64),
            np.array([len(s.answer) for s in sampled], np.int64),
        )
        result = self.runner.run(
            RaggedBatch(
                np.array(ids, np.int64),
                np.array(positions, np.int64),
                np.array(slots, np.int64),
                np.array(cu_q, np.int32),
                np.array([s.computed for s, _ in work], np.int32),
                table,
                np.array(samples, np.int64),
                sampling if any(s.temperature for s in sampled) else None,
            )
        )
        assert len(result.token_ids) == len(sampled)
        self.pad_rows += result.backend_pad_rows
        for row, (seq, token) in enumerate(zip(sampled, result.token_ids.tolist(), strict=True)):
            seq.tokens.append(token)
            seq.answer.append(token)
            seq.logits.append(self.recorder.logits[-1][row])

    def preempt(self, seq: Seq) -> None:
        """Give its blocks away; everything must be computed again, into other blocks."""
        self.free[:0] = seq.blocks
        seq.blocks, seq.computed = [], 0

    def generate(self, seqs: list[Seq], answer: int, chunk: int = 1000) -> None:
        """All sequences together, each at most `chunk` tokens a pass, until each has `answer` tokens."""
        while open_seqs := [s for s in seqs if len(s.answer) < answer]:
            self.step([(s, min(chunk, s.waiting)) for s in open_seqs])

"""Engines over the mock model, on a clock that the test moves, and what came out of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from engines import schedulers
from engines.config import EngineConfig
from engines.overlap import build_engine
from engines.request import Output, Request
from engines.step_log import RequestRecord, StepRecord
from tests.support.checker import Checker
from tests.support.mock_runner import MockRunner
from tests.support.promises import promises_of

SCHEDULERS = tuple(schedulers.names())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class MemoryLog:
    """Takes the place of StepLog."""

    steps: list[StepRecord] = field(default_factory=list)
    requests: dict[int, RequestRecord] = field(default_factory=dict)

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def request(self, record: RequestRecord) -> None:
        assert record.seq_id not in self.requests, "two lines for one request"
        self.requests[record.seq_id] = record

    def flush(self) -> None:
        pass


def config(scheduler: str, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "name": scheduler,
        "scheduler": scheduler,
        "reservation": "max_model_len" if scheduler == "static" else "on_demand",
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "max_model_len": 16,
        "block_size": 4,
    }
    return EngineConfig(**{**values, **changes})


class Driver:
    """One engine, its outputs by request, and a readable trace of its iterations."""

    TICK = 0.001  # seconds between two iterations

    def __init__(
        self, cfg: EngineConfig, num_kv_blocks: int = 100, fail_at: tuple[int, ...] = (), **more: Any
    ):
        self.clock = Clock()
        self.log = MemoryLog()
        self.runner = MockRunner(num_kv_blocks, cfg.block_size, fail_at)
        self.engine = build_engine(
            cfg,
            self.runner,
            num_kv_blocks=num_kv_blocks,
            clock=self.clock,
            step_log=self.log,  # type: ignore[arg-type]
            **more,
        )
        self.outputs: list[Output] = []

    @cached_property
    def checker(self) -> Checker:
        return Checker(self.engine, self.log, promises_of(self.engine))

    def add(self, prompt_len: int, max_tokens: int, **more: Any) -> int:
        """A prompt of its own tokens for every request."""
        start = 10_000 * (self.engine.counters.received + 1)
        return self.engine.add(Request(list(range(start, start + prompt_len)), max_tokens, **more))

    def step(self) -> list[Output]:
        if (
            self.engine.config.overlap
        ):  # plans are a pass ahead of their results: the checker knows no such loop
            outputs = self.engine.step()
            self.outputs += outputs
            self.engine.check_integrity()
            self.clock.now += self.TICK
            return outputs
        before = self.checker.before()
        outputs = self.engine.step()
        self.outputs += outputs
        self.checker.after(before, outputs)
        self.clock.now += self.TICK
        return outputs

    def abort(self, seq_id: int) -> None:
        """Twice, which does no harm. Seat and KV are free at once, but for the row of a static batch."""
        self.engine.abort(seq_id)
        self.engine.abort(seq_id)
        self.engine.check_integrity()
        scheduler = self.engine.scheduler
        assert all(seq.seq_id != seq_id for seq in (*scheduler.running, *scheduler.waiting))

    def run(self, limit: int = 2000) -> None:
        """Until there is no work. Time jumps to the wake-up that the engine asks for."""
        for _ in range(limit):
            if not self.engine.has_work:
                return
            wakeup = self.engine.next_wakeup(self.clock.now)
            assert wakeup is not None
            self.clock.now = max(self.clock.now, wakeup)
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def trace(self) -> list[str]:
        """A line an iteration: p prefill, d decode, r recompute, e ended row; sequence, and tokens if not
        1."""
        return [
            " ".join(
                f"{'pdre'[kind]}{seq_id}" + (f":{tokens}" if kind in (0, 2) else "")
                for seq_id, tokens, kind in zip(step.ids, step.tokens, step.kind, strict=True)
            )
            for step in self.log.steps
        ]

    def answers(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for output in self.outputs:
            found.setdefault(output.seq_id, []).extend(output.token_ids)
        return found

    def reasons(self) -> dict[int, str]:
        ends = [(o.seq_id, o.finish_reason) for o in self.outputs if o.finish_reason is not None]
        assert len(dict(ends)) == len(ends), "two ends for one request"
        return dict(ends)

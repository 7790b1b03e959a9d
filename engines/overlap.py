"""The overlapped loop (`engine.overlap=true`): the next iteration is planned and packed while this one runs,
as in SGLang's overlap scheduler and vLLM's async scheduling. It is held to the loop of engines/engine.py.

    plan     iteration N+1, with every length as if the tokens of N had arrived: they will, one each
    launch   N+1 behind N; where a row begins with a token of N, it is taken from N's results on the device
    collect  N: wait for its tokens, publish them

Of a sequence that reaches max_tokens the last pass is known: it loses its seat when that pass is launched,
and its blocks are free when the pass is over. That it has ended by itself (EOS, stop_after), or that nobody
wants it any more, is known one iteration late: its row of N+1 is computed and thrown away, an ended row in
the records. What it gives back may be planned for N+2 at once, while N+1 still runs: passes run one after the
other in the order of their launch, or N+1 could not read what N has written, so whatever N+2 writes comes
after the last pass that reads the old content.

When KV is so short that somebody might have to give way, N is collected first, as in the plain loop: what
ends in it may be enough. A request that comes while N runs is planned for N+2, one pass later than in the
plain loop. A pass that fails also costs the sequences of the pass that was launched on it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.batch import StepResult
from engines.engine import Engine
from engines.launch import Handle, Launcher, LostKv, launcher_for
from engines.live import Live
from engines.plan import Kind
from engines.prepared import Prepared
from engines.recorder import to_ns
from engines.request import Output, make_output
from engines.step_log import Ending


@dataclass(slots=True)
class _Flight:
    """A pass that has been launched and not collected."""

    ready: Prepared
    handle: Handle
    lives: list[Live]  # of ready.sampled
    filled: list[tuple[Live, array[int], int, int]]  # table, computed after it, preemptions before it
    leases: list[array[int]] = field(default_factory=list)  # tables of those whose last pass it is

    def index(self) -> dict[int, int]:
        """By seq_id, which of its results is the newest token."""
        return {entry.seq.seq_id: i for i, entry in enumerate(self.ready.sampled)}


class OverlappedEngine(Engine):
    """An Engine whose `step` returns the outputs of the pass before the one that it has planned."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._launcher: Launcher = launcher_for(self.runner, self.clock)
        self._flights: deque[_Flight] = deque()  # two at most, and one between steps

    @property
    def has_work(self) -> bool:
        return bool(self._flights) or super().has_work

    def next_wakeup(self, now: float) -> float | None:
        return now if self._flights else super().next_wakeup(now)

    def step(self) -> list[Output]:
        now = self.clock()
        self._limit()
        self._expire(now)
        if self._flights and self._kv_may_run_out():
            self._collect()
        plan = self.scheduler.schedule(now)
        if plan.entries:
            self._launch(self._prepare(plan, now))
        elif not self._flights:
            self.recorder.waited()
            self.gate.waited()
        if self._flights and (len(self._flights) > 1 or not plan.entries):
            self._collect()
        outputs, self._outbox = self._outbox, []
        if not self.has_work:
            self._idle()
        return outputs

    def end(self) -> Ending:
        while self._flights:
            self._collect()
        self._launcher.close()
        return super().end()

    # -- an iteration ----------------------------------------------------------------------------------------

    def _kv_may_run_out(self) -> bool:
        """Whether the next tokens of those that run need more blocks than there are."""
        running, pool = self.scheduler.running, self.pool
        if pool.available >= len(running) + pool.blocks_for(self.config.max_num_batched_tokens):
            return False
        return sum(pool.missing(seq.block_table, seq.num_tokens) for seq in running) > pool.available

    def _launch(self, ready: Prepared) -> None:
        before = self._flights[-1] if self._flights else None
        source = None if before is None else _source(ready, before.index())
        handle = self._launcher.launch(
            ready.batch, ready.copies, source, None if before is None else before.handle
        )
        self._flights.append(self._advance(ready, handle))

    def _advance(self, ready: Prepared, handle: Handle) -> _Flight:
        """Every length as it will be when the pass is over."""
        lives = self._live
        flight = _Flight(ready, handle, [lives[entry.seq.seq_id] for entry in ready.sampled], [])
        for seq, num_tokens, _, _ in ready.plan.entries:
            seq.num_computed = computed = seq.num_computed + num_tokens
            seq.max_computed = max(seq.max_computed, computed)
            if self.pool.prefix_cache:
                flight.filled.append((lives[seq.seq_id], seq.block_table, computed, seq.num_preemptions))
        for live in flight.lives:
            seq = live.seq
            live.tokens.append(0)
            live.pending += 1
            seq.num_tokens += 1
            if seq.num_tokens == seq.prompt_len + seq.max_tokens:
                flight.leases.append(seq.block_table)
                seq.block_table = array("i")
                self.scheduler.finish(seq)
        return flight

    def _collect(self) -> None:
        flight = self._flights.popleft()
        ready, pad_rows = flight.ready, 0
        try:
            result, start, end = flight.handle.wait()
        except LostKv:
            raise
        except Exception as error:
            start = end = self.clock()
            self._fail(ready.plan, error)
        else:
            pad_rows = result.backend_pad_rows
            self._publish_flight(flight, result, end)
        for table in flight.leases:
            self.pool.release(table)
        self._conclude(ready, start, end, pad_rows)

    def _publish_flight(self, flight: _Flight, result: StepResult, now: float) -> None:
        """As Engine._publish; a row may have lost its sequence since it was planned."""
        for live, table, computed, preemptions in flight.filled:
            if not live.answered and live.seq.num_preemptions == preemptions:
                self._share(live.seq, table, computed)
        entries = flight.ready.plan.entries
        for entry, live, token in zip(
            flight.ready.sampled, flight.lives, result.token_ids.tolist(), strict=True
        ):
            if live.answered:
                if live.record.finish_reason in ("stop", "length"):  # it had ended before this pass began
                    self.recorder.ended_before(flight.ready.tally)
                    if entry.kind is Kind.DECODE:  # or else most of the row is what a preemption cost it
                        entries[entries.index(entry)] = entry._replace(kind=Kind.ENDED)
                continue
            self.counters.output_tokens += 1
            live.tokens[len(live.tokens) - live.pending] = token
            live.pending -= 1
            self._name_blocks(live)
            reason = found = None
            if live.record.first_token_ns is None:
                live.record.first_token_ns = to_ns(now)
                if self.pool.prefix_cache:
                    live.found = found = live.seq.num_cached
            if len(live.tokens) - live.pending >= live.longest or token in live.ends:
                self._forget_pending(live)
                reason = self._end_reason(live, token)
                self._end(live, reason)
            self._outbox.append(make_output((live.seq.seq_id, (token,), reason, None, found)))
            live.answered = reason is not None

    def _end(self, live: Live, reason: str) -> None:
        self._forget_pending(live)
        super()._end(live, reason)

    def _forget_pending(self, live: Live) -> None:
        """What is being computed beyond the end of its answer does not count."""
        if live.pending:
            del live.tokens[-live.pending :]
            live.seq.num_tokens -= live.pending
            live.pending = 0

    def _leases(self) -> list[array[int]]:
        return [table for flight in self._flights for table in flight.leases]


def _source(ready: Prepared, newest: dict[int, int]) -> NDArray[np.int64] | None:
    """[T]: which result of the pass before is the token; -1: it is known. Only the last token of a sequence
    can be unknown, and a row that has it is sampled."""
    source: NDArray[np.int64] | None = None
    for row, entry in zip(ready.batch.sample_rows.tolist(), ready.sampled, strict=True):
        index = newest.get(entry.seq.seq_id)
        if index is not None:
            if source is None:
                source = np.full(len(ready.batch.token_ids), -1, np.int64)
            source[row] = index
    return source


def build_engine(config: Any, runner: Any, **kwargs: Any) -> Engine:
    """The engine with the loop that the configuration asks for."""
    kind: Callable[..., Engine] = OverlappedEngine if config.overlap else Engine
    return kind(config, runner, **kwargs)

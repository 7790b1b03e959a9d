"""The engine: schedule, run, publish, once an iteration. One thread, no event loop, no wall clock of its own.

schedule   which sequences get how many tokens (engines/schedulers)
run        one forward pass over the ragged batch (engines/runner.py)
publish    append tokens, end what has ended, give back its seat and KV, hand out what clients may have
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

from engines import integrity
from engines.admission import blocked
from engines.assembly import assemble, sampling_arrays
from engines.batch import Copies, RaggedBatch, Sampling, StepResult
from engines.config import ConfigError, EngineConfig
from engines.forced import ForcedPreemption
from engines.gate import Change, Gate
from engines.kv_pool import BlockPool, IntegrityError
from engines.live import Live
from engines.plan import Entry, Kind, Plan
from engines.prepared import Prepared
from engines.recorder import Recorder, new_record, to_ns
from engines.request import Output, Request, make_output
from engines.schedulers import build as build_scheduler
from engines.sequence import Sequence, Status
from engines.stats import Occupancy, QueueState, Stats
from engines.step_log import Ending, StepLog


class Runner(Protocol):
    def run(self, batch: RaggedBatch) -> StepResult: ...

    def copy(self, copies: Copies) -> None: ...


class Engine:
    """Raises ConfigError when the pool cannot hold what the reservation asks for.

    `num_kv_blocks` counts the null block, `num_host_blocks` those of host memory, for preemption=swap.
    `eos_token_ids` end an answer unless the request says ignore_eos or carries stop_after, which then decides
    alone. Times of `clock` are seconds; the records take them as nanoseconds. Not thread-safe: whoever drives
    it calls every method from one thread."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        num_kv_blocks: int,
        num_host_blocks: int = 0,
        clock: Callable[[], float] = time.monotonic,
        eos_token_ids: Collection[int] = (),
        seed: int = 0,
        step_log: StepLog | None = None,
        ids: Iterator[int] | None = None,
    ) -> None:
        self.config = config
        self.runner = runner
        self.clock = clock
        self.eos_token_ids = frozenset(eos_token_ids)
        self.seed = seed
        self.pool = BlockPool(num_kv_blocks, config.block_size, config.prefix_cache)
        self.scheduler = build_scheduler(config, self.pool, num_host_blocks)
        needed = self.pool.blocks_for(config.max_model_len)
        if config.reservation == "max_model_len" and needed > self.pool.usable:
            raise ConfigError(
                f"engine.num_kv_blocks={num_kv_blocks}: reservation=max_model_len needs {needed + 1} "
                f"for engine.max_model_len={config.max_model_len}"
            )
        self.recorder = Recorder(step_log, config.prefix_cache)
        self.counters = self.recorder.counters
        self.gate = Gate(self.scheduler, self.counters)
        self._live: dict[int, Live] = {}
        self._ended: list[Live] = []  # the answer has ended, but it or its KV has not left yet
        self._outbox: list[Output] = []
        self._ids = itertools.count() if ids is None else ids
        self._runs: deque[str] = deque(maxlen=16)  # that requests have named lately
        self._drawn: set[int] = set()  # seq_ids of those that are not sampled greedily
        self._forced = ForcedPreemption(config.preempt_every, config.preempt_seed)

    # -- requests come and go --------------------------------------------------------------------------------

    def add(self, request: Request, arrival: float | None = None) -> int:
        """Queue a request; its internal id. max_tokens is cut to what max_model_len leaves. `arrival` is when
        the server got it, on the engine's clock, if that was before now (an iteration may have been running).
        Raises Refused."""
        now = self.clock()
        seq_id = next(self._ids)
        prompt = array("q", request.prompt_token_ids)
        max_tokens = min(request.max_tokens, self.config.max_model_len - len(prompt))
        seq = Sequence(
            seq_id,
            len(prompt),
            max_tokens,
            arrived := now if arrival is None else arrival,
            request.priority,
            request.tenant,
            request.request_class,
            None if request.deadline_ms is None else arrived + request.deadline_ms / 1e3,
        )
        record = new_record(seq, request)
        self.counters.received += 1
        decision = self.gate.ask(seq, request, now)
        if decision.verdict == "reject":
            self.recorder.refused(record, str(decision.reason), now, idle=not self.has_work)
            raise decision.refused()
        seed = request.sampling.seed
        if seed is None:
            seed = (self.seed * 1_000_003 + seq_id) & 0x7FFF_FFFF_FFFF_FFFF
        limit = max_tokens if request.stop_after is None else min(max_tokens, request.stop_after)
        ends_itself = request.ignore_eos or request.stop_after is not None
        ends = frozenset[int]() if ends_itself else self.eos_token_ids
        live = Live(request, seq, prompt, seed, record, len(prompt) + limit, ends)
        self._live[seq_id] = live
        if request.sampling.temperature:
            self._drawn.add(seq_id)
        self._forget_other_runs(request.label.get("run"))
        self._name_blocks(live)
        self.scheduler.add(seq)
        return seq_id

    def abort(self, seq_id: int, reason: str = "abort") -> None:
        """Nobody waits for more of this answer: its client has left ("abort"), or it is whole, since a stop
        string was seen in its text ("stop"). Nothing happens if it is unknown or has left. Seat and KV are
        free at once, except in a static batch with pad_finished: there they are when the batch ends."""
        live = self._live.get(seq_id)
        if live is None or live.answered:
            return
        now, state = self.clock(), live.state
        self._end(live, reason)
        if reason == "abort":
            live.record.abort_seen_ns = to_ns(now)
            state = live.record.abort_state = "held" if live.seq.status is Status.ENDED else state
            self.counters.aborted[state] = self.counters.aborted.get(state, 0) + 1
        self._answer(live, Output(seq_id, (), reason))
        self._dismiss(now)

    @property
    def has_work(self) -> bool:
        return bool(self._outbox or self.scheduler.running or self.scheduler.waiting)

    def next_wakeup(self, now: float) -> float | None:
        """When `step` next has something to do: now, a later time (a batch waits for company), or None until
        a request arrives. Calling it earlier does no harm and no work."""
        if self._outbox:
            return now
        wakeup = self.scheduler.next_wakeup(now)
        if wakeup is not None and wakeup > now:
            waiting, timeout = self.scheduler.waiting, self.config.queue_timeout_ms
            ends = [None if timeout is None else waiting.next_overdue(timeout / 1e3), waiting.next_hopeless()]
            wakeup = min([wakeup, *(end for end in ends if end is not None)])
        return wakeup

    # -- an iteration ----------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """One iteration, and the outputs that may leave after it. What fails in the pass ends the sequences
        in it with finish_reason `error`; the engine goes on. Raises IntegrityError if KV has leaked."""
        now = self.clock()
        self._limit()
        self._expire(now)
        plan = self.scheduler.schedule(now)
        if plan.entries:
            self._iterate(plan, now)
        else:
            self.recorder.waited()
            self.gate.waited()
        outputs, self._outbox = self._outbox, []
        if not self.has_work:
            self._idle()
        return outputs

    def _iterate(self, plan: Plan, now: float) -> None:
        """The plain order: one pass is over before the next one is planned. (engines/overlap.py is ahead.)"""
        ready = self._prepare(plan, now)
        pad_rows = 0
        start = self.clock()
        if ready.copies is not None:  # if it fails, KV of others is lost as well: nobody catches that
            self.runner.copy(ready.copies)
        try:
            result = self.runner.run(ready.batch)
        except Exception as error:  # out of memory, say: it costs the sequences of this pass, not the engine
            end = self.clock()
            self._fail(plan, error)
        else:
            end = self.clock()
            pad_rows = result.backend_pad_rows
            self._publish(plan, result, end)
        self._conclude(ready, start, end, pad_rows)

    def _prepare(self, plan: Plan, now: float) -> Prepared:
        """The arrays of the pass, and what is written down about it before it changes anything."""
        copies = self.scheduler.preemption.take_copies()
        tally = self.recorder.planned(plan, copies)
        occupancy = self._occupancy()
        decode = Kind.DECODE  # of many rows few are anything else, and none of them is new
        starting = [entry.seq for entry in plan.entries if entry.kind is not decode]
        entered = [seq for seq in starting if self._live[seq.seq_id].record.admitted_ns is None]
        for seq in starting:
            self.recorder.scheduled(seq, self._live[seq.seq_id].record, now)
        batch, sampled = assemble(plan, self._tokens, self.config.block_size, self.config.max_model_len)
        sampling = self._sampling(sampled)
        if sampling is not None:
            batch = replace(batch, sampling=sampling)
        why = blocked(self.scheduler, plan)
        return Prepared(plan, now, batch, sampled, copies, tally, occupancy, entered, why)

    def _conclude(self, ready: Prepared, start: float, end: float, pad_rows: int) -> None:
        """The pass is over, and its tokens are published."""
        plan, why = ready.plan, ready.blocked
        self.scheduler.published(plan, end - start)
        self._force_preemption(ready.sampled)
        self._dismiss(end)
        self.gate.passed(ready.entered, why is not None, ready.planned_at, end)
        self.recorder.passed(plan, ready.tally, ready.occupancy, start, end, pad_rows, why)

    def _publish(self, plan: Plan, result: StepResult, now: float) -> None:
        ended, cached, drain = Kind.ENDED, self.pool.prefix_cache, self.scheduler.drain
        lives, outbox, produced = self._live, self._outbox, 0
        tokens = iter(result.token_ids.tolist())  # of the entries that were sampled (engines/assembly.py)
        for seq, num_tokens, kind, _ in plan.entries:
            if kind is ended:
                seq.num_padded += 1
                next(tokens)
                continue
            seq.num_computed = computed = seq.num_computed + num_tokens
            if computed > seq.max_computed:
                seq.max_computed = computed
            if cached:
                self._share(seq, seq.block_table, computed)
            if computed < seq.num_tokens:  # a piece of its prompt
                continue
            produced += 1
            live, token = lives[seq.seq_id], next(tokens)
            live.tokens.append(token)
            reason = found = None
            if computed == seq.prompt_len:
                live.record.first_token_ns = to_ns(now)
                if cached:
                    live.found = found = seq.num_cached
            seq.num_tokens = length = computed + 1
            if cached:
                self._name_blocks(live)
            if length >= live.longest or token in live.ends:
                reason = self._end_reason(live, token)
                self._end(live, reason)
                live.answered = not drain
            if not drain:
                outbox.append(make_output((seq.seq_id, (token,), reason, None, found)))
        self.counters.output_tokens += produced

    def _share(self, seq: Sequence, table: array[int], computed: int) -> None:
        """The blocks that this pass has filled can be found from now on, and not before."""
        full = computed // self.pool.block_size
        if full > seq.num_published:
            self.pool.publish(table, seq.block_keys, seq.num_published, full)
            seq.num_published = full

    def _name_blocks(self, live: Live) -> None:
        """Keys for the blocks that its tokens fill: the scheduler compares them and knows no tokens."""
        if not self.pool.prefix_cache:
            return
        size, keys, tokens = self.pool.block_size, live.seq.block_keys, live.tokens
        for start in range(len(keys) * size, len(tokens) - live.pending - size + 1, size):
            key = tokens[start : start + size].tobytes()
            salted = start == 0 and self.config.prefix_cache_salt == "tenant"
            keys.append((live.seq.tenant, key) if salted else key)

    def _forget_other_runs(self, run: str | None) -> None:
        """A run must not find what an earlier one, or its own warm-up, has left in the cache: it is emptied
        when the first request of a run comes. Requests without that label leave it alone."""
        if run is not None and run not in self._runs:
            self._runs.append(run)
            self.pool.forget()

    def _end_reason(self, live: Live, token: int) -> str:
        length = live.seq.num_tokens - live.seq.prompt_len
        return "stop" if token in live.ends or length < live.seq.max_tokens else "length"

    def _fail(self, plan: Plan, error: Exception) -> None:
        message = f"{type(error).__name__}: {error}"
        self.counters.out_of_memory += _is_out_of_memory(error)
        for entry in plan.entries:
            live = self._live.get(entry.seq.seq_id)
            if entry.kind is not Kind.ENDED and live is not None and not live.answered:
                self._end(live, "error")
                self._answer(live, Output(live.seq.seq_id, (), "error", message))

    def _expire(self, now: float) -> None:
        """End those that have waited too long and those that cannot make their deadline."""
        waiting, timeout = self.scheduler.waiting, self.config.queue_timeout_ms
        overdue = [] if timeout is None else waiting.overdue(now, timeout / 1e3)
        hopeless = [seq for seq in waiting.hopeless(now) if seq not in overdue]
        for reason, ended in (("queue_timeout", overdue), ("deadline", hopeless)):
            for seq in ended:
                live = self._live[seq.seq_id]
                self._end(live, reason)
                self._answer(live, Output(seq.seq_id, (), reason))
        if overdue or hopeless:
            self._dismiss(now)

    def _force_preemption(self, sampled: list[Entry]) -> None:
        """Tests: engine.preempt_every and engine.preempt_seed."""
        if self.config.preempt_every is None:
            return
        victim = self._forced.victim(self.scheduler.running, {entry.seq.seq_id for entry in sampled})
        if victim is not None:
            self.scheduler.preempt(victim)
            self.counters.preemptions += 1

    # -- how a request leaves --------------------------------------------------------------------------------

    def _end(self, live: Live, reason: str) -> None:
        """No more tokens for it. The scheduler takes seat and KV back, now or when the static batch ends."""
        if live not in self._ended:
            self._ended.append(live)
        live.record.finish_reason = reason
        if reason in ("stop", "length"):
            self.scheduler.reservation.ended(live.seq)
            self.gate.pace.ended(live.seq.num_tokens - live.seq.prompt_len)
        self.scheduler.finish(live.seq)

    def _answer(self, live: Live, output: Output) -> None:
        self._outbox.append(output)
        live.answered = output.finish_reason is not None

    def _dismiss(self, now: float) -> None:
        """Let go of what has ended: of drained answers when the batch is over, of records when KV is free."""
        batch_over = not self.scheduler.running
        for live in list(self._ended):
            record = live.record
            if not live.answered and batch_over:
                self._answer(
                    live, Output(live.seq.seq_id, live.answer, record.finish_reason, None, live.found)
                )
            if record.finish_ns is None and live.seq.status is Status.FINISHED:
                record.finish_ns = to_ns(now)
            if live.answered and record.finish_ns is not None:
                self._ended.remove(live)
                del self._live[live.seq.seq_id]
                self._drawn.discard(live.seq.seq_id)
                self.recorder.left(live.seq, record)

    def _idle(self) -> None:
        integrity.check_idle(self.scheduler)
        self.recorder.idle()

    # -- looking in ------------------------------------------------------------------------------------------

    def queue_state(self) -> QueueState:
        return self.gate.queue_state()

    def set_limits(self, changes: Mapping[str, Any]) -> dict[str, Change]:
        """Between two iterations: budgets and bounds, old and new. Raises ConfigError."""
        change = self.gate.change(changes)
        self._limit()
        return change

    def _limit(self) -> None:
        config = self.gate.in_force()
        if config is not self.config:
            self.config = config
            self.scheduler.limit(config)

    def stats(self) -> Stats:
        self.counters.released_blocks = self.pool.num_released
        counters: dict[str, Any] = {
            name: dict(value) if type(value) is dict else value for name, value in vars(self.counters).items()
        }
        return Stats(**counters, **vars(self._occupancy()))

    def end(self) -> Ending:
        """The last call: nobody waits for an answer any more, so what is still under way is aborted. With
        nothing left to do, no sequence and no block may be left either; what is, has leaked."""
        under_way = len(self._live)
        for seq_id in list(self._live):
            self.abort(seq_id)
        self._outbox.clear()
        try:
            self.check_integrity()
            integrity = "ok"
        except IntegrityError as error:
            integrity = str(error)
        now = self._occupancy()
        return Ending(to_ns(self.clock()), under_way, **asdict(now), integrity=integrity)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every sequence is in one place and every block is accounted for."""
        integrity.check(self.scheduler, [live.seq for live in self._live.values()], self._leases())

    def _leases(self) -> list[array[int]]:
        """Blocks that no sequence holds any more and that are not free yet."""
        return []

    def _occupancy(self) -> Occupancy:
        scheduler, pool = self.scheduler, self.pool
        return Occupancy(
            running=len(scheduler.running) + len(scheduler.ended),
            waiting=len(scheduler.waiting),
            kv_live=pool.num_live,
            kv_cached=pool.num_cached,
            kv_free=pool.num_free,
        )

    def _tokens(self, seq: Sequence) -> array[int]:
        return self._live[seq.seq_id].tokens

    def _sampling(self, sampled: list[Entry]) -> Sampling | None:
        if not self._drawn:
            return None
        lives = [self._live[entry.seq.seq_id] for entry in sampled]
        return sampling_arrays(
            [live.request.sampling for live in lives],
            [live.seed for live in lives],
            [live.seq.num_tokens - live.seq.prompt_len for live in lives],
        )


def _is_out_of_memory(error: Exception) -> bool:
    """torch has a type of its own on CUDA, and on the CPU a RuntimeError that says so."""
    return (
        isinstance(error, MemoryError)
        or "OutOfMemory" in type(error).__name__
        or "can't allocate memory" in str(error)
    )

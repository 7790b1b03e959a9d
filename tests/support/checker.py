"""What must hold of any engine between two iterations, whatever its scheduler, queue, reservation and
preemption.

Driver.step asks a Checker before and after each iteration, so every test that drives an engine is held to
it. engines/integrity.py checks the state (each sequence in one place, blocks, reference counts, order); this
checks what the iteration did to it. What only some schedulers promise is in tests/support/promises.py.

    progress    a step that is due computes a token, or ends a request              (rows 3, 4, 30, 34, 35)
    plan        nobody twice, nobody who has left, within seats and budget, and each token has one use
    tokens      what was delivered is what was sampled, once, and nothing after an end    (rows 8, 12, 13)
    KV running out
                a seat is lost only where everyone's next tokens did not fit, by the last in the order of
                preemption, and never by all                                          (rows 2, 3, 14, 35)
    entry       nobody overtakes in the order of the queue, nor an equal under any order, those that lost
                their seat included                                                       (row 14)
    work        iterations in all: at most one for each token of each request, times what the scheduler and
                forced preemptions may cost                              (no livelock, no starvation)
    sums        free + cached + live = usable; received = running + waiting + refused + finished
                                                                                          (rows 5-7, 20)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from engines.engine import Engine
from engines.plan import Kind
from engines.request import Output
from engines.sequence import Sequence, Status
from engines.step_log import StepRecord

ORDERS: dict[str, Callable[[Sequence], Any]] = {
    "fcfs": lambda seq: seq.seq_id,
    "priority": lambda seq: (seq.priority, seq.seq_id),
    "deadline": lambda seq: (inf if seq.deadline is None else seq.deadline, seq.seq_id),
}
"""What the orders that do not move with time say, in the checker's own words."""

WORST_CASE = ("prompt_plus_max_tokens", "max_model_len")


@dataclass(frozen=True)
class Before:
    """The engine when the iteration begins."""

    now: float
    due: bool
    running: tuple[Sequence, ...]  # in the order of their seats
    waiting: tuple[Sequence, ...]  # in the order of service
    ended: frozenset[int]
    decoding: frozenset[int]
    order: tuple[int, ...]  # in which the running ones lose their seats, the last one first
    swapped: frozenset[int]  # wait, and their KV is in host memory
    wanted: int  # blocks for everyone's next tokens
    available: int
    rows: int  # of the log
    over: frozenset[int]


@dataclass(frozen=True)
class Step:
    """An iteration that computed something."""

    engine: Engine
    before: Before
    record: StepRecord

    @property
    def served(self) -> set[int]:
        rows = zip(self.record.ids, self.record.kind, strict=True)
        return {seq_id for seq_id, kind in rows if kind != Kind.ENDED}

    @property
    def victims(self) -> set[int]:
        return set(self.record.preempted)

    @property
    def entered(self) -> list[Sequence]:
        """Who got a seat, in the order of the plan."""
        waiting = {seq.seq_id: seq for seq in self.before.waiting}
        return [waiting[seq_id] for seq_id in self.record.ids if seq_id in waiting]

    @property
    def prompts(self) -> set[int]:
        """Who got a seat and had something to compute before it could go on."""
        return {seq.seq_id for seq in self.entered} - self.before.swapped

    @property
    def left_waiting(self) -> list[Sequence]:
        """Who waited, in the order of service, and still does."""
        entered = {seq.seq_id for seq in self.entered}
        without_seat = (Status.WAITING, Status.PREEMPTED)
        return [s for s in self.before.waiting if s.seq_id not in entered and s.status in without_seat]


class Promises(Protocol):
    """What a scheduler promises beyond this module."""

    check_entry: bool  # whether equals enter in the order of their arrival

    @property
    def factor(self) -> int:
        """Iterations for a token of the request that is first in the order of preemption, at most."""
        ...

    def check(self, step: Step) -> None: ...


class Log(Protocol):
    steps: list[StepRecord]


class Checker:
    """`log` takes the engine's records. Raises AssertionError, and whatever check_integrity raises."""

    def __init__(self, engine: Engine, log: Log, promises: Promises) -> None:
        self.engine = engine
        self.log = log
        self.promises = promises
        self.told: dict[int, int] = {}  # by seq_id: tokens that were delivered
        self.over: set[int] = set()
        self.work: dict[int, int] = {}  # by seq_id: tokens that it may take in all
        self.rivals = 0  # arrivals that may take the first place in the order of preemption
        self.busy = 0  # iterations that computed something
        self.natural = 0  # preemptions that the plans tell of

    def before(self) -> Before:
        engine, scheduler = self.engine, self.engine.scheduler
        now = engine.clock()
        wakeup = engine.next_wakeup(now)
        assert engine.has_work == (wakeup is not None), "work and wake-up disagree"
        running, waiting = tuple(scheduler.running), tuple(scheduler.waiting)
        for seq in (*running, *waiting):
            if seq.seq_id not in self.work:
                self.work[seq.seq_id] = seq.prompt_len + seq.max_tokens
                self.rivals += engine.config.victim == "least_urgent"
        return Before(
            now=now,
            due=wakeup is not None and wakeup <= now,
            running=running,
            waiting=waiting,
            ended=frozenset(seq.seq_id for seq in scheduler.ended),
            decoding=frozenset(seq.seq_id for seq in running if seq.decoding),
            order=tuple(seq.seq_id for seq in self._in_order(running)),
            swapped=frozenset(seq.seq_id for seq in waiting if seq.swapped),
            wanted=sum(self._wants(seq) for seq in running),
            available=scheduler.pool.available,
            rows=len(self.log.steps),
            over=frozenset(self.over),
        )

    def after(self, before: Before, outputs: Seq[Output]) -> None:
        self.engine.check_integrity()
        self._check_outputs(outputs)
        records = self.log.steps[before.rows :]
        if before.due:
            assert records or outputs, "a step with work did nothing"
        assert len(records) <= 1
        if records:
            step = Step(self.engine, before, records[0])
            self.busy += 1
            self.natural += len(step.victims)
            self._check_plan(step)
            self._check_preempted(step)
            self._check_entry(step)
            self.promises.check(step)
            self._check_work()
        self._check_sums()

    def _in_order(self, running: Seq[Sequence]) -> Seq[Sequence]:
        if self.engine.config.victim == "newest":
            return running
        return sorted(running, key=self.engine.scheduler.waiting.key)

    def _wants(self, seq: Sequence) -> int:
        """Blocks that a running sequence may ask for in the next iteration."""
        scheduler, limits = self.engine.scheduler, self.engine.config
        longest = limits.prefill_chunk_size or limits.max_num_batched_tokens
        tokens = scheduler.reservation.tokens(seq, seq.num_computed + min(seq.remaining, longest))
        return scheduler.pool.blocks_for(tokens) - len(seq.block_table)

    def _check_outputs(self, outputs: Seq[Output]) -> None:
        for output in outputs:
            assert output.seq_id not in self.over, "an output after the last one"
            assert output.token_ids or output.finish_reason, "an output of nothing"
            self.told[output.seq_id] = self.told.get(output.seq_id, 0) + len(output.token_ids)
            if output.finish_reason is not None:
                self.over.add(output.seq_id)
        scheduler = self.engine.scheduler
        for seq in (*scheduler.running, *scheduler.waiting):
            sampled = 0 if scheduler.drain else seq.num_tokens - seq.prompt_len
            assert self.told.get(seq.seq_id, 0) == sampled, f"{seq}: delivered other than sampled"
            assert seq.seq_id not in self.over, f"{seq} has had its last output"

    def _check_plan(self, step: Step) -> None:
        record, limits, before = step.record, self.engine.config, step.before
        computed = sum(record.tokens) + record.left_pad_tokens
        assert 1 <= computed <= limits.max_num_batched_tokens, f"{computed} tokens"
        assert min(record.tokens) >= 1
        assert len(record.ids) == len(set(record.ids)) <= limits.max_num_seqs
        assert step.served, "a pass for nobody"
        parts = record.prefill_tokens + record.decode_tokens + record.recomputed_tokens
        assert computed == parts + record.ended_rows + record.left_pad_tokens
        known = {seq.seq_id for seq in (*before.running, *before.waiting)}
        assert step.served <= known - before.over, "computed for nobody"
        assert set(record.ids) - step.served <= before.ended
        assert not step.served & step.victims, "computed for one that has lost its seat"
        pool = self.engine.pool
        assert record.kv_live + record.kv_cached + record.kv_free == pool.usable

    def _check_preempted(self, step: Step) -> None:
        before, order = step.before, step.before.order
        if not step.victims:
            return
        assert self.engine.config.reservation not in WORST_CASE, "what was reserved was taken away"
        assert len(step.victims) < len(order), "everyone lost its seat"
        if not step.victims <= set(order):  # a newcomer of one lane gives way to the prompts of another
            assert self.engine.config.lanes, "a newcomer has lost its seat at once"
            return
        assert not step.entered or self.engine.config.lanes, "somebody entered on what was taken from another"
        assert before.wanted > before.available, "a seat was lost though everyone's next tokens had KV"
        last = set(order[len(order) - len(step.victims) :])
        assert step.victims == last, f"{step.victims} lost their seats, {last} were the last in order"

    def _check_entry(self, step: Step) -> None:
        latest: dict[Any, int] = {}
        for seq in step.entered:
            latest[_equals(seq)] = max(seq.seq_id, latest.get(_equals(seq), -1))
        if not self.promises.check_entry:
            return
        limits = self.engine.config
        queues = {limits.queue, *(lane.get("queue") or limits.queue for lane in limits.lanes.values())}
        for seq in step.left_waiting if queues <= set(EQUALS_AS_THEY_CAME) else ():
            assert seq.seq_id > latest.get(_equals(seq), -1), f"{seq} was overtaken by an equal"
        order = ORDERS.get(limits.queue)
        if order and not limits.lanes and not limits.queue_policy and step.entered:
            last = max(order(seq) for seq in step.entered)
            for seq in step.left_waiting:
                assert order(seq) > last, f"{seq} was overtaken"

    def _check_work(self) -> None:
        forced = self.engine.counters.preemptions - self.natural
        bound = self.promises.factor * sum(self.work.values()) * (1 + forced + self.rivals)
        assert self.busy <= bound, f"{self.busy} iterations for {bound}"

    def _check_sums(self) -> None:
        stats, pool = self.engine.stats(), self.engine.pool
        assert stats.kv_live + stats.kv_cached + stats.kv_free == pool.usable
        gone = sum(stats.refusals.values()) + sum(stats.finished.values())
        rest = stats.received - stats.running - stats.waiting - gone
        held = self.engine.scheduler.drain  # answers that wait for the end of their batch
        assert rest >= 0 if held else rest == 0, f"{rest} requests are nowhere"
        if not self.engine.has_work:
            assert rest == stats.running == stats.waiting == stats.kv_live == 0
            assert set(self.work) <= self.over, "a request without an end"


EQUALS_AS_THEY_CAME = ("fcfs", "priority", "deadline", "fair", "deadline_then_fair")
"""Orders that look at nothing but arrival and what `_equals` names; one that is not here may look at more."""


def _equals(seq: Sequence) -> Any:
    """Requests between which these orders have no reason to choose other than by arrival."""
    due = None if seq.deadline is None else round(seq.deadline - seq.arrival, 6)
    return seq.tenant, seq.request_class, seq.priority, due


def ids(sequences: Iterable[Sequence]) -> set[int]:
    return {seq.seq_id for seq in sequences}

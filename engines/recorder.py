"""Counts what happens in the engine, and writes it down where there is a step log."""

from __future__ import annotations

from engines.batch import Copies
from engines.plan import DECODE, ENDED, Plan
from engines.request import Request
from engines.sequence import Sequence
from engines.stats import Counters, Occupancy
from engines.step_log import RequestRecord, StepLog, StepRecord


def new_record(seq: Sequence, request: Request) -> RequestRecord:
    return RequestRecord(
        seq_id=seq.seq_id,
        run=request.label.get("run"),
        id=request.label.get("id"),
        attempt=request.label.get("attempt"),
        tenant=request.tenant,
        request_class=request.request_class,
        priority=request.priority,
        prompt_tokens=seq.prompt_len,
        max_tokens=request.max_tokens,
        arrival_ns=to_ns(seq.arrival),
    )


def to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


class Recorder:
    def __init__(self, log: StepLog | None, prefix_cache: bool = False) -> None:
        self.counters = Counters()
        self.log = log
        self._prefix_cache = prefix_cache
        self._logged = (0, 0, 0)  # preemptions, refusals and prefix cache hits at the last row
        self._pass_ended: float | None = None  # None: idle since

    def refused(self, record: RequestRecord, reason: str, now: float, idle: bool) -> None:
        _bump(self.counters.refusals, reason)
        record.finish_reason, record.refusal, record.finish_ns = "refused", reason, to_ns(now)
        if self.log is not None:
            self.log.request(record)
            if idle:  # no iteration will come to write it down
                self.log.flush()

    def scheduled(self, seq: Sequence, record: RequestRecord, now: float) -> None:
        """It is in the plan of an iteration."""
        if record.admitted_ns is None:
            record.admitted_ns = to_ns(now)
            if self._prefix_cache:
                self.counters.prefix_cache_queries += seq.prompt_len
        if seq.num_cached > record.cached_tokens:  # it has just got a seat
            self.counters.prefix_cache_hits += seq.num_cached - record.cached_tokens
            record.cached_tokens = seq.num_cached

    def planned(self, plan: Plan, copies: Copies | None) -> Counters:
        """What the pass will compute, by use, and copy. Before the pass moves num_computed."""
        tally, total = Counters(), self.counters
        decodes = 0
        for entry in plan.entries:
            _, num_tokens, kind, left_pad = entry
            tally.left_pad_tokens += left_pad
            if kind is DECODE:  # nearly all rows of a large batch, and nothing to split
                decodes += num_tokens
                continue
            if kind is ENDED:
                tally.ended_rows += 1
                continue
            prefill, decode, recomputed = entry.split()
            tally.prefill_tokens += prefill
            tally.decode_tokens += decode
            tally.recomputed_tokens += recomputed
            entry.seq.num_recomputed += recomputed
        tally.decode_tokens += decodes
        total.left_pad_tokens += tally.left_pad_tokens
        total.ended_rows += tally.ended_rows
        total.prefill_tokens += tally.prefill_tokens
        total.decode_tokens += tally.decode_tokens
        total.recomputed_tokens += tally.recomputed_tokens
        total.preemptions += len(plan.preempted)
        if copies is not None:
            tally.swapped_out, tally.swapped_in = len(copies.out), len(copies.back)
            total.swapped_out += tally.swapped_out
            total.swapped_in += tally.swapped_in
        total.kv_exhausted += bool(plan.preempted)
        return tally

    def ended_before(self, tally: Counters) -> None:
        """A decode of this pass was planned before anybody knew that its answer had ended (overlap)."""
        for counters in (tally, self.counters):
            counters.decode_tokens -= 1
            counters.ended_rows += 1

    def passed(
        self,
        plan: Plan,
        tally: Counters,
        occupancy: Occupancy,
        start: float,
        end: float,
        pad_rows: int,
        blocked: str | None = None,
    ) -> None:
        """An iteration is over. `occupancy` is that of its pass, `blocked` why the head of the queue was not
        in it."""
        if self.log is not None:
            preemptions, refusals = self.counters.preemptions, sum(self.counters.refusals.values())
            hits = self.counters.prefix_cache_hits
            gap = None if self._pass_ended is None else to_ns(start) - to_ns(self._pass_ended)
            self.log.step(
                StepRecord(
                    step=self.counters.steps,
                    start_ns=to_ns(start),
                    duration_ns=to_ns(end) - to_ns(start),
                    host_gap_ns=gap,
                    num_seqs=len(plan.entries) - tally.ended_rows,
                    prefill_tokens=tally.prefill_tokens,
                    decode_tokens=tally.decode_tokens,
                    ended_rows=tally.ended_rows,
                    left_pad_tokens=tally.left_pad_tokens,
                    recomputed_tokens=tally.recomputed_tokens,
                    cached_tokens=hits - self._logged[2],
                    backend_pad_rows=pad_rows,
                    waiting=occupancy.waiting,
                    running=occupancy.running,
                    kv_live=occupancy.kv_live,
                    kv_cached=occupancy.kv_cached,
                    kv_free=occupancy.kv_free,
                    preemptions=preemptions - self._logged[0],
                    swapped_out=tally.swapped_out,
                    swapped_in=tally.swapped_in,
                    refusals=refusals - self._logged[1],
                    ids=[entry.seq.seq_id for entry in plan.entries],
                    tokens=[entry.num_tokens for entry in plan.entries],
                    kind=[int(entry.kind) for entry in plan.entries],
                    preempted=[seq.seq_id for seq in plan.preempted],
                    blocked=blocked,
                )
            )
            self._logged = (preemptions, refusals, hits)
        self.counters.steps += 1
        self._pass_ended = end

    def left(self, seq: Sequence, record: RequestRecord) -> None:
        """Neither a token nor a block of it remains."""
        _bump(self.counters.finished, str(record.finish_reason))
        if self.log is not None:
            record.output_tokens = seq.num_tokens - seq.prompt_len
            record.preemptions = seq.num_preemptions
            record.swaps = seq.num_swaps
            record.recomputed_tokens = seq.num_recomputed
            if record.finish_reason == "abort":
                computed = seq.max_computed - seq.num_cached
                record.wasted_tokens = computed + seq.num_recomputed + seq.num_padded
            self.log.request(record)

    def waited(self) -> None:
        """There was nothing to compute: the time until the next pass is not the host's."""
        self._pass_ended = None

    def idle(self) -> None:
        """Nothing is left to do: a good time to write."""
        self._pass_ended = None
        if self.log is not None:
            self.log.flush()


def _bump(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1

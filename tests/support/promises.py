"""What each scheduler promises beyond what holds for all (tests/support/checker.py). A scheduler without an
entry in PROMISES is held to what holds for all, with a generous bound on its iterations.

    every decode      each sequence that decodes gets a token in each iteration, or loses its seat
                      (continuous, static, dynamic, sliced; chunked without decode_seq_budget)      row 28
    turns             under decode_seq_budget nobody gets a second token while another waits for one (chunked)
    prompts alone     an iteration with somebody's prompt computes nothing else; without one everyone decodes
                      (prefill_first, tgi)
    one interruption  between two of them the batch decodes (tgi)
    whole prompts     whoever is computed has its next token afterwards          (all with whole_prompts)
    no empty seat     nobody waits for a seat while its whole answer would fit   (continuous, chunked,
                      prefill_first; tgi after max_waiting_tokens decodes)       rows 1, 4, 16
    batches           nobody joins a batch that runs; an incomplete one has waited (static, dynamic, sliced)
    slices            none is longer than slice_tokens; nobody gets a third one while another waits
                      (sliced)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from engines.engine import Engine
from engines.sequence import Sequence, Status
from tests.support.checker import Step, ids

ORDERS_WITHOUT_TIME = ("fcfs", "priority", "deadline")
"""Queues in which the first in the order before an iteration is also the first whose turn it is in it."""


class Promised:
    check_entry = True

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lanes = bool(engine.config.lanes)
        self._most_seats = 1

    @property
    def factor(self) -> int:
        """Lanes may make a prompt that is partly computed wait for those of others."""
        self._most_seats = max(self._most_seats, self.engine.config.max_num_seqs)
        return self._iterations() * (1 + self._most_seats if self.lanes else 1)

    def _iterations(self) -> int:
        return 1 + self._most_seats

    def check(self, step: Step) -> None:
        if self.engine.scheduler.whole_prompts:
            for seq in (*step.before.running, *step.before.waiting):
                if seq.seq_id in step.served and seq.status is Status.RUNNING:
                    assert seq.decoding, f"{seq}: a whole prompt was cut"

    def every_decode(self, step: Step) -> None:
        stalled = step.before.decoding - step.served - step.victims
        assert not stalled, f"{stalled} decode and got no token"

    def prompts_alone(self, step: Step, joined: set[int]) -> None:
        if joined:
            assert step.served == ids(step.entered), "prompts are not alone"
            assert not step.victims, "a seat was lost for a prompt"
        else:
            self.every_decode(step)

    def no_empty_seat(self, step: Step, least_budget: Callable[[Sequence], int]) -> None:
        """`least_budget`: tokens of the budget that suffice for a sequence to enter."""
        limits, scheduler, record = self.engine.config, self.engine.scheduler, step.record
        if self.lanes or limits.queue not in ORDERS_WITHOUT_TIME or step.victims or not step.left_waiting:
            return
        if limits.kv_high_watermark is not None or limits.reservation == "predicted_peak":
            return
        head = step.left_waiting[0]
        spare = record.kv_free + record.kv_cached - limits.kv_watermark * scheduler.pool.usable
        for seq in scheduler.running:  # what they need for their own prompts (chunked)
            held = scheduler.pool.blocks_for(scheduler.reservation.tokens(seq, seq.num_tokens))
            spare -= max(0, held - len(seq.block_table))
        computed = 0 if not step.entered and not step.before.running else self._computed(step)
        fits = (
            record.running < limits.max_num_seqs
            and scheduler.pool.blocks_for(scheduler.reservation.most(head)) <= spare
            and least_budget(head) <= limits.max_num_batched_tokens - computed
        )
        assert not fits, f"{head} waits though there is a seat, KV and budget"

    def _computed(self, step: Step) -> int:
        return sum(step.record.tokens) + step.record.left_pad_tokens


class Continuous(Promised):
    def _iterations(self) -> int:
        return 1

    def check(self, step: Step) -> None:
        super().check(step)
        self.every_decode(step)
        self.no_empty_seat(step, lambda seq: seq.num_tokens)


class Chunked(Promised):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._since: dict[int, set[int]] = {}  # of those that decode: who had a token since their last one

    def _iterations(self) -> int:
        return 1 if self._decodes() is None else self._most_seats

    def _decodes(self) -> int | None:
        found: int | None = self.engine.scheduler.settings.decode_seq_budget
        return found

    def check(self, step: Step) -> None:
        longest = self.engine.config.prefill_chunk_size
        assert longest is None or max(step.record.tokens) <= longest
        self.no_empty_seat(step, lambda seq: 1)
        budget = self._decodes()
        if budget is None:
            self.every_decode(step)
            return
        served = step.before.decoding & step.served
        assert len(served) <= budget, f"{len(served)} decodes, decode_seq_budget is {budget}"
        waits = step.before.decoding - served - step.victims
        for seq_id in waits:
            had = self._since.setdefault(seq_id, set())
            assert not had & served, f"{had & served} had two tokens while {seq_id} waited for one"
            had |= served
        self._since = {seq_id: had for seq_id, had in self._since.items() if seq_id in waits}


class PrefillFirst(Promised):
    """Between two decodes at most every seat is given to someone new."""

    def check(self, step: Step) -> None:
        super().check(step)
        self.prompts_alone(step, step.prompts)  # those that come back from host memory decode with the others
        if self.engine.scheduler.settings.delay_factor:
            return
        if step.prompts and not ids(step.left_waiting[:1]) & step.before.swapped:
            self.no_empty_seat(step, lambda seq: seq.num_tokens)
        elif not step.entered:
            self.no_empty_seat(step, lambda seq: 1)  # nobody had taken of the budget yet


class Tgi(Promised):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._decodes = 0  # since somebody joined
        self._interrupted = False

    def check(self, step: Step) -> None:
        super().check(step)
        self.prompts_alone(step, ids(step.entered))
        settings = self.engine.scheduler.settings
        budget = settings.max_batch_prefill_tokens or self.engine.config.max_num_batched_tokens
        if step.entered:
            assert not (self._interrupted and step.before.running), "two interruptions in a row"
            self._decodes, self._interrupted = 0, bool(step.before.running)
            return
        self._interrupted = False
        if self._decodes >= max(1, settings.max_waiting_tokens):
            self.no_empty_seat(step, lambda seq: 1 if seq.num_tokens <= budget else 1 << 30)
        self._decodes += 1


class Static(Promised):
    def _iterations(self) -> int:
        return 1

    def check(self, step: Step) -> None:
        super().check(step)
        self.every_decode(step)
        if not step.entered:
            return
        limits, before = self.engine.config, step.before
        assert not before.running, "somebody joined a batch that runs"
        oldest = min(seq.arrival for seq in before.waiting)
        waited = oldest + limits.max_queue_delay_ms / 1e3 <= before.now
        full = len(step.entered) == limits.max_num_seqs or step.left_waiting
        assert waited or full or self._preferred(len(step.entered)), "an incomplete batch did not wait"

    def _preferred(self, size: int) -> bool:
        return False


class Dynamic(Static):
    def _preferred(self, size: int) -> bool:
        return size in self.engine.scheduler.preferred


class Sliced(Static):
    check_entry = False  # a round takes the whole queue, the short ones together

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._iteration = 0  # of the slice
        self._slices: dict[int, Counter[int]] = {}  # of those that wait: the slices that others had
        self._limits: tuple[int, int] = 0, 0

    def check(self, step: Step) -> None:
        super().check(step)
        assert not step.victims, "KV ran out within a slice"
        self._iteration = 1 if step.entered else self._iteration + 1
        assert self._iteration <= self.engine.scheduler.settings.slice_tokens, "a slice is too long"
        limits = self.engine.config.max_num_seqs, self.engine.config.max_num_batched_tokens
        if limits != self._limits:  # a new round begins
            self._slices.clear()
            self._limits = limits
        entered, left = ids(step.entered), ids(step.left_waiting)
        for seq_id in left:
            had = self._slices.setdefault(seq_id, Counter())
            had.update(entered)
            assert not entered or max(had.values()) <= 2, f"{had} had slices while {seq_id} waited"
        if entered:
            self._slices = {seq_id: had for seq_id, had in self._slices.items() if seq_id in left}


PROMISES: dict[str, type[Promised]] = {
    "chunked": Chunked,
    "continuous": Continuous,
    "dynamic": Dynamic,
    "prefill_first": PrefillFirst,
    "sliced": Sliced,
    "static": Static,
    "tgi": Tgi,
}


def promises_of(engine: Engine) -> Promised:
    """By the file that its scheduler comes from."""
    package, _, name = type(engine.scheduler).__module__.rpartition(".")
    found = PROMISES.get(name) if package == "engines.schedulers" else None
    return (found or Promised)(engine)

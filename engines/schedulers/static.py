"""Static batching, at the level of whole requests (Hugging Face generate(), FasterTransformer).

    if the batch has ended: form the next one from the head of the queue, and prefill it in one pass
    otherwise:              every sequence of the batch decodes one token

Nobody joins a batch that runs. Three switches say how true to the original it is, all on by default:

    left_pad      the prompts are padded to the longest, and the pads are computed
    pad_finished  a row whose answer has ended is computed, and keeps its KV, until the batch ends; the row of
                  a client that has gone as well, since generate() could not drop it either
    drain         the answers leave when the batch has ended (the engine holds them until then)

max_queue_delay_ms lets an incomplete batch wait for company, as Triton's dynamic batcher does. Decodes do not
read the keys of the pads again, as they do in generate(): padding costs a little less here than there."""

from __future__ import annotations

from itertools import takewhile

from engines.plan import Plan
from engines.schedulers.base import Scheduler
from engines.sequence import Sequence, Status


class StaticScheduler(Scheduler):
    whole_prompts = True

    @property
    def drain(self) -> bool:
        return self.config.drain

    @property
    def joinable(self) -> bool:
        return not self.running

    def schedule(self, now: float) -> Plan:
        if not self.running:
            return self._prefill(self._next_batch()) if self._ready_at(now) <= now else Plan()

        plan = Plan()
        self.decode(self.running, plan)
        for seq in self.ended:
            plan.add_ended(seq)
        return plan

    def next_wakeup(self, now: float) -> float | None:
        if self.running or not self.waiting:
            return super().next_wakeup(now)
        return self._ready_at(now)

    def finish(self, seq: Sequence) -> None:
        if self.config.pad_finished and seq.status is Status.RUNNING:
            self.stand_up(seq)
            self.ended.append(seq)
            seq.status = Status.ENDED
        elif seq.status is not Status.ENDED:
            super().finish(seq)
        self._end_batch()

    def free_some(self, plan: Plan) -> None:
        """Rows that are computed for nobody give way first. Only on_demand and prompt can get here."""
        if self.ended:
            super().finish(self.ended.pop())
        else:
            super().free_some(plan)

    def preempt(self, victim: Sequence | None = None) -> Sequence:
        victim = super().preempt(victim)
        self._end_batch()
        return victim

    def _end_batch(self) -> None:
        """When the longest has ended, so have the rows that only kept it company."""
        while self.ended and not self.running:
            super().finish(self.ended.pop())

    def _prefill(self, batch: list[Sequence]) -> Plan:
        plan = Plan()
        joined = list(takewhile(lambda seq: self.admit(seq, seq.remaining), batch))
        longest = max((seq.remaining for seq in joined), default=0)
        for seq in joined:
            plan.add(seq, seq.remaining, longest - seq.remaining if self.config.left_pad else 0)
        return plan

    def _next_batch(self) -> list[Sequence]:
        """As much of the queue, from its head, as seats, the token budget and KV allow."""
        batch = Plan()
        longest = total = blocks = 0
        for seq in self.entering(batch):
            length, size = max(longest, seq.remaining), len(batch.entries) + 1
            tokens = length * size if self.config.left_pad else total + seq.remaining
            needed = blocks + self.missing(seq, self.reservation.tokens(seq, seq.num_tokens))
            full = size > self.config.max_num_seqs or tokens > self.config.max_num_batched_tokens
            if not full and needed <= self.pool.available:
                batch.add(seq, seq.remaining)
                longest, total, blocks = length, total + seq.remaining, needed
        return [entry.seq for entry in batch.entries]

    def _ready_at(self, now: float) -> float:
        """When the next batch may start: at once if it is full, else when the oldest has waited enough."""
        if not self.waiting or self._is_full(self._next_batch()):
            return now
        oldest = min(seq.arrival for seq in self.waiting)
        return max(now, oldest + self.config.max_queue_delay_ms / 1e3)

    def _is_full(self, batch: list[Sequence]) -> bool:
        """Whether company that may still come would have to wait anyway."""
        return len(batch) < len(self.waiting) or len(batch) == self.config.max_num_seqs

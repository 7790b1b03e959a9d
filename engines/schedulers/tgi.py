"""Text Generation Inference v3 without prefill chunking (backends/v3, `batching_task`).

    1. the batch is empty: the head of the queue and who fits behind it form it; their prompts are computed
    2. before each decode, how many must be able to join, for the decodes to be worth an interruption?
           1                                            if waited >= max_waiting_tokens
           floor(size of the batch * waiting_served_ratio)  before that
    3. if so many can: their prompts are computed alone while the batch pauses; waited = 1
    4. a decode for everyone; waited += 1

waited is 1 after a prefill, as in TGI: max_waiting_tokens=20 lets anybody in after 19 decodes. An
interruption is always followed by a decode (TGI has no way back to 2 without 4); the prefill that forms a
batch is not.

The KV of prompt and limit is reserved at entry (reservation=prompt_plus_max_tokens), so nobody is ever
preempted: TGI's max_batch_total_tokens is the KV pool here, and its worst case is one token less, since the
last token of an answer is never computed. policy.max_batch_prefill_tokens bounds the prompts of one
iteration. An error costs the requests of its pass, not the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

from engines.plan import Plan
from engines.schedulers.base import Scheduler
from engines.sequence import Sequence


@dataclass(frozen=True, slots=True)
class TgiSettings:
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    max_batch_prefill_tokens: int | None = None  # None: the token budget

    def __post_init__(self) -> None:
        if self.waiting_served_ratio < 0:
            raise ValueError(f"waiting_served_ratio={self.waiting_served_ratio}: needs 0 or more")
        if self.max_waiting_tokens < 0:
            raise ValueError(f"max_waiting_tokens={self.max_waiting_tokens}: needs 0 or more")
        if self.max_batch_prefill_tokens is not None and self.max_batch_prefill_tokens < 1:
            raise ValueError(f"max_batch_prefill_tokens={self.max_batch_prefill_tokens}: needs 1 or more")


class TgiScheduler(Scheduler):
    whole_prompts = True
    overlaps = True
    Settings = TgiSettings

    _waited = 1
    _decode_next = False  # the batch has just been interrupted

    def schedule(self, now: float) -> Plan:
        plan = Plan()
        if not (self.running and self._decode_next):
            self._join(plan)
        if plan.entries:
            return plan

        self._decode_next = False
        self._waited += 1
        self.decode(self.running, plan)
        return plan

    def _join(self, plan: Plan) -> None:
        joining = self._next_batch()
        if not joining or len(joining) < self._least():
            return
        self._decode_next = bool(self.running)
        self._waited = 1
        for seq in joining:
            if not self.admit(seq, seq.remaining):
                break  # somebody else's KV is in the way after all
            plan.add(seq, seq.remaining)

    def _least(self) -> int:
        """How many must join for an interruption to be worth it."""
        if not self.running or self._waited >= self.settings.max_waiting_tokens:
            return 1
        return int(len(self.running) * self.settings.waiting_served_ratio)

    def _next_batch(self) -> list[Sequence]:
        """Who could join now: from the head of the queue, as far as seats, prefill budget and KV reach."""
        batch = Plan()
        budget = self.settings.max_batch_prefill_tokens or self.config.max_num_batched_tokens
        blocks = 0
        for seq in self.entering(batch):
            needed = blocks + self.missing(seq, self.reservation.tokens(seq, seq.num_tokens))
            first = not batch.entries and not self.running  # a prompt above the budget still runs, alone
            over = batch.num_tokens + seq.remaining > budget and not first
            full = len(batch.entries) == self.free_seats()
            if not over and not full and needed <= self.pool.available:
                batch.add(seq, seq.remaining)
                blocks = needed
        return [entry.seq for entry in batch.entries]

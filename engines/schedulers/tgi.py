"""Text Generation Inference v3 without prefill chunking (router, `batching_task`).

    the batch is empty: the head of the queue and who fits behind it form it; their prompts are computed
    otherwise, before each decode: how many must join at least, for the decodes to be worth an interruption?
        1                                        if max_waiting_tokens decodes have passed since the last time
        floor(batch size * waiting_served_ratio) before that
    if so many fit: their prompts are computed alone, the others pause, and then all go on together
    otherwise: every running sequence decodes one token

The KV of prompt and limit is reserved at entry (reservation=prompt_plus_max_tokens), so nobody is ever
preempted. policy.max_batch_prefill_tokens bounds the prompts of one such iteration."""

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
    Settings = TgiSettings

    _waited = 0  # decodes since somebody joined

    def schedule(self, now: float) -> Plan:
        plan = Plan()
        least = 1
        if self.running and self._waited < self.settings.max_waiting_tokens:
            least = int(len(self.running) * self.settings.waiting_served_ratio)
        joining = self._next_batch()
        if joining and len(joining) >= least:
            for seq in joining:
                if not self.admit(seq, seq.remaining):
                    break  # somebody else's KV is in the way after all
                plan.add(seq, seq.remaining)
        if plan.entries:
            self._waited = 0
            return plan

        self._waited += 1
        for seq in self.seated():
            if self.make_room(seq, 1, plan):
                plan.add(seq, 1)
        return plan

    def _next_batch(self) -> list[Sequence]:
        """Who could join now: from the head of the queue, as far as seats, prefill budget and KV reach."""
        batch: list[Sequence] = []
        budget = self.settings.max_batch_prefill_tokens or self.config.max_num_batched_tokens
        tokens = blocks = 0
        for seq in self.in_line():
            tokens += seq.remaining
            blocks += self.missing(seq, self.reservation.tokens(seq, seq.num_tokens))
            first = not batch and not self.running  # a prompt above the budget still runs, alone
            over = tokens > budget and not first
            if over or len(batch) == self.free_seats() or blocks > self.pool.available:
                break
            batch.append(seq)
        return batch

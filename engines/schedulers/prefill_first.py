"""Prompts first, in iterations of their own (vLLM v0's default scheduler).

    1. while a seat, the token budget and KV above the watermark allow, the head of the queue gets in, unless
       it was swapped out
    2. if anybody did: this iteration computes their whole prompts, and nothing else
    3. otherwise every running sequence decodes one token; if KV runs out, the victim is preempted
    4. if nobody was: those at the head that were swapped out come back and decode as well

New requests start early and everyone else's stream stands still meanwhile: the longest gap between two tokens
is the time of whole prompts, and under a steady flow of arrivals of several in a row. policy.delay_factor f
holds 1 back, to let prompts gather: until the oldest has waited for f times what the last prompts took.

Other than in v0, a sequence that is alone may go below the watermark, a decode asks for a block only where
its token needs one, and host memory that is full means recompute, not the end of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from engines.plan import Plan
from engines.schedulers.base import Scheduler


@dataclass(frozen=True, slots=True)
class PrefillFirstSettings:
    delay_factor: float = 0.0

    def __post_init__(self) -> None:
        if self.delay_factor < 0:
            raise ValueError(f"delay_factor={self.delay_factor}: needs 0 or more")


class PrefillFirstScheduler(Scheduler):
    whole_prompts = True
    overlaps = True
    Settings = PrefillFirstSettings

    _last = 0.0  # when the last iteration began
    _last_prefilled = False
    _prefill_s = 0.0  # what the last one with prompts took

    def schedule(self, now: float) -> Plan:
        plan = Plan()
        if self._prompts_may_enter(now):
            for seq in self.entering(plan):
                if not seq.swapped and seq.remaining <= self.budget(plan) and self.admit(seq, seq.remaining):
                    plan.add(seq, seq.remaining)
        self._last_prefilled = bool(plan.entries)
        if plan.entries:
            return plan

        self.decode(self.running, plan)
        for seq in self.entering(plan):
            if seq.swapped and self.admit(seq, seq.remaining):
                plan.add(seq, seq.remaining)
        return plan

    def _prompts_may_enter(self, now: float) -> bool:
        if self._last_prefilled:
            self._prefill_s = now - self._last
        self._last = now
        if not self.settings.delay_factor or not self.running or not self.waiting:
            return True
        waited = now - min(seq.arrival for seq in self.waiting)
        return waited > self.settings.delay_factor * self._prefill_s

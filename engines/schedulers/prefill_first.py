"""Prompts first, in iterations of their own (vLLM v0's default scheduler).

    1. while a seat, the token budget and KV above the watermark allow, the head of the queue gets in
    2. if anybody did: this iteration computes their whole prompts, and nothing else
    3. otherwise every running sequence decodes one token; if KV runs out, the victim is preempted

New requests start early and everyone else's stream stands still meanwhile: the longest gap between two tokens
is the time of whole prompts, and under a steady flow of arrivals of several in a row."""

from __future__ import annotations

from engines.plan import Plan
from engines.schedulers.base import Scheduler


class PrefillFirstScheduler(Scheduler):
    whole_prompts = True

    def schedule(self, now: float) -> Plan:
        plan = Plan()
        for seq in self.entering(plan):
            if seq.remaining <= self.budget(plan) and self.admit(seq, seq.remaining):
                plan.add(seq, seq.remaining)

        if not plan.entries:
            for seq in self.seated():
                if self.make_room(seq, 1, plan):
                    plan.add(seq, 1)
        return plan

"""Continuous batching: requests enter and leave at every iteration (Orca, OSDI 2022).

    1. every running sequence decodes one token; if KV runs out, the newest is preempted
    2. if nobody was: while a seat, the token budget and KV allow, the head of the queue joins, prompt and all

Whole prompts share the pass with everyone's decodes, so a long prompt makes one long iteration and everyone
waits for it: the generation stall that chunked prefill removes. With reservation=max_model_len the KV is
Orca's; with on_demand, the default, vLLM's (SOSP 2023)."""

from __future__ import annotations

from engines.plan import Plan
from engines.schedulers.base import Scheduler


class ContinuousScheduler(Scheduler):
    whole_prompts = True

    def schedule(self, now: float) -> Plan:
        plan = Plan()

        for seq in self.seated():
            if self.make_room(seq, 1, plan):
                plan.add(seq, 1)

        # KV that was taken from someone is not for a newcomer of the same iteration (vLLM V1). In order of
        # arrival the victim is the head and would not fit; the rule does not depend on that order.
        while not plan.preempted and self.waiting and self.free_seats():
            seq = self.head()
            prompt = seq.remaining  # of a preempted sequence: prompt and answer so far
            if prompt > self.budget(plan) or not self.admit(seq, prompt):
                break  # nobody overtakes the head of the queue
            plan.add(seq, prompt)
        return plan

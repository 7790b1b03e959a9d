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
    overlaps = True

    def schedule(self, now: float) -> Plan:
        plan = Plan()

        self.decode(self.running, plan)

        for seq in self.entering(plan):
            prompt = seq.remaining  # of a preempted sequence: prompt and answer so far
            if prompt <= self.budget(plan) and self.admit(seq, prompt):
                plan.add(seq, prompt)
        return plan

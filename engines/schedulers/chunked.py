"""Chunked prefill, or stall-free batching (Sarathi-Serve, OSDI 2024; vLLM V1).

    1. every decoding sequence takes one token
    2. what is left of the token budget goes to prompts that are partly computed, oldest first
    3. then to new ones, from the head of the queue, unless KV has run out

It differs from `continuous` in the split of the budget only: no iteration computes more than
max_num_batched_tokens, so no decode waits longer than one such pass, however long the prompts are. Decodes
come first, as in Sarathi-Serve; vLLM V1 walks its running list once and in order, where the piece of an early
prompt can come before a later decode. prefill_chunk_size is vLLM's long_prefill_token_threshold."""

from __future__ import annotations

from dataclasses import dataclass

from engines.plan import Plan
from engines.schedulers.base import Scheduler
from engines.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class ChunkedSettings:
    whole_input_must_fit: bool = True  # vLLM V1's scheduler_reserve_full_isl
    decode_seq_budget: int | None = None  # decodes in one iteration; they take turns. None: all of them

    def __post_init__(self) -> None:
        if self.decode_seq_budget is not None and self.decode_seq_budget < 1:
            raise ValueError(f"decode_seq_budget={self.decode_seq_budget}: needs 1 or more, or null")


class ChunkedScheduler(Scheduler):
    Settings = ChunkedSettings

    _turn = 0  # seq_id after which the next round of decodes begins, where not all fit one iteration

    def schedule(self, now: float) -> Plan:
        plan = Plan()

        # The budget is at least the number of seats (EngineConfig): there is a token for every decode, and
        # one for a partial prompt.
        for seq in self._decodes():
            if seq.status is Status.RUNNING and self.make_room(seq, 1, plan):
                plan.add(seq, 1)

        for seq in self.seated():
            if not seq.decoding:
                chunk = self._chunk(seq, plan)
                if chunk and self.make_room(seq, chunk, plan):
                    plan.add(seq, chunk)

        # KV that was taken from someone is not for a newcomer of the same iteration (vLLM V1). In order of
        # arrival the victim is the head and would not fit; the rule does not depend on that order.
        while not plan.preempted and self.waiting and self.free_seats():
            seq = self.head()
            chunk = self._chunk(seq, plan)
            if not chunk or not self._input_fits(seq) or not self.admit(seq, chunk):
                break  # nobody overtakes the head of the queue
            plan.add(seq, chunk)
        return plan

    def _decodes(self) -> list[Sequence]:
        """Who takes a token: every decoding sequence, or, under decode_seq_budget, those whose turn it is."""
        decoding = [seq for seq in self.running if seq.decoding]
        budget = self.settings.decode_seq_budget
        if budget is None or len(decoding) <= budget:
            return decoding
        in_turn = sorted(decoding, key=lambda seq: (seq.seq_id <= self._turn, seq.seq_id))[:budget]
        self._turn = in_turn[-1].seq_id
        return in_turn

    def _chunk(self, seq: Sequence, plan: Plan) -> int:
        """The next piece of its prompt: what is left of it, of the budget, or the longest piece allowed."""
        longest = self.config.prefill_chunk_size or self.config.max_num_batched_tokens
        return min(seq.remaining, longest, self.budget(plan))

    def _input_fits(self, seq: Sequence) -> bool:
        """A check, not a reservation: with on_demand, KV is taken piece by piece. Without it, prompts enter
        by half and then take each other's blocks away. vLLM V1 (scheduler_reserve_full_isl) looks at the free
        blocks alone; here those that running sequences still need for their own prompts are set aside."""
        if not self.settings.whole_input_must_fit:
            return True
        promised = sum(self.missing(s, s.num_tokens) for s in self.running)
        return self.missing(seq, seq.num_tokens) + promised <= self.pool.available

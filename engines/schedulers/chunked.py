"""Chunked prefill, or stall-free batching (Sarathi-Serve, OSDI 2024; vLLM V1).

    1. every decoding sequence takes one token
    2. what is left of the token budget goes to prompts that are partly computed, oldest first
    3. then to new ones, in the order of the queue, unless KV has run out

It differs from `continuous` in the split of the budget only: no iteration computes more than
max_num_batched_tokens, so no decode waits longer than one such pass, however long the prompts are. Decodes
come first, as in Sarathi-Serve; vLLM V1 walks its running list once and in order, where the piece of an early
prompt can come before a later decode. Sarathi-Serve takes the KV of the whole prompt at entry
(reservation=prompt), vLLM V1 that of the piece (on_demand). prefill_chunk_size is vLLM's
long_prefill_token_threshold, whole_input_must_fit its scheduler_reserve_full_isl. decode_seq_budget bounds
the decodes of one iteration; they take turns, so nobody starves."""

from __future__ import annotations

from dataclasses import dataclass

from engines.plan import Plan
from engines.schedulers.base import Scheduler
from engines.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class ChunkedSettings:
    whole_input_must_fit: bool = True
    decode_seq_budget: int | None = None  # None: every decoding sequence takes a token in every iteration
    pieces_in_blocks: bool = False  # pieces but the last are multiples of the block (TensorRT-LLM)

    def __post_init__(self) -> None:
        if self.decode_seq_budget is not None and self.decode_seq_budget < 1:
            raise ValueError(f"decode_seq_budget={self.decode_seq_budget}: needs 1 or more, or null")


class ChunkedScheduler(Scheduler):
    overlaps = True
    Settings = ChunkedSettings

    _turn = -1  # seq_id after which the next round of decodes begins, where not all fit one iteration

    def schedule(self, now: float) -> Plan:
        plan = Plan()
        decoding: list[Sequence] = []
        partial: list[Sequence] = []
        for seq in self.running:  # Sequence.decoding, spelled out: the call is a tenth of the step
            known = seq.num_tokens - 1
            (decoding if seq.num_computed == known >= seq.prompt_len else partial).append(seq)

        # The budget is at least the number of seats (EngineConfig): there is a token for every decode, and
        # one for a partial prompt.
        if len(decoding) <= (self.settings.decode_seq_budget or len(decoding)):
            self.decode(decoding, plan)
        else:
            self._decode_in_turn(decoding, plan)

        for seq in self.entering(plan, partial):
            chunk = self._chunk(seq, plan)
            if not chunk:
                continue
            if seq.status is Status.RUNNING:
                if self.make_room(seq, chunk, plan):
                    plan.add(seq, chunk)
            elif self._input_fits(seq, partial) and self.admit(seq, chunk):
                plan.add(seq, chunk)
                partial.append(seq)
        return plan

    def _decode_in_turn(self, decoding: list[Sequence], plan: Plan) -> None:
        """A token for as many as decode_seq_budget allows: those that have waited the longest for theirs."""
        for seq in sorted(decoding, key=lambda seq: (seq.seq_id <= self._turn, seq.seq_id)):
            if len(plan.entries) == self.settings.decode_seq_budget:
                return
            if seq.status is Status.RUNNING and self.make_room(seq, 1, plan):
                plan.add(seq, 1)
                self._turn = seq.seq_id

    def _chunk(self, seq: Sequence, plan: Plan) -> int:
        """The next piece of its prompt: what is left of it, of the budget, or the longest piece allowed."""
        longest = self.config.prefill_chunk_size or self.config.max_num_batched_tokens
        chunk = min(seq.remaining, longest, self.prompt_budget(seq, plan))
        if not self.settings.pieces_in_blocks or chunk == seq.remaining:
            return chunk
        return chunk - chunk % self.pool.block_size or chunk  # less than a block is left: better than nothing

    def _input_fits(self, seq: Sequence, partial: list[Sequence]) -> bool:
        """A check, not a reservation: with on_demand, KV is taken piece by piece. Without it, prompts enter
        by half and then take each other's blocks away. vLLM V1 (scheduler_reserve_full_isl) looks at the free
        blocks alone; here those that running sequences still need for their own prompts are set aside."""
        if not self.settings.whole_input_must_fit:
            return True
        promised = sum(self.missing(s, s.num_tokens) for s in partial)
        return self.missing(seq, seq.num_tokens) + promised <= self.pool.available

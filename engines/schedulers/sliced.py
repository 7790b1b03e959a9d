"""Slice-level scheduling (SCLS, arXiv 2406.13511): static batches that run for a slice of S tokens only.

    at the border of a slice:
    1. whoever has not ended goes back to the queue with its answer so far as part of its prompt; its KV is
       given up
    2. if no batch is planned: sort the whole queue by length, cut it (dynamic programming) to the least time,
       time(N, L) = prefill(N * L) + S * decode(N), with N * (L + S) tokens of KV at most
    3. the next planned batch is prefilled in one pass, then it decodes until its slice is over

Within a slice it is a static batch: a row that has ended is computed to the border (pad_finished). No answer
holds others up for longer than a slice, and KV never runs out; the price is a prefill per slice. With a
prefix cache that price is nearly gone, since the blocks of the slice before are still there.

Other than in the paper: one instance, so batches run in the order of their oldest request rather than longest
job first; KV is in blocks and holds no pads, so a batch needs the sum of its own rooms; costs are settings
rather than fitted; a batch all of whose answers have ended does not run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.config import EngineConfig
from engines.plan import Plan
from engines.reservation import Reservation
from engines.schedulers.static import StaticScheduler
from engines.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class SlicedSettings:
    """The costs are relative: only their ratios matter. The paper fits them by profiling."""

    slice_tokens: int = 32
    prefill_cost: float = 1.0  # of a token of a prompt
    step_cost: float = 8.0  # of an iteration, whatever is in it
    decode_cost: float = 1.0  # of a sequence in an iteration

    def __post_init__(self) -> None:
        if self.slice_tokens < 1:
            raise ValueError(f"slice_tokens={self.slice_tokens}: needs 1 or more")
        for name in ("prefill_cost", "step_cost", "decode_cost"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: needs 0 or more")


class SlicedScheduler(StaticScheduler):
    whole_prompts = True
    in_turn = False
    Settings = SlicedSettings

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reservation = Reservation("slice", self._room)
        self._rooms: dict[int, int] = {}  # by seq_id: tokens that the running batch holds KV for
        self._planned: list[list[Sequence]] = []  # the batches of this round that have not run
        self._iterations = 0  # that the running batch has left

    def limit(self, config: EngineConfig) -> None:
        super().limit(config)
        self._planned = []  # they were cut to other limits

    def published(self, plan: Plan, seconds: float) -> None:
        super().published(plan, seconds)
        self._iterations -= 1
        if self._iterations == 0:
            for seq in list(self.running):
                self._requeue(seq)
            self._end_batch()

    def _requeue(self, seq: Sequence) -> None:
        """Its slice is over and its answer is not. Not a preemption: the next slice is its turn."""
        self.stand_up(seq)
        self.release(seq)
        seq.status = Status.PREEMPTED
        self.waiting.push(seq)

    def _prefill(self, batch: list[Sequence]) -> Plan:
        self._rooms = {seq.seq_id: self._room(seq) for seq in batch}
        self._iterations = self.settings.slice_tokens
        plan = super()._prefill([self.look_up(seq) for seq in batch])
        behind = batch[len(plan.entries) :]  # a watermark was in their way: they are next, in this round
        self._planned = ([behind] if behind else []) + self._planned[1:]
        return plan

    def _room(self, seq: Sequence) -> int:
        """Tokens that it needs KV for until its slice is over."""
        if seq.status in (Status.RUNNING, Status.ENDED):
            return self._rooms[seq.seq_id]
        return min(seq.num_tokens + self.settings.slice_tokens, seq.prompt_len + seq.max_tokens)

    def _next_batch(self) -> list[Sequence]:
        """The next batch of this round; a round takes the whole queue, so nobody is left behind for ever."""
        waiting = (Status.WAITING, Status.PREEMPTED)
        self._planned = [[s for s in batch if s.status in waiting] for batch in self._planned]
        self._planned = [batch for batch in self._planned if batch] or self._cut()
        return self._planned[0] if self._planned else []

    def _cut(self) -> list[list[Sequence]]:
        """Batches of the queue, sorted by length, of least estimated time; those with the first in line
        first."""
        queue = sorted(self.waiting, key=lambda seq: seq.num_tokens)
        blocks = np.cumsum([0, *(self.pool.blocks_for(self._room(seq)) for seq in queue)])
        fits = np.searchsorted(blocks, blocks - self.pool.usable)  # where a batch up to n may begin, by KV
        sizes = np.arange(1, min(len(queue), self.config.max_num_seqs) + 1)
        prefill, decode = self._times(sizes)
        best = np.zeros(len(queue) + 1)  # time of the first n
        start = [0] * (len(queue) + 1)  # where the last batch of the first n begins
        for end in range(1, len(queue) + 1):
            longest = queue[end - 1].num_tokens
            most = min(len(sizes), self.config.max_num_batched_tokens // longest)
            lowest = min(end - 1, max(0, end - most, int(fits[end])))
            last = best[lowest:end][::-1] + decode[: end - lowest] + prefill[: end - lowest] * longest
            size = int(last.argmin()) + 1
            best[end], start[end] = last[size - 1], end - size
        batches = []
        end = len(queue)
        while end:
            batches.append(sorted(queue[start[end] : end], key=self.waiting.key))
            end = start[end]
        return sorted(batches, key=lambda batch: self.waiting.key(batch[0]))

    def _times(self, sizes: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Of batches of these sizes: the prefill, for each token of the longest prompt, and the decodes."""
        s = self.settings
        return s.prefill_cost * sizes, s.slice_tokens * (s.step_cost + s.decode_cost * sizes)

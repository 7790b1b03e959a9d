"""What all schedulers share: the seats, the queue, the KV pool, and how a sequence moves between them.

A subclass decides in `schedule` who gets how many tokens of the next iteration. `running` is in the order in
which seats were given: to the head of the queue, unless a subclass says otherwise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from engines.config import EngineConfig, settings_of
from engines.kv_pool import BlockPool
from engines.plan import Plan
from engines.preemption import Preemption
from engines.queues.base import WaitingQueue
from engines.reservation import Reservation
from engines.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class NoSettings:
    """A scheduler without settings of its own."""


class Scheduler(ABC):
    whole_prompts: ClassVar[bool] = False  # it never cuts a prompt: the budget must hold the longest
    Settings: ClassVar[type[Any]] = (
        NoSettings  # a frozen dataclass: the keys of engine.policy; may raise ValueError
    )

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        waiting: WaitingQueue,
        reservation: Reservation,
        preemption: Preemption,
    ) -> None:
        self.config = config
        self.settings: Any = settings_of(config.policy, self.Settings)
        self.pool = pool
        self.waiting = waiting
        self.reservation = reservation
        self.preemption = preemption
        self.running: list[Sequence] = []
        self.ended: list[Sequence] = []  # rows that a static batch computes for nobody

    @property
    def drain(self) -> bool:
        """Whether answers leave only when the whole batch has ended."""
        return False

    @abstractmethod
    def schedule(self, now: float) -> Plan:
        """The next iteration. With sequences running it is never empty. `now` is in seconds of the engine's
        clock."""

    def next_wakeup(self, now: float) -> float | None:
        """When `schedule` next has something to do: now, a later time, or None until a request arrives."""
        return now if self.running or self.waiting else None

    def add(self, seq: Sequence) -> None:
        self.waiting.push(seq)

    def published(self, plan: Plan) -> None:
        """The pass of `plan` is over, and what has ended has left. For rules that count what was done."""
        for entry in plan.entries:
            self.waiting.served(entry.seq, entry.num_tokens)

    def finish(self, seq: Sequence) -> None:
        """The answer has ended, or nobody wants it any more: seat and KV are free. Harmless when repeated."""
        if seq in self.running:
            self.running.remove(seq)
        self.waiting.remove(seq)
        self.pool.release(seq.block_table)
        seq.status = Status.FINISHED

    def seated(self) -> Iterator[Sequence]:
        """The running sequences, first seat first; those that lose their seat meanwhile are left out."""
        return (seq for seq in list(self.running) if seq.status is Status.RUNNING)

    def budget(self, plan: Plan) -> int:
        """Tokens that the iteration may still take."""
        return self.config.max_num_batched_tokens - plan.num_tokens

    def free_seats(self) -> int:
        return self.config.max_num_seqs - len(self.running)

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """KV for `num_tokens` more, and for what the reservation keeps ahead. All or nothing."""
        return self.pool.grow(seq.block_table, self.reservation.tokens(seq, seq.num_computed + num_tokens))

    def admit(self, seq: Sequence, num_tokens: int) -> bool:
        """Give a waiting sequence a seat, if there is KV for its first `num_tokens` and, while others run,
        the watermark stays free."""
        wanted = self.reservation.tokens(seq, seq.num_computed + num_tokens)
        spare = self.pool.num_free - self.pool.missing(seq.block_table, wanted)
        if self.running and spare < self.config.kv_watermark * self.pool.usable:
            return False
        if not self.reservation.admits(seq, self.running, self.pool) or not self.reserve(seq, num_tokens):
            return False
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.status = Status.RUNNING
        return True

    def make_room(self, seq: Sequence, num_tokens: int, plan: Plan) -> bool:
        """KV for `num_tokens` more of a running sequence, at the cost of those behind it in the order of
        preemption. False: it was the last of them."""
        while not self.reserve(seq, num_tokens):
            self.free_some(plan)
            if seq.status is not Status.RUNNING:
                return False
        return True

    def free_some(self, plan: Plan) -> None:
        """KV has run out: take someone's, and take back what was planned for them."""
        victim = self.preempt()
        plan.drop(victim)
        plan.preempted.append(victim)

    def preempt(self) -> Sequence:
        """Take the seat and the KV of the victim; it waits again."""
        victim = self.preemption.victim(self.running)
        self.running.remove(victim)
        self.preemption.evict(victim, self.pool)
        self.waiting.push(victim)
        return victim

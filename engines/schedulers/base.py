"""What all schedulers share: the seats, the queue, the KV pool, and how a sequence moves between them.

A subclass decides in `schedule` who gets how many tokens of the next iteration. `running` is in the order in
which seats were given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator
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
    in_turn: ClassVar[bool] = True  # it takes who is next from `entering`; else it cannot have lanes
    overlaps: ClassVar[bool] = False  # it may plan while a pass runs: lengths are all that it looks at
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
        self._seats_given = 0
        self.ended: list[Sequence] = []  # rows that a static batch computes for nobody

    @property
    def drain(self) -> bool:
        """Whether answers leave only when the whole batch has ended."""
        return False

    @property
    def joinable(self) -> bool:
        """Whether the next iteration may take in somebody new, seats and KV permitting."""
        return True

    @abstractmethod
    def schedule(self, now: float) -> Plan:
        """The next iteration. With sequences running it is never empty. `now` is in seconds of the engine's
        clock."""

    def limit(self, config: EngineConfig) -> None:
        """Other limits hold from now on. They never ask for a seat back (engines/gate.py)."""
        self.config = config

    def next_wakeup(self, now: float) -> float | None:
        """When `schedule` next has something to do: now, a later time, or None until a request arrives."""
        return now if self.running or self.waiting else None

    def add(self, seq: Sequence) -> None:
        self.waiting.push(seq)

    def published(self, plan: Plan, seconds: float) -> None:
        """The pass of `plan` is over, after so long, and what has ended has left. For rules that count what
        was done."""
        if type(self.waiting).served is not WaitingQueue.served:  # most orders do not count
            for entry in plan.entries:
                self.waiting.served(entry.seq, entry.num_tokens)
        self.waiting.passed(plan.num_tokens, seconds)

    def finish(self, seq: Sequence) -> None:
        """The answer has ended, or nobody wants it any more: seat and KV are free. Harmless when repeated."""
        if seq.status is Status.RUNNING:
            self.stand_up(seq)
        self.waiting.gone(seq)
        self.release(seq)
        seq.status = Status.FINISHED

    def seated(self) -> Iterator[Sequence]:
        """The running sequences, first seat first; those that lose their seat meanwhile are left out."""
        return (seq for seq in list(self.running) if seq.status is Status.RUNNING)

    def budget(self, plan: Plan) -> int:
        """Tokens that the iteration may still take."""
        return self.config.max_num_batched_tokens - plan.num_tokens

    def prompt_budget(self, seq: Sequence, plan: Plan) -> int:
        """Tokens of its prompt that the iteration may still take: its lane may have a budget of its own."""
        return min(self.budget(plan), self.waiting.budget(seq, plan))

    def free_seats(self) -> int:
        return self.config.max_num_seqs - len(self.running)

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """KV for `num_tokens` more, and for what the reservation keeps ahead. All or nothing."""
        return self.pool.grow(seq.block_table, self.reservation.tokens(seq, seq.num_computed + num_tokens))

    def release(self, seq: Sequence) -> None:
        """Its KV is nobody's any more; what the prefix cache keeps of it can be found until it is evicted."""
        self.pool.release(seq.block_table)
        self.preemption.forget(seq)
        seq.num_computed = 0

    def entering(self, plan: Plan, partial: Iterable[Sequence] = ()) -> Iterator[Sequence]:
        """Who may enter, the next one each time that it is asked for, looked up. Whoever has not been added
        to `plan` by then could not enter, and nobody overtakes it (in its lane, if there are lanes). Running
        sequences of `partial`, whose prompts are partly computed, come before those that wait (of their
        lane).

        KV that was taken from someone is not for a newcomer of the same iteration (vLLM V1)."""
        if not partial and not self.free_seats():
            return
        for seq in self.waiting.in_turn(plan, partial):
            if seq.status is Status.RUNNING:
                yield seq
            elif self.free_seats() > 0 and not plan.preempted:
                yield self.look_up(seq)

    def look_up(self, seq: Sequence) -> Sequence:
        """What the prefix cache has of a waiting sequence counts as computed: `remaining` is what a seat
        would cost it now. Its newest token never does, since somebody has to yield the next one. What was
        put away in host memory counts as it is."""
        if seq.swapped:
            return seq
        most = (seq.num_tokens - 1) // self.pool.block_size
        seq.num_computed = len(self.pool.find(seq.block_keys, most)) * self.pool.block_size
        return seq

    def missing(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that it takes until `seq` holds num_tokens; what it would share with others takes none."""
        return self.pool.missing(seq.block_table, num_tokens, self._hit(seq))

    def _hit(self, seq: Sequence) -> list[int]:
        """Of a waiting sequence, the blocks that it would begin with."""
        if seq.status is Status.RUNNING:
            return []
        return self.pool.find(seq.block_keys, seq.num_computed // self.pool.block_size)

    def admit(self, seq: Sequence, num_tokens: int) -> bool:
        """Give a waiting sequence a seat, if there is KV for its first `num_tokens` and, while others run,
        the watermark stays free. What the prefix cache or the host has of it comes first."""
        hit = self._hit(seq)
        if not seq.swapped and len(hit) * self.pool.block_size < seq.num_computed:
            self.look_up(seq)  # those admitted before it have taken what it would have found
            return False
        wanted = self.reservation.tokens(seq, seq.num_computed + num_tokens)
        spare = self.pool.available - self.pool.missing(seq.block_table, wanted, hit)
        if self.running and spare < self.config.kv_watermark * self.pool.usable:
            return False
        high = self.config.kv_high_watermark
        if high is not None and self.running and self.pool.num_live > high * self.pool.usable:
            return False
        if not self.reservation.admits(seq, self.running, self.pool):
            return False
        if not self.pool.grow(seq.block_table, wanted, hit):
            return False
        seq.start(len(hit))
        self.preemption.restore(seq, len(hit))
        self.waiting.entered(seq)
        self.running.append(seq)
        seq.seat = self._seats_given
        self._seats_given += 1
        seq.status = Status.RUNNING
        return True

    def stand_up(self, seq: Sequence) -> None:
        """It gives its seat back. Its status and its KV are for the caller to see to."""
        del self.running[bisect_left(self.running, seq.seat, key=_seat)]  # remove() would look at everyone

    def make_room(self, seq: Sequence, num_tokens: int, plan: Plan) -> bool:
        """KV for `num_tokens` more of a running sequence, at the cost of those behind it in the order of
        preemption. False: it was the last of them."""
        while not self.reserve(seq, num_tokens):
            self.free_some(plan)
            if seq.status is not Status.RUNNING:
                return False
        return True

    def decode(self, sequences: Iterable[Sequence], plan: Plan) -> None:
        """A token for each of these running sequences; those that lose their seat meanwhile get none."""
        running, size = Status.RUNNING, self.pool.block_size
        sequences = list(sequences)
        # Most have room in their last block, and then there is nothing to ask for. (What a reservation keeps
        # ahead was taken when they got their seats.)
        for seq in [seq for seq in sequences if seq.num_computed >= len(seq.block_table) * size]:
            if seq.status is running:
                self.make_room(seq, 1, plan)
        plan.add_decodes([seq for seq in sequences if seq.status is running])

    def free_some(self, plan: Plan) -> None:
        """KV has run out: take someone's, and take back what was planned for them."""
        victim = self.preempt()
        plan.drop(victim)
        plan.preempted.append(victim)

    def preempt(self, victim: Sequence | None = None) -> Sequence:
        """Take the seat and the KV of the victim, by default of whoever has to give way; it waits again."""
        victim = self.preemption.victim(self.running) if victim is None else victim
        self.stand_up(victim)
        self.preemption.evict(victim, self.pool)
        self.waiting.push(victim)
        return victim


def _seat(seq: Sequence) -> int:
    return seq.seat

"""Lanes: requests of different classes wait in queues of their own.

    1. each lane has its order (engine.queue, unless it names one), and may have a bound on its seats and on
       the prompt tokens that one iteration computes for it
    2. next is the lane that has had the fewest tokens for its weight; an idle one saves no credit, and what
       it does not use goes to the others (counters and lift: engines/shares.py)
    3. a lane at a bound of its own waits for nobody and nobody waits for it
    4. a lane whose head finds no KV, seat or budget does not block the others either, until one of them has
       had patience_tokens (at weight 1) more than its share: then it is its turn

Requests whose class no lane names are the lane `default`.

Bound: two lanes that wait without a pause and below their own bounds have had, over any time, the same number
of tokens per weight but for patience_tokens, one iteration and what running sequences still compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain, islice
from math import inf
from typing import Any

from engines.plan import Kind, Plan
from engines.queues.base import NO_LIMIT, Key, WaitingQueue
from engines.sequence import Sequence, Status
from engines.shares import Shares, check_weight

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class LaneSettings:
    classes: tuple[str, ...] = ()  # request classes; without any, the lane's own name
    weight: float = 1.0
    max_num_seqs: int | None = None  # seats
    max_num_batched_tokens: int | None = (
        None  # prompt tokens in one iteration; alone, a whole prompt may exceed
    )
    patience_tokens: int = 8192
    queue: str | None = None  # None: engine.queue, with engine.queue_policy
    queue_policy: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_weight("weight", self.weight)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: needs 1 or more, or null")
        if self.patience_tokens < 0:
            raise ValueError(f"patience_tokens={self.patience_tokens}: needs 0 or more")
        if self.queue_policy and self.queue is None:
            raise ValueError(f"queue_policy={dict(self.queue_policy)}: needs queue beside it")


class Lanes(WaitingQueue):
    """`order` makes the queue of a lane. `whole_prompts`: the scheduler never cuts one."""

    def __init__(
        self,
        lanes: Mapping[str, LaneSettings],
        order: Callable[[LaneSettings], WaitingQueue],
        whole_prompts: bool,
    ) -> None:
        super().__init__()
        self.lanes = {**lanes, DEFAULT: lanes.get(DEFAULT, LaneSettings())}
        self._queues = {name: order(lane) for name, lane in self.lanes.items()}
        self._lane_of = {c: name for name, lane in self.lanes.items() for c in lane.classes or (name,)}
        heaviest_first = sorted(self.lanes, key=lambda name: -self.lanes[name].weight)
        self._rank = {name: rank for rank, name in enumerate(heaviest_first)}
        self._shares = Shares({name: lane.weight for name, lane in self.lanes.items()})
        self._seated: dict[str, set[int]] = {name: set() for name in self.lanes}
        self._whole_prompts = whole_prompts
        self._tally = _Tally(self.lane)

    def lane(self, seq: Sequence) -> str:
        return self._lane_of.get(seq.request_class, DEFAULT)

    def key(self, seq: Sequence) -> Key:
        """For `least_urgent`: lanes of small weight give way first, each in its own order."""
        name = self.lane(seq)
        return (self._rank[name], *self._queues[name].key(seq))

    def __iter__(self) -> Iterator[Sequence]:
        """Lane by lane, the one whose turn it is first. Who may enter is for `in_turn` to say."""
        for name in sorted(self._queues, key=lambda name: (self._shares.of(name), self._rank[name])):
            yield from self._queues[name]

    def in_turn(self, plan: Plan, partial: Iterable[Sequence] = ()) -> Iterator[Sequence]:
        """Each lane's partly computed prompts come before those of its queue."""
        begun: dict[str, list[Sequence]] = {}
        for begun_seq in partial:
            begun.setdefault(self.lane(begun_seq), []).append(begun_seq)
        lines = {
            name: chain(begun.get(name, ()), queue)
            for name, queue in self._queues.items()
            if name in begun or (queue and self._free_seats(name) > 0)
        }
        heap = [(self._shares.of(name), self._rank[name], name) for name in lines]
        heapify(heap)
        planned = dict.fromkeys(lines, 0)  # that are to enter and still wait: a draft of a batch
        limit = inf  # no lane that has had more may take what another one waits for
        while heap:
            counter, rank, name = heap[0]
            seq = next(lines[name], None)
            if seq is None or not self._may_go_on(seq, name, plan, planned[name]):
                heappop(heap)
                continue
            waits = seq.status is not Status.RUNNING
            if waits and counter > limit:
                heappop(heap)
                continue
            cost = self._shares.cost(name, seq.remaining)
            yield seq
            if plan.ends_with(seq):
                planned[name] += seq.status is not Status.RUNNING
                heapreplace(heap, (counter + cost, rank, name))
            elif waits:
                limit = min(limit, counter + self.lanes[name].patience_tokens)
                heappop(heap)

    def _may_go_on(self, seq: Sequence, name: str, plan: Plan, planned: int) -> bool:
        """Whether the lane's own bounds let it have this one."""
        if seq.status is not Status.RUNNING and planned >= self._free_seats(name):
            return False
        return self.budget(seq, plan) >= (seq.remaining if self._whole_prompts else 1)

    def budget(self, seq: Sequence, plan: Plan) -> int:
        name = self.lane(seq)
        bound = self.lanes[name].max_num_batched_tokens
        if bound is None:
            return NO_LIMIT
        had = self._tally.of(plan, name)
        if self._whole_prompts and not had:
            return max(bound, seq.remaining)
        return bound - had

    def _free_seats(self, name: str) -> int:
        bound = self.lanes[name].max_num_seqs
        return NO_LIMIT if bound is None else bound - len(self._seated[name])

    # -- what it is told

    def push(self, seq: Sequence) -> None:
        name = self.lane(seq)
        self._note(seq)
        self._keys[seq.seq_id] = ()
        self._seated[name].discard(seq.seq_id)
        self._queues[name].push(seq)
        self._turn(name)

    def remove(self, seq: Sequence) -> None:
        self._left(seq, self._queues[self.lane(seq)].remove)

    def entered(self, seq: Sequence) -> None:
        self._seated[self.lane(seq)].add(seq.seq_id)
        self._left(seq, self._queues[self.lane(seq)].entered)

    def gone(self, seq: Sequence) -> None:
        self._seated[self.lane(seq)].discard(seq.seq_id)
        self._left(seq, self._queues[self.lane(seq)].gone)

    def _left(self, seq: Sequence, tell: Callable[[Sequence], None]) -> None:
        self._new.pop(seq.seq_id, None)
        self._keys.pop(seq.seq_id, None)
        tell(seq)
        self._turn(self.lane(seq))

    def _turn(self, name: str) -> None:
        """It saves no credit while it asks for nothing or is at its own bound."""
        if self._queues[name] and self._free_seats(name) > 0:
            self._shares.wait(name)
        else:
            self._shares.rest(name)

    def served(self, seq: Sequence, num_tokens: int) -> None:
        name = self.lane(seq)
        self._shares.charge(name, num_tokens)
        self._queues[name].served(seq, num_tokens)

    def passed(self, num_tokens: int, seconds: float) -> None:
        for queue in self._queues.values():
            queue.passed(num_tokens, seconds)

    def hopeless(self, now: float) -> list[Sequence]:
        return [seq for queue in self._queues.values() for seq in queue.hopeless(now)]

    def next_hopeless(self) -> float | None:
        times = [queue.next_hopeless() for queue in self._queues.values()]
        return min((time for time in times if time is not None), default=None)

    def disorder(self) -> str | None:
        for name, queue in self._queues.items():
            wrong = queue.disorder()
            if wrong is not None:
                return f"lane {name}: {wrong}"
            seats, bound = len(self._seated[name]), self.lanes[name].max_num_seqs
            if bound is not None and seats > bound:
                return f"lane {name} has {seats} seats, its max_num_seqs is {bound}"
        return None


class _Tally:
    """Prompt tokens of each lane in the plan that is being made. Counts each entry once, and anew after a
    preemption has taken some back."""

    def __init__(self, lane: Callable[[Sequence], str]) -> None:
        self._lane = lane
        self._plan: Plan | None = None
        self._seen = self._preempted = 0
        self._tokens: dict[str, int] = {}

    def of(self, plan: Plan, name: str) -> int:
        if plan is not self._plan or len(plan.preempted) != self._preempted:
            self._plan, self._preempted = plan, len(plan.preempted)
            self._seen, self._tokens = 0, {}
        for entry in islice(plan.entries, self._seen, None):
            if entry.kind in (Kind.PREFILL, Kind.RECOMPUTE):
                lane = self._lane(entry.seq)
                self._tokens[lane] = self._tokens.get(lane, 0) + entry.num_tokens
        self._seen = len(plan.entries)
        return self._tokens.get(name, 0)

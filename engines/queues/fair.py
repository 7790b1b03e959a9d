"""Fair shares of tokens between tenants (VTC: Sheng et al., Fairness in Serving Large Language Models, OSDI
2024).

    counter = (prompt_cost * prompt tokens + output_cost * output tokens) / weight, per tenant
    1. next is the oldest request of the tenant with the smallest counter
    2. when it enters, its tenant is charged for its prompt; then for each output token
    3. a tenant that begins to wait is lifted to the smallest counter of those that wait (engines/shares.py)

What the prefix cache had costs nothing, and what is computed again after a preemption is nobody's wish: it is
not charged. Whoever has had a seat keeps its place, in front of those that have not, by the counter that its
tenant had when it first entered. That is also the order in which `least_urgent` takes seats away: it never
changes, so two sequences cannot evict each other in turn.

Bound (theorem 4.4 of the paper): of two tenants that wait without a pause, over any time, the shares (cost
over weight) differ by at most 2 * max(prompt_cost * longest prompt, output_cost * tokens in the running
batch) over the smaller weight. Nobody is hurt by the load of another tenant, only by their number."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Any, ClassVar

from engines.queues.base import Key, WaitingQueue
from engines.sequence import Sequence
from engines.shares import MOST_WEIGHT, Shares, check_weight


@dataclass(frozen=True, slots=True)
class FairSettings:
    prompt_cost: float = 1.0
    output_cost: float = 2.0
    weights: Mapping[str, float] = field(default_factory=dict)  # of tenants; 1 for those that are not here

    def __post_init__(self) -> None:
        for name in ("prompt_cost", "output_cost"):
            if not 0 <= getattr(self, name) <= MOST_WEIGHT:
                raise ValueError(f"{name}={getattr(self, name)}: needs 0 or more, at most {MOST_WEIGHT:g}")
        for tenant, weight in self.weights.items():
            check_weight(f"weights.{tenant}", weight)


@dataclass(slots=True)
class _Started:
    counter: float  # of its tenant, when it first entered
    charged: int = 0  # output tokens


class FairQueue(WaitingQueue):
    """`_lines` holds those that never had a seat, tenant by tenant; the entries of the base class those that
    lost theirs."""

    Settings: ClassVar[type[Any]] = FairSettings

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._shares = Shares(self.settings.weights)
        self._lines: dict[str, list[Sequence]] = {}
        self._started: dict[int, _Started] = {}  # by seq_id, until they are gone

    def key(self, seq: Sequence) -> Key:
        started = self._started.get(seq.seq_id)
        if started is not None:
            return (0, started.counter, seq.seq_id)
        return (1, self._shares.of(seq.tenant), seq.seq_id)

    def __iter__(self) -> Iterator[Sequence]:
        """As if each were charged for its prompt before the next is chosen."""
        yield from super().__iter__()
        yield from self._by_share({}, set())

    def _by_share(self, charged: Mapping[str, float], had: set[int]) -> Iterator[Sequence]:
        """Those that never had a seat, without `had`, as if tenants had been charged so much more."""
        heap = [
            (self._shares.of(tenant) + charged.get(tenant, 0.0), line[0].seq_id, tenant)
            for tenant, line in self._lines.items()
        ]
        heapify(heap)
        lines: dict[str, Iterator[Sequence]] = {}
        while heap:
            counter, _, tenant = heap[0]
            if tenant not in lines:
                lines[tenant] = iter(list(self._lines[tenant]))  # what is yielded may leave meanwhile
            seq = next((seq for seq in lines[tenant] if seq.seq_id not in had), None)
            if seq is None:
                heappop(heap)
                continue
            cost = self._prompt_cost(seq)
            yield seq
            heapreplace(heap, (counter + cost, seq.seq_id, tenant))

    def _prompt_cost(self, seq: Sequence) -> float:
        return self._shares.cost(seq.tenant, self.settings.prompt_cost * seq.remaining)

    def push(self, seq: Sequence) -> None:
        if seq.seq_id in self._started:
            super().push(seq)
            return
        self._note(seq)
        self._shares.wait(seq.tenant)
        self._keys[seq.seq_id] = (seq.seq_id,)
        insort(self._lines.setdefault(seq.tenant, []), seq, key=_arrival)

    def remove(self, seq: Sequence) -> None:
        if seq.seq_id in self._started or seq.seq_id not in self._keys:
            super().remove(seq)
            return
        del self._keys[seq.seq_id]
        self._new.pop(seq.seq_id, None)
        line = self._lines[seq.tenant]
        del line[bisect_left(line, seq.seq_id, key=_arrival)]
        if not line:
            del self._lines[seq.tenant]
            self._shares.rest(seq.tenant)

    def entered(self, seq: Sequence) -> None:
        counter = self._shares.of(seq.tenant)
        self.remove(seq)
        if seq.seq_id not in self._started:
            self._started[seq.seq_id] = _Started(counter)
            self._shares.charge(seq.tenant, self.settings.prompt_cost * seq.remaining)

    def served(self, seq: Sequence, num_tokens: int) -> None:
        """Output tokens are counted where they appear, whatever the pass had to compute for them."""
        started = self._started.get(seq.seq_id)
        if started is not None:
            output = seq.num_tokens - seq.prompt_len
            if output > started.charged:
                self._shares.charge(seq.tenant, self.settings.output_cost * (output - started.charged))
                started.charged = output

    def gone(self, seq: Sequence) -> None:
        self.served(seq, 0)
        self.remove(seq)
        self._started.pop(seq.seq_id, None)

    def disorder(self) -> str | None:
        keys = [key for key, _ in self._entries]
        if keys != sorted(keys):
            return f"those that lost their seats are out of their order: {keys}"
        for tenant, line in self._lines.items():
            ids = [seq.seq_id for seq in line]
            if ids != sorted(ids):
                return f"the line of tenant {tenant!r} is out of its order: {ids}"
        return None


def _arrival(seq: Sequence) -> int:
    return seq.seq_id

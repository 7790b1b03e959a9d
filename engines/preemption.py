"""What happens when KV runs out: who gives way, and what becomes of its KV.

`newest` takes from the sequence that got its seat last (vLLM's rule under fcfs), `least_urgent` from the last
in the queue's order (vLLM's under priority). Both are a total order of the running sequences, and a sequence
only takes from those behind it or gives way itself. The first in that order can therefore always have what
it needs, and a sequence alone never has to give way: admission has checked that the pool holds it to its end.
So every iteration makes progress, and two sequences never evict each other in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engines.config import EngineConfig
from engines.kv_pool import BlockPool
from engines.queues.base import WaitingQueue
from engines.sequence import Sequence, Status


class Preemption(Protocol):
    """`victim`: of the running ones, in the order of their seats. `evict`: its KV is given up or put away;
    it has no seat any more."""

    def victim(self, running: list[Sequence]) -> Sequence: ...

    def evict(self, victim: Sequence, pool: BlockPool) -> None: ...


class Recompute:
    """Its KV is dropped: prompt and answer so far become one prompt to compute when it gets its seat
    back."""

    def __init__(self, victim: Callable[[list[Sequence]], Sequence]) -> None:
        self.victim = victim

    def evict(self, victim: Sequence, pool: BlockPool) -> None:
        pool.release(victim.block_table)
        victim.num_computed = victim.num_published = 0
        victim.num_preemptions += 1
        victim.status = Status.PREEMPTED


def newest(running: list[Sequence]) -> Sequence:
    return running[-1]


def build(config: EngineConfig, waiting: WaitingQueue) -> Preemption:
    if config.victim == "newest":
        return Recompute(newest)
    return Recompute(lambda running: max(running, key=waiting.key))

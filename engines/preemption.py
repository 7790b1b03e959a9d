"""What happens when KV runs out: who gives way, and what becomes of its KV.

Who: `newest` takes from the sequence that got its seat last (vLLM's rule under fcfs), `least_urgent` from the
last in the queue's order (vLLM's under priority). Both are a total order of the running sequences, and a
sequence only takes from those behind it or gives way itself. The first in that order can therefore always
have what it needs, and a sequence alone never has to give way: admission has checked that the pool holds it
to its end. So every iteration makes progress, two sequences never evict each other in turn, and one
loses its seat at most as often as those ahead of it and it itself ask for another block: where prompts are
computed whole, once for each block of their answers.

What becomes of it: `recompute` drops it, and prompt and answer so far become one prompt to compute when the
sequence gets its seat back. `swap` copies it to host memory (vLLM v0) and back; where the host has no room,
it is dropped after all."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engines.batch import Copies
from engines.config import EngineConfig
from engines.host_pool import HostPool
from engines.kv_pool import BlockPool, IntegrityError
from engines.queues.base import WaitingQueue
from engines.sequence import Sequence, Status

Victim = Callable[[list[Sequence]], Sequence]
"""Of the running ones, in the order of their seats."""


class Preemption:
    """Takes seats away. `host` has no blocks where KV is always computed again."""

    def __init__(self, victim: Victim, host: HostPool) -> None:
        self.victim = victim
        self.host = host

    def evict(self, victim: Sequence, pool: BlockPool) -> None:
        """It has lost its seat: its KV is put away, or given up."""
        computed = victim.block_table[: pool.blocks_for(victim.num_computed)]
        if self.host.stay(victim.seq_id):
            pass  # it has lost its seat again before its KV came back
        elif computed and self.host.put_away(victim.host_table, computed):
            victim.num_swaps += 1
        else:
            victim.num_computed = 0
        pool.release(victim.block_table)
        victim.num_preemptions += 1
        victim.status = Status.PREEMPTED

    def restore(self, seq: Sequence, num_hit: int) -> None:
        """It has got its seat back, with a table for all that it had. The first blocks were found in the
        prefix cache."""
        if seq.swapped:
            self.host.bring_back(seq.seq_id, seq.host_table, num_hit, seq.block_table)

    def forget(self, seq: Sequence) -> None:
        """It will not come back. Harmless when repeated."""
        self.host.release(seq.seq_id, seq.host_table)

    def take_copies(self) -> Copies | None:
        """What the pass that comes now has to begin with."""
        return self.host.take()

    def check(self, sequences: Iterable[Sequence], pool: BlockPool) -> None:
        """Raise IntegrityError unless the host holds what the sequences without a seat have computed."""
        sequences = list(sequences)
        self.host.check(seq.host_table for seq in sequences)
        for seq in sequences:
            if seq.swapped:
                what, held = f"sequence {seq.seq_id} ({seq.status.value})", len(seq.host_table)
                if seq.status is not Status.PREEMPTED or held != pool.blocks_for(seq.num_computed):
                    raise IntegrityError(f"{what}: {held} blocks on the host, {seq.num_computed} computed")


def newest(running: list[Sequence]) -> Sequence:
    return running[-1]


def build(config: EngineConfig, waiting: WaitingQueue, num_host_blocks: int) -> Preemption:
    host = HostPool(num_host_blocks if config.preemption == "swap" else 0)
    if config.victim == "newest":
        return Preemption(newest, host)
    return Preemption(lambda running: max(running, key=waiting.key), host)

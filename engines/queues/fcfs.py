"""First come, first served.

    key = arrival

A preempted sequence came before everyone who waits: its place is in front. Bound: a request waits for those
that came before it and for nobody else."""

from __future__ import annotations

from engines.queues.base import Key, WaitingQueue
from engines.sequence import Sequence


class FcfsQueue(WaitingQueue):
    def key(self, seq: Sequence) -> Key:
        return (seq.seq_id,)

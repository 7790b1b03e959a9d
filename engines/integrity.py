"""The invariants of the engine, checked from a snapshot between two iterations: all by tests after every
one, the sums whenever the engine falls idle."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from engines.kv_pool import IntegrityError
from engines.schedulers import Scheduler
from engines.sequence import Sequence, Status


def check(scheduler: Scheduler, sequences: Iterable[Sequence], leases: Iterable[array[int]] = ()) -> None:
    """Raise IntegrityError unless each sequence is in exactly one place, seats and limits hold, the queue is
    in its order, and the blocks are those that the tables, `leases` and the reservation account for."""
    sequences = list(sequences)
    places = {
        Status.WAITING: list(scheduler.waiting),
        Status.PREEMPTED: list(scheduler.waiting),
        Status.RUNNING: scheduler.running,
        Status.ENDED: scheduler.ended,
        Status.FINISHED: [],
    }
    placed = [*scheduler.running, *scheduler.waiting, *scheduler.ended]
    if len({id(seq) for seq in placed}) != len(placed):
        raise IntegrityError("a sequence is in two places")
    if not set(placed) <= set(sequences):
        raise IntegrityError("the scheduler holds a sequence that the engine does not know")
    for seq in sequences:
        if seq.status is not Status.FINISHED and seq not in places[seq.status]:
            raise IntegrityError(f"sequence {seq.seq_id} is {seq.status.value} but not in its place")
        if seq.status is Status.FINISHED and seq in placed:
            raise IntegrityError(f"sequence {seq.seq_id} has finished but is still scheduled")
        _check_tokens(scheduler, seq)
    disorder = scheduler.waiting.disorder()
    if disorder is not None:
        raise IntegrityError(disorder)
    seats = len(scheduler.running) + len(scheduler.ended)
    if seats > scheduler.config.max_num_seqs:
        raise IntegrityError(f"{seats} sequences have seats, max_num_seqs is {scheduler.config.max_num_seqs}")
    scheduler.pool.check([*(seq.block_table for seq in sequences), *leases])
    scheduler.preemption.check(sequences, scheduler.pool)


def check_idle(scheduler: Scheduler) -> None:
    """Nothing is left to do: nobody holds anything. From sums, cheap enough for every idle moment."""
    pool, host = scheduler.pool, scheduler.preemption.host
    pool.check_sums()
    if pool.num_live or any(pool.ref_count):
        raise IntegrityError(f"{pool.num_live} KV blocks are live and no request is")
    if host.num_free != host.num_blocks:
        raise IntegrityError(f"{host.num_blocks - host.num_free} blocks of the host are held by no request")


def _check_tokens(scheduler: Scheduler, seq: Sequence) -> None:
    what = f"sequence {seq.seq_id} ({seq.status.value})"
    if not 0 <= seq.num_computed <= seq.num_tokens <= seq.prompt_len + seq.max_tokens:
        raise IntegrityError(f"{what}: {seq.num_computed} computed of {seq.num_tokens} tokens")
    held = len(seq.block_table)
    if seq.status in (Status.RUNNING, Status.ENDED):
        least = scheduler.pool.blocks_for(seq.num_computed)
        most = scheduler.pool.blocks_for(scheduler.reservation.tokens(seq, seq.num_tokens))
        if not least <= held <= most:
            raise IntegrityError(f"{what}: holds {held} blocks, needs {least} to {most}")
    elif held:
        raise IntegrityError(f"{what}: holds {held} blocks without a seat")

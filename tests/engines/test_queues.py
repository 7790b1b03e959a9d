from __future__ import annotations

from engines.queues.fcfs import FcfsQueue
from engines.sequence import Sequence, Status


def seq(seq_id: int, arrival: float = 0.0) -> Sequence:
    return Sequence(seq_id, prompt_len=4, max_tokens=4, arrival=arrival)


def ids(queue: FcfsQueue) -> list[int]:
    return [s.seq_id for s in queue]


def test_first_come_first_served_with_preempted_in_front() -> None:
    queue = FcfsQueue()
    for i in (3, 4, 5):
        queue.push(seq(i))
    queue.push(seq(2))  # victims come newest first, so the oldest of them ends in front
    queue.push(seq(1))
    assert ids(queue) == [1, 2, 3, 4, 5]
    assert queue.head.seq_id == 1
    assert len(queue) == 5


def test_removal_from_the_middle_and_of_a_stranger() -> None:
    queue, sequences = FcfsQueue(), [seq(i) for i in range(3)]
    for s in sequences:
        queue.push(s)
    queue.remove(sequences[1])
    queue.remove(sequences[1])
    queue.remove(seq(9))
    assert ids(queue) == [0, 2]


def test_only_those_who_never_had_a_seat_are_overdue() -> None:
    queue = FcfsQueue()
    early, late, preempted = seq(1, arrival=1.0), seq(2, arrival=2.5), seq(0, arrival=0.0)
    queue.push(early)
    queue.push(late)
    preempted.status = Status.PREEMPTED
    queue.push(preempted)
    assert queue.overdue(now=2.9, timeout=2.0) == []
    assert queue.overdue(now=3.0, timeout=2.0) == [early]
    assert queue.overdue(now=9.0, timeout=2.0) == [early, late]
    assert queue.next_overdue(2.0) == 3.0
    queue.remove(early)
    queue.remove(late)
    assert queue.next_overdue(2.0) is None

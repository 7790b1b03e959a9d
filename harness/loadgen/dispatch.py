"""Which request leaves next, and when: pure state, no clock, no network.

Open loop: no arrival depends on another one, on an answer, or on how late the client was. A late arrival
leaves at once and keeps its intended time, so nothing drifts and nothing is forfeited. Closed loop: as places
come free. In both, a later turn of a session follows the end of the turn before it."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from harness.loadgen.answer import Verdict
from harness.loadgen.settings import LoadSettings
from workloads.schedule import ScheduledRequest

NS = 1_000_000_000
BROKEN = ("connect", "reset")


@dataclass(frozen=True, slots=True, eq=False)
class Due:
    """One attempt of a request and its times, CLOCK_MONOTONIC ns."""

    request: ScheduledRequest
    intended_ns: int  # what latency counts from: the first attempt's, for a retry too
    due_ns: int  # when this attempt may leave; of the first attempt: intended_ns
    attempt: int = 1


class Dispatcher:
    """Drive it with next_ns -> take -> ended. Every request of the schedule comes out exactly once as its
    last attempt, be it by take(), or by drop() and leftovers() as one that was never sent.

    Open: turns without think_s are due at t0 + arrival_s; at most `concurrency` attempts are under way, who
    waits for a place does so in order of due times. Who has waited longer than max_wait_s when a place comes
    free is shed. Closed: `concurrency` clients (place i of n begins at t0 + ramp_s * i/n); a client stays
    with its request through retries and with its session through think times. With duration_s the closed
    schedule is a supply: what was not taken before the end was not due.

    A turn with think_s is due think_s after the turn before it has ended, and that moment is its intended
    time; when that turn did not complete, the session has ended. An attempt that broke (connect, reset, HTTP
    5xx) or was refused before any token is retried after retry_backoff_s * 2**(attempt - 1).
    """

    def __init__(self, requests: Sequence[ScheduledRequest], settings: LoadSettings, *, t0_ns: int) -> None:
        self.launched = 0  # requests of which an attempt was taken
        self.retried = 0  # attempts that were followed by another one
        self._settings = settings
        self._closed = settings.kind == "closed"
        self._t0_ns = t0_ns
        self._total = len(requests)
        self._later: dict[str, ScheduledRequest] = {}  # by the id of the turn before it
        first = _link(requests, self._later)
        if not self._closed:
            first.sort(key=lambda request: request.arrival_s)
        self._first = deque(first)  # what waits for its arrival, or for any client
        self._known: list[tuple[int, int, Due]] = []  # heap by due_ns: next turns and retries
        self._serial = 0
        self._under_way = 0
        self._dropped: deque[tuple[Due, str]] = deque()
        self._expected: deque[Due] = deque()
        self._cap = settings.concurrency or float("inf")
        self._free: list[int] = []  # closed: heap of the moments at which places came free
        self._end_ns: int | None = None
        if self._closed:
            n, ramp_ns = settings.concurrency or 1, (settings.ramp_s or 0) * NS
            self._free = [t0_ns + round(ramp_ns * i / n) for i in range(n)]
            if settings.duration_s is not None:
                self._end_ns = t0_ns + round(settings.duration_s * NS)

    @property
    def scheduled(self) -> int:
        """Requests that were due: all of them, in a closed loop with a duration those taken so far."""
        return self.launched if self._end_ns is not None else self._total

    @property
    def exhausted(self) -> bool:
        """Nothing will be due any more: nothing is left to send, and nothing that is under way can bring a
        retry, a session's next turn or a free place for somebody who waits."""
        if self._known:
            return False
        brings_more = self._later or self._settings.retries or (self._closed and self._first)
        if self._under_way and brings_more:
            return False
        return not self._first or (self._end_ns is not None and self._place_ns() is None)

    def next_ns(self) -> int | None:
        """The earliest due time of what has a place; may have passed. None: nothing until an answer ends, or
        nothing is left."""
        if self._closed:
            place_ns = self._place_ns() if self._first else None
            known_ns = self._known[0][0] if self._known else None
            if place_ns is None or known_ns is None:
                return place_ns if known_ns is None else known_ns
            return min(place_ns, known_ns)
        if self._under_way >= self._cap:
            return None
        known_ns = self._known[0][0] if self._known else None
        if not self._first:
            return known_ns
        arrival_ns = self._arrival_ns(self._first[0])
        return arrival_ns if known_ns is None else min(arrival_ns, known_ns)

    def take(self, now_ns: int) -> Due | None:
        """The one that has been due for longest, if it has a place. It is under way until ended()."""
        while True:
            next_ns = self.next_ns()
            if next_ns is None or next_ns > now_ns:
                return None
            due = self._pop(next_ns)
            wait_s = self._settings.max_wait_s
            if wait_s is not None and now_ns - due.due_ns > wait_s * NS:
                self._drop(due, "shed", "session_ended")
                continue
            if due.attempt == 1:
                self.launched += 1
            self._under_way += 1
            return due

    def ended(self, due: Due, verdict: Verdict, now_ns: int, *, tokens: int) -> bool:
        """An attempt that was taken has ended. True: another one follows, so this one is not the request's
        last. tokens: of the answer, that had arrived."""
        self._under_way -= 1
        if not tokens and due.attempt <= self._settings.retries and _may_be_retried(verdict):
            wait_s = self._settings.retry_backoff_s * 2 ** (due.attempt - 1)
            again = Due(due.request, due.intended_ns, now_ns + round(wait_s * NS), due.attempt + 1)
            if self._end_ns is None or again.due_ns < self._end_ns:
                self.retried += 1
                self._push(again)
                return True
        if verdict.outcome == "completed":
            turn = self._later.pop(due.request.id, None)
            if turn is not None:
                at_ns = now_ns + round((turn.think_s or 0.0) * NS)
                if self._end_ns is None or at_ns < self._end_ns:
                    self._push(Due(turn, at_ns, at_ns))
                    return False
                self._drop_turns(turn, now_ns, "not_sent")
        else:
            run_ends = verdict.outcome == "cut_off"
            self._drop_after(due.request, now_ns, "not_sent" if run_ends else "session_ended")
        if self._closed:
            heapq.heappush(self._free, now_ns)
        return False

    def expected(self) -> Due | None:
        """A retry or a next turn whose time is known since the last call, once each: to build its body."""
        return self._expected.popleft() if self._expected else None

    def drop(self) -> tuple[Due, str] | None:
        """One that will never be sent, with its reason (shed, session_ended), once each; None: none so
        far."""
        return self._dropped.popleft() if self._dropped else None

    def leftovers(self, now_ns: int) -> list[tuple[Due, str]]:
        """The load is over: all that was never sent and not yet dropped, with its reason (shed,
        session_ended, not_sent). Nothing can be taken any more."""
        for _, _, due in sorted(self._known, key=lambda entry: entry[:2]):
            # Of a supply only what has begun is owed an end.
            if self._end_ns is None or due.attempt > 1:
                self._dropped.append((due, "not_sent"))
            self._drop_after(due.request, due.intended_ns, "not_sent")
        for request in self._first if self._end_ns is None else ():
            intended_ns = now_ns if self._closed else self._arrival_ns(request)
            self._dropped.append((Due(request, intended_ns, intended_ns), "not_sent"))
            self._drop_after(request, intended_ns, "not_sent")
        self._known, self._free = [], []
        self._first.clear()
        left = list(self._dropped)
        self._dropped.clear()
        return left

    def _place_ns(self) -> int | None:
        """Closed loop: when the next free place came or comes free, unless that is past the end."""
        if not self._free or (self._end_ns is not None and self._free[0] >= self._end_ns):
            return None
        return self._free[0]

    def _arrival_ns(self, request: ScheduledRequest) -> int:
        return self._t0_ns + round(request.arrival_s * NS)

    def _pop(self, next_ns: int) -> Due:
        """What next_ns() spoke of. Who has waited through a backoff or a thought goes before a newcomer."""
        if self._known and self._known[0][0] == next_ns:
            return heapq.heappop(self._known)[2]
        if self._closed:
            heapq.heappop(self._free)
        return Due(self._first.popleft(), next_ns, next_ns)

    def _push(self, due: Due) -> None:
        self._serial += 1
        heapq.heappush(self._known, (due.due_ns, self._serial, due))
        self._expected.append(due)

    def _drop(self, due: Due, reason: str, later: str) -> None:
        self._dropped.append((due, reason))
        self._drop_after(due.request, due.intended_ns, later)

    def _drop_after(self, request: ScheduledRequest, now_ns: int, reason: str) -> None:
        turn = self._later.pop(request.id, None)
        if turn is not None:
            self._drop_turns(turn, now_ns, reason)

    def _drop_turns(self, turn: ScheduledRequest | None, now_ns: int, reason: str) -> None:
        """This turn of a session and all that follow it. They would have come one thought after another."""
        while turn is not None:
            now_ns += round((turn.think_s or 0.0) * NS)
            if self._end_ns is None:
                self._dropped.append((Due(turn, now_ns, now_ns), reason))
            turn = self._later.pop(turn.id, None)


def _link(requests: Sequence[ScheduledRequest], later: dict[str, ScheduledRequest]) -> list[ScheduledRequest]:
    """The requests that wait for no other; fills `later` with those that do, by the id of the turn before
    them. A turn with think_s whose session begins outside of these requests waits for none."""
    first: list[ScheduledRequest] = []
    latest: dict[str, ScheduledRequest] = {}
    for request in requests:
        before = latest.get(request.session) if request.session is not None else None
        if before is not None and request.think_s is not None:
            later[before.id] = request
        else:
            first.append(request)
        if request.session is not None:
            latest[request.session] = request
    return first


def _may_be_retried(verdict: Verdict) -> bool:
    if verdict.outcome == "failed":
        return verdict.reason in BROKEN or (verdict.status is not None and verdict.status >= 500)
    return verdict.outcome == "rejected"

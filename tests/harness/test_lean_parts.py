"""Parts of the lean backend without a network: how clocks are mapped, the alarm, samples, the taking in."""

from __future__ import annotations

import select
import socket
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.loadgen.call import Call
from harness.loadgen.dispatch import Due
from harness.loadgen.lean import sockets
from harness.loadgen.lean.clock import STEP_NS, WallClock
from harness.loadgen.lean.exchange import MAX_WAITING_BYTES, Digestion, End, Exchange
from harness.loadgen.lean.samples import Samples
from tests.support.load import request
from tests.support.script_server import DONE, completion, usage

timer = pytest.importorskip("harness.loadgen.lean.timer")


class Clocks:
    """A monotonic and a wall clock; each reading takes as long as the script says."""

    def __init__(self, takes_ns: list[int]) -> None:
        self.now_ns = 10**15
        self.offset_ns = 1_700_000_000 * 10**9
        self.takes_ns = takes_ns
        self.readings = 0

    def _pass(self) -> None:
        self.now_ns += self.takes_ns[self.readings % len(self.takes_ns)]
        self.readings += 1

    def monotonic_ns(self) -> int:
        self._pass()
        return self.now_ns

    def realtime_ns(self) -> int:
        self._pass()
        return self.now_ns + self.offset_ns


@given(st.lists(st.integers(20, 3000), min_size=5, max_size=40), st.integers(-(10**12), 10**12))
def test_the_difference_of_the_clocks_is_known_and_a_step_is_told(takes_ns: list[int], step_ns: int) -> None:
    clocks = Clocks(takes_ns)
    wall = WallClock(clocks.monotonic_ns, clocks.realtime_ns)
    assert abs(wall.offset_ns - clocks.offset_ns) <= 3000
    for _ in range(20):
        assert not wall.sample()
    assert wall.step_ns is None
    clocks.offset_ns += step_ns
    seen = wall.sample()
    if abs(step_ns) > STEP_NS + 12_000:
        assert seen
        assert wall.step_ns is not None
        assert abs(wall.step_ns - step_ns) <= 12_000
        assert abs(wall.offset_ns - clocks.offset_ns) <= 3000
    if abs(step_ns) < STEP_NS - 12_000:
        assert not seen


def test_the_largest_of_several_steps_is_kept() -> None:
    clocks = Clocks([50])
    wall = WallClock(clocks.monotonic_ns, clocks.realtime_ns)
    for step_ns in (10**9, -(10**10), 10**8):
        clocks.offset_ns += step_ns
        assert wall.sample()
    assert wall.step_ns is not None
    assert abs(wall.step_ns + 10**10) < 1000


def test_a_reading_that_lost_its_core_is_not_believed() -> None:
    clocks = Clocks([50, 50, 50, 5_000_000, 5_000_000, 5_000_000])
    wall = WallClock(clocks.monotonic_ns, clocks.realtime_ns)
    assert abs(wall.offset_ns - clocks.offset_ns) <= 100


def test_this_machines_clocks_do_not_step_by_themselves() -> None:
    wall = WallClock()
    assert not any(wall.sample() for _ in range(100))
    assert abs(time.time_ns() - time.monotonic_ns() - wall.offset_ns) < 10**9


def test_the_alarm_rings_at_its_time_never_before_and_each_time_anew() -> None:
    epoll, alarm = select.epoll(), timer.Timer()
    epoll.register(alarm.fileno(), select.EPOLLIN | select.EPOLLET)
    try:
        for wait_ns in (3_000_000, 700_000, 0, -5_000_000, 2_000_000):
            when_ns = time.monotonic_ns() + wait_ns
            alarm.arm(when_ns)
            assert epoll.poll(10) == [(alarm.fileno(), select.EPOLLIN)]
            assert time.monotonic_ns() >= when_ns
            assert epoll.poll(0) == []  # an edge is told once, without a read
        alarm.arm(time.monotonic_ns() + 10**12)
        assert epoll.poll(0.01) == []
    finally:
        alarm.close()
        epoll.close()


@given(st.integers(0, 3000), st.sampled_from([4, 8, 50]))
def test_a_sample_is_bounded_and_evenly_spread(count: int, limit: int) -> None:
    samples = Samples(limit)
    for value in range(count):
        samples.add(value)
    kept = samples.values
    assert len(kept) == count if count < limit else limit / 2 <= len(kept) <= limit
    assert kept[:1] == list(range(count))[:1]
    assert len({after - before for before, after in pairwise(kept)}) <= 1
    if count >= limit:
        assert count - kept[-1] <= kept[1] - kept[0]


TOKEN = completion("x", [1])
ENDING = completion(finish="length") + usage(1) + DONE


def exchange(number: int) -> Exchange:
    call = Call(Due(request(number), 0, 0), timeout_s=None, keep_text=False)
    call.dispatched(1)
    call.on_send(2)
    call.on_headers(3, 200, "text/event-stream")
    return Exchange(number, call)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["piece", "end", "break", "step", "tick"]))))
def test_every_exchange_is_taken_in_in_order_and_concluded_once(script: list[tuple[int, str]]) -> None:
    digestion = Digestion()
    exchanges = [exchange(number) for number in range(4)]
    pieces, ended, over = [0] * 4, [False] * 4, []

    def step() -> None:
        done = digestion.step()
        if done is not None:
            over.append(done.number)

    for now_ns, (number, what) in enumerate(script, 100):
        if what == "tick":
            digestion.tick(now_ns)
        elif what == "step":
            if digestion.ready:
                step()
        elif ended[number]:
            continue
        elif what == "piece":
            pieces[number] += 1
            digestion.add(exchanges[number], now_ns, TOKEN)
        else:
            ended[number] = True
            if what == "end":
                digestion.add(exchanges[number], now_ns, ENDING)
            broke = what == "break"
            digestion.add_end(
                exchanges[number], End(now_ns, "reset" if broke else None, "gone" if broke else "")
            )
            assert digestion.ready
    digestion.tick(10**6)
    while digestion.ready:
        step()
    assert digestion.waiting_bytes == 0
    assert sorted(over) == [number for number in range(4) if ended[number]]
    for number, item in enumerate(exchanges):
        answer = item.call.answer
        assert answer.chunk_tokens == [1] * pieces[number]
        assert answer.chunk_ns == sorted(answer.chunk_ns)
        assert (item.call.verdict is not None) == ended[number]


def test_what_has_ended_goes_first() -> None:
    digestion = Digestion()
    first, second = exchange(0), exchange(1)
    digestion.add(first, 10, TOKEN)
    assert not digestion.ready  # the next tick is soon enough
    digestion.add(second, 11, TOKEN + ENDING)
    digestion.add_end(second, End(12))
    assert digestion.step() is second
    assert first.call.answer.tokens == 0


def test_what_waits_too_long_or_is_too_much_is_overdue() -> None:
    digestion = Digestion()
    digestion.add(exchange(0), 10, TOKEN)
    digestion.tick(100)
    assert not digestion.overdue
    digestion.tick(10 + 10**9)
    assert digestion.overdue
    digestion.step()
    assert not digestion.overdue
    digestion.add(exchange(1), 10**9, b":" * (MAX_WAITING_BYTES + 1))
    digestion.tick(10**9 + 1)
    assert digestion.overdue


def probe(monkeypatch: pytest.MonkeyPatch, *, stream_from: int | None, datagram: str) -> str | None:
    """What the look for stamps says where reads number 0, 1.. of the stream bring them from stream_from on,
    and datagrams have that of their arrival, of their reading, or none."""
    streams = 0

    def stamp_ns(sock: socket.socket) -> int | None:
        nonlocal streams
        assert sock.recv(1) == b"x"
        if sock.type == socket.SOCK_DGRAM:
            return {"arrival": time.time_ns() - 500_000_000, "reading": time.time_ns(), "none": None}[
                datagram
            ]
        streams += 1
        return time.time_ns() if stream_from is not None and streams > stream_from else None

    monkeypatch.setattr(sockets, "_stamp_ns", stamp_ns)
    return sockets.stamps_unavailable()


linux = pytest.mark.skipif(sockets.stamps_unavailable() is not None, reason="needs the kernel's stamps")


@linux
def test_a_kernel_that_is_slow_to_stamp_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(monkeypatch, stream_from=100, datagram="reading") is None
    assert probe(monkeypatch, stream_from=sockets.SURE_AFTER - 1, datagram="arrival") is None
    monkeypatch.setattr(sockets, "STAMPS_AFTER_S", 0.05)
    assert "within 0.05 s" in (probe(monkeypatch, stream_from=None, datagram="reading") or "")


@linux
@pytest.mark.parametrize("datagram", ["arrival", "none"])
def test_a_kernel_that_stamps_no_stream_is_known_at_once(
    monkeypatch: pytest.MonkeyPatch, datagram: str
) -> None:
    monkeypatch.setattr(sockets, "STAMPS_AFTER_S", 3600.0)
    assert "TCP" in (probe(monkeypatch, stream_from=None, datagram=datagram) or "")


@linux
def test_a_kernel_without_the_option_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_SO_TIMESTAMPNS", 9999)
    assert "no kernel receive stamps: " in (sockets.stamps_unavailable() or "")

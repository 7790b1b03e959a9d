"""The parts beside the way of the bytes: the stop, the bodies that are built ahead, the watch over a server
that broke off, and which backend is taken."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from harness.loadgen import LoadError, LoadSettings, Stop, Target
from harness.loadgen import run as run_module
from harness.loadgen import watch as watch_module
from harness.loadgen.bodies import Bodies
from harness.loadgen.dispatch import Due
from harness.loadgen.run import choose_backend, planned, run_load
from harness.loadgen.watch import Lifeline
from harness.records import RequestLog, read_request_file
from tests.support.load import CountingPrompts, every, request


def readable(stop: Stop) -> bool:
    return bool(select.select([stop], [], [], 0)[0])


def test_the_first_reason_stands() -> None:
    with Stop() as stop:
        assert (stop.is_set, stop.reason, readable(stop)) == (False, None, False)
        stop.set("one")
        stop.set("two")
        assert (stop.is_set, stop.reason, readable(stop)) == (True, "one", True)
        assert readable(stop)  # for good
    stop.set("after it was closed")
    assert stop.reason == "one"


def test_without_an_eventfd_it_is_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "eventfd", raising=False)
    with Stop() as stop:
        assert not readable(stop)
        for _ in range(20_000):  # more than a pipe holds
            stop.set("x")
        assert readable(stop)


def test_a_signal_handler_and_many_threads_may_set_it() -> None:
    with Stop() as stop:
        before = signal.signal(signal.SIGUSR1, lambda *_: stop.set("signal"))
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        threads = [threading.Thread(target=stop.set, args=[str(k)]) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (stop.reason, readable(stop)) == ("signal", True)


class Counted(CountingPrompts):
    def __init__(self) -> None:
        self.built = 0

    def tokens(self, segments):  # type: ignore[no-untyped-def]
        self.built += 1
        return super().tokens(segments)


def first(req, attempt: int = 1) -> Due:  # type: ignore[no-untyped-def]
    return Due(req, 0, 0, attempt)


def ids(body: bytes) -> tuple[str, int]:
    about = orjson.loads(body)["batchmark"]
    return about["id"], about["attempt"]


def test_bodies_are_built_ahead_once_each_up_to_a_bound() -> None:
    prompts, requests = Counted(), every(0.1, 10)
    bodies = Bodies(requests, prompts, Target("http://x", "m"), "run", ahead=4)
    while bodies.prepare():
        pass
    assert prompts.built == 4
    for req in requests[:2]:
        assert ids(bodies.body(first(req))) == (req.id, 1)
    assert prompts.built == 4
    while bodies.prepare():
        pass
    assert prompts.built == 6
    assert [ids(bodies.body(first(req)))[0] for req in requests[2:]] == [req.id for req in requests[2:]]
    assert prompts.built == 10
    assert not bodies.prepare()


def test_a_body_that_overtakes_the_building_is_not_built_again() -> None:
    prompts, requests = Counted(), every(0.1, 6)
    bodies = Bodies(requests, prompts, Target("http://x", "m"), "run", ahead=4)
    assert ids(bodies.body(first(requests[1]))) == ("r000001", 1)
    while bodies.prepare():
        pass
    for req in (requests[0], *requests[2:]):
        bodies.body(first(req))
    assert prompts.built == 6


def test_turns_and_retries_are_built_when_they_are_expected() -> None:
    prompts = Counted()
    requests = [request(0, session="s"), request(1, session="s", turn=1, think_s=1.0), request(2)]
    bodies = Bodies(requests, prompts, Target("http://x", "m"), "run", ahead=1)
    assert bodies.prepare()
    assert not bodies.prepare()  # there is no room
    bodies.expect(first(requests[1]))
    bodies.expect(first(requests[0], attempt=2))
    assert bodies.prepare()  # what is expected has room of its own, as much again
    assert not bodies.prepare()
    assert ids(bodies.body(first(requests[1]))) == ("r000001", 1)
    assert ids(bodies.body(first(requests[0]))) == ("r000000", 1)
    assert prompts.built == 2
    assert bodies.prepare()
    assert ids(bodies.body(first(requests[0], attempt=2))) == ("r000000", 2)
    assert prompts.built == 3
    bodies.expect(first(requests[0], attempt=3))
    assert ids(bodies.body(first(requests[0], attempt=3))) == ("r000000", 3)
    assert ids(bodies.body(first(requests[2]))) == ("r000002", 1)
    while bodies.prepare():
        pass
    assert prompts.built == 5


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "DEAD_AFTER_S", 0.3)
    monkeypatch.setattr(watch_module, "PROBE_EVERY_S", 0.02)


def until(happened: Callable[[], bool], patience_s: float = 20.0) -> bool:
    end = time.monotonic() + patience_s
    while not happened() and time.monotonic() < end:
        time.sleep(0.005)
    return happened()


@pytest.mark.usefixtures("quick")
def test_a_server_that_takes_no_connection_stops_the_load() -> None:
    with socket.socket() as free, Stop() as stop:
        free.bind(("127.0.0.1", 0))
        line = Lifeline(f"http://127.0.0.1:{free.getsockname()[1]}", stop)
        began = time.monotonic()
        line.suspect()
        assert until(lambda: stop.is_set)
        assert time.monotonic() - began >= 0.3
        assert (stop.reason or "").startswith("server unreachable: 127.0.0.1:")
        line.close()


@pytest.mark.usefixtures("quick")
def test_a_server_that_accepts_again_does_not() -> None:
    accepted = 0

    def serve(listening: socket.socket) -> None:
        nonlocal accepted
        while True:
            try:
                listening.accept()[0].close()
            except OSError:
                return
            accepted += 1

    with socket.socket() as listening, Stop() as stop:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        threading.Thread(target=serve, args=[listening], daemon=True).start()
        line = Lifeline(f"http://127.0.0.1:{listening.getsockname()[1]}", stop)
        for k in range(1, 4):  # each suspicion is followed up, by the one thread
            line.suspect()
            assert until(lambda k=k: accepted >= k)  # type: ignore[misc]
        assert sum(thread.name == "lifeline" for thread in threading.enumerate()) == 1
        assert not stop.is_set
        line.close()
        assert until(lambda: not any(t.name == "lifeline" for t in threading.enumerate()))
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.usefixtures("quick")
def test_a_load_that_has_ended_is_not_stopped_any_more() -> None:
    with socket.socket() as free, Stop() as stop:
        free.bind(("127.0.0.1", 0))
        line = Lifeline(f"http://127.0.0.1:{free.getsockname()[1]}", stop)
        line.suspect()
        line.close()
        assert until(lambda: not any(t.name == "lifeline" for t in threading.enumerate()))
        assert not stop.is_set


HTTP = Target("http://127.0.0.1:1", "m")


def test_auto_takes_the_lean_backend_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    for why, name in ((None, "run_lean"), ("there is no epoll", "run_aio")):
        monkeypatch.setattr(run_module, "_lean_unavailable", lambda target, settings, why=why: why)
        backend, notes = choose_backend(HTTP, LoadSettings(run_id="x"))
        assert backend.__name__ == name
        assert notes == ([f"load.backend=auto: aiohttp, since {why}"] if why else [])
    with pytest.raises(LoadError, match=r"^load.backend=lean: there is no epoll; use load.backend=auto$"):
        choose_backend(HTTP, LoadSettings(run_id="x", backend="lean"))
    backend, notes = choose_backend(HTTP, LoadSettings(run_id="x", backend="aiohttp"))
    assert (backend.__name__, notes) == ("run_aio", [])


def test_what_only_aiohttp_can_do() -> None:
    _, (note,) = choose_backend(HTTP, LoadSettings(run_id="x", trust_env=True))
    assert note == "load.backend=auto: aiohttp, since load.trust_env=true asks for the environment's proxies"
    backend, (note,) = choose_backend(Target("https://127.0.0.1:1", "m"), LoadSettings(run_id="x"))
    assert backend.__name__ == "run_aio"
    assert note.startswith("load.backend=auto: aiohttp, since ")


def test_a_platform_without_the_lean_one_gets_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "harness.loadgen.lean", None)
    backend, (note,) = choose_backend(HTTP, LoadSettings(run_id="x"))
    assert backend.__name__ == "run_aio"
    assert note == "load.backend=auto: aiohttp, since the lean one cannot be imported here"


def test_a_stop_writes_what_was_never_sent_in_few_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50,000 records, a write each, kept a Ctrl-C waiting for seconds."""
    written: list[int] = []
    write = RequestLog._write
    monkeypatch.setattr(RequestLog, "_write", lambda log, line: (written.append(len(line)), write(log, line)))
    stop, t0_ns, path = Stop(), time.monotonic_ns(), tmp_path / "requests.jsonl"
    stop.set("interrupted")
    log = RequestLog(path, run="r", t0_ns=t0_ns)
    settings = LoadSettings(run_id="r", kind="open")
    plan = every(60.0, 2500)
    run_load(
        plan, CountingPrompts(), Target("http://127.0.0.1:9", "m"), settings, log, t0_ns=t0_ns, stop=stop
    )
    assert len(written) <= 3 + 1 + 2  # batches, the first request, header and footer
    file = read_request_file(path)
    assert sorted(record.id for record in file.records) == [request.id for request in plan]
    unsent = [record for record in file.records if record.reason == "not_sent"]
    assert len(unsent) >= 2499
    assert {(r.intended_ns, r.outcome, r.final) for r in unsent if r.id == plan[7].id} == {
        (7 * 60 * 10**9, "cut_off", True)
    }


def test_which_requests_a_load_is_about() -> None:
    requests = every(0.1, 10)
    assert len(planned(requests, LoadSettings(run_id="x", requests=4))) == 4
    assert len(planned(requests, LoadSettings(run_id="x", duration_s=0.35))) == 4
    closed = LoadSettings(run_id="x", kind="closed", concurrency=1, duration_s=0.35)
    assert len(planned(requests, closed)) == 10

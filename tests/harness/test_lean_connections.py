"""Connections of the lean backend over real sockets: kept, opened ahead, closed in time, not to be had."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from harness.loadgen.lean import pool, sockets
from harness.loadgen.lean.loop import SPARES
from tests.support.load import backends, every, request
from tests.support.raw_answers import FRAMINGS, run_lean, whole
from tests.support.raw_server import Peer, RawServer

pytestmark = pytest.mark.skipif(
    "lean" not in backends(), reason="the lean backend needs Linux's epoll and stamps"
)


def test_connections_are_kept_and_those_that_the_server_closed_are_not_used(tmp_path: Path) -> None:
    with RawServer(whole) as server:
        kept = run_lean(server, every(0.0, 40), tmp_path, kind="closed", concurrency=2)
        assert kept.result.counts["completed"] == 40
        assert kept.result.connections <= 2 + SPARES

    def once(peer: Peer) -> None:
        peer.request()
        peer.send(FRAMINGS["chunks"])  # says nothing of a close, and closes

    with RawServer(once) as server:
        closed = run_lean(server, every(0.02, 40), tmp_path)
        assert closed.result.counts["completed"] == 40
        assert closed.result.connections >= 40


def test_a_burst_finds_connections_that_were_opened_ahead(tmp_path: Path) -> None:
    accepted_before_first = []

    def talk(peer: Peer) -> None:
        peer.request()
        accepted_before_first.append(server.accepted)
        peer.send(FRAMINGS["close"])

    with RawServer(talk) as server:
        done = run_lean(server, [request(i, 0.3) for i in range(8)], tmp_path)
        assert done.result.counts["completed"] == 8
        assert accepted_before_first[0] >= 8


def test_idle_connections_are_closed_before_the_server_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "IDLE_NS", 100_000_000)
    with RawServer(whole) as server:
        plan = [request(0), request(1, 0.4, session="s", turn=1), request(2, 0.8)]
        done = run_lean(server, plan, tmp_path)
        assert done.result.counts["completed"] == 3
        closed_by_us = [end for end in server.ends if isinstance(end, EOFError)]
        assert len(closed_by_us) >= 8  # the spares of the first 0.1 s


def test_a_name_with_a_dead_address_is_reached_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RawServer(whole) as server:
        dead = sockets.Address(socket.AF_INET, ("127.0.0.1", _closed_port()))
        live = sockets.Address(socket.AF_INET, ("127.0.0.1", server.port))
        monkeypatch.setattr(sockets, "resolve", lambda host, port: [dead, live])
        done = run_lean(server, every(0.01, 5), tmp_path)
    assert done.result.counts["completed"] == 5


def test_an_address_that_never_answers_is_left_after_its_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CONNECT_NS", 400_000_000)
    with RawServer(whole) as server, _full_backlog() as (mute, _):
        live = sockets.Address(socket.AF_INET, ("127.0.0.1", server.port))
        monkeypatch.setattr(sockets, "resolve", lambda host, port: [mute, live])
        assert run_lean(server, every(0.01, 3), tmp_path).result.counts["completed"] == 3
        monkeypatch.setattr(sockets, "resolve", lambda host, port: [mute])
        failed = run_lean(server, [request()], tmp_path).only
    assert (failed.outcome, failed.reason) == ("failed", "connect")
    assert "no connection within 0.4 s" in (failed.error or "")
    assert failed.send_ns is None


class _full_backlog:
    """A listener that accepts nobody and whose queue is full: connecting to it gets no answer."""

    def __enter__(self) -> tuple[sockets.Address, list[socket.socket]]:
        self.held = [socket.socket()]
        self.held[0].bind(("127.0.0.1", 0))
        self.held[0].listen(0)
        name = self.held[0].getsockname()
        for _ in range(4):
            self.held.append(socket.socket())
            self.held[-1].setblocking(False)
            self.held[-1].connect_ex(name)
        return sockets.Address(socket.AF_INET, name), self.held

    def __exit__(self, *exc_info: object) -> None:
        for sock in self.held:
            sock.close()


def _closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_ipv6(tmp_path: Path) -> None:
    try:
        server = RawServer(whole, host="::1")
    except OSError as exc:
        pytest.skip(f"no IPv6 here: {exc}")
    with server:
        assert run_lean(server, every(0.01, 3), tmp_path).result.counts["completed"] == 3


def test_no_descriptors_left_is_a_failure_of_those_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = sockets.start, [0]

    def start(address: sockets.Address) -> socket.socket:
        calls[0] += 1
        if 9 <= calls[0] <= 14:
            raise OSError(24, "Too many open files")
        return original(address)

    monkeypatch.setattr(sockets, "start", start)

    def slow(peer: Peer) -> None:
        while True:
            peer.request()
            peer.send(FRAMINGS["chunks"], 0.3)

    with RawServer(slow) as server:
        done = run_lean(server, every(0.001, 20), tmp_path)
    reasons = [r.reason for r in done.records.values() if r.outcome == "failed"]
    assert reasons
    assert set(reasons) == {"connect"}
    assert done.result.counts["completed"] == 20 - len(reasons)


def test_a_name_that_does_not_resolve_is_told_by_every_request(tmp_path: Path) -> None:
    done = run_lean("http://does-not-exist.invalid:9", every(0.01, 3), tmp_path)
    assert {(r.outcome, r.reason) for r in done.records.values()} == {("failed", "connect")}
    assert "address" in (done.records["r000000"].error or "")

"""The lean backend over real sockets: servers that break every rule, stamps, stops, descriptors."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.loadgen import Stop, Target
from harness.loadgen.lean import lean_unavailable
from tests.support.load import backends, every, request
from tests.support.raw_answers import CHUNKED, ENDING, FRAMINGS, HEAD, TOKEN, chunk, run_lean
from tests.support.raw_server import Peer, RawServer

pytestmark = pytest.mark.skipif(
    "lean" not in backends(), reason="the lean backend needs Linux's epoll and stamps"
)


@pytest.mark.parametrize("name", FRAMINGS)
def test_every_framing_split_anywhere_is_the_same_answer(name: str, tmp_path: Path) -> None:
    wire, cuts = FRAMINGS[name], random.Random(name)

    def talk(peer: Peer) -> None:
        while True:
            peer.request()
            borders = sorted({0, len(wire), *(cuts.randrange(len(wire)) for _ in range(12))})
            for begin, end in pairwise(borders):
                peer.send(wire[begin:end], 0.001)
            if name in ("close", "1.0"):
                return

    with RawServer(talk) as server:
        done = run_lean(server, every(0.05, 6), tmp_path)
    assert done.result.counts["completed"] == 6
    assert {(r.output_tokens, sum(r.chunk_tokens), r.status) for r in done.records.values()} == {(2, 2, 200)}
    assert done.result.stamps == "kernel"


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (b"", "reset"),
        (b"HTTP/1.1 20", "reset"),
        (CHUNKED, "reset"),
        (CHUNKED + chunk(TOKEN), "reset"),
        (CHUNKED + chunk(TOKEN) + b"5", "reset"),
        (CHUNKED + chunk(TOKEN) + b"ff\r\nda", "reset"),
        (HEAD + b"Content-Length: 9999\r\n\r\n" + TOKEN, "reset"),
        (b"nonsense\r\n\r\n", "protocol"),
        (CHUNKED + b"zz\r\n", "protocol"),
        (HEAD + b"Transfer-Encoding: br\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, "protocol"),
    ],
)
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_break_at_any_stage_is_that_requests_failure_and_no_others(
    wire: bytes, reason: str, how: str, tmp_path: Path
) -> None:
    def talk(peer: Peer) -> None:
        while True:
            if b'"r000001"' in peer.request():
                peer.send(wire)
                time.sleep(0.02)  # so that the bytes are not lost with the reset
                if how == "reset":
                    peer.reset()
                return
            peer.send(FRAMINGS["chunks"])

    with RawServer(talk) as server:
        done = run_lean(server, every(0.05, 3), tmp_path)
    broken = done.records["r000001"]
    assert (broken.outcome, broken.reason) == ("failed", reason)
    assert broken.error
    assert [done.records[i].outcome for i in ("r000000", "r000002")] == ["completed"] * 2
    assert len(broken.chunk_ns) == (TOKEN in wire and reason == "reset")


def test_bytes_after_the_body_end_the_connection_not_the_answer(tmp_path: Path) -> None:
    def talk(peer: Peer) -> None:
        while True:
            peer.request()
            peer.send(FRAMINGS["chunks"] + b"HTTP/1.1 200 OK\r\n\r\nmore")

    with RawServer(talk) as server:
        done = run_lean(server, every(0.05, 4), tmp_path)
        assert done.result.counts["completed"] == 4
        assert server.accepted >= 4  # each on a connection of its own


def test_a_large_prompt_leaves_in_pieces_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """A server with a small buffer that reads slowly: the kernel takes the request bit by bit."""
    size = 200_000

    def talk(peer: Peer) -> None:
        while True:
            peer.sock.recv(1, socket.MSG_PEEK)
            time.sleep(0.1)
            body = peer.request()
            big = len(body) > size
            peer.send(HEAD + b"Content-Length: %d\r\nX-Size: %d\r\n\r\n" % (len(TOKEN + ENDING), len(body)))
            if not big:
                peer.send(TOKEN + ENDING)
                continue
            # Whole and in order, byte for byte.
            assert body.count(b",") > size / 4
            assert body.startswith(b"{")
            assert body.endswith(b"}")
            peer.send(TOKEN + ENDING)

    from workloads.schedule import Segment

    plan = [
        request(0, segments=(Segment("big", size),), prompt_tokens=size),
        *(request(i, 0.05 + i * 0.002) for i in range(1, 11)),
    ]
    with RawServer(talk, receive_buffer=4096) as server:
        done = run_lean(server, plan, tmp_path)
    assert done.result.counts["completed"] == 11
    first = done.records["r000000"]
    others = [r for r in done.records.values() if r.id != "r000000"]
    assert first.send_ns < min(r.send_ns for r in others)
    assert min(r.headers_ns for r in others) < first.headers_ns + 10**9


def test_what_a_server_says_before_it_takes_the_whole_request_is_read(tmp_path: Path) -> None:
    from workloads.schedule import Segment

    def talk(peer: Peer) -> None:
        peer.sock.recv(1000)
        peer.send(
            b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\n\r\n{}"
        )
        time.sleep(0.2)
        peer.reset()

    plan = [request(0, segments=(Segment("big", 2_000_000),), prompt_tokens=2_000_000)]
    with RawServer(talk, receive_buffer=4096) as server:
        done = run_lean(server, plan, tmp_path)
    assert (done.only.outcome, done.only.reason, done.only.status) == ("failed", "http_413", 413)


@pytest.mark.parametrize("kind", ["after_tokens", "after_s", "timeout"])
def test_a_server_that_only_writes_sees_the_hang_up(kind: str, tmp_path: Path) -> None:
    seen_ns = []

    def talk(peer: Peer) -> None:
        peer.request()
        peer.send(CHUNKED)
        try:
            for _ in range(2000):
                peer.send(chunk(TOKEN), 0.005)
        finally:
            seen_ns.append(time.monotonic_ns())

    changes: dict[str, Any] = {"cancel_kind": kind, "cancel_value": 3 if kind == "after_tokens" else 0.1}
    if kind == "timeout":
        changes = {"timeout_s": 0.1}
    with RawServer(talk) as server:
        done = run_lean(server, [request(0, stop_after=2000, **changes)], tmp_path)
        until = time.monotonic() + 10
        while not seen_ns and time.monotonic() < until:
            time.sleep(0.01)
    record = done.only
    assert record.outcome == ("timed_out" if kind == "timeout" else "cancelled")
    assert record.end_ns is not None
    assert seen_ns
    if kind == "after_tokens":
        assert sum(record.chunk_tokens) == 3
    # With RST the very next write fails; a FIN alone would let one more through.
    assert seen_ns[0] - (record.end_ns + done.t0_ns) < 2e9


def test_stamps_are_the_kernels_even_when_the_reader_was_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every read is delayed by 30 ms; the stamps lie where the server wrote."""
    from harness.loadgen.lean.loop import Loop

    sends: list[int] = []

    def talk(peer: Peer) -> None:
        peer.request()
        sends.append(peer.send(CHUNKED))
        for _ in range(5):
            sends.append(peer.send(chunk(TOKEN), 0.1))
        peer.send(chunk(ENDING) + b"0\r\n\r\n", 0.1)

    original = Loop._event

    def late(self: Loop, connection: Any, mask: int) -> None:
        time.sleep(0.03)
        original(self, connection, mask)

    monkeypatch.setattr(Loop, "_event", late)
    with RawServer(talk) as server:
        done = run_lean(server, [request(0, stop_after=5)], tmp_path)
    record = done.only
    assert record.outcome == "completed"
    stamps = [record.headers_ns, *record.chunk_ns]
    late_ms = [(stamp + done.t0_ns - sent) / 1e6 for stamp, sent in zip(stamps, sends, strict=True)]
    assert all(ms >= 0 for ms in late_ms)
    assert sorted(late_ms)[2] < 15  # most of them; a reader's stamps would all be 30 ms late
    assert sorted(done.result.read_lag_ms)[3] > 25


@pytest.mark.parametrize("seed", range(6))
def test_a_stop_at_any_moment_ends_everything_and_leaves_no_descriptor(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)

    def talk(peer: Peer) -> None:
        while True:
            peer.request()
            peer.send(CHUNKED, rng.random() * 0.05)
            for _ in range(20):
                peer.send(chunk(TOKEN), 0.01)
            peer.send(chunk(ENDING) + b"0\r\n\r\n")

    plan = [
        request(i, i * 0.004, stop_after=20, timeout_s=rng.choice([None, 0.1]))
        if i % 3
        else request(i, i * 0.004, cancel_kind="after_s", cancel_value=0.05)
        for i in range(100)
    ]
    with RawServer(talk) as server:
        run_lean(server, plan[:5], tmp_path)  # what is opened once
        before = _descriptors()
        stop, told = Stop(), []
        moment = rng.random() * 0.6

        def later() -> None:
            time.sleep(moment)
            told.append(time.monotonic())
            stop.set("test")

        thread = threading.Thread(target=later)
        thread.start()
        with stop:
            done = run_lean(server, plan, tmp_path, stop=stop)  # drive() checks that all are accounted for
            ended = time.monotonic()
        thread.join()
        assert len(done.records) == 100
        assert ended - told[0] < 20
        until = time.monotonic() + 10
        while _descriptors() - server_side(server) > before and time.monotonic() < until:
            time.sleep(0.01)
        assert _descriptors() - server_side(server) <= before


def server_side(server: RawServer) -> int:
    return server.open


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (Target("https://127.0.0.1:1", "m"), "TLS"),
        (Target("http://a:b@127.0.0.1:1", "m"), "user name"),
    ],
)
def test_what_is_left_to_aiohttp(target: Target, why: str) -> None:
    assert why in (lean_unavailable(target) or "")


def test_a_base_path_and_the_key_are_on_the_wire_and_the_key_is_nowhere_else(tmp_path: Path) -> None:
    heads = []

    def talk(peer: Peer) -> None:
        heads.append(peer.sock.recv(1 << 16))
        peer.send(FRAMINGS["close"])

    with RawServer(talk) as server:
        target = Target(f"{server.base_url}/api/v1", "m", api_key="sk-secret")
        done = run_lean(server, [request()], tmp_path, target=target)
    lines = heads[0].split(b"\r\n")
    assert done.only.outcome == "completed"
    assert lines[0] == b"POST /api/v1/completions HTTP/1.1"
    assert b"Authorization: Bearer sk-secret" in lines
    assert f"Host: 127.0.0.1:{server.port}".encode() in lines
    assert b"secret" not in (tmp_path / "requests.jsonl").read_bytes()

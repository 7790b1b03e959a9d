"""The truth server's own log, held against a client that reads raw sockets and its own clock."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.truth_server import (
    ABORTED,
    CHAT,
    HERE,
    STREAM,
    TruthServer,
    TruthServerError,
    build,
    read_log,
)

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not (shutil.which("g++") or shutil.which("c++")),
    reason="the truth server needs Linux and a C++ compiler",
)


class Client:
    """One connection. events() yields the data of each SSE event with the time at which it was read."""

    def __init__(self, server: TruthServer) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        self._rest = b""

    def post(self, path: str = "/v1/completions", **body: object) -> int:
        data = json.dumps({"model": "any", **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        before = time.monotonic_ns()
        self.socket.sendall(head + data)
        return before

    def get(self, path: str) -> tuple[int, bytes]:
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        return self.response()

    def response(self) -> tuple[int, bytes]:
        """Status and body, by Content-Length."""
        head = self._until(b"\r\n\r\n").decode()
        length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
        while len(self._rest) < length:
            self._more()
        body, self._rest = self._rest[:length], self._rest[length:]
        return int(head.split()[1]), body

    def events(self) -> Iterator[tuple[int, str]]:
        head = self._until(b"\r\n\r\n")
        assert b" 200 OK\r\n" in head
        assert b"Transfer-Encoding: chunked" in head
        while size := int(self._until(b"\r\n"), 16):
            chunk = b""
            while len(chunk) < size + 2:
                if not self._rest:
                    self._more()
                take = size + 2 - len(chunk)
                chunk, self._rest = chunk + self._rest[:take], self._rest[take:]
            text = chunk.decode()
            assert text.startswith("data: ")
            assert text.endswith("\n\n\r\n")
            yield time.monotonic_ns(), text[6:-4]
        assert self._until(b"\r\n") == b"\r\n"

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._rest:
            self._more()
        found, self._rest = self._rest.split(mark, 1)
        return found + mark

    def _more(self) -> None:
        piece = self.socket.recv(65536)
        if not piece:
            raise ConnectionError("the server closed the connection")
        self._rest += piece


def batchmark(request_id: str, tokens: int, **extra: object) -> dict[str, object]:
    return {
        "prompt": [5, 6, 7],
        "max_tokens": tokens + 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "batchmark": {"run": "t", "id": request_id, "attempt": 2, "stop_after": tokens},
        **extra,
    }


def test_every_token_is_logged_when_it_left_and_never_before_its_deadline() -> None:
    with TruthServer(ttft_ms=40, gap_ms=10) as server:
        client, reads, asked = Client(server), [], []
        for k in range(3):  # on one connection
            asked.append(client.post(**batchmark(f"r{k}", 6)))
            reads.append(list(client.events()))
        truth = server.stop()
    assert truth.index == {"r0": 0, "r1": 1, "r2": 2}
    assert truth.rows["attempt"].tolist() == [2, 2, 2]
    assert set(truth.rows["connection"].tolist()) == {0}
    assert truth.rows["sent"].tolist() == [6, 6, 6]
    assert truth.rows["flags"].tolist() == [STREAM] * 3
    for k, events in enumerate(reads):
        row, sent, due = truth.rows[k], truth.sent_of(k), truth.due_of(k)
        assert [json.loads(text)["choices"][0]["token_ids"] for _, text in events[:6]] == [[17]] * 6
        assert json.loads(events[6][1])["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 6,
            "total_tokens": 9,
        }
        assert events[7][1] == "[DONE]"
        assert asked[k] <= row["arrived_ns"] + 100_000  # two clocks are compared: the stamp is the kernel's
        assert row["arrived_ns"] - 100_000 <= row["received_ns"] <= row["head_ns"] <= sent[0]
        assert due[0] == row["received_ns"] + 40_000_000
        assert np.diff(due).tolist() == [10_000_000] * 5
        assert (sent >= due).all()
        assert sent[-1] <= row["done_ns"]
        stamps = [at for at, _ in events[:6]]
        assert all(left <= read for left, read in zip(sent, stamps, strict=True))
        assert np.median(truth.lateness_ns()) < 10e6


def test_the_openai_dialect_chat_and_whole_answers() -> None:
    with TruthServer(instant=True) as server:
        client = Client(server)
        assert client.get("/health")[0] == 200
        assert json.loads(client.get("/v1/models")[1])["data"][0]["object"] == "model"
        assert client.get("/nowhere")[0] == 404
        client.post("/v1/chat/completions", messages=[], max_completion_tokens=4, stream=True)
        chat = [text for _, text in client.events()]
        client.post(prompt='say "max_tokens": 9', max_tokens=5)
        status, whole = client.response()
        truth = server.stop()
    deltas = [json.loads(text)["choices"][0]["delta"] for text in chat[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, *[{"content": " word"}] * 4]
    assert json.loads(chat[-2])["choices"][0]["finish_reason"] == "length"
    assert status == 200
    assert json.loads(whole)["choices"][0]["text"] == " word" * 5
    assert truth.rows["tokens"].tolist() == [4, 5]
    assert truth.rows["sent"].tolist() == [4, 1]
    assert truth.rows["flags"].tolist() == [CHAT | STREAM, 0]


def test_slots_serve_in_order_of_receipt_each_for_its_service_time() -> None:
    with TruthServer(slots=1, ttft_ms=50, gap_ms=10) as server:
        clients, other = [Client(server) for _ in range(4)], Client(server)
        for k, client in enumerate(clients):
            client.post(**batchmark(f"r{k}", 2))
            assert other.get("/health")[0] == 200  # what was sent before has been read before
        clients[1].socket.close()  # leaves while it waits
        for k in (0, 2, 3):
            assert len(list(clients[k].events())) == 4
        truth = server.stop()
    rows = truth.rows
    assert [row.decode() for row in rows["id"]] == ["r0", "r1", "r2", "r3"]
    assert rows["gone_ns"][1] > 0
    assert rows["started_ns"][1] == 0
    assert rows["sent"].tolist() == [2, 0, 2, 2]
    # The slot is free when its last token was due: 60 ms each, without what a late wake-up would add.
    assert rows["started_ns"][2] - rows["started_ns"][0] == 60_000_000
    assert rows["started_ns"][3] - rows["started_ns"][2] == 60_000_000


def test_requests_in_pieces_back_to_back_and_large() -> None:
    with TruthServer(ttft_ms=5, gap_ms=1) as server:
        client = Client(server)
        body = json.dumps(batchmark("pieces", 3)).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nCONTENT-length:  %d\r\n\r\n" % len(body)
        whole = head + body
        for cut in range(0, len(whole), 11):
            client.socket.sendall(whole[cut : cut + 11])
            time.sleep(0.0005)
        assert len(list(client.events())) == 5
        client.post(**batchmark("first", 4))
        client.post(**batchmark("second", 2))  # before the answer to the first has ended
        assert len(list(client.events())) == 6
        assert len(list(client.events())) == 4
        client.post(**batchmark("large", 1, prompt=list(range(100_000))))
        large = [text for _, text in client.events()]
        truth = server.stop()
    assert list(truth.index) == ["pieces", "first", "second", "large"]
    rows = truth.rows
    assert rows["first_byte_ns"][0] < rows["received_ns"][0]
    assert rows["first_byte_ns"][3] < rows["received_ns"][3]
    assert rows["received_ns"][2] >= rows["done_ns"][1]  # its turn comes when the first is over
    assert json.loads(large[1])["usage"]["prompt_tokens"] == 100_000


def test_patterns_of_gaps() -> None:
    with TruthServer(ttft_ms=1, gap_ms=1, pattern="stall", stall_every=4, stall_ms=30) as server:
        client = Client(server)
        client.post(**batchmark("r", 10))
        list(client.events())
        stall = server.stop()
    assert np.diff(stall.due).tolist() == [1e6, 1e6, 1e6, 31e6, 1e6, 1e6, 1e6, 31e6, 1e6]
    gaps = []
    for _ in range(2):
        with TruthServer(ttft_ms=0, gap_ms=0.5, pattern="lognormal", sigma=0.5, seed=7) as server:
            client = Client(server)
            client.post(**batchmark("r", 400))
            list(client.events())
            gaps.append(np.diff(server.stop().due))
    assert (gaps[0] == gaps[1]).all()  # seeded
    assert len(set(gaps[0].tolist())) > 300
    assert 0.4e6 < gaps[0].mean() < 0.6e6


def test_errors_resets_and_hang_ups() -> None:
    with TruthServer(ttft_ms=1, gap_ms=2, error_every=2, abort_every=3) as server:
        client = Client(server)
        client.post(**batchmark("whole", 4))
        assert len(list(client.events())) == 6
        client.post(**batchmark("refused", 4))
        assert client.response()[0] == 500
        client.post(**batchmark("reset", 4))
        with pytest.raises(ConnectionError):
            list(client.events())
        slow = Client(server)
        slow.post(**batchmark("refused too", 4))
        assert slow.response()[0] == 500
        slow.post(**batchmark("left", 100_000))
        next(slow.events())
        slow.socket.close()
        other = Client(server)  # it serves on
        assert other.get("/health")[0] == 200
        while not _gone(server):
            pass
        truth = server.stop()
    rows = truth.rows
    assert rows["status"].tolist() == [200, 500, 200, 500, 200]
    assert (rows["flags"] & ABORTED != 0).tolist() == [False, False, True, False, False]
    assert rows["sent"][:4].tolist() == [4, 0, 2, 0]
    assert 0 < rows["sent"][4] < 100_000
    assert rows["gone_ns"][4] >= truth.sent_of(4)[0]
    assert rows["done_ns"][4] == 0


def _gone(server: TruthServer) -> bool:
    """The server holds no socket but the listener and one client."""
    time.sleep(0.01)
    links = [os.readlink(f"/proc/{server.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{server.pid}/fd")]
    return sum(link.startswith("socket:") for link in links) <= 2


def test_many_streams_at_once_keep_their_deadlines_and_their_counts() -> None:
    with TruthServer(ttft_ms=20, gap_ms=5) as server:
        clients = [Client(server) for _ in range(100)]
        for k, client in enumerate(clients):
            client.post(**batchmark(f"r{k:03d}", 20))
        for client in clients:
            assert len(list(client.events())) == 22
        truth = server.stop()
    assert len(truth) == 100
    assert truth.rows["sent"].tolist() == [20] * 100
    assert (truth.lateness_ns() >= 0).all()
    assert sorted(truth.index) == [f"r{k:03d}" for k in range(100)]


def test_a_wrong_option_a_missing_compiler_and_a_foreign_file(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = [sys.executable, "-m", "tests.support.truth_server"]
    done = subprocess.run([*run, "--pattern", "odd"], capture_output=True, text=True, cwd=HERE.parents[1])
    assert done.returncode == 2
    assert done.stderr == "truth_server: --pattern odd: choose from constant, lognormal, stall\n"
    (tmp_path / "other").write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a log of the truth server"):
        read_log(tmp_path / "other")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(TruthServerError, match="CXX=no-such-compiler"):
        build()

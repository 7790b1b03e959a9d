"""The scraper against real sockets: no server, however it behaves, disturbs a run or is disturbed by it."""

import contextlib
import json
import socket
import threading
import time

import pytest

from harness import scrape
from harness.conf import UsageError
from harness.metrics.server_metrics import read_server_metrics, summarise_server_metrics
from harness.prometheus import FIGURES
from harness.scrape import Scraper, metrics_endpoint
from tests.support.metrics_texts import UNKNOWN, VLLM_V1


def ok(text, *, headers="", content_length=True):
    body = text if isinstance(text, bytes) else text.encode()
    length = f"Content-Length: {len(body)}\r\n" if content_length else ""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n{length}{headers}\r\n"
    return head.encode() + body


class Server:
    """Plays `script(n, connection, server)` for its n-th connection, on a real socket."""

    def __init__(self, script):
        self.requests = []
        self.closing = threading.Event()
        self.script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/metrics"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(len(self._threads) - 1, connection))
            self._threads.append(thread)
            thread.start()

    def _serve(self, n, connection):
        with connection:
            try:
                request = b""
                while not request.endswith(b"\r\n\r\n"):
                    piece = connection.recv(4096)
                    if not piece:
                        return
                    request += piece
                self.requests.append(request.decode())
                self.script(n, connection, self)
            except OSError:
                pass

    def stop_listening(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self):
        self.closing.set()
        with contextlib.suppress(OSError):
            self.stop_listening()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def serve():
    servers = []

    def start(script):
        servers.append(Server(script if callable(script) else lambda n, c, s: c.sendall(script)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def quick(monkeypatch):
    """A short period, and all the patience that a loaded machine needs."""
    monkeypatch.setattr(scrape, "PERIOD_NS", 10_000_000)
    monkeypatch.setattr(scrape, "TIMEOUT_S", 20.0)


def until(holds):
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def scraped(tmp_path, url, *, rows=3, api_key=None, until_=None):
    path = tmp_path / "server_metrics.jsonl"
    with Scraper(path, url, api_key, t0_ns=time.monotonic_ns()) as scraper:
        until(lambda: until_(scraper) if until_ else scraper.rows >= rows)
    return scraper, read_server_metrics(tmp_path)


def test_a_server_is_scraped_through_the_run(tmp_path, quick, serve):
    def count(n, connection, server):
        connection.sendall(
            ok(VLLM_V1.replace('total{engine="0",model_name="m"} 400.0', f"total{{}} {400 + n}"))
        )

    server = serve(count)
    scraper, rows = scraped(tmp_path, server.url, rows=5, api_key="sk-1")
    assert len(rows) == scraper.rows == len(server.requests)
    assert [row["prefix_cache_queries_total"] for row in rows] == list(range(400, 400 + len(rows)))
    assert all(set(row) == {"t_ns", "took_ms", "error", "dialect", *FIGURES} for row in rows)
    assert [row["t_ns"] for row in rows] == sorted(row["t_ns"] for row in rows)
    assert scraper.reasons == {}
    assert scraper.meta()["dialect"] == "vllm"
    assert scraper.meta()["failures"] == {}
    assert all("authorization: bearer sk-1\r\n" in request.lower() for request in server.requests)
    assert server.requests[0].startswith("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:")
    summary = summarise_server_metrics(rows)
    assert summary["prefix_cache_queries"] == len(rows) - 1
    assert summary["running"] == {"mean": 9.0, "max": 9.0}


def test_a_short_run_has_a_row_at_its_start_and_one_at_its_end(tmp_path, serve):
    server = serve(ok(VLLM_V1))
    t0_ns = time.monotonic_ns() + 3600 * 10**9  # the load begins later
    with Scraper(tmp_path / "server_metrics.jsonl", server.url, t0_ns=t0_ns) as scraper:
        pass
    assert [row["running"] for row in read_server_metrics(tmp_path)] == [9, 9]
    assert scraper.period_ns == 500_000_000
    assert all("authorization" not in request.lower() for request in server.requests)


@pytest.mark.parametrize("kind", ["chunked", "until closed", "a byte at a time"])
def test_answers_may_be_framed_and_split_in_any_way(tmp_path, quick, serve, kind):
    def script(n, connection, server):
        if kind == "chunked":
            pieces = [VLLM_V1[i : i + 100] for i in range(0, len(VLLM_V1), 100)]
            body = "".join(f"{len(piece):x}\r\n{piece}\r\n" for piece in pieces) + "0\r\n\r\n"
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body.encode())
        elif kind == "until closed":
            connection.sendall(ok(VLLM_V1, content_length=False))
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in ok(VLLM_V1):
                connection.sendall(bytes([byte]))

    _, rows = scraped(tmp_path, serve(script).url)
    assert [row["error"] for row in rows] == [None] * len(rows)
    assert {row["generation_tokens_total"] for row in rows} == {1024}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "HTTP 404"),
        (b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "HTTP 307"),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "HTTP 401"),
        (ok("<!DOCTYPE html><title>Sign in</title>"), "not Prometheus text"),
        (ok(VLLM_V1)[:-500], "cut off"),
        (ok(VLLM_V1, content_length=False)[:-500], "cut off"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP (BadStatusLine)"),
        (b"", "not HTTP (RemoteDisconnected)"),
        (ok(b"\x1f\x8b\x08\x00\xff\xff", headers="Content-Encoding: gzip\r\n"), "not UTF-8"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", "more than 4194304 bytes"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n", "not HTTP (LineTooLong)"),
    ],
)
def test_an_answer_without_figures_is_null_with_its_reason(tmp_path, quick, serve, answer, reason):
    scraper, rows = scraped(tmp_path, serve(answer).url, rows=2)
    assert all(reason in row["error"] for row in rows)
    assert set(rows[0]) == {"t_ns", "took_ms", "error"}
    assert all(reason in scraper.reasons[figure] for figure in FIGURES)
    assert sum(scraper.meta()["failures"].values()) == len(rows)


def test_a_body_without_end_is_read_no_further_than_the_bound(tmp_path, quick, serve, monkeypatch):
    monkeypatch.setattr(scrape, "MAX_BYTES", 100_000)
    sent = []

    def script(n, connection, server):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        total = 0
        try:
            while total < 2 << 30:
                total += connection.send(b"vllm:num_requests_running 1\n" * 1000)
        finally:
            sent.append(total)

    _, rows = scraped(tmp_path, serve(script).url, rows=2)
    assert {row["error"] for row in rows} == {"more than 100000 bytes"}
    until(lambda: len(sent) >= 2)
    assert max(sent) < 100 << 20  # what fits into the sockets' buffers, not the 2 GiB


def test_a_server_that_hangs_or_drips_costs_its_time_and_no_more(tmp_path, monkeypatch, serve):
    monkeypatch.setattr(scrape, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(scrape, "PERIOD_NS", 20_000_000)

    def script(n, connection, server):
        if n % 2:  # a header that never ends: no single read takes long
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while not server.closing.wait(0.01):
                connection.sendall(b"y")
        server.closing.wait(60)

    server = serve(script)
    scraper, rows = scraped(tmp_path, server.url, rows=3)
    assert {row["error"] for row in rows} == {"no answer within 0.1 s"}
    assert all(99 <= row["took_ms"] < 5000 for row in rows)
    assert len(rows) == scraper.rows


def test_the_end_of_a_run_does_not_wait_for_a_server_that_hangs(tmp_path, monkeypatch, serve):
    monkeypatch.setattr(scrape, "TIMEOUT_S", 120.0)
    monkeypatch.setattr("harness.sampler.JOIN_S", 0.1)
    server = serve(lambda n, connection, server: server.closing.wait(100))
    begin = time.monotonic()
    with Scraper(tmp_path / "server_metrics.jsonl", server.url, t0_ns=0) as scraper:
        until(lambda: server.requests)
    assert time.monotonic() - begin < 60
    assert not scraper._thread.is_alive()
    assert not scraper.reasons.get("server_metrics", "").startswith("gave up")


def test_a_server_that_dies_in_between_keeps_what_was_read(tmp_path, quick, serve):
    def script(n, connection, server):
        if n == 2:
            server.stop_listening()
        connection.sendall(ok(VLLM_V1.replace("} 24.0", f"}} {24 + 100 * n}.0")))

    scraper, rows = scraped(
        tmp_path, serve(script).url, until_=lambda s: any("refused" in reason for reason in s.failures)
    )
    assert [row["error"] for row in rows[:3]] == [None] * 3
    assert {row["error"] for row in rows[3:]} == {"connection refused"}
    assert scraper.reasons == {}  # every figure had a value
    summary = summarise_server_metrics(rows)
    assert summary["generation_tokens"] == 200
    assert summary["failed"] == len(rows) - 3
    assert summary["end_s"] == rows[2]["t_ns"] / 1e9


def test_failures_in_a_row_make_pauses_longer_and_end_the_scraping(tmp_path, quick, serve, monkeypatch):
    monkeypatch.setattr(scrape, "FAILURES", 5)
    server = serve(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
    scraper, rows = scraped(tmp_path, server.url, until_=lambda s: "server_metrics" in s.reasons)
    assert len(rows) == len(server.requests) == 5  # the end of the run asked no more
    assert "after 5 failures: HTTP 503" in scraper.reasons["server_metrics"]
    times = [row["t_ns"] / 1e6 for row in rows]
    assert times[4] - times[0] >= 10 * (1.5 + 3.5 + 7.5 + 15.5) - 1  # pauses never end early


def test_a_success_forgives_the_failures_before_it(tmp_path, quick, serve, monkeypatch):
    monkeypatch.setattr(scrape, "FAILURES", 2)
    bad = b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"
    server = serve(lambda n, connection, server: connection.sendall(ok(VLLM_V1) if n % 2 else bad))
    scraper, rows = scraped(tmp_path, server.url, rows=8)
    assert [row["error"] for row in rows[:8]] == ["HTTP 500", None] * 4
    assert scraper.reasons == {}


def test_an_unknown_server_is_told_with_its_names(tmp_path, quick, serve):
    scraper, rows = scraped(tmp_path, serve(ok(UNKNOWN)).url, rows=2)
    assert rows[0]["dialect"] is None
    assert rows[0]["error"] is None
    assert scraper.meta()["unknown_names"] == ["http_requests_total", "go_goroutines"]
    assert all("unknown server" in scraper.reasons[figure] for figure in FIGURES)


@pytest.mark.parametrize(
    ("url", "key", "reason"),
    [
        ("http://127.0.0.1:1/metrics", None, "connection refused"),
        ("http://name.invalid/metrics", None, "cannot be resolved"),
        ("http://127.0.0.1:1/metrics", "a\nb: c", None),
    ],
)
def test_nobody_there(tmp_path, quick, url, key, reason):
    scraper, rows = scraped(tmp_path, url, rows=1, api_key=key)
    if reason:
        assert reason in rows[0]["error"]
    else:
        assert "b: c" not in json.dumps(rows) + json.dumps(scraper.meta())


def test_a_key_that_no_header_can_hold_is_not_sent_nor_repeated(tmp_path, quick, serve):
    server = serve(ok(VLLM_V1))
    scraper, rows = scraped(tmp_path, server.url, rows=1, api_key="sk-1\r\nX-Other: 1")
    assert "API key has characters" in rows[0]["error"]
    assert server.requests == []
    assert "sk-1" not in (tmp_path / "server_metrics.jsonl").read_text() + json.dumps(scraper.meta())


def test_no_address_is_no_file_and_a_reason(tmp_path):
    with Scraper(tmp_path / "server_metrics.jsonl", None, t0_ns=0) as scraper:
        pass
    assert scraper.reasons == dict.fromkeys(FIGURES, "engine.metrics_url=null")
    assert list(tmp_path.iterdir()) == []
    assert read_server_metrics(tmp_path) == []


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({}, ("http://h:8000/metrics", "key")),
        ({"metrics_url": "auto"}, ("http://h:8000/metrics", "key")),
        ({"metrics_url": None}, (None, None)),
        ({"metrics_url": "http://h:9000/m?a=b"}, ("http://h:9000/m?a=b", "key")),
        ({"metrics_url": "http://other/metrics"}, ("http://other/metrics", None)),
        ({"metrics_url": "https://h/metrics"}, ("https://h/metrics", None)),
    ],
)
def test_where_to_scrape_and_who_gets_the_key(engine, expected):
    assert metrics_endpoint(engine, "http://h:8000", "key") == expected


@pytest.mark.parametrize(
    "url", ["ftp://h/m", "h:8000", "http://", "http://h:0/", "http://h:x/", "http://[::1", "http://h/a b", 7]
)
def test_an_address_that_cannot_be_is_a_usage_error(url):
    with pytest.raises(UsageError, match=r"engine\.metrics_url=.*: needs an address such as http://"):
        metrics_endpoint({"metrics_url": url}, "http://h:8000", None)
    with pytest.raises(UsageError) as raised:
        metrics_endpoint({"metrics_url": "http://me:secret@h/"}, "http://h:8000", None)
    assert "secret" not in str(raised.value)

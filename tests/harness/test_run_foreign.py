"""A server that is not ours: what is asked of it before a run, and what is said when it does not do."""

import contextlib
import json
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from harness.conf import UsageError, compose
from harness.foreign import probe, takes_websockets
from harness.plan import draw_schedule
from harness.target import asked_over, foreign_target


@pytest.fixture
def server():
    """serve(status, body) -> its address; what it was asked is in serve.asked."""
    started = []

    def serve(status, body):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                serve.asked.append((self.path, self.headers.get("Authorization")))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

            def log_message(self, *args):
                pass

        listener = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True).start()
        started.append(listener)
        return f"http://127.0.0.1:{listener.server_address[1]}"

    serve.asked = []
    yield serve
    for listener in started:
        listener.shutdown()
        listener.server_close()


MODELS = {"object": "list", "data": [{"id": "first", "max_model_len": 77}, {"id": "second"}]}


def test_the_first_model_is_taken_and_its_limit_kept(server):
    url = server(200, MODELS)
    for written in (url, url + "/", url + "/v1", url + "/v1/"):
        found = probe({"base_url": written})
        assert (found.root, found.model, found.max_model_len) == (url, "first", 77)
    assert {path for path, _ in server.asked} == {"/v1/models"}


@pytest.mark.parametrize("limit", [-5, 0, "4096", 1.5, None])
def test_a_limit_that_is_none_is_left_out(server, limit):
    url = server(200, {"data": [{"id": "a", "max_model_len": limit}]})
    assert probe({"base_url": url}).max_model_len is None


def test_a_model_that_is_named_is_taken_also_without_a_list(server):
    assert probe({"base_url": server(200, MODELS), "model": "second"}).model == "second"
    assert probe({"base_url": server(404, {}), "model": "mine"}).model == "mine"


def test_the_key_of_the_variable_is_sent_and_shown_nowhere(server, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-secret-123")
    url = server(200, MODELS)
    target = foreign_target(
        compose(["engine=openai", f"engine.base_url={url}", "engine.api_key_env=SOME_KEY"])
    )
    assert server.asked[-1][1] == "Bearer sk-secret-123"
    assert "sk-secret-123" not in repr(target)
    assert target.load.api_key == "sk-secret-123"


def test_no_proxy_of_the_environment_is_used(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert probe({"base_url": server(200, MODELS)}).model == "first"


@pytest.mark.parametrize(
    ("status", "body", "part"),
    [
        (200, b"<html>hello</html>", "OpenAI-compatible"),
        (200, {"models": []}, "OpenAI-compatible"),
        (200, {"data": [1]}, "OpenAI-compatible"),
        (200, {"data": []}, "set engine.model"),
        (404, {}, "engine.model"),
        (500, {}, "HTTP 500"),
        (401, {}, "engine.api_key_env"),
    ],
)
def test_a_server_that_does_not_do_is_one_line(server, status, body, part):
    url = server(status, body)
    with pytest.raises(UsageError, match=rf"^engine\.base_url={url}: [^\n]+$") as caught:
        probe({"base_url": url})
    assert part in str(caught.value)


def test_nobody_there_and_no_such_host():
    with pytest.raises(UsageError, match="connection refused"):
        probe({"base_url": "http://127.0.0.1:9"})
    with pytest.raises(UsageError, match="nobody answers there"):
        probe({"base_url": "http://no-such-host.invalid"})


def test_a_server_without_tls_is_told_from_nobody(server):
    with pytest.raises(UsageError, match=r"no TLS is spoken there .*; is it http://\?"):
        probe({"base_url": server(200, MODELS).replace("http://", "https://")})


@pytest.mark.parametrize(
    ("opening", "drip", "part"),
    [
        (b"\x00\xff garbage\r\n\r\n", b"", "not a list of models"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", b"", "not a list of models"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" ", "no answer within"),  # each read brings something, for ever
    ],
)
def test_a_server_that_does_not_speak_http_is_one_line(monkeypatch, opening, drip, part):
    monkeypatch.setattr("harness.foreign.PROBE_TIMEOUT_S", 0.3)
    ended = threading.Event()

    def talk(listener):
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(opening)
            while drip and not ended.wait(0.05):
                connection.sendall(drip)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        speaker = threading.Thread(target=talk, args=(listener,), daemon=True)
        speaker.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UsageError, match=rf"^engine\.base_url={url}: [^\n]+$") as caught:
            probe({"base_url": url})
        ended.set()
        speaker.join(5)
    assert part in str(caught.value)


def test_what_a_foreign_server_is_sent(server):
    url = server(200, MODELS)
    plain = foreign_target(compose(["engine=openai", f"engine.base_url={url}"]))
    assert plain.load.sends_text
    assert plain.length_mode == "exact"
    ids = foreign_target(compose(["engine=openai", f"engine.base_url={url}", "engine.tokenizer=bytes"]))
    assert not ids.load.sends_text
    chat = foreign_target(compose(["engine=openai", f"engine.base_url={url}", "engine.api=chat"]))
    assert chat.load.api == "chat"


def drawn(*overrides):
    cfg = compose(["engine=openai", "workload=chat", "load.requests=200", *overrides])
    return cfg, draw_schedule(cfg)


def test_without_the_route_websockets_are_sent_as_sse_and_told(server, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-secret-123")
    url = server(200, MODELS)
    address = (f"engine.base_url={url}", "engine.api_key_env=SOME_KEY")
    cfg, schedule = drawn(*address, "engine.api=chat")
    requests, told = asked_over(foreign_target(cfg), schedule)
    assert server.asked[-1] == ("/v1/chat/completions/ws", "Bearer sk-secret-123")
    over = [r.transport for r in schedule].count("websocket")
    assert over > 5
    assert told == (
        f"note: {url} has no WebSocket at /v1/chat/completions/ws: {over} of 200 requests that would have "
        "come over one are sent as SSE"
    )
    assert {r.transport for r in requests} == {"http"}
    assert [replace(r, transport="http") for r in schedule] == list(requests)
    asked = len(server.asked)
    cfg, plain = drawn(*address, "workload.websocket_fraction=0")
    assert asked_over(foreign_target(cfg), plain) == (plain.requests, None)
    assert len(server.asked) == asked + 1, "no handshake where nobody wants one"


@pytest.mark.parametrize(
    "answered",
    [b"", b"\x00 garbage\r\n\r\n", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"],
)
def test_what_is_no_upgrade_is_no_route(answered):
    def talk(listener):
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answered)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        speaker = threading.Thread(target=talk, args=(listener,), daemon=True)
        speaker.start()
        assert not takes_websockets(f"http://127.0.0.1:{listener.getsockname()[1]}", "v1/completions", None)
        speaker.join(5)

"""A server with known truth: it sends what a script says and logs when it really sent it.

Raw sockets, no HTTP library: a script may break every rule. It runs in an event loop on 127.0.0.1 and a free
port; script_process.py gives it a process of its own, so that its truth does not share an interpreter with
what is measured. All stamps are CLOCK_MONOTONIC ns, taken right before the bytes are handed to the socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support import script_socket


@dataclass(frozen=True)
class Step:
    """Something that a stream does, after_s after the step before it; or at_s after the request was there,
    however late the step before it was."""

    kind: str  # tokens | plain (bytes that carry no token) | reset | close | hang
    after_s: float = 0.0
    data: bytes = b""
    tokens: int = 0
    at_s: float | None = None


@dataclass(frozen=True)
class Script:
    """One response. split: bytes per chunk of the body, None: a chunk per step. cut: each step leaves in two
    writes, the second cut_s after the first `cut` bytes of what is on the wire (the chunk's size line
    included). framing: chunked | length (Content-Length) | close (the end of the connection ends the body);
    a client that asks for a WebSocket gets each event as a message. head: bytes that are sent instead of
    status line and headers, whatever they are."""

    steps: Sequence[Step]
    status: int = 200
    content_type: str = "text/event-stream"
    head_after_s: float = 0.0
    split: int | None = None
    cut: int | None = None
    cut_s: float = 0.002
    framing: str = "chunked"
    head: bytes | None = None


Rule = Callable[[dict[str, Any], int], Script]
"""Chooses the response from the request's body and its number, from 0."""


@dataclass(frozen=True)
class ById:
    """Our own requests say who they are: a script for each id, `other` for the rest."""

    scripts: Mapping[str, Script]
    other: Script | None = None

    def __call__(self, body: dict[str, Any], number: int) -> Script:
        name = body.get("batchmark", {}).get("id")
        script = self.scripts.get(name, self.other)
        assert script is not None, f"no script for request {name}"
        return script


@dataclass(frozen=True)
class InTurn:
    """The n-th request gets the n-th script, the last one stands for all after it."""

    scripts: Sequence[Script]

    def __call__(self, body: dict[str, Any], number: int) -> Script:
        return self.scripts[min(number, len(self.scripts) - 1)]


@dataclass(frozen=True)
class AsAsked:
    """A well-behaved server: as many tokens as asked for, one a chunk, and the prompt counted as it came.
    short: tokens of the prompt that its count leaves out."""

    first_s: float = 0.0
    gap_s: float = 0.0
    short: int = 0

    def __call__(self, body: dict[str, Any], number: int) -> Script:
        n = body.get("batchmark", {}).get("stop_after") or body["max_tokens"]
        prompt = len(body.get("prompt") or body.get("messages"))
        steps = [tokens(1, at_s=self.first_s + k * self.gap_s) for k in range(n)]
        return Script([*steps, *ending(n, prompt=prompt - self.short)])


@dataclass
class Pausing:
    """One token after service_s; a request that comes between from_s and to_s, counted from the first one, is
    held until then. What was under way when it began stays under way too."""

    from_s: float
    to_s: float
    service_s: float
    began: float | None = None

    def __call__(self, body: dict[str, Any], number: int) -> Script:
        now = time.monotonic()
        self.began = now if self.began is None else self.began
        at_s = now - self.began
        held_s = self.to_s - at_s if self.from_s <= at_s + self.service_s and at_s < self.to_s else 0.0
        return timeline([(held_s + self.service_s, 1)])


@dataclass
class Seen:
    """What the server saw and did for one request."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    received_ns: int
    sends: list[tuple[int, int]] = field(default_factory=list)  # (ns, tokens) of steps that carried tokens
    plain_ns: list[int] = field(default_factory=list)
    closed_ns: int | None = None  # the client closed the connection before the script had ended
    ended_ns: int | None = None  # the script has ended
    connection: int = 0


def sse(value: Any, event: str | None = None) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {text}\n\n".encode()


def completion(
    text: str = "", ids: Sequence[int] | None = None, finish: str | None = None, **extra: Any
) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = list(ids)
    return sse({"id": "c", "object": "text_completion", "choices": [choice], **extra})


def crlf(data: bytes) -> bytes:
    """The same event with the other line end."""
    return data.replace(b"\n", b"\r\n")


COMMENT = b": still here\n\n"


def chat(delta: dict[str, Any], finish: str | None = None, **extra: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return sse({"id": "c", "object": "chat.completion.chunk", "choices": [choice], **extra})


def usage(output: int, prompt: int = 3) -> bytes:
    return sse({"id": "c", "choices": [], "usage": {"completion_tokens": output, "prompt_tokens": prompt}})


DONE = sse("[DONE]")


def plain(data: bytes, after_s: float = 0.0, *, at_s: float | None = None) -> Step:
    return Step("plain", after_s, data, at_s=at_s)


def tokens(
    n: int = 1,
    after_s: float = 0.0,
    *,
    at_s: float | None = None,
    with_ids: bool = True,
    text: str | None = None,
    **extra: Any,
) -> Step:
    """A completion chunk of n tokens."""
    body = completion("x" * n if text is None else text, list(range(n)) if with_ids else None, **extra)
    return Step("tokens", after_s, body, n, at_s)


def delta(at_s: float, n: int = 1, **channels: Any) -> Step:
    """A chat chunk of n tokens at its own time: content, reasoning_content, tool_calls."""
    return Step("tokens", 0.0, chat(channels), n, at_s)


def ending(n: int, *, with_usage: bool = True, reason: str = "length", prompt: int = 3) -> list[Step]:
    """finish_reason, usage and [DONE] of an answer of n tokens."""
    steps = [plain(completion(finish=reason))]
    if with_usage:
        steps.append(plain(usage(n, prompt)))
    return [*steps, plain(DONE)]


def timeline(chunks: Sequence[tuple[float, int]]) -> Script:
    """Chunks of n tokens, each at its own time after the request: (seconds, n)."""
    steps = [tokens(n, at_s=at_s) for at_s, n in chunks]
    return Script([*steps, *ending(sum(n for _, n in chunks))])


def answer(n: int, gap_s: float = 0.0, first_s: float = 0.0) -> Script:
    """n tokens, one a chunk."""
    steps = [tokens(1, first_s if k == 0 else gap_s) for k in range(n)]
    return Script([*steps, *ending(n)])


def refusal(status: int, message: str = "no", code: str | None = None) -> Script:
    body = json.dumps({"error": {"message": message, "type": "t", "param": None, "code": code}}).encode()
    return Script([plain(body)], status=status, content_type="application/json")


class ScriptServer:
    """Use as an async context manager. A request is under way from the end of its body until its last
    bytes, or the client's hang-up. GETs (/v1/models) are answered apart, and counted in `gets` alone."""

    def __init__(self, script: Rule | Script) -> None:
        self.open_connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.play(script)

    def play(self, script: Rule | Script) -> None:
        """Begin anew with another script and an empty log."""
        self._script = script if callable(script) else InTurn([script])
        self.seen: list[Seen] = []
        self.gets: list[str] = []
        self.connections = 0
        self.peak = 0  # most requests under way at once
        self._under_way: set[int] = set()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> ScriptServer:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=4096)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Close the port and break every connection, as the death of the process would."""
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def by_id(self, request_id: str) -> Seen:
        return next(s for s in self.seen if s.body["batchmark"]["id"] == request_id)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open_connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._connection(reader, writer, self.connections)
        finally:
            self.open_connections -= 1
            self._tasks.discard(task)
            writer.transport.abort()

    async def _connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        first = b""
        while True:
            head = first + await reader.readuntil(b"\r\n\r\n")
            request_line, *lines = head.decode("latin-1").split("\r\n")
            headers = {
                k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)
            }
            raw = await reader.readexactly(int(headers.get("content-length", 0)))
            method, path, _ = request_line.split(" ", 2)
            socket_key = headers.get("sec-websocket-key")
            if socket_key is not None:
                writer.write(script_socket.accept(socket_key))
                _, raw = await script_socket.read_frame(reader)
            received_ns = time.monotonic_ns()
            if method == "GET" and socket_key is None:
                self.gets.append(path)
                writer.write(_MODELS if path.endswith("/v1/models") else _NOT_FOUND)
                first = await reader.read(1)
                if not first:
                    return
                continue
            seen = Seen(path, json.loads(raw or b"{}"), headers, received_ns, connection=number)
            self.seen.append(seen)
            self._under_way.add(id(seen))
            self.peak = max(self.peak, len(self._under_way))
            gone = asyncio.create_task(_next_byte(reader))
            script = self._script(seen.body, len(self.seen) - 1)
            if socket_key is not None:
                script = replace(script, framing="websocket")
            play = asyncio.create_task(self._play(script, seen, writer))
            try:
                await asyncio.wait({gone, play}, return_when=asyncio.FIRST_COMPLETED)
                if not play.done():
                    seen.closed_ns = time.monotonic_ns()
                    return
                if not play.result():
                    return
                seen.ended_ns = time.monotonic_ns()
            finally:
                self._under_way.discard(id(seen))
                play.cancel()
                if not gone.done() and (play.cancelled() or not play.done()):
                    gone.cancel()
            first = await gone
            if not first:
                return

    async def _play(self, script: Script, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        """False: the script broke the connection, or its end is the end of the connection."""
        if script.head_after_s:
            await asyncio.sleep(script.head_after_s)
        writer.write(_head(script))
        last = len(script.steps) - 1
        for k, step in enumerate(script.steps):
            await _until(step, seen.received_ns)
            if step.kind == "reset":
                _reset(writer)
                return False
            if step.kind == "close":
                await writer.drain()
                writer.close()
                return False
            if step.kind == "hang":
                await asyncio.Event().wait()
            if k == last:  # from here on the client may have all of it, and send its next one
                self._under_way.discard(id(seen))
            await self._write(script, step, seen, writer)
        if script.framing == "chunked":
            writer.write(b"0\r\n\r\n")
        if script.framing == "websocket":
            writer.write(script_socket.close(1000 if script.status == 200 else 4000 + script.status))
        await writer.drain()
        if script.framing == "close":
            writer.close()
        return script.framing != "close"

    async def _write(self, script: Script, step: Step, seen: Seen, writer: asyncio.StreamWriter) -> None:
        size = script.split or len(step.data)
        pieces = [step.data[i : i + size] for i in range(0, len(step.data), size or 1)]
        if script.framing == "chunked":
            pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
        elif script.framing == "websocket":
            wire = b"".join(script_socket.messages(step.data, script.status))
            size = script.split or len(wire) or 1
            pieces = [wire[i : i + size] for i in range(0, len(wire), size)]
        if script.cut is not None:
            wire = b"".join(pieces)
            pieces = [piece for piece in (wire[: script.cut], wire[script.cut :]) if piece]
            line_end = 2 if script.framing == "chunked" else 0
            # A blank line is one from its CR on: an event does not wait for the LF.
            whole = len(wire) - line_end - step.data.endswith(b"\r\n")
        stamp = time.monotonic_ns()
        for k, piece in enumerate(pieces):
            if k and script.cut is not None:
                await asyncio.sleep(script.cut_s)
                if script.cut < whole:  # the event is only complete now
                    stamp = time.monotonic_ns()
            writer.write(piece)
            if script.split:
                await asyncio.sleep(0)
        if step.kind == "tokens":
            seen.sends.append((stamp, step.tokens))
        else:
            seen.plain_ns.append(stamp)


async def _next_byte(reader: asyncio.StreamReader) -> bytes:
    """Empty: the client is gone, in whatever way. Nobody waits for it where the script ends first, so it may
    not raise."""
    with contextlib.suppress(ConnectionError):
        return await reader.read(1)
    return b""


def _head(script: Script) -> bytes:
    if script.head is not None:
        return script.head
    if script.framing == "websocket":  # it has left with the handshake
        return b""
    framing = {
        "chunked": "Transfer-Encoding: chunked\r\n",
        "length": f"Content-Length: {sum(len(step.data) for step in script.steps)}\r\n",
        "close": "Connection: close\r\n",
    }
    head = f"HTTP/1.1 {script.status} Scripted\r\nContent-Type: {script.content_type}\r\n"
    return f"{head}{framing[script.framing]}\r\n".encode()


def _json_response(status: str, value: Any) -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


_MODELS = _json_response("200 OK", {"object": "list", "data": [{"id": "scripted", "max_model_len": 8192}]})
_NOT_FOUND = _json_response("404 Not Found", {"error": {"message": "no such path"}})


async def _until(step: Step, received_ns: int) -> None:
    if step.at_s is None:
        if step.after_s:
            await asyncio.sleep(step.after_s)
        return
    wait_s = step.at_s - (time.monotonic_ns() - received_ns) / 1e9
    if wait_s > 0:
        await asyncio.sleep(wait_s)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()

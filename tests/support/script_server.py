"""A server with known truth: it sends what a script says and logs when it really sent it.

Raw sockets, no HTTP library: a script may break every rule. It runs in the event loop of the test, on
127.0.0.1 and a free port. All stamps are CLOCK_MONOTONIC ns, taken right before the bytes are handed to the
socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """Something that a stream does, after_s after the step before it."""

    kind: str  # tokens | plain (bytes that carry no token) | reset | close | hang
    after_s: float = 0.0
    data: bytes = b""
    tokens: int = 0


@dataclass(frozen=True)
class Script:
    """One response. split: bytes per write of the body, None: a write per step."""

    steps: Sequence[Step]
    status: int = 200
    content_type: str = "text/event-stream"
    head_after_s: float = 0.0
    split: int | None = None


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


def chat(delta: dict[str, Any], finish: str | None = None, **extra: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return sse({"id": "c", "object": "chat.completion.chunk", "choices": [choice], **extra})


def usage(output: int, prompt: int = 3) -> bytes:
    return sse({"id": "c", "choices": [], "usage": {"completion_tokens": output, "prompt_tokens": prompt}})


DONE = sse("[DONE]")


def plain(data: bytes, after_s: float = 0.0) -> Step:
    return Step("plain", after_s, data)


def tokens(n: int = 1, after_s: float = 0.0, *, with_ids: bool = True, text: str | None = None) -> Step:
    """A completion chunk of n tokens."""
    body = completion("x" * n if text is None else text, list(range(n)) if with_ids else None)
    return Step("tokens", after_s, body, n)


def ending(n: int, *, with_usage: bool = True, reason: str = "length") -> list[Step]:
    """finish_reason, usage and [DONE] of an answer of n tokens."""
    steps = [plain(completion(finish=reason))]
    if with_usage:
        steps.append(plain(usage(n)))
    return [*steps, plain(DONE)]


def answer(n: int, gap_s: float = 0.0, first_s: float = 0.0) -> Script:
    """n tokens, one a chunk."""
    steps = [tokens(1, first_s if k == 0 else gap_s) for k in range(n)]
    return Script([*steps, *ending(n)])


def refusal(status: int, message: str = "no", code: str | None = None) -> Script:
    body = json.dumps({"error": {"message": message, "type": "t", "param": None, "code": code}}).encode()
    return Script([plain(body)], status=status, content_type="application/json")


class ScriptServer:
    """Use as an async context manager. `script` chooses the response from the request's body and its
    number."""

    def __init__(self, script: Callable[[dict[str, Any], int], Script] | Script) -> None:
        self._script = script if callable(script) else lambda body, number: script
        self.seen: list[Seen] = []
        self.connections = 0
        self.open_connections = 0
        self.peak = 0  # most requests under way at once
        self._active = 0
        self._tasks: set[asyncio.Task[None]] = set()

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
            seen = Seen(
                request_line.split()[1],
                json.loads(raw or b"{}"),
                headers,
                time.monotonic_ns(),
                connection=number,
            )
            self.seen.append(seen)
            self._active += 1
            self.peak = max(self.peak, self._active)
            gone = asyncio.create_task(reader.read(1))
            play = asyncio.create_task(self._play(self._script(seen.body, len(self.seen) - 1), seen, writer))
            try:
                await asyncio.wait({gone, play}, return_when=asyncio.FIRST_COMPLETED)
                if not play.done():
                    seen.closed_ns = time.monotonic_ns()
                    return
                if not play.result():
                    return
                seen.ended_ns = time.monotonic_ns()
            finally:
                self._active -= 1
                play.cancel()
                if not gone.done() and (play.cancelled() or not play.done()):
                    gone.cancel()
            first = await gone
            if not first:
                return

    async def _play(self, script: Script, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        """False: the script broke the connection."""
        if script.head_after_s:
            await asyncio.sleep(script.head_after_s)
        writer.write(
            f"HTTP/1.1 {script.status} Scripted\r\nContent-Type: {script.content_type}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        for step in script.steps:
            if step.after_s:
                await asyncio.sleep(step.after_s)
            if step.kind == "reset":
                _reset(writer)
                return False
            if step.kind == "close":
                await writer.drain()
                writer.close()
                return False
            if step.kind == "hang":
                await asyncio.Event().wait()
            size = script.split or len(step.data)
            pieces = [step.data[i : i + size] for i in range(0, len(step.data), size or 1)]
            stamp = time.monotonic_ns()
            for piece in pieces:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                if script.split:
                    await asyncio.sleep(0)
            if step.kind == "tokens":
                seen.sends.append((stamp, step.tokens))
            else:
                seen.plain_ns.append(stamp)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()

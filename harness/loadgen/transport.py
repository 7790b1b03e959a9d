"""How bytes get to a server and back. `Transport` is all that the load generator knows of a network.

An exchange tells its sink three things, each with the CLOCK_MONOTONIC ns at which it happened: the request
was written, the response's head has come, bytes of the body have come. Stamps are taken before anything is
parsed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Protocol

import aiohttp
from aiohttp import payload
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from harness.loadgen import websocket

CONNECT_TIMEOUT_S = 10.0
KEEPALIVE_S = 4.0
"""Below the 5 s after which common servers drop an idle connection: a POST on it could not be repeated."""
READ_BUFFER_BYTES = 1 << 20
MAX_REDIRECTS = 5


class Sink(Protocol):
    """Who an exchange reports to."""

    def on_send(self, now_ns: int) -> None: ...

    def on_headers(self, now_ns: int, status: int, content_type: str) -> None: ...

    def on_data(self, now_ns: int, piece: bytes) -> bool:
        """False: hang up now."""


class TransportError(Exception):
    """The exchange broke. reason: connect (nobody answered), reset (it broke off), protocol (not HTTP)."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Transport(Protocol):
    """Sends requests. Cancelling post() closes its connection at once, without reading it to the end."""

    async def post(self, path: str, body: bytes, sink: Sink) -> None:
        """One exchange, until the body has ended or the sink hangs up. Raises TransportError."""

    async def converse(self, path: str, body: bytes, sink: Sink) -> None:
        """The same over a WebSocket of its own: the body goes as one message, and what the server says is
        told as a stream of events would be (harness.loadgen.websocket)."""

    async def close(self) -> None: ...

    @property
    def connections(self) -> int:
        """That were opened."""


class AiohttpTransport:
    """Over aiohttp: one session, no limit on connections, keep-alive, no cookies. Redirects that keep the
    method are followed; the key goes to no other origin. trust_env: proxies and .netrc as the environment
    says, a look-up of about 1 ms a request."""

    def __init__(self, base_url: str, api_key: str | None = None, *, trust_env: bool = False) -> None:
        self.connections = 0
        self._base = URL(base_url.rstrip("/") + "/")
        self._authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_create_end.append(self._connected)
        tracing.on_request_headers_sent.append(_head_sent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=CONNECT_TIMEOUT_S),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=trust_env,
            trace_configs=[tracing],
            read_bufsize=READ_BUFFER_BYTES,
        )

    async def post(self, path: str, body: bytes, sink: Sink) -> None:
        url = self._base.join(URL(path.lstrip("/")))
        with _named_errors():
            response = await self._post(url, body, sink)
            try:
                await _respond(response, sink)
            finally:
                if not response.closed:
                    _abort(response)

    async def converse(self, path: str, body: bytes, sink: Sink) -> None:
        key = websocket.new_key()
        with _named_errors():
            response = await self._session.get(
                self._base.join(URL(path.lstrip("/") + websocket.SUFFIX)),
                headers={**self._authorization, **websocket.HEADERS, websocket.KEY: key},
                allow_redirects=False,
                trace_request_ctx=sink,
            )
            try:
                if response.status != 101:
                    await _respond(response, sink)
                    return
                fault = websocket.refused(key, {k.lower(): v for k, v in response.headers.items()})
                connection = response.connection
                if fault is not None:
                    raise TransportError("protocol", fault)
                if connection is None or connection.protocol is None or connection.transport is None:
                    raise ConnectionResetError("the server closed the connection after its handshake")
                messages = _Messages(sink, connection.transport)
                connection.transport.write(websocket.frame(body))
                # What aiohttp's own WebSocket client does: from here on bytes come to feed_data as they are.
                connection.protocol.set_parser(messages, None)
                await messages.end
            finally:
                _abort(response)

    async def _post(self, url: URL, body: bytes, sink: Sink) -> aiohttp.ClientResponse:
        """The first response that is no redirect to somewhere else."""
        for hop in count():
            response = await self._session.post(
                url,
                data=_StampedBody(body, sink),
                headers=self._authorization if url.origin() == self._base.origin() else None,
                allow_redirects=False,
            )
            target = _redirect(response)
            if target is None or hop == MAX_REDIRECTS:
                break
            url = target
            response.release()
        return response

    async def close(self) -> None:
        await self._session.close()

    async def _connected(self, session: object, context: object, params: object) -> None:
        self.connections += 1


async def _head_sent(session: object, context: SimpleNamespace, params: object) -> None:
    """A handshake is handed to the socket."""
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.on_send(time.monotonic_ns())


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """TransportError for whatever aiohttp raises."""
    try:
        yield
    except aiohttp.ClientConnectorError as exc:
        raise TransportError("connect", _line(exc)) from exc
    except aiohttp.ConnectionTimeoutError as exc:
        raise TransportError("connect", f"no connection within {CONNECT_TIMEOUT_S:g} s") from exc
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as exc:
        raise TransportError("reset", _line(exc)) from exc
    except (ConnectionError, OSError) as exc:
        raise TransportError("reset", _line(exc)) from exc
    except aiohttp.ClientError as exc:
        raise TransportError("protocol", _line(exc)) from exc


class _Messages:
    """The reader of a WebSocket, in the place of aiohttp's: it stamps bytes as the event loop brings them.
    `end` is done when nothing more will come, or the sink hangs up."""

    def __init__(self, sink: Sink, transport: asyncio.Transport) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sink = sink
        self._transport = transport
        self._frames = websocket.Frames()
        self._begun = False

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """As aiohttp's protocol wants it: (stop reading, what is left)."""
        now_ns = time.monotonic_ns()
        frames = self._frames
        piece = frames.feed(data) if data else b""
        if not self._begun and frames.status is not None:
            self._begun = True
            self._sink.on_headers(now_ns, frames.status, frames.content_type)
        more = self._sink.on_data(now_ns, piece) if piece else True
        if frames.replies:
            self._transport.write(frames.replies)
            frames.replies = b""
        if not more or frames.ended:
            self._finish(TransportError(*frames.broken) if more and frames.broken else None)
        return self.end.done(), b""

    def feed_eof(self) -> None:
        self._finish(ConnectionResetError("the server closed the connection without a close frame"))

    def _finish(self, exc: BaseException | None) -> None:
        if self.end.done():
            return
        if exc is None:
            self.end.set_result(None)
        else:
            self.end.set_exception(exc)


async def _respond(response: aiohttp.ClientResponse, sink: Sink) -> None:
    sink.on_headers(time.monotonic_ns(), response.status, response.headers.get("Content-Type", ""))
    await _read(response, sink)


async def _read(response: aiohttp.ClientResponse, sink: Sink) -> None:
    content, connection = response.content, response.connection
    protocol = None if connection is None else connection.protocol
    closed: asyncio.Future[None] | None = getattr(protocol, "closed", None)

    def wake(end: asyncio.Future[None]) -> None:
        # aiohttp closes a connection whose framing it cannot read, but leaves the reader of the body waiting.
        broken = None if end.cancelled() else end.exception()
        if not content.is_eof() and content.exception() is None:
            content.set_exception(
                TransportError("protocol", _line(broken or ValueError("bad chunked framing")))
            )

    if closed is not None:
        closed.add_done_callback(wake)
    try:
        while True:
            piece = await content.readany()
            now_ns = time.monotonic_ns()
            if not piece:
                return
            if not sink.on_data(now_ns, piece):
                return
    finally:
        if closed is not None:
            closed.remove_done_callback(wake)


def _redirect(response: aiohttp.ClientResponse) -> URL | None:
    """Where a redirect that keeps the method leads; 301 to 303 do not keep it."""
    location = response.headers.get("Location")
    if response.status not in (307, 308) or not location:
        return None
    try:
        url = response.url.join(URL(location))
    except ValueError:
        return None
    return url if url.scheme in ("http", "https") and url.host else None


def _abort(response: aiohttp.ClientResponse) -> None:
    """Close the socket now: the server must see that its reader is gone, not that it reads slowly."""
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()
    response.close()


class _StampedBody(payload.BytesPayload):
    """A request body that says when it is handed to the socket (head and body leave in one write)."""

    def __init__(self, body: bytes, sink: Sink) -> None:
        super().__init__(body, content_type="application/json")
        self._sink = sink

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self._sink.on_send(time.monotonic_ns())
        await super().write_with_length(writer, content_length)


def _line(exc: BaseException) -> str:
    # aiohttp gives a response that it cannot read a status of its own making.
    text = exc.message if isinstance(exc, aiohttp.ClientResponseError) else str(exc)
    return (" ".join(text.split()) or type(exc).__name__)[:300]

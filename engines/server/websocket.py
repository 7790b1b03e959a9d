"""One answer over a WebSocket (RFC 6455): the request comes as one text message, each chunk leaves as one.

The messages are what the lines of a server-sent stream hold after "data: ", [DONE] included. Whatever goes
wrong before the first of them is a message with the error, its HTTP `status` and, where one would be sent,
Retry-After as `retry_after_s`; the close code is 4000 + status (1000 after a whole answer). A connection
carries one request: who closes it, in whatever way, has left."""

from __future__ import annotations

import asyncio
import logging

import orjson
from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web

from engines.server.answer import Answer
from engines.server.engine_client import Stream
from engines.server.errors import ApiError, error_body, error_object, shown
from engines.server.sending import StreamIdle

LOG = logging.getLogger("batchmark.server")
SUFFIX = "/ws"
"""Of the paths: beside each one that takes a POST."""
CLOSE_CODES = 4000
"""Plus the HTTP status: a code of the range that RFC 6455 leaves to applications (7.4.2)."""
CLOSE_S = 1.0
"""How long a client gets to answer our close."""


class Talk:
    """The server's side of one connection: open, receive, send (or refuse), close."""

    def __init__(self, request: web.Request, max_bytes: int, idle_s: float | None) -> None:
        """idle_s: how long the client may let the server wait, for its request and for each write."""
        self._request = request
        self._socket = web.WebSocketResponse(max_msg_size=max_bytes, compress=False, timeout=CLOSE_S)
        self._max_bytes = max_bytes
        self.idle_s = idle_s
        self._code = int(WSCloseCode.OK)
        self._watcher: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises ApiError where the request is no handshake."""
        if not self._socket.can_prepare(self._request).ok:
            raise ApiError(
                f"GET {shown(self._request.path)}: needs a WebSocket handshake (RFC 6455: Upgrade, "
                "Sec-WebSocket-Version: 13, Sec-WebSocket-Key)"
            )
        await self._socket.prepare(self._request)

    async def receive(self) -> bytes:
        """The request. Raises ApiError for what is none, ConnectionError when the client leaves or says
        nothing."""
        try:
            async with asyncio.timeout(self.idle_s):
                message = await self._socket.receive()
        except TimeoutError:
            self._disconnect()
        if message.type is WSMsgType.TEXT:
            return str(message.data).encode()
        if message.type is WSMsgType.BINARY:
            raise ApiError("the message is binary: needs one text message, the JSON of the request")
        if message.type is WSMsgType.ERROR and isinstance(message.data, WebSocketError):
            if message.data.code == WSCloseCode.MESSAGE_TOO_BIG:
                raise ApiError(f"the message is larger than {self._max_bytes} bytes", 413)
            raise ApiError(f"the message cannot be read: {message.data}")
        raise ConnectionResetError("the client left")

    async def send(self, stream: Stream, answer: Answer) -> web.StreamResponse:
        """All of an answer. Before its first chunk what goes wrong is raised, then it is a message."""
        self._watcher = asyncio.create_task(self._watch())
        try:
            while answer.finish_reason is None:
                for chunk in answer.chunks(answer.take(await stream.next())):
                    stream.begun = True
                    await self._write(chunk)
        except ConnectionError:
            raise
        except Exception as error:
            if not stream.begun:
                raise
            if not isinstance(error, ApiError):
                LOG.exception("a stream failed")
                error = ApiError("internal error: see the server's log", 500)
            self._code = CLOSE_CODES + error.status
            await self._write(error_body(error))
        finally:
            self._watcher.cancel()
        return self._socket

    async def refuse(self, error: ApiError) -> None:
        """Say what would have been an HTTP status. Does nothing where aiohttp has closed already: after a
        message that it could not read (codes 1002, 1007 and 1009)."""
        if self._socket.closed:
            return
        self._code = CLOSE_CODES + error.status
        told = {"error": error_object(error), "status": error.status}
        if error.retry_after_s is not None:
            told["retry_after_s"] = error.retry_after_s
        await self._write(orjson.dumps(told))

    async def close(self) -> web.StreamResponse:
        if self._watcher is not None:  # only one may read
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._socket.close(code=self._code)
        return self._socket

    async def _watch(self) -> None:
        """While an answer is under way: pings are answered within receive(), and anything else is its end,
        which the handler is told as if the connection had broken."""
        message = await self._socket.receive()
        if message.type in (WSMsgType.TEXT, WSMsgType.BINARY):
            await self._socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"one request a connection")
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _write(self, chunk: bytes) -> None:
        try:
            async with asyncio.timeout(self.idle_s):
                await self._socket.send_str(chunk.decode())
        except TimeoutError:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
        raise StreamIdle("the client has stopped reading, or sent no request")

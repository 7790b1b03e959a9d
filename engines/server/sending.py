"""How an answer leaves: as a stream of events or as one body, and no longer than its client takes it.

A client that stops reading does not close its connection, and no end of it will ever be seen: once what the
kernel and aiohttp hold for it is full, a write waits. Longer than the idle timeout, and the client is
disconnected; its handler then ends as for any client that left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from aiohttp import web

from engines.server.answer import Answer
from engines.server.engine_client import Stream
from engines.server.errors import ApiError, error_body

LOG = logging.getLogger("batchmark.server")
SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class StreamIdle(ConnectionError):
    """The client took nothing for longer than engine.stream_idle_timeout_ms, and has been disconnected."""


class Writer:
    """Writes to one client. Raises StreamIdle."""

    def __init__(self, request: web.Request, headers: Mapping[str, str], idle_s: float | None) -> None:
        self._request = request
        self.headers = dict(headers)
        self._idle_s = idle_s

    async def prepare(self, response: web.StreamResponse) -> None:
        await response.prepare(self._request)

    async def write(self, response: web.StreamResponse, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._idle_s):
                await response.write(data)
        except TimeoutError:
            self._disconnect()

    async def write_eof(self, response: web.StreamResponse, data: bytes = b"") -> None:
        try:
            async with asyncio.timeout(self._idle_s):
                await response.write_eof(data)
        except TimeoutError:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
        raise StreamIdle("the client has stopped reading")


async def send_whole(writer: Writer, stream: Stream, answer: Answer) -> web.StreamResponse:
    texts: list[str] = []
    token_ids: list[int] = []
    while answer.finish_reason is None:
        visible = answer.take(await stream.next())
        texts.append(visible.text)
        token_ids += visible.token_ids
    body = answer.body("".join(texts), token_ids)
    response = web.Response(body=body, headers=writer.headers, content_type="application/json")
    await writer.prepare(response)
    # here rather than after the handler: an answer that nobody takes is no success
    await writer.write_eof(response)
    return response


async def send_stream(writer: Writer, stream: Stream, answer: Answer) -> web.StreamResponse:
    response = web.StreamResponse(headers=SSE_HEADERS | writer.headers)
    try:
        while answer.finish_reason is None:
            events = answer.events(answer.take(await stream.next()))
            if not events:
                continue
            if not response.prepared:
                stream.begun = True
                await writer.prepare(response)
            if answer.finish_reason is None:
                await writer.write(response, events)
            else:
                await writer.write_eof(response, events)
    except ConnectionError:
        raise
    except Exception as error:  # the status is on its way already: say it in the stream, and leave out [DONE]
        if not response.prepared:
            raise
        if not isinstance(error, ApiError):
            LOG.exception("a stream failed")
            error = ApiError("internal error: see the server's log", 500)
        response.force_close()
        await writer.write_eof(response, b"data: " + error_body(error) + b"\n\n")
    return response

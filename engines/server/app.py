"""The aiohttp application: routes, refusals, streaming.

Headers leave with the first token, so that whatever goes wrong before it is an HTTP status. A client that
hangs up cancels its handler (see app_runner), whose `finally` tells the engine at once: in the queue, in
prefill or in decode.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engines.model.tokenizer import Tokenizer
from engines.pace import retry_after
from engines.request import Refused
from engines.routes import CHAT, COMPLETIONS, Route
from engines.server import protocol
from engines.server.access import check_host, check_key, check_same_origin, local_names
from engines.server.admin import Admin, check_token, is_admin
from engines.server.answer import Answer
from engines.server.detokenizer import Detokenizer
from engines.server.engine_client import EngineClient, Tags
from engines.server.errors import ApiError, error_body, shown
from engines.server.log import event, request_event
from engines.server.metrics import Metrics
from engines.server.sending import StreamIdle, Writer, send_stream, send_whole
from engines.server.timeouts import WARNING, declared_timeout_s, warning
from engines.server.websocket import SUFFIX, Talk

LOG = logging.getLogger("batchmark.server")
LONG_TEXT_CHARS = 4096
"""A prompt longer than this is tokenised in a thread, so that it delays nobody's tokens."""
HANDLERS_END_S = 1.0
"""How long open handlers get, at the end, to say that the server is going."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the application needs beside the engine."""

    model: str  # the name that clients send
    engine: str  # the label of the metrics
    max_model_len: int
    vocab_size: int
    host: str = "127.0.0.1"
    api_key: str | None = None
    admin_token: str | None = None
    routes: tuple[Route, ...] = ()
    metrics_tenants: int = 20


class Server:
    """Routes over one engine."""

    def __init__(self, config: ServerConfig, engine: EngineClient, tokenizer: Tokenizer) -> None:
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.admin = Admin(engine, list(config.routes))
        names = [route.name for route in config.routes]
        self.metrics = Metrics(
            engine, config.model, config.engine, config.max_model_len, names, config.metrics_tenants
        )
        engine.on_output = self.metrics.on_output
        engine.on_report = self.metrics.on_report
        self._created = int(time.time())
        self._numbers = itertools.count()
        self._names = local_names(config.host)
        aliases = [(route.match or {}).get("model", ()) for route in config.routes]
        self._served = tuple(dict.fromkeys([config.model, *itertools.chain(*aliases)]))
        self._body_limit = protocol.max_body_bytes(config.max_model_len)

    def build(self) -> web.Application:
        app = web.Application(client_max_size=self._body_limit, middlewares=[self._guard])
        app.add_routes(
            [
                web.post(COMPLETIONS, self._completions),
                web.post(CHAT, self._chat),
                web.get(COMPLETIONS + SUFFIX, self._socket),
                web.get(CHAT + SUFFIX, self._socket),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                *self.admin.handlers(),
            ]
        )
        return app

    # -- what stands before every route

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Host, Origin and key; then every error as an OpenAI body."""
        try:
            check_host(request, self._names)
            if is_admin(request.path):
                check_token(request, self.config.admin_token)
            else:
                check_key(request, self.config.api_key)
            return await handler(request)
        except ConnectionError:  # the client left while its body was being read, or its answer written
            LOG.debug("client left: %s", request.path)
            return web.Response(status=499)
        except Exception as error:
            allow = error.headers.get("Allow") if isinstance(error, web.HTTPException) else None
            return _error(self._problem(request, error), allow)

    def _problem(self, request: web.Request, error: Exception) -> ApiError:
        """What a client is told of an error, which is counted here."""
        if isinstance(error, Refused):
            wait_s = error.retry_after_s or (1 if error.status in (429, 503) else None)
            return ApiError(error.message, error.status, code=error.reason, retry_after_s=wait_s)
        if isinstance(error, ApiError):
            self.metrics.invalid[error.status] += error.status < 500
            event("invalid", path=request.path, status=error.status, code=error.code, param=error.param)
            return error
        if isinstance(error, web.HTTPException):
            self.metrics.invalid[error.status] += 1
            return self._http_error(request, error)
        if isinstance(error, web.RequestPayloadError | HttpProcessingError):
            self.metrics.invalid[400] += 1
            reason = getattr(error.__cause__ or error, "message", "") or "it is not what its headers say"
            return ApiError(f"the body cannot be read: {reason}", 400)
        LOG.error("%s %s failed", request.method, request.path, exc_info=error)
        return ApiError("internal error: see the server's log", 500)

    def _http_error(self, request: web.Request, error: web.HTTPException) -> ApiError:
        if error.status == 404:
            return ApiError(f"{request.method} {shown(request.path)}: no such path; see /v1/models", 404)
        if error.status == 405:
            allowed = error.headers.get("Allow", "")
            return ApiError(f"{request.method} {shown(request.path)}: needs {allowed}", 405)
        if error.status == 413:
            return ApiError(
                f"the body is larger than {self._body_limit} bytes: no prompt of max_model_len="
                f"{self.config.max_model_len} tokens needs more",
                413,
            )
        return ApiError(error.reason, error.status)

    # -- small routes

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model_card(name) for name in self._served]})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        protocol.check_model(name, self._served)
        return _json(self._model_card(name))

    def _model_card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "batchmark",
            "max_model_len": self.config.max_model_len,
        }

    async def _health(self, request: web.Request) -> web.Response:
        if self.engine.dead is not None:
            raise ApiError(f"the engine has stopped: {self.engine.dead}", 503)
        return _json({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    # -- generation

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        arrival_ns = time.monotonic_ns()
        return await self._complete(request, protocol.parse_json(await request.read()), arrival_ns)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        arrival_ns = time.monotonic_ns()
        return await self._converse(request, protocol.parse_json(await request.read()), arrival_ns)

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        """The same over a WebSocket, which always streams."""
        check_same_origin(request)
        idle_ms = self.admin.stream_idle_timeout_ms[-1]
        talk = Talk(request, self._body_limit, None if idle_ms is None else idle_ms / 1e3)
        await talk.open()
        try:
            message = await talk.receive()
            arrival_ns = time.monotonic_ns()
            body = protocol.parse_json(message)
            if body.setdefault("stream", True) is False:
                raise ApiError(
                    "stream=false: a WebSocket always streams; POST for a whole answer", 400, "stream"
                )
            generate = self._converse if request.path == CHAT + SUFFIX else self._complete
            await generate(request, body, arrival_ns, talk)
        except ConnectionError:
            raise
        except Exception as error:
            await talk.refuse(self._problem(request, error))
        return await talk.close()

    async def _complete(
        self, request: web.Request, body: dict[str, Any], arrival_ns: int, talk: Talk | None = None
    ) -> web.StreamResponse:
        asked = protocol.parse_completion(body, self._served, self.config.vocab_size)
        if isinstance(asked.prompt, str):
            ids = await self._in_thread(self.tokenizer.encode, asked.prompt, len(asked.prompt))
        else:
            ids = asked.prompt or []
        return await self._generate(request, asked, ids, arrival_ns, talk)

    async def _converse(
        self, request: web.Request, body: dict[str, Any], arrival_ns: int, talk: Talk | None = None
    ) -> web.StreamResponse:
        asked = protocol.parse_chat(body, self._served)
        messages = asked.messages or []
        size = sum(len(message["content"]) for message in messages)
        try:
            ids = await self._in_thread(self.tokenizer.apply_chat_template, messages, size)
        except ValueError as error:
            raise ApiError(f"messages: {error}", param="messages") from None
        return await self._generate(request, asked, ids, arrival_ns, talk)

    async def _in_thread(self, encode: Callable[..., list[int]], what: object, size: int) -> list[int]:
        return await asyncio.to_thread(encode, what) if size > LONG_TEXT_CHARS else encode(what)

    async def _generate(
        self,
        request: web.Request,
        asked: protocol.Generation,
        ids: list[int],
        arrival_ns: int,
        talk: Talk | None,
    ) -> web.StreamResponse:
        if not ids:
            raise ApiError("prompt: holds no token; needs at least one", param="prompt")
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client left")
        model = asked.model or self.config.model
        wanted = asked.to_request(ids, self.config.max_model_len)
        route = self.admin.route_of(wanted.tenant, model, request.path.removesuffix(SUFFIX))
        headers = self._warn_of_timeouts(request, route)
        stream = self.engine.submit(wanted, arrival_ns, transport, Tags(route, request.path, model))
        self.metrics.on_received(stream)
        detokenizer = Detokenizer(self.tokenizer.token_bytes, asked.stop)
        answer = Answer(asked, model, f"{next(self._numbers):08d}", len(ids), detokenizer)
        outcome = "abort"  # unless the handler gets to its end: it is cancelled when the client leaves
        idle_ms = self.admin.stream_idle_timeout_ms[route]
        idle_s = None if idle_ms is None else idle_ms / 1e3
        try:
            if talk is not None:
                talk.idle_s = idle_s
                response = await talk.send(stream, answer)
            else:
                send = send_stream if asked.stream else send_whole
                response = await send(Writer(request, headers, idle_s), stream, answer)
            outcome = answer.finish_reason or "error"
            return response
        except StreamIdle:
            self.metrics.idle_streams += 1
            event("stream_idle", logging.WARNING, answer=answer.id, tenant=wanted.tenant, timeout_ms=idle_ms)
            raise
        except Refused as refused:
            outcome = f"refused {refused.reason}"
            if refused.retry_after_s is None and refused.status == 503:  # it was given up in the queue
                refused.retry_after_s = retry_after(self._wait_s(route))
            raise
        except ApiError:
            outcome = "error"
            raise
        finally:
            self.engine.abort(stream, "stop" if outcome == "stop" else "abort")
            self.metrics.on_ended(stream, outcome)
            request_event(stream, answer, outcome, self.admin.routes[route].name)

    def _wait_s(self, route: int) -> float | None:
        """What its queue is estimated to take, as of the engine's last word."""
        return self.engine.queues[route].wait_s if self.engine.queues else None

    def _warn_of_timeouts(self, request: web.Request, route: int) -> dict[str, str]:
        """Headers of the answer."""
        declared_s = declared_timeout_s(request.headers)
        text = warning(declared_s, self.admin.queue_timeout_ms[route], self._wait_s(route))
        if text is None:
            return {}
        self.metrics.timeout_warnings += 1
        event("client_timeout", message=text, route=self.admin.routes[route].name, peer=request.remote)
        return {WARNING: text}


def _is_ours(record: logging.LogRecord) -> bool:
    """What is not HTTP is answered with a 400; that is no fault of ours and needs no traceback."""
    fault = record.exc_info[1] if record.exc_info else None
    return not isinstance(fault, HttpProcessingError | web.RequestPayloadError)


def app_runner(app: web.Application) -> web.AppRunner:
    """The one way to run the application. Without handler_cancellation, which is off by default, nobody
    would notice that a client has left while nothing is written to it."""
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=HANDLERS_END_S)


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _error(error: ApiError, allow: str | None = None) -> web.Response:
    response = web.Response(body=error_body(error), status=error.status, content_type="application/json")
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if allow:
        response.headers["Allow"] = allow
    return response

"""The engine as the event loop sees it: requests go in, their tokens come out of a Stream each.

The engine runs at the other end of a channel. Neither side ever waits for the other: a slow reader holds up
nobody, since its tokens only pile up in its own Stream, at most max_tokens of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engines.request import Refused, Request
from engines.server.channel import Channel
from engines.server.wire import Abort, Add, Ask, Died, Message, Report, Told, WireError
from engines.stats import QueueState, Stats


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stream has gathered since it was last asked. Exactly one delta of a stream has a
    finish_reason."""

    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None
    cached_tokens: int | None = None  # of its prompt, found in the prefix cache; None: there is none


class NotDone(Exception):
    """The engine did not do what it was asked; the message is one line. gone: there is no engine to ask."""

    def __init__(self, message: str, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


@dataclass(frozen=True, slots=True)
class Tags:
    """Where a request came in: the labels that it is counted under, beside its own tenant and class."""

    route: int = 0
    path: str = ""
    model: str = ""


class Stream:
    """One request on its way through the engine. Only the event loop touches it."""

    __slots__ = (
        "_error",
        "_finish_reason",
        "_refused",
        "_tokens",
        "_waiter",
        "arrival_ns",
        "begun",
        "cached_tokens",
        "first_token_ns",
        "first_tokens",
        "key",
        "last_token_ns",
        "output_tokens",
        "request",
        "tags",
        "transport",
    )

    def __init__(
        self, key: int, request: Request, arrival_ns: int, transport: asyncio.Transport, tags: Tags
    ) -> None:
        """key: its name in the engine's reports. transport: the client's connection. A half-closed one with
        a full send buffer does not end by itself, so it is looked at when outputs arrive."""
        self.key = key
        self.request = request
        self.arrival_ns = arrival_ns
        self.transport = transport
        self.tags = tags
        self.cached_tokens: int | None = None  # of its prompt, once it has a token; None: no prefix cache
        self.begun = False  # headers of its answer have left, so that no status can say any more how it ends
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.first_tokens = 0  # tokens in the first output
        self.output_tokens = 0
        self._tokens: list[int] = []
        self._finish_reason: str | None = None
        self._error: str | None = None
        self._refused: Refused | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """The engine has nothing more to say about this request."""
        return self._finish_reason is not None or self._refused is not None

    async def next(self) -> Delta:
        """Everything since the last call; waits until there is something. Raises Refused."""
        while not self._tokens and not self.ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._refused is not None:
            raise self._refused
        tokens, self._tokens = self._tokens, []
        return Delta(tokens, self._finish_reason, self._error, self.cached_tokens)

    def push(self, token_ids: list[int], now_ns: int) -> None:
        self._tokens.extend(token_ids)
        self.output_tokens += len(token_ids)
        self.last_token_ns = now_ns
        if self.first_token_ns is None:
            self.first_token_ns = now_ns
            self.first_tokens = len(token_ids)
        self._wake()

    def finish(self, reason: str, error: str | None = None) -> None:
        self._finish_reason, self._error = reason, error
        self._wake()

    def refuse(self, refused: Refused) -> None:
        self._refused = refused
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """The server's end of the channel. `dead` says why the engine is no more, `stats` are as of its last
    report. Every call is made on the event loop."""

    def __init__(self, channel: Channel, stats: Stats, how_it_ended: Callable[[], str]) -> None:
        """how_it_ended is asked, in a thread, when the channel ends and the engine has said no reason; it may
        wait for a moment."""
        self.on_output: Callable[[Stream, int, int], None] | None = None  # stream, tokens, now_ns
        self.on_report: Callable[[Report], None] | None = None
        self.on_death: Callable[[str], None] | None = None
        self.stats = stats
        self.queues: list[QueueState] = []  # by route; empty until the first report
        self.dead: str | None = None
        self._channel = channel
        self._how_it_ended = how_it_ended
        self._keys = itertools.count()
        self._open: dict[int, Stream] = {}
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loss: asyncio.Task[None] | None = None

    def start(self) -> None:
        """On the event loop that the reports go to."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fileno(), self._on_readable)

    def submit(
        self, request: Request, arrival_ns: int, transport: asyncio.Transport, tags: Tags | None = None
    ) -> Stream:
        """Hand a request to the engine. A refusal comes out of Stream.next()."""
        tags = Tags() if tags is None else tags
        stream = Stream(next(self._keys), request, arrival_ns, transport, tags)
        if self.dead is not None:
            stream.refuse(Refused("engine_dead", f"the engine has stopped: {self.dead}", 503))
            return stream
        self._send(Add(stream.key, arrival_ns, request, tags.route))
        self._open[stream.key] = stream
        return stream

    def abort(self, stream: Stream, reason: str = "abort") -> None:
        """Free what the request holds: its client has left ("abort"), or a stop string has ended its answer
        ("stop"). Nothing happens when it has ended already."""
        if self._open.pop(stream.key, None) is not None:
            self._send(Abort(stream.key, reason))

    async def ask(self, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A question, one of wire.QUESTIONS; the engine answers after its current iteration. Raises
        NotDone."""
        if self.dead is not None:
            raise NotDone(f"the engine has stopped: {self.dead}", gone=True)
        key = next(self._keys)
        answer = self._asked[key] = asyncio.get_running_loop().create_future()
        self._send(Ask(key, what, arguments))
        try:
            return await answer
        finally:
            self._asked.pop(key, None)

    def fail_open(self, reason: str, refuse: bool = False) -> None:
        """End every stream with an error, or, with `refuse`, as going: those whose headers have not left are
        sent away, whatever was computed for them. Let the engine forget them."""
        for stream in list(self._open.values()):
            if refuse and not stream.begun:
                stream.refuse(Refused("going", reason, 503))
            else:
                stream.finish("going" if refuse else "error", reason)
            self.abort(stream)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(NotDone(reason, gone=True))

    def close(self) -> None:
        """Let the engine end after its current iteration; what still runs is dropped. Harmless when
        repeated."""
        if self._loop is not None:
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
            self._loop = None
        self._channel.end()

    def _send(self, message: Message) -> None:
        self._channel.send(message)
        if self._channel.unsent and self._loop is not None:
            self._loop.add_writer(self._channel.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        self._channel.flush()
        if not self._channel.unsent and self._loop is not None:
            self._loop.remove_writer(self._channel.fileno())

    def _on_readable(self) -> None:
        """One receive() a call: what is left makes the channel readable again, and the handlers get their
        turn in between."""
        try:
            messages = self._channel.receive()
        except WireError as error:
            return self._die(f"it sent what is no message: {error}")
        for message in messages:
            if isinstance(message, Report):
                self._deliver(message)
            elif isinstance(message, Told):
                self._tell(message)
            elif isinstance(message, Died):
                return self._die(message.reason)
        if self._channel.ended:
            assert self._loop is not None
            self._loop.remove_reader(self._channel.fileno())
            self._loss = self._loop.create_task(self._lost())
        return None

    def _tell(self, told: Told) -> None:
        answer = self._asked.get(told.key)
        if answer is None or answer.done():  # whoever asked has gone
            return
        if told.error is None:
            answer.set_result(told.value)
        else:
            answer.set_exception(NotDone(told.error))

    def _deliver(self, report: Report) -> None:
        self.stats = report.stats
        self.queues = report.queues or self.queues
        if self.on_report is not None:
            self.on_report(report)
        for refusal in report.refusals:
            stream = self._open.pop(refusal.key, None)
            if stream is not None:
                told = (refusal.reason, refusal.message, refusal.status, refusal.retry_after_s)
                stream.refuse(Refused(*told))
        for produced in report.produced:
            stream = self._open.get(produced.key)
            if stream is None:  # aborted since
                continue
            if produced.cached_tokens is not None:
                stream.cached_tokens = produced.cached_tokens
            if produced.token_ids:
                if self.on_output is not None:
                    self.on_output(stream, len(produced.token_ids), report.at_ns)
                stream.push(produced.token_ids, report.at_ns)
            if produced.finish_reason is not None:
                del self._open[produced.key]
                stream.finish(produced.finish_reason, produced.error)
            elif stream.transport.is_closing():
                stream.transport.abort()  # which cancels the handler
                self.abort(stream)

    async def _lost(self) -> None:
        self._die(await asyncio.to_thread(self._how_it_ended))

    def _die(self, reason: str) -> None:
        self.dead = reason
        if self._loop is not None:
            self._loop.remove_reader(self._channel.fileno())
        self.fail_open(f"the engine has stopped: {reason}")
        if self.on_death is not None:
            self.on_death(reason)

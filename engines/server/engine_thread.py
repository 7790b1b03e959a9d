"""The engine loop in a thread of its own, and the one bridge between it and the event loop.

The event loop appends commands (add, abort) and wakes the thread; the thread steps the engine while it has
work and hands everything that an iteration produced to the event loop in one call. Neither side ever waits
for the other: a slow reader holds up nobody, since its tokens only pile up in its own Stream, at most
max_tokens of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engines.request import Output, Refused, Request
from engines.stats import Stats


class Engine(Protocol):
    """What the server needs of engines.engine.Engine. Every call is made by the engine thread."""

    clock: Callable[[], float]  # seconds

    def add(self, request: Request, arrival: float | None = None) -> int: ...

    def abort(self, seq_id: int, reason: str = ...) -> None: ...

    def step(self) -> list[Output]: ...

    @property
    def has_work(self) -> bool: ...

    def next_wakeup(self, now: float) -> float | None: ...

    def stats(self) -> Stats: ...


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stream has gathered since it was last asked. Exactly one delta of a stream has a
    finish_reason."""

    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None


class Stream:
    """One request on its way through the engine. Only the event loop touches it, but for seq_id, which
    belongs to the engine thread."""

    __slots__ = (
        "_error",
        "_finish_reason",
        "_refused",
        "_tokens",
        "_waiter",
        "arrival_ns",
        "first_token_ns",
        "first_tokens",
        "last_token_ns",
        "output_tokens",
        "request",
        "seq_id",
        "transport",
    )

    def __init__(self, request: Request, arrival_ns: int, transport: asyncio.Transport) -> None:
        """transport: the client's connection. A half-closed one with a full send buffer does not end by
        itself, so it is looked at when outputs arrive."""
        self.request = request
        self.arrival_ns = arrival_ns
        self.transport = transport
        self.seq_id: int | None = None
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
        return Delta(tokens, self._finish_reason, self._error)

    def feed(self, event: Output | Refused, now_ns: int) -> None:
        if isinstance(event, Refused):
            self._refused = event
        else:
            if event.token_ids:
                self._tokens.extend(event.token_ids)
                self.output_tokens += len(event.token_ids)
                self.last_token_ns = now_ns
                if self.first_token_ns is None:
                    self.first_token_ns = now_ns
                    self.first_tokens = len(event.token_ids)
            if event.finish_reason is not None:
                self._finish_reason = event.finish_reason
                self._error = event.error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


Events = list[tuple[Stream, Output | Refused]]


class EngineThread:
    """Owns the engine. submit and abort are called on the event loop; `dead` says why the thread is no
    more."""

    def __init__(
        self,
        engine: Engine,
        on_output: Callable[[Stream, int, int], None] | None = None,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        """on_output(stream, tokens, now_ns) and on_death(reason) are called on the event loop."""
        self._engine = engine
        self.on_output = on_output
        self.on_death = on_death
        self.stats = engine.stats()  # as of the last iteration; replaced whole, so any thread may read it
        self.dead: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = threading.Condition()
        self._commands: deque[tuple[str, Stream]] = deque()
        self._stopping = False
        self._streams: dict[int, Stream] = {}  # of the engine thread
        self._open: set[Stream] = set()  # of the event loop
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """On the event loop that the outputs go to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, request: Request, arrival_ns: int, transport: asyncio.Transport) -> Stream:
        """Queue a request. A refusal comes out of Stream.next()."""
        stream = Stream(request, arrival_ns, transport)
        if self.dead is not None:
            stream.feed(Refused("engine_dead", f"the engine has stopped: {self.dead}", 503), arrival_ns)
            return stream
        self._open.add(stream)
        self._command("add", stream)
        return stream

    def abort(self, stream: Stream, reason: str = "abort") -> None:
        """Free what the request holds: its client has left ("abort"), or a stop string has ended its answer
        ("stop"). Nothing happens when it has ended already."""
        if stream in self._open:
            self._open.discard(stream)
            self._command(reason, stream)

    def fail_open(self, reason: str, refuse: bool = False) -> None:
        """End every stream with an error, or, with `refuse`, send those away that have no token yet; let the
        engine forget them."""
        now_ns = time.monotonic_ns()
        for stream in list(self._open):
            if refuse and stream.first_token_ns is None:
                stream.feed(Refused("going", reason, 503), now_ns)
            else:
                stream.feed(Output(-1, (), "error", reason), now_ns)
            self.abort(stream)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the current iteration; what still runs is dropped. False: it did not end in
        time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _command(self, verb: str, stream: Stream) -> None:
        with self._wake:
            self._commands.append((verb, stream))
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._iterate():
                pass
        except BaseException as error:  # whatever it was, nobody may wait for this engine any longer
            traceback.print_exc()
            self._hand_over(self._die, f"{type(error).__name__}: {error}")

    def _iterate(self) -> bool:
        """Commands, then one step. False when it is time to end."""
        with self._wake:
            while not self._commands and not self._stopping:
                now = self._engine.clock()
                wakeup = self._engine.next_wakeup(now)
                if wakeup is not None and wakeup <= now:
                    break
                self._wake.wait(None if wakeup is None else wakeup - now)
            stopping = self._stopping
            commands, self._commands = self._commands, deque()
        if commands:  # a pass may take long: refusals and what has left are not to be seen only after it
            self._obey(commands)
            self.stats = self._engine.stats()
        if stopping:  # what has just been given up is on record
            return False
        if not self._engine.has_work:
            return True
        events: Events = []
        for output in self._engine.step():
            ending = output.finish_reason is not None
            stream = self._streams.pop(output.seq_id) if ending else self._streams[output.seq_id]
            events.append((stream, output))
        self.stats = self._engine.stats()
        if events:
            self._hand_over(self._deliver, events, time.monotonic_ns())
        return True

    def _obey(self, commands: deque[tuple[str, Stream]]) -> None:
        refusals: Events = []
        for verb, stream in commands:
            if verb == "add":
                try:
                    stream.seq_id = self._engine.add(stream.request, stream.arrival_ns / 1e9)
                    self._streams[stream.seq_id] = stream
                except Refused as refused:
                    refusals.append((stream, refused))
            elif stream.seq_id is not None:
                self._engine.abort(stream.seq_id, verb)
        if refusals:
            self._hand_over(self._deliver, refusals, time.monotonic_ns())

    def _hand_over(self, call: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed: the server is going, nobody listens
            self._stopping = True

    def _deliver(self, events: Events, now_ns: int) -> None:
        for stream, event in events:
            if stream not in self._open:  # aborted since
                continue
            if isinstance(event, Output) and event.token_ids and self.on_output is not None:
                self.on_output(stream, len(event.token_ids), now_ns)
            stream.feed(event, now_ns)
            if stream.ended:
                self._open.discard(stream)
            elif stream.transport.is_closing():
                stream.transport.abort()  # which cancels the handler
                self.abort(stream)

    def _die(self, reason: str) -> None:
        self.dead = reason
        self.fail_open(f"the engine has stopped: {reason}")
        if self.on_death is not None:
            self.on_death(reason)

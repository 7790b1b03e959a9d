"""The engine's loop: commands in, one iteration, one report out. It owns the engine and everything below it,
and knows the server only as the other end of a channel."""

from __future__ import annotations

import contextlib
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from engines.request import Output, Refused
from engines.routes import DEFAULT
from engines.server.channel import Channel
from engines.server.control import answer
from engines.server.step_trace import StepTrace
from engines.server.wire import Abort, Add, Ask, Died, Left, Message, Pass, Produced, Refusal, Report, Told
from engines.step_log import Ending, RequestRecord, StepLog, StepRecord
from engines.turns import Engines

if TYPE_CHECKING:
    from engines.server.recordings import Next

LAST_WORDS_S = 1.0
"""How long the reason of a failure may wait for a server that is slow to take it."""
QUEUES_EVERY_S = 0.5
"""How often the queues are looked through for /metrics, while there is work."""


class ReportLog:
    """Stands where the engine's StepLog stands: keeps what the next report tells of, and passes every row on
    to the files, if there are any."""

    def __init__(self, files: StepLog | None, route: str = DEFAULT, shared: ReportLog | None = None) -> None:
        """One for each route; `shared` is the first of them."""
        self._files = files
        self._route = route
        self._passes: list[Pass] = [] if shared is None else shared._passes
        self._left: list[Left] = [] if shared is None else shared._left
        self.trace: StepTrace = StepTrace() if shared is None else shared.trace

    def step(self, record: StepRecord) -> None:
        self.trace.add(self._route, record)
        self._passes.append(Pass(sum(record.tokens), record.duration_ns, record.host_gap_ns))
        if self._files is not None:
            self._files.step(record)

    def request(self, record: RequestRecord) -> None:
        admitted, first, end = record.admitted_ns, record.first_token_ns, record.finish_ns
        if admitted is not None:
            self._left.append(
                Left(
                    admitted - record.arrival_ns,
                    None if first is None else first - admitted,
                    None if first is None or end is None else end - first,
                )
            )
        if self._files is not None:
            self._files.request(record)

    def flush(self) -> None:
        if self._files is not None:
            self._files.flush()

    def end(self, ending: Ending) -> None:
        if self._files is not None:
            self._files.end(ending)

    def close(self) -> None:
        if self._files is not None:
            self._files.close()

    def take(self) -> tuple[list[Pass], list[Left]]:
        """What has come since the last call."""
        taken = list(self._passes), list(self._left)
        self._passes.clear()
        self._left.clear()
        return taken


class EngineLoop:
    """Runs until the server says no more, or until the engine fails."""

    def __init__(
        self, engine: Engines, log: ReportLog, channel: Channel, next_recording: Next | None = None
    ) -> None:
        """next_recording: ends these engines and begins others; None: it has these for life."""
        self._engine = engine
        self._log = log
        self._channel = channel
        self._next_recording = next_recording
        self._seq_ids: dict[int, int] = {}  # by key, of the requests whose last output has not left
        self._keys: dict[int, int] = {}  # by seq_id
        self._queues_due = 0.0  # on the engine's clock; 0: at once

    def run(self) -> str | None:
        """None when the server has ended it, else why the engine has failed; the server is told first."""
        try:
            while self._iterate():
                pass
        except BaseException as error:  # whatever it was, nobody may wait for this engine any longer
            reason = f"{type(error).__name__}: {error}"
            self._channel.send(Died(reason))
            with contextlib.suppress(OSError):  # a disk that is full of records has no room for a log either
                traceback.print_exc()
            self._channel.drain(LAST_WORDS_S)
            return reason
        return None

    def _iterate(self) -> bool:
        """Commands, then one step. False when it is time to end."""
        now = self._engine.clock()
        wakeup = self._engine.next_wakeup(now)
        self._channel.wait(None if wakeup is None else max(0.0, wakeup - now))
        self._channel.flush()
        commands: list[Message] = []
        while more := self._channel.receive():
            commands += more
        if commands:  # a pass may take long: refusals and what has left are not to be seen only after it
            self._report([], self._obey(commands))
        if self._channel.ended:
            return False
        if self._engine.has_work:
            self._report([self._produced(output) for output in self._engine.step()], [])
        return True

    def _obey(self, commands: list[Message]) -> list[Refusal]:
        refusals = []
        for command in commands:
            if isinstance(command, Add):
                try:
                    seq_id = self._engine.add(command.request, command.arrival_ns / 1e9, command.route)
                except Refused as refused:
                    told = (refused.reason, refused.message, refused.status, refused.retry_after_s)
                    refusals.append(Refusal(command.key, *told))
                else:
                    self._seq_ids[command.key], self._keys[seq_id] = seq_id, command.key
            elif isinstance(command, Abort):
                if command.key in self._seq_ids:  # else its last output is on its way
                    self._engine.abort(self._seq_ids[command.key], command.reason)
            elif isinstance(command, Ask) and command.what == "records":
                self._channel.send(self._move(command))
            elif isinstance(command, Ask):
                self._channel.send(answer(command, self._engine, self._log.trace))
            else:
                raise RuntimeError(f"the server sent {type(command).__name__} to a running engine")
        return refusals

    def _move(self, ask: Ask) -> Told:
        """records: {folder}. The records of the run so far are ended and closed, and from now on fresh
        engines write to that folder, or nowhere (null). What was still under way has been aborted."""
        folder = ask.arguments.get("folder")
        if self._next_recording is None or not isinstance(folder, str | None):
            return Told(ask.key, f"records: cannot go to {folder!r:.200}", {})
        recording = self._next_recording(None if folder is None else Path(folder))
        self._engine, self._log = recording.engines, recording.log
        self._seq_ids.clear()
        self._keys.clear()
        return Told(ask.key, recording.problem, {})

    def _produced(self, output: Output) -> Produced:
        key = self._keys[output.seq_id]
        if output.finish_reason is not None:
            del self._keys[output.seq_id], self._seq_ids[key]
        ids, found = list(output.token_ids), output.cached_tokens
        return Produced(key, ids, output.finish_reason, output.error, found)

    def _report(self, produced: list[Produced], refusals: list[Refusal]) -> None:
        passes, left = self._log.take()
        stats, queues = self._engine.stats(), []
        now = self._engine.clock()
        idle = not self._engine.has_work  # the last word until there is work again
        if idle or now >= self._queues_due:
            queues, self._queues_due = self._engine.queues(), 0.0 if idle else now + QUEUES_EVERY_S
        self._channel.send(Report(time.monotonic_ns(), stats, produced, refusals, passes, left, queues))

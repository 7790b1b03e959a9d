"""run_load: one schedule against one server, every request of it accounted for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence

from harness.loadgen.bodies import AHEAD, Bodies, Prompts, path_of
from harness.loadgen.client import Call
from harness.loadgen.pacing import closed_loop, open_loop
from harness.loadgen.settings import LoadResult, LoadSettings, Target
from harness.loadgen.transport import AiohttpTransport, Transport
from harness.loadgen.watch import Lifeline, LoopLag
from harness.records import OUTCOMES, RecordsWriteError, RequestLog, RequestRecord
from workloads.schedule import Schedule, ScheduledRequest

OnEvent = Callable[[str, RequestRecord | None], None]
"""("scheduled", None) per request before the load, ("sent", None) at its launch,
("ended", record) at its end."""

STOP_GRACE_S = 1.5
MAX_FILES = 65536


async def run_load(
    schedule: Schedule,
    prompts: Prompts,
    target: Target,
    settings: LoadSettings,
    log: RequestLog,
    *,
    t0_ns: int,
    stop: asyncio.Event,
    on_event: OnEvent | None = None,
    transport: Transport | None = None,
) -> LoadResult:
    """Send the schedule, wait for what is under way, close the log. t0_ns: CLOCK_MONOTONIC, at which
    arrival 0 leaves. When `stop` is set the load ends within 2 s: what is under way becomes
    cut_off/in_flight, what has not left cut_off/not_sent. Raises nothing for what a server does; a disk
    that is full ends the load and is the result's incomplete_reason."""
    load = _Load(_planned(schedule, settings), prompts, target, settings, log, t0_ns, on_event)
    load.transport = transport or AiohttpTransport(target.root_url, target.api_key)
    try:
        with _quiet_gc(), _many_files():
            return await load.run(stop)
    finally:
        await load.transport.close()


class _Load:
    """The state of one load: which calls are under way, how the ended ones ended."""

    def __init__(
        self,
        requests: Sequence[ScheduledRequest],
        prompts: Prompts,
        target: Target,
        settings: LoadSettings,
        log: RequestLog,
        t0_ns: int,
        on_event: OnEvent | None,
    ) -> None:
        self.requests = requests
        self.settings = settings
        self.log = log
        self.t0_ns = t0_ns
        self.transport: Transport
        self.calls: dict[Call, asyncio.Task[None]] = {}
        self.launched = 0
        self.sent = 0
        self.last_send_ns: int | None = None
        self.counts = dict.fromkeys(OUTCOMES, 0)
        self.incomplete_reason: str | None = None
        self.halt = asyncio.Event()
        self.notes: list[str] = []
        # Our servers count; a guess is no count.
        counts_here = target.dialect == "openai" and target.tokenizer is not None and target.tokenizer.exact
        self._tokenizer = target.tokenizer if counts_here else None
        self._uncounted: list[tuple[str, int, str]] = []  # id, attempt, text: for the count after the run
        self._path = path_of(target)
        ahead = max(AHEAD, settings.concurrency or 0)
        self._bodies = Bodies(requests, prompts, target, settings.run_id, ahead=ahead)
        self._gate = (
            asyncio.Semaphore(settings.concurrency)
            if settings.kind == "open" and settings.concurrency
            else None
        )
        self._on_event = on_event
        self._lifeline = Lifeline(target.root_url, self.stop)

    def stop(self, reason: str) -> None:
        """End the load early; the first reason stands."""
        if self.incomplete_reason is None:
            self.incomplete_reason = reason
        self.halt.set()

    async def run(self, stop: asyncio.Event) -> LoadResult:
        cpu_start = time.process_time()
        lag = LoopLag()
        for _ in self.requests:
            self._tell("scheduled")
        helpers = [asyncio.create_task(lag.run()), asyncio.create_task(self._forward(stop))]
        try:
            await self._drive()
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._lifeline.close()
            load_end_ns = time.monotonic_ns() - self.t0_ns
            cpu_s = time.process_time() - cpu_start
            self._close_log()
        return LoadResult(
            scheduled=self.launched if self._draws_to_time else len(self.requests),
            sent=self.sent,
            counts=self.counts,
            last_send_ns=self.last_send_ns,
            load_end_ns=load_end_ns,
            incomplete_reason=self.incomplete_reason,
            loop_lag_ms=tuple(lag.samples_ms),
            cpu_s=cpu_s,
            notes=tuple(self.notes),
        )

    async def _drive(self) -> None:
        """Pace until the schedule is through, wait for the answers; or cut everything off when halted."""
        halted = asyncio.create_task(self.halt.wait())
        pacer = asyncio.create_task(self._pace())
        try:
            await asyncio.wait({pacer, halted}, return_when=asyncio.FIRST_COMPLETED)
            while self.calls and not self.halt.is_set():
                await asyncio.wait({halted, *self.calls.values()}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pacer.cancel()
            halted.cancel()
            under_way = list(self.calls.items())
            for call, _ in under_way:
                call.cut_off()
            if under_way:
                await asyncio.wait({task for _, task in under_way}, timeout=STOP_GRACE_S)
            outcome = (await asyncio.gather(pacer, return_exceptions=True))[0]
        if isinstance(outcome, Exception):
            raise outcome
        if self.halt.is_set() and not self._draws_to_time:
            for request in self.requests[self.launched :]:
                self._never_sent(request)

    @property
    def _draws_to_time(self) -> bool:
        """In a closed loop with a duration the schedule is a supply: what was not launched was not due."""
        return self.settings.kind == "closed" and self.settings.duration_s is not None

    async def _pace(self) -> None:
        if self.settings.kind == "open":
            await open_loop(
                self.requests, t0_ns=self.t0_ns, launch=self._launch, prepare=self._bodies.prepare
            )
            return
        assert self.settings.concurrency is not None
        duration_s = self.settings.duration_s
        await closed_loop(
            self.requests,
            t0_ns=self.t0_ns,
            concurrency=self.settings.concurrency,
            duration_s=duration_s,
            launch=self._launch,
            prepare=self._bodies.prepare,
        )
        spent_s = (time.monotonic_ns() - self.t0_ns) / 1e9
        if duration_s is not None and self.launched == len(self.requests) and spent_s < duration_s:
            self.notes.append(
                f"load.duration_s={duration_s:g}: all {self.launched} requests had ended after "
                f"{spent_s:.1f} s; draw more"
            )

    def _launch(self, request: ScheduledRequest, intended_ns: int) -> asyncio.Task[None]:
        call = self._call(request, self._bodies.take(), intended_ns)
        self.launched += 1
        task = asyncio.get_running_loop().create_task(call.run(self.transport, self._gate))
        self.calls[call] = task
        task.add_done_callback(lambda _: self.calls.pop(call, None))
        self._tell("sent")
        return task

    def _never_sent(self, request: ScheduledRequest) -> None:
        is_open = self.settings.kind == "open"
        intended_ns = self.t0_ns + round(request.arrival_s * 1e9) if is_open else time.monotonic_ns()
        self._call(request, b"", intended_ns).cut_off()

    def _call(self, request: ScheduledRequest, body: bytes, intended_ns: int) -> Call:
        return Call(
            request,
            body,
            path=self._path,
            intended_ns=intended_ns,
            timeout_s=self.settings.timeout_s,
            keep_text=self.settings.keep_text or self._tokenizer is not None,
            on_end=self._ended,
        )

    def _ended(self, call: Call) -> None:
        record = call.record(self.t0_ns, keep_text=self.settings.keep_text)
        self.counts[record.outcome] += 1
        if record.send_ns is not None:
            self.sent += 1
            self.last_send_ns = max(record.send_ns, self.last_send_ns or record.send_ns)
        if record.output_tokens is None and record.chunk_ns and call.answer.text:
            self._uncounted.append((record.id, record.attempt, call.answer.text))
        if call.broken_by is not None:
            self._lifeline.suspect()
        with self._disk():
            self.log.append(record)
        self._tell("ended", record)

    def _close_log(self) -> None:
        """Count what no server counted, on whole texts, now that nobody is being timed; then the footer."""
        with self._disk():
            if self._tokenizer is not None:
                for record_id, attempt, text in self._uncounted:
                    self.log.set_tokens(record_id, attempt, self._tokenizer.count(text))
        with self._disk():
            self.log.close()

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except RecordsWriteError as exc:
            self.stop(str(exc))

    async def _forward(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.stop("interrupted")

    def _tell(self, what: str, record: RequestRecord | None = None) -> None:
        if self._on_event is not None:
            self._on_event(what, record)


def _planned(schedule: Schedule, settings: LoadSettings) -> Sequence[ScheduledRequest]:
    """The requests that this load is about: load.requests counts them; in an open loop load.duration_s
    leaves out those that arrive later."""
    requests = schedule.requests[: settings.requests]
    if settings.kind == "open" and settings.duration_s is not None:
        requests = tuple(r for r in requests if r.arrival_s < settings.duration_s)
    return requests


@contextlib.contextmanager
def _quiet_gc() -> Iterator[None]:
    """No collection while a load runs: a full one takes tens of ms, and all stamps of that time would be
    late."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _many_files() -> Iterator[None]:
    """A socket per request under way: raise the soft limit of open files as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    raised = soft != resource.RLIM_INFINITY and soft < wanted
    if raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        if raised:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

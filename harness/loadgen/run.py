"""run_load: one schedule against one server, every request of it accounted for."""

from __future__ import annotations

import contextlib
import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence

from harness.loadgen.bodies import AHEAD, Bodies, Prompts, path_of
from harness.loadgen.call import Call, never_sent
from harness.loadgen.dispatch import Dispatcher, Due
from harness.loadgen.settings import BackendReport, LoadError, LoadResult, LoadSettings, Target
from harness.loadgen.stop import Stop
from harness.loadgen.watch import Lifeline
from harness.records import OUTCOMES, RecordsWriteError, RequestLog, RequestRecord
from workloads.schedule import ScheduledRequest

OnEvent = Callable[[str, RequestRecord | None], None]
"""("scheduled", None) per request before the load, ("sent", None) when an attempt is launched, ("ended",
record) at the end of a request, ("retried", None) at the end of an attempt that is not its last."""

OnIdle = Callable[[], bool]
"""Called when there is nothing else to do, for work that may wait and takes well under a millisecond. True:
it did some."""

DROPS_AT_ONCE = 16
"""Records of requests that will never be sent, written beside that of an answer: no pile of them may hold up
the reading."""
BATCH = 1000
"""Of them, in one write, when the load is over."""
MAX_FILES = 65536


def run_load(
    requests: Sequence[ScheduledRequest],
    prompts: Prompts,
    target: Target,
    settings: LoadSettings,
    log: RequestLog,
    *,
    t0_ns: int,
    stop: Stop,
    on_event: OnEvent | None = None,
    on_idle: OnIdle | None = None,
) -> LoadResult:
    """Send the schedule, wait for what is under way, close the log. t0_ns: CLOCK_MONOTONIC, at which
    arrival 0 leaves. When `stop` is set the load ends within 2 s: what is under way becomes
    cut_off/in_flight, what has not left cut_off/not_sent. Raises nothing for what a server does; a disk
    that is full ends the load and is the result's incomplete_reason. LoadError: a backend that cannot be
    used here was asked for by name."""
    backend, notes = choose_backend(target, settings)
    load = Load(planned(requests, settings), prompts, target, settings, log, t0_ns, stop, on_event, on_idle)
    load.notes += notes
    with _quiet_gc(), _many_files():
        return load.run(backend)


def choose_backend(
    target: Target, settings: LoadSettings
) -> tuple[Callable[[Load], BackendReport], list[str]]:
    """The backend that load.backend asks for, and for "auto" a line when it is not the lean one."""
    why = "load.backend=aiohttp" if settings.backend == "aiohttp" else _lean_unavailable(target, settings)
    if why is None:
        from harness.loadgen.lean import run_lean

        return run_lean, []
    if settings.backend == "lean":
        raise LoadError(f"load.backend=lean: {why}; use load.backend=auto")
    from harness.loadgen.aio import run_aio

    return run_aio, [f"load.backend=auto: aiohttp, since {why}"] if settings.backend == "auto" else []


def _lean_unavailable(target: Target, settings: LoadSettings) -> str | None:
    if settings.trust_env:
        return "load.trust_env=true asks for the environment's proxies"
    try:
        from harness.loadgen.lean import lean_unavailable
    except ImportError:
        return "the lean one cannot be imported here"
    return lean_unavailable(target)


class Load:
    """One load as its backend sees it: what is due, with which body, and who is told that a call has ended.
    And its books: which calls are under way, how the ended ones ended."""

    def __init__(
        self,
        requests: Sequence[ScheduledRequest],
        prompts: Prompts,
        target: Target,
        settings: LoadSettings,
        log: RequestLog,
        t0_ns: int,
        stop: Stop,
        on_event: OnEvent | None,
        on_idle: OnIdle | None = None,
    ) -> None:
        self.target = target
        self.settings = settings
        self.t0_ns = t0_ns
        self.stop = stop
        self.path = f"/{path_of(target)}"
        self.dispatcher = Dispatcher(requests, settings, t0_ns=t0_ns)
        self.bodies = Bodies(
            requests, prompts, target, settings.run_id, ahead=max(AHEAD, settings.concurrency or 0)
        )
        self.notes: list[str] = []
        self._requests = requests
        self._log = log
        self._on_event = on_event
        self._on_idle = on_idle
        self._open: set[Call] = set()
        self._counts = dict.fromkeys(OUTCOMES, 0)
        self._sent_attempts = 0
        self._sent_again: set[str] = set()  # requests of which an attempt that was not the last was sent
        self._sent = 0
        self._last_send_ns: int | None = None
        self._disk_error: str | None = None
        # Our servers count; a guess is no count.
        counts_here = target.dialect == "openai" and target.tokenizer is not None and target.tokenizer.exact
        self._tokenizer = target.tokenizer if counts_here else None
        self._uncounted: list[tuple[str, int, str]] = []  # id, attempt, text: for the count after the run
        self._lifeline = Lifeline(target.root_url, stop)

    # What a backend calls.

    def call(self, due: Due, now_ns: int) -> Call:
        """Begin an attempt that dispatcher.take() gave."""
        call = self._call(due)
        self._open.add(call)
        self._tell("sent")
        return call

    def ended(self, call: Call, now_ns: int) -> None:
        """A call has its verdict: exactly once for each one that was begun."""
        assert call.verdict is not None
        self._open.remove(call)
        ended_ns = now_ns if call.end_ns is None else call.end_ns
        again = self.dispatcher.ended(call.due, call.verdict, ended_ns, tokens=call.answer.tokens)
        while (due := self.dispatcher.expected()) is not None:
            self.bodies.expect(due)
        if call.broken_by is not None:
            self._lifeline.suspect()
        self._record(call, final=not again)
        self._write_drops(DROPS_AT_ONCE)

    def idle(self, until_ns: int) -> bool:
        """Do one piece of work that can wait: build a body ahead. About 1 ms for a long prompt, so only call
        it while until_ns, when something must be done, is a few ms away. False: there was none."""
        return self.bodies.prepare() or (self._on_idle is not None and self._on_idle())

    # The load as a whole.

    def run(self, backend: Callable[[Load], BackendReport]) -> LoadResult:
        cpu_start = time.process_time()
        for _ in self._requests:
            self._tell("scheduled")
        try:
            report = backend(self)
        finally:
            now_ns = time.monotonic_ns()
            incomplete_reason = self.stop.reason
            cpu_s = time.process_time() - cpu_start
            self._lifeline.close()
            unsent = self._account_for_the_rest(now_ns)
            self._close_log()
        if unsent and incomplete_reason is None:
            incomplete_reason = f"the load ended before {unsent} of its requests were sent"
        self._note_a_dry_supply(now_ns)
        return LoadResult(
            scheduled=self.dispatcher.scheduled,
            sent=self._sent,
            counts=self._counts,
            last_send_ns=self._last_send_ns,
            load_end_ns=now_ns - self.t0_ns,
            incomplete_reason=incomplete_reason or self._disk_error,
            loop_lag_ms=report.loop_lag_ms,
            cpu_s=cpu_s,
            notes=tuple(self.notes),
            backend=report.backend,
            stamps=report.stamps,
            read_lag_ms=report.read_lag_ms,
            connections=report.connections,
            sent_attempts=self._sent_attempts,
            retried=self.dispatcher.retried,
            clock_offset_step_ns=report.clock_offset_step_ns,
        )

    def _account_for_the_rest(self, now_ns: int) -> int:
        """Records for what is still under way and for what never left. Returns how many the end of the load
        kept from leaving."""
        for call in list(self._open):
            call.cut_off(now_ns)
            self.ended(call, now_ns)
        left = self.dispatcher.leftovers(now_ns)
        for first in range(0, len(left), BATCH):
            self._never_sent(left[first : first + BATCH])
        return sum(reason == "not_sent" for _, reason in left)

    def _note_a_dry_supply(self, now_ns: int) -> None:
        duration_s, spent_s = self.settings.duration_s, (now_ns - self.t0_ns) / 1e9
        if self.settings.kind != "closed" or duration_s is None or spent_s >= duration_s:
            return
        if self.dispatcher.launched == len(self._requests) and not self.stop.is_set:
            self.notes.append(
                f"load.duration_s={duration_s:g}: all {len(self._requests)} requests had ended after "
                f"{spent_s:.1f} s; draw more"
            )

    def _call(self, due: Due) -> Call:
        return Call(
            due,
            timeout_s=self.settings.timeout_s,
            keep_text=self.settings.keep_text or self._tokenizer is not None,
        )

    def _never_sent(self, dropped: Sequence[tuple[Due, str]]) -> None:
        text = "" if self.settings.keep_text else None
        records = [
            never_sent(due.request, due.attempt, due.intended_ns - self.t0_ns, reason, text)
            for due, reason in dropped
        ]
        with self._disk():
            self._log.extend(records)
        for record in records:
            self._counts[record.outcome] += 1
            self._tell("ended", record)

    def _write_drops(self, most: int) -> None:
        dropped: list[tuple[Due, str]] = []
        while len(dropped) < most and (drop := self.dispatcher.drop()) is not None:
            dropped.append(drop)
        if dropped:
            self._never_sent(dropped)

    def _record(self, call: Call, *, final: bool) -> None:
        record = call.record(self.t0_ns, keep_text=self.settings.keep_text, final=final)
        if record.send_ns is not None:
            self._sent_attempts += 1
            self._sent += record.id not in self._sent_again
            if not final:
                self._sent_again.add(record.id)
            self._last_send_ns = max(record.send_ns, self._last_send_ns or record.send_ns)
        if record.output_tokens is None and record.chunk_ns and call.answer.text:
            self._uncounted.append((record.id, record.attempt, call.answer.text))
        with self._disk():
            self._log.append(record)
        if final:
            self._counts[record.outcome] += 1
            self._tell("ended", record)
        else:
            self._tell("retried")

    def _close_log(self) -> None:
        """Count what no server counted, on whole texts, now that nobody is being timed; then the footer."""
        with self._disk():
            if self._tokenizer is not None:
                for record_id, attempt, text in self._uncounted:
                    self._log.set_tokens(record_id, attempt, self._tokenizer.count(text))
        with self._disk():
            self._log.close()

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except RecordsWriteError as exc:
            if self._disk_error is None:
                self._disk_error = str(exc)
                self.stop.set(self._disk_error)

    def _tell(self, what: str, record: RequestRecord | None = None) -> None:
        if self._on_event is not None:
            self._on_event(what, record)


def planned(requests: Sequence[ScheduledRequest], settings: LoadSettings) -> Sequence[ScheduledRequest]:
    """The requests that a load is about: load.requests counts them; in an open loop load.duration_s leaves
    out those that arrive later."""
    requests = requests[: settings.requests]
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

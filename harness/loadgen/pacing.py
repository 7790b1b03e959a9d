"""When requests leave: on absolute times (open loop), or as places come free (closed loop).

Open loop: no arrival depends on another one, on an answer, or on how late the client was. A late arrival
leaves at once and keeps its intended time, so nothing drifts and nothing is forfeited."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ctypes.util
import os
import time
from collections.abc import Callable, Iterator, Sequence

from workloads.schedule import ScheduledRequest

NS = 1_000_000_000
SPIN_NS = 100_000
"""The alarm is set this much early and the rest is spun: a wake-up takes about this long, and a send may be
late but never early."""
PREPARE_MARGIN_NS = 3_000_000
"""Bodies are built ahead only while the next arrival is further away than this."""

Launch = Callable[[ScheduledRequest, int], "asyncio.Task[None]"]
"""Start one request with its intended time, CLOCK_MONOTONIC ns; the task ends when the request has ended."""


async def open_loop(
    requests: Sequence[ScheduledRequest], *, t0_ns: int, launch: Launch, prepare: Callable[[], bool]
) -> None:
    """Launch every request at t0 + arrival_s. prepare: build something ahead; False when there is nothing
    left."""
    with Alarm() as alarm:
        for request in requests:
            intended_ns = t0_ns + round(request.arrival_s * NS)
            while intended_ns - time.monotonic_ns() > PREPARE_MARGIN_NS and prepare():
                await asyncio.sleep(0)
            await alarm.until(intended_ns)
            launch(request, intended_ns)


async def closed_loop(
    requests: Sequence[ScheduledRequest],
    *,
    t0_ns: int,
    concurrency: int,
    duration_s: float | None,
    launch: Launch,
    prepare: Callable[[], bool],
) -> int:
    """`concurrency` places. A request's intended time is the moment at which its place came free, so a slow
    answer holds back nobody but the next one in its own place. Returns how many requests were launched."""
    end_ns = None if duration_s is None else t0_ns + round(duration_s * NS)
    waiting: Iterator[ScheduledRequest] = iter(requests)
    launched = 0

    async def place() -> None:
        nonlocal launched
        free_ns = t0_ns
        while end_ns is None or free_ns < end_ns:
            request = next(waiting, None)
            if request is None:
                return
            launched += 1
            task = launch(request, free_ns)
            prepare()
            await asyncio.shield(task)
            free_ns = time.monotonic_ns()

    for _ in range(concurrency):
        if not prepare():
            break
    with Alarm() as alarm:
        await alarm.until(t0_ns)
    await asyncio.gather(*(place() for _ in range(concurrency)))
    return launched


class Alarm:
    """Waits for absolute CLOCK_MONOTONIC times, to about 0.1 ms: asyncio's own timers round up to whole
    milliseconds. Uses a Linux timerfd; without one it falls back to asyncio's timers."""

    def __init__(self) -> None:
        self._fd = _timerfd_create()
        self._due: asyncio.Future[None] | None = None

    def __enter__(self) -> Alarm:
        if self._fd is not None:
            asyncio.get_running_loop().add_reader(self._fd, self._ring)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)

    async def until(self, target_ns: int) -> None:
        """Return at target_ns or as soon after it as possible, never before. A time that has passed still
        lets the event loop run once, so that a burst cannot starve the reading of answers."""
        early_ns = target_ns - SPIN_NS
        if early_ns <= time.monotonic_ns():
            await asyncio.sleep(0)
        elif self._fd is None:
            await asyncio.sleep((early_ns - time.monotonic_ns()) / NS)
        else:
            self._due = asyncio.get_running_loop().create_future()
            _timerfd_settime(self._fd, early_ns)
            await self._due
        while time.monotonic_ns() < target_ns:
            pass

    def _ring(self) -> None:
        assert self._fd is not None
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        if self._due is not None and not self._due.done():
            self._due.set_result(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


_CLOCK_MONOTONIC, _TFD_TIMER_ABSTIME = 1, 1


def _timerfd_create() -> int | None:
    """A non-blocking timerfd (os.timerfd_create only exists since Python 3.13); None where there is none."""
    create = getattr(_libc(), "timerfd_create", None)
    fd = -1 if create is None else create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    return fd if fd >= 0 else None


def _timerfd_settime(fd: int, when_ns: int) -> None:
    # A value of zero would disarm the timer.
    spec = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(max(1, when_ns), NS)))
    if _libc().timerfd_settime(fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
        raise OSError(ctypes.get_errno(), "timerfd_settime")


_LIBC: ctypes.CDLL | None = None


def _libc() -> ctypes.CDLL:
    global _LIBC
    if _LIBC is None:
        _LIBC = ctypes.CDLL(None, use_errno=True)
    return _LIBC

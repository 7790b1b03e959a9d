"""Waiting for absolute times in an event loop."""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import os
import time

NS = 1_000_000_000
SPIN_NS = 100_000
"""The alarm is set this much early and the rest is spun: a wake-up takes about this long, and a send may be
late but never early."""
PREPARE_MARGIN_NS = 3_000_000
"""Bodies are built ahead only while the next arrival is further away than this."""


class Alarm:
    """Waits for absolute CLOCK_MONOTONIC times, to about 0.1 ms: asyncio's own timers round up to whole
    milliseconds. Uses a Linux timerfd; without one it falls back to asyncio's timers."""

    def __init__(self) -> None:
        self._fd = _timerfd_create()
        self._due: asyncio.Future[bool] | None = None

    def __enter__(self) -> Alarm:
        if self._fd is not None:
            asyncio.get_running_loop().add_reader(self._fd, self._ring)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)

    async def until(self, target_ns: int | None) -> bool:
        """True: it is target_ns, or as little later as possible; never before. False: wake() came first. None
        waits for wake() alone. A time that has passed still lets the event loop run once, so that a burst
        cannot starve the reading of answers."""
        if target_ns is None:
            return await self._sleep(None)
        early_ns = target_ns - SPIN_NS
        if early_ns <= time.monotonic_ns():
            await asyncio.sleep(0)
        while early_ns > time.monotonic_ns():
            if not await self._sleep(early_ns):
                return False
        while time.monotonic_ns() < target_ns:
            pass
        return True

    def wake(self) -> None:
        """End the waiting that is under way."""
        if self._due is not None and not self._due.done():
            self._due.set_result(False)

    async def _sleep(self, early_ns: int | None) -> bool:
        loop = asyncio.get_running_loop()
        self._due = loop.create_future()
        timer: asyncio.TimerHandle | None = None
        if early_ns is not None and self._fd is not None:
            _timerfd_settime(self._fd, early_ns)
        elif early_ns is not None:
            timer = loop.call_later((early_ns - time.monotonic_ns()) / NS, self._ring)
        try:
            return await self._due
        finally:
            if timer is not None:
                timer.cancel()
            self._due = None

    def _ring(self) -> None:
        if self._fd is not None:
            try:
                os.read(self._fd, 8)
            except BlockingIOError:  # it was set anew since it rang
                return
        if self._due is not None and not self._due.done():
            self._due.set_result(True)


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

"""A Linux timerfd: wakes an epoll loop at an absolute CLOCK_MONOTONIC time, exact to the wake-up itself.

epoll's own timeout counts whole milliseconds. os.timerfd_create exists since Python 3.13 only, hence ctypes.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

NS = 1_000_000_000
_CLOCK_MONOTONIC, _TFD_TIMER_ABSTIME = 1, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


def timerfd_unavailable() -> str | None:
    try:
        return None if _libc().timerfd_create and _libc().timerfd_settime else "no timerfd"
    except (AttributeError, OSError):
        return "the C library has no timerfd"


class Timer:
    """One alarm at a time. Watch its fileno() edge-triggered: nothing has to be read from it then, as each
    expiry is an edge of its own."""

    def __init__(self) -> None:
        """Raises OSError."""
        libc = _libc()
        self._fd = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._settime = libc.timerfd_settime
        self._spec = _Itimerspec()
        self._spec_at = ctypes.byref(self._spec)
        self._when_ns = 0

    def fileno(self) -> int:
        return self._fd

    def arm(self, when_ns: int) -> None:
        """Ring at when_ns, at once if that has passed; in place of what was set before."""
        if when_ns == self._when_ns:
            return
        self._when_ns = when_ns
        # A value of zero would disarm the timer.
        self._spec.value.sec, self._spec.value.nsec = divmod(max(1, when_ns), NS)
        if self._settime(self._fd, _TFD_TIMER_ABSTIME, self._spec_at, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _libc() -> Any:
    """For each caller anew: dlopen of what is loaded costs nothing, and a module that is imported elsewhere
    than on Linux must not need it."""
    return ctypes.CDLL(None, use_errno=True)

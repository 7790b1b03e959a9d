"""Ctrl-C and SIGTERM: the first ends a run early and keeps what was measured, the second leaves at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDED_AT_ONCE = 130
"""Exit code after the second signal: nothing was finished, so none of our own codes says it."""


class Interruption:
    """Handles the signals for the length of a `with`, in the main thread.

    A first signal calls `on_signal` if it is set; before that (nothing is being measured yet) it raises
    KeyboardInterrupt where the program stands. A second one calls `at_once` and leaves the process.
    """

    raised = False  # by any of them: an import that it met may have made something else of it

    def __init__(self) -> None:
        self.count = 0
        self.on_signal: Callable[[], None] | None = None
        self.at_once: Callable[[], None] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup asked for this one to be ignored
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1:
            if self.on_signal is None:
                Interruption.raised = True
                raise KeyboardInterrupt
            self.on_signal()
            return
        if self.at_once is not None:
            self.at_once()
        sys.stderr.flush()
        os._exit(ENDED_AT_ONCE)

"""The progress bar of a load: how far it is, and TTFT, TPOT and throughput of the last answers.

It writes to standard error, and nothing at all when that is no terminal or CI=true.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, deque
from statistics import median
from typing import TYPE_CHECKING, TextIO

from harness.records import RequestRecord

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

REFRESH_S = 0.5
"""Drawing takes a few ms in which no answer is read, so it is done rarely."""
LAST = 50
"""Answers that the live figures look back on."""


def is_interactive(stream: TextIO | None = None) -> bool:
    stream = sys.stderr if stream is None else stream
    return stream.isatty() and os.environ.get("CI", "").lower() not in ("true", "1")


class Progress:
    """Give it to run_load as on_event; use it as a context manager around the load."""

    def __init__(self, *, enabled: bool | None = None) -> None:
        self.enabled = is_interactive() if enabled is None else enabled
        self.scheduled = 0
        self.under_way = 0
        self.outcomes: Counter[str] = Counter()
        self._ttft_ms: deque[float] = deque(maxlen=LAST)
        self._tpot_ms: deque[float] = deque(maxlen=LAST)
        self._tokens: deque[tuple[float, int]] = deque(maxlen=LAST)
        self._bar: Bar | None = None
        self._drawn = 0.0

    def __enter__(self) -> Progress:
        if self.enabled:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("load"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[live]}"),
                console=Console(stderr=True),
                auto_refresh=False,
                transient=True,
            )
            self._bar.add_task("load", live="")
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._draw()
            self._bar.stop()

    def __call__(self, what: str, record: RequestRecord | None) -> None:
        """An event of run_load."""
        if what == "scheduled":
            self.scheduled += 1
        elif what == "sent":
            self.under_way += 1
        elif record is not None:
            self._ended(record)
        now = time.monotonic()
        if self._bar is not None and now - self._drawn >= REFRESH_S:
            self._drawn = now
            self._draw()

    def live(self) -> str:
        """The figures of the last answers, as far as there are any."""
        parts = [f"in flight {self.under_way}"]
        if self._ttft_ms:
            parts.append(f"TTFT {median(self._ttft_ms):.0f} ms")
        if self._tpot_ms:
            parts.append(f"TPOT {median(self._tpot_ms):.1f} ms")
        if len(self._tokens) > 1 and (span := self._tokens[-1][0] - self._tokens[0][0]) > 0:
            parts.append(f"{sum(n for _, n in list(self._tokens)[1:]) / span:.0f} tok/s")
        bad = {name: n for name, n in self.outcomes.items() if name != "completed"}
        parts += [f"{name} {n}" for name, n in sorted(bad.items())]
        return "  ".join(parts)

    def _ended(self, record: RequestRecord) -> None:
        self.outcomes[record.outcome] += 1
        self.under_way -= record.dispatch_ns is not None
        if record.end_ns is not None and record.output_tokens:
            self._tokens.append((record.end_ns / 1e9, record.output_tokens))
        if not record.chunk_ns:
            return
        self._ttft_ms.append((record.chunk_ns[0] - record.intended_ns) / 1e6)
        later = sum(record.chunk_tokens[1:])
        if later:
            self._tpot_ms.append((record.chunk_ns[-1] - record.chunk_ns[0]) / later / 1e6)

    def _draw(self) -> None:
        assert self._bar is not None
        ended = sum(self.outcomes.values())
        self._bar.update(self._bar.task_ids[0], total=self.scheduled, completed=ended, live=self.live())
        self._bar.refresh()

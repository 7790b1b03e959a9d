"""How far a load is: each worker counts in a Tally and sends its figures; the parent's Progress adds them up
and draws a bar with TTFT, TPOT and throughput of the last answers.

The bar goes to standard error, and nothing at all when that is no terminal or CI=true.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from harness.records import RequestRecord

REFRESH_S = 0.25
LAST = 50
"""Answers of each worker that the live figures look back on."""
SPAN_S = 5.0
"""The time that the live throughput looks back on; there is none before a tenth of it has passed."""


def is_interactive(stream: TextIO | None = None) -> bool:
    stream = sys.stderr if stream is None else stream
    return stream.isatty() and os.environ.get("CI", "").lower() not in ("true", "1")


class Tally:
    """One worker's figures; give it to run_load as on_event. Counting takes about a microsecond."""

    def __init__(self) -> None:
        self.events = 0
        self.launched = 0  # attempts
        self.under_way = 0
        self.tokens = 0  # of answers that have ended
        self.outcomes: Counter[str] = Counter()
        self.ttft_ms: deque[float] = deque(maxlen=LAST)
        self.tpot_ms: deque[float] = deque(maxlen=LAST)

    def __call__(self, what: str, record: RequestRecord | None) -> None:
        """An event of run_load."""
        self.events += 1
        if what == "sent":
            self.launched += 1
            self.under_way += 1
        elif what == "retried":
            self.under_way -= 1
        elif record is not None:
            self._ended(record)

    def frame(self) -> dict[str, Any]:
        """The figures so far, for Progress.update."""
        return {
            "type": "progress",
            "launched": self.launched,
            "under_way": self.under_way,
            "tokens": self.tokens,
            "outcomes": dict(self.outcomes),
            "ttft_ms": list(self.ttft_ms),
            "tpot_ms": list(self.tpot_ms),
        }

    def _ended(self, record: RequestRecord) -> None:
        self.outcomes[record.outcome] += 1
        self.under_way -= record.dispatch_ns is not None
        self.tokens += record.output_tokens or 0
        if not record.chunk_ns:
            return
        self.ttft_ms.append(round((record.chunk_ns[0] - record.intended_ns) / 1e6, 3))
        later = sum(record.chunk_tokens[1:])
        if later:
            self.tpot_ms.append(round((record.chunk_ns[-1] - record.chunk_ns[0]) / later / 1e6, 3))


class Progress:
    """The bar of a whole load, for the length of a `with`."""

    def __init__(self, scheduled: int, *, enabled: bool | None = None) -> None:
        self.enabled = is_interactive() if enabled is None else enabled
        self.scheduled = scheduled
        self._latest: dict[int, Mapping[str, Any]] = {}
        self._tokens: deque[tuple[float, int]] = deque()
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

    def update(self, worker: int, frame: Mapping[str, Any]) -> None:
        """A worker's figures, as Tally.frame() gives them. Raises KeyError or TypeError for others."""
        now = time.monotonic()
        self._latest[worker] = frame
        self._tokens.append((now, sum(latest["tokens"] for latest in self._latest.values())))
        while len(self._tokens) > 2 and now - self._tokens[0][0] > SPAN_S:
            self._tokens.popleft()
        if self._bar is not None and now - self._drawn >= REFRESH_S:
            self._drawn = now
            self._draw()

    @property
    def under_way(self) -> int:
        return sum(latest["under_way"] for latest in self._latest.values())

    @property
    def outcomes(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for latest in self._latest.values():
            total.update(latest["outcomes"])
        return total

    def live(self) -> str:
        """The figures of the last answers, as far as there are any."""
        parts = [f"in flight {self.under_way}"]
        for label, name, digits in (("TTFT", "ttft_ms", 0), ("TPOT", "tpot_ms", 1)):
            values = [value for latest in self._latest.values() for value in latest[name]]
            if values:
                parts.append(f"{label} {median(values):.{digits}f} ms")
        if len(self._tokens) > 1 and (span := self._tokens[-1][0] - self._tokens[0][0]) > SPAN_S / 10:
            parts.append(f"{(self._tokens[-1][1] - self._tokens[0][1]) / span:.0f} tok/s")
        bad = {name: n for name, n in self.outcomes.items() if name != "completed"}
        parts += [f"{name} {n}" for name, n in sorted(bad.items())]
        return "  ".join(parts)

    def _draw(self) -> None:
        assert self._bar is not None
        ended = sum(self.outcomes.values())
        self._bar.update(self._bar.task_ids[0], total=self.scheduled, completed=ended, live=self.live())
        self._bar.refresh()

"""How far a running run is, from the files that it appends to. Each poll reads only what has come since."""

from __future__ import annotations

import contextlib
import json
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

MAX_JSON = 64 << 20
MAX_READ = 16 << 20
"""Bytes of one file in one poll: a run of hours that nobody has watched yet is caught up with in steps."""


class Progress:
    """Of one run directory. The load's workers write requests.<k>.jsonl, which become requests.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[str, int] = {}
        self._outcomes: Counter[str] = Counter()
        self._ttft_ms: list[float] = []
        self._tpot_ms: list[float] = []
        self._tokens = 0
        self._end_ns = 0
        self._seen: set[tuple[str, int]] = set()
        self._server: dict[str, Any] = {}

    def poll(self) -> dict[str, Any]:
        """scheduled (None before the load), done, outcomes, tokens_per_s and percentiles of the answers so
        far, and what the server last said of itself (running, waiting)."""
        for file in sorted(self._path.glob("requests*.jsonl")):
            for line in self._new_lines(file):
                with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
                    self._add(line)  # a damaged line is none
        for line in self._new_lines(self._path / "server_metrics.jsonl"):
            self._server = line if line.get("error") is None else self._server
        elapsed = self._end_ns / 1e9
        return {
            "scheduled": self._scheduled(),
            "done": sum(self._outcomes.values()),
            "outcomes": dict(self._outcomes),
            "elapsed_s": round(elapsed, 1),
            "tokens_per_s": self._tokens / elapsed if elapsed > 0 else None,
            "ttft_p50": _percentile(self._ttft_ms, 50),
            "ttft_p99": _percentile(self._ttft_ms, 99),
            "tpot_p50": _percentile(self._tpot_ms, 50),
            "running": number(self._server.get("running")),
            "waiting": number(self._server.get("waiting")),
        }

    def _scheduled(self) -> int | None:
        try:
            planned = read_json(self._path / "meta.json")["planned"]
            return None if planned["requests"] is None else int(planned["requests"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None

    def _add(self, row: dict[str, Any]) -> None:
        if row.get("type") != "request" or not row.get("final", True):
            return
        key = (str(row.get("id")), int(row.get("attempt") or 0))
        if key in self._seen:  # in a worker's part and in the merged file
            return
        end, counts = int(row.get("end_ns") or 0), row.get("chunk_tokens") or []
        stamps = [int(stamp) for stamp in row.get("chunk_ns") or []]
        tokens, later = sum(counts), sum(counts[1:])
        ttft_ms = (stamps[0] - row["intended_ns"]) / 1e6 if stamps else None
        self._seen.add(key)  # nothing above has failed: the row counts as a whole or not at all
        self._outcomes[str(row.get("outcome"))] += 1
        self._end_ns = max(self._end_ns, end)
        self._tokens += tokens
        if ttft_ms is not None:
            self._ttft_ms.append(ttft_ms)
            if later:
                self._tpot_ms.append((stamps[-1] - stamps[0]) / 1e6 / later)

    def _new_lines(self, file: Path) -> Iterator[dict[str, Any]]:
        """Whole lines since the last poll; half a line waits for its other half."""
        try:
            if not file.is_file():  # opening a pipe would wait for somebody who writes
                return
            with open(file, "rb") as stream:
                start = self._offsets.get(file.name, 0)
                stream.seek(start)
                data = stream.read(MAX_READ)
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[file.name] = start + len(whole)
        for line in whole.splitlines():
            try:
                row = json.loads(line, parse_constant=_no_constant)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def read_json(path: Path) -> Any:
    """Of a regular file of bearable size. Raises OSError, ValueError, or RecursionError."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a regular file")
    if found.st_size > MAX_JSON:
        raise ValueError(f"{found.st_size} bytes; at most {MAX_JSON} are read")
    return json.loads(path.read_bytes(), parse_constant=_no_constant)


def number(value: Any) -> float | None:
    """A finite number, or None: a browser reads no NaN."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")
    return value if known else None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no figure")


def _percentile(values: list[float], q: float) -> float | None:
    return float(np.percentile(values, q)) if values else None

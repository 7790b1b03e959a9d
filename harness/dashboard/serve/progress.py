"""How far a running run is, from the files that it appends to. Each poll reads only what has come since."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

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
                self._add(line)
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
            "running": self._server.get("running"),
            "waiting": self._server.get("waiting"),
        }

    def _scheduled(self) -> int | None:
        try:
            planned = json.loads((self._path / "meta.json").read_bytes())["planned"]
            return None if planned["requests"] is None else int(planned["requests"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _add(self, row: dict[str, Any]) -> None:
        if row.get("type") != "request" or not row.get("final", True):
            return
        key = (str(row.get("id")), int(row.get("attempt") or 0))
        if key in self._seen:  # in a worker's part and in the merged file
            return
        self._seen.add(key)
        self._outcomes[str(row.get("outcome"))] += 1
        self._end_ns = max(self._end_ns, int(row.get("end_ns") or 0))
        stamps, counts = row.get("chunk_ns") or [], row.get("chunk_tokens") or []
        self._tokens += sum(counts)
        if stamps:
            self._ttft_ms.append((stamps[0] - row["intended_ns"]) / 1e6)
            if sum(counts[1:]):
                self._tpot_ms.append((stamps[-1] - stamps[0]) / 1e6 / sum(counts[1:]))

    def _new_lines(self, file: Path) -> Iterator[dict[str, Any]]:
        """Whole lines since the last poll; half a line waits for its other half."""
        try:
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
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def _percentile(values: list[float], q: float) -> float | None:
    return float(np.percentile(values, q)) if values else None

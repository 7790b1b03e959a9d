"""A load against the script server, through the real pipeline (load, requests.jsonl, summary.json), and what
the server's own log says about it.

A client can only be late: each of its figures lies at or above the server's, by as much as the machine made
it wait. So figures are held to the truth from the log, not to the plan, and a machine under load moves both.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.loadgen import LoadResult, LoadSettings, Stop, Target, run_load
from harness.loadgen.run import choose_backend
from harness.metrics import write_summary
from harness.records import RequestLog, RequestRecord, read_requests, write_meta
from tests.support.load import CountingPrompts
from tests.support.run_factory import default_meta
from tests.support.script_process import ScriptProcess, Truth
from tests.support.script_server import Rule, Script, Seen
from workloads.schedule import Schedule, ScheduledRequest

EARLY_MS = 1.0
"""Kernel stamps are mapped from another clock; nothing else makes a client early."""
LATE_MS = 60.0
"""For a median, or a mean, of a class of answers on a machine that has other things to do. What a test
tells apart is further apart than this."""


LEAD_NS = 150_000_000
"""From the choice of t0 to the first arrival."""


@dataclass(frozen=True)
class Golden:
    folder: Path
    summary: dict[str, Any]
    records: dict[str, RequestRecord]
    truth: Truth
    t0_ns: int
    result: LoadResult

    def of_class(self, name: str) -> dict[str, Any]:
        figures: dict[str, Any] = self.summary["by_class"][name]
        return figures

    def pairs(self, name: str | None = None) -> list[tuple[RequestRecord, Seen]]:
        """Each request of a class that was sent, with the server's view of it, in order of ids."""
        sent = [r for _, r in sorted(self.records.items()) if r.send_ns is not None]
        chosen = [r for r in sent if name in (None, r.request_class)]
        return [(record, self.truth.by_id(record.id)) for record in chosen]

    def true_ms(self, figure: Callable[[Seen], int], name: str | None = None) -> np.ndarray:
        """From each request's intended time to a moment of the server's log, in ms."""
        values = [(figure(s) - self.t0_ns - r.intended_ns) / 1e6 for r, s in self.pairs(name)]
        return np.array(values)


def first_token(seen: Seen) -> int:
    return seen.sends[0][0]


def last_token(seen: Seen) -> int:
    return seen.sends[-1][0]


def true_gaps_ms(seen: Seen) -> np.ndarray:
    return np.diff([ns for ns, _ in seen.sends]) / 1e6


def assert_follows(ours: float | None, truth: float, late_ms: float = LATE_MS) -> None:
    """Our figure is the true one, and late by no more than late_ms."""
    assert ours is not None
    assert truth - EARLY_MS <= ours <= truth + late_ms, f"{ours:.3f} ms, and the truth is {truth:.3f} ms"


def measure(
    server: ScriptProcess,
    script: Rule | Script,
    requests: Sequence[ScheduledRequest],
    folder: Path,
    *,
    backend: str,
    target: Target | None = None,
    slo: Mapping[str, float] | None = None,
    stop_after_s: float | None = None,
    on_event: Callable[[str, RequestRecord | None], None] | None = None,
    **settings: Any,
) -> Golden:
    """Run the load and build its summary. stop_after_s: the load is ended that long after t0."""
    server.play(script)
    folder.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(tuple(requests), name="scripted", seed=0)
    wanted = target or Target(server.base_url, "m")
    asked = LoadSettings(run_id="test", backend=backend, **settings)
    choose_backend(wanted, asked)  # its import comes before the time that counts
    gc.collect()
    gc.freeze()  # the load's own collection is then quick; it unfreezes when it has ended
    t0_ns = time.monotonic_ns() + LEAD_NS
    log = RequestLog(folder / "requests.jsonl", run="test", t0_ns=t0_ns)
    pairs = [[time.monotonic_ns(), time.time_ns()]]
    with Stop() as stop:
        if stop_after_s is not None:
            timer = threading.Timer(LEAD_NS / 1e9 + stop_after_s, stop.set, ["the test ends it"])
            timer.daemon = True
            timer.start()
        result = run_load(
            schedule.requests,
            CountingPrompts(),
            wanted,
            asked,
            log,
            t0_ns=t0_ns,
            stop=stop,
            on_event=on_event,
        )
    pairs.append([time.monotonic_ns(), time.time_ns()])
    truth = server.truth()
    assert result.backend == backend
    schedule.to_parquet(folder / "schedule.parquet")
    write_meta(folder, meta(result, t0_ns, pairs, slo or {}))
    load = {"kind": asked.kind, "concurrency": asked.concurrency}
    (folder / "config.yaml").write_text(json.dumps({"load": load}))
    summary = write_summary(folder)
    assert json.loads((folder / "summary.json").read_text()) == summary
    records = {record.id: record for record in read_requests(folder) if record.final}
    assert len(records) == result.scheduled == sum(result.counts.values())
    return Golden(folder, summary, records, truth, t0_ns, result)


def meta(result: LoadResult, t0_ns: int, pairs: list[list[int]], slo: Mapping[str, float]) -> dict[str, Any]:
    """meta.json of such a run, as harness.run writes it."""
    client = {
        "backend": result.backend,
        "stamps": result.stamps,
        "processes": 1,
        "loop_lag_ms": list(result.loop_lag_ms),
        "read_lag_ms": list(result.read_lag_ms),
        "cpu_s": result.cpu_s,
        "connections": result.connections,
        "retried": result.retried,
        "calibration": None,
    }
    return default_meta(
        run="test",
        t0_ns=t0_ns,
        load_end_ns=result.load_end_ns,
        duration_s=result.load_end_ns / 1e9,
        complete=result.incomplete_reason is None,
        incomplete_reason=result.incomplete_reason,
        engine="openai",
        workload="scripted",
        server={},
        clock_pairs=pairs,
        slo=dict(slo),
        planned={"requests": result.scheduled, "rate": None, "length_scale": 1.0},
        client=client,
    )

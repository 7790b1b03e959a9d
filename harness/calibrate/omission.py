"""`--coordinated-omission`: requests that wait in the client for a place must not look quick.

Ten requests a second, 500 ms of service each, one at a time: the queue grows by 400 ms a request. A client
that counts from its send sees 500 ms for all eight; their users waited 1.9 s on average (the case of
vllm-project/vllm#54101; the term is Gil Tene's)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.calibrate.client import run_client
from harness.calibrate.truth import truth_server
from harness.loadgen.settings import LoadSettings
from workloads.schedule import ScheduledRequest, Segment, request_id

REQUESTS, RATE, TOKENS = 8, 10.0, 8
TTFT_MS, GAP_MS = 430.0, 10.0
SERVICE_MS = TTFT_MS + GAP_MS * (TOKENS - 1)
TOLERANCE_MS = 10.0
"""Between a view's figure and the server's own account of it. A client that adds more is no measure."""


class CaseError(RuntimeError):
    """A request failed, so there is nothing to compare. One line."""


@dataclass(frozen=True)
class View:
    """mean and p99 of the eight, ms: what the client says and what the server's log says."""

    name: str
    reported: tuple[float, float]
    true: tuple[float, float]

    def agrees(self, tolerance_ms: float) -> bool:
        return all(abs(r - t) <= tolerance_ms for r, t in zip(self.reported, self.true, strict=True))


def run_case(backend: str) -> list[View]:
    """The views: from_intended, from_send, dispatch delay. Raises CaseError."""
    requests = [
        ScheduledRequest(
            id=request_id(k),
            arrival_s=k / RATE,
            segments=(Segment(f"calibrate-{k}", 32),),
            prompt_tokens=32,
            max_tokens=TOKENS,
            stop_after=TOKENS,
        )
        for k in range(REQUESTS)
    ]
    settings = LoadSettings(run_id="calibrate", backend=backend, concurrency=1, timeout_s=60.0)
    with truth_server(ttft_ms=TTFT_MS, gap_ms=GAP_MS) as server:
        run = run_client(server.base_url, requests, settings, core=None)
        truth = server.stop()
    done = [r for r in run.records if r.outcome == "completed" and r.send_ns is not None]
    if len(done) != REQUESTS:
        raise CaseError(f"{len(done)} of {REQUESTS} requests completed: {run.result.counts}")
    rows = [truth.index[r.id] for r in done]
    last = np.array([truth.sent_of(row)[-1] for row in rows], np.float64)
    intended = np.array([r.intended_ns + run.t0_ns for r in done], np.float64)
    received = truth.rows["received_ns"][rows].astype(np.float64)
    send = np.array([r.send_ns or 0 for r in done], np.float64)
    end = np.array([r.chunk_ns[-1] for r in done], np.float64)
    own = intended - run.t0_ns
    return [
        View("E2E from the intended arrival", _figures(end - own), _figures(last - intended)),
        View("E2E from the send", _figures(end - send), _figures(last - received)),
        View("dispatch delay", _figures(send - own), _figures(received - intended)),
    ]


def report(views: list[View], tolerance_ms: float) -> tuple[list[str], dict[str, Any]]:
    """Lines for people, and the same for machines."""
    lines = [
        f"{REQUESTS} requests, {RATE:g}/s, service {SERVICE_MS:g} ms, one at a time (load.concurrency=1)",
        f"{'view':<32}{'mean ms':>10}{'true':>10}{'p99 ms':>10}{'true':>10}",
    ]
    for view in views:
        (mean, p99), (true_mean, true_p99) = view.reported, view.true
        mark = "" if view.agrees(tolerance_ms) else f"   off by more than {tolerance_ms:g} ms"
        lines.append(f"{view.name:<32}{mean:>10.1f}{true_mean:>10.1f}{p99:>10.1f}{true_p99:>10.1f}{mark}")
    value = {
        view.name.replace(" ", "_").lower(): {"mean": view.reported[0], "p99": view.reported[1]}
        | {"true_mean": view.true[0], "true_p99": view.true[1]}
        for view in views
    }
    return lines, value


def _figures(values_ns: np.ndarray) -> tuple[float, float]:
    return float(values_ns.mean()) / 1e6, float(np.percentile(values_ns, 99)) / 1e6

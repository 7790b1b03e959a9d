"""`--table`: rates one after the other, one client process on one core, the server of known truth on another;
and how the figures are shown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from harness.calibrate.client import ClientRun, run_client
from harness.calibrate.compare import compare
from harness.calibrate.noise import NoiseWatch
from harness.calibrate.truth import truth_server
from harness.cli import say
from harness.loadgen.settings import LoadSettings
from workloads.schedule import ScheduledRequest, Segment, request_id

STALL_EVERY, STALL_MS = 32, 300.0


@dataclass(frozen=True)
class Case:
    """One line of the table. The server's answers: ttft_ms, then gap_ms between tokens; with pattern stall
    every 32nd gap is 300 ms longer."""

    backend: str
    rate: float
    requests: int
    tokens: int = 64
    prompt_tokens: int = 256
    ttft_ms: float = 100.0
    gap_ms: float = 20.0
    pattern: str = "constant"
    seed: int = 0


@dataclass(frozen=True)
class Cores:
    client: int
    server: int


def poisson(case: Case) -> list[ScheduledRequest]:
    """A Poisson schedule; another rate replays the same pattern."""
    gaps = np.random.default_rng([case.seed, case.requests]).standard_exponential(case.requests)
    return [
        ScheduledRequest(
            id=request_id(k),
            arrival_s=float(at),
            segments=(Segment(f"calibrate-{k}", case.prompt_tokens),),
            prompt_tokens=case.prompt_tokens,
            max_tokens=case.tokens,
            stop_after=case.tokens,
        )
        for k, at in enumerate(np.cumsum(gaps) / case.rate)
    ]


def measure(case: Case, cores: Cores, *, realtime: bool = False) -> dict[str, Any]:
    """Run one case: the figures of compare(), what the load cost and what disturbed it."""
    watch: list[NoiseWatch] = []
    stall = {"stall_every": STALL_EVERY, "stall_ms": STALL_MS} if case.pattern == "stall" else {}
    with truth_server(
        ttft_ms=case.ttft_ms, gap_ms=case.gap_ms, pattern=case.pattern, core=cores.server, **stall
    ) as server:
        run = run_client(
            server.base_url,
            poisson(case),
            LoadSettings(run_id="calibrate", backend=case.backend, timeout_s=120.0),
            core=cores.client,
            realtime=realtime,
            seed=case.seed,
            on_ready=lambda: watch.append(
                NoiseWatch(cores.client, cores.server, server.pid, client_first=realtime)
            ),
        )
        noise = watch[0].stop(run.result.cpu_s)
        truth = server.stop()
    asked = {"rate_asked" if k == "rate" else k: v for k, v in asdict(case).items() if k != "requests"}
    figures = asked | compare(run.records, truth, run.t0_ns) | cost(run)
    figures["core_share"] = run.result.cpu_s / (run.result.load_end_ns / 1e9)
    figures["start_s"] = (int(truth.rows["received_ns"].min()) - run.started_ns) / 1e9
    return figures | {"noise": asdict(noise), "noise_total": noise.total, "noisy": noise.noisy}


def cost(run: ClientRun) -> dict[str, Any]:
    """CPU of the client process under load, and how it moved the bytes."""
    result, tokens = run.result, sum(len(record.chunk_ns) for record in run.records)
    read_lag = np.percentile(result.read_lag_ms, (50, 99)) if result.read_lag_ms else (None, None)
    loop_lag = float(np.percentile(result.loop_lag_ms, 99)) if result.loop_lag_ms else None
    return {
        "ran": result.backend,
        "stamps": result.stamps,
        "cpu_s": result.cpu_s,
        "cpu_s_per_1k_tokens": result.cpu_s / tokens * 1000 if tokens else None,
        "connections": result.connections,
        "read_lag_p50": None if read_lag[0] is None else float(read_lag[0]),
        "read_lag_p99": None if read_lag[1] is None else float(read_lag[1]),
        "loop_lag_p99": loop_lag,
        "notes": list(result.notes),
    }


def measure_all(
    cases: Sequence[Case], cores: Cores, *, repeat: int, tries: int, realtime: bool = False
) -> list[dict[str, Any]]:
    """Every case `repeat` times, taking turns; a noisy one is run again, up to `tries` times in all, and the
    quietest try counts. One row per case: medians over the repeats, `noisy` if any of them still was."""
    runs: list[list[dict[str, Any]]] = [[] for _ in cases]
    for turn in range(repeat):
        for k, case in enumerate(cases):
            best: dict[str, Any] | None = None
            for attempt in range(1, tries + 1):
                figures = measure(case, cores, realtime=realtime)
                if best is None or figures["noise_total"] < best["noise_total"]:
                    best = figures
                if not figures["noisy"]:
                    break
                say(
                    f"{case.backend} at {case.rate:g}/s, run {turn + 1}.{attempt}: others took "
                    f"{figures['noise']['others_client']:.0%} of the client's core, "
                    f"{figures['noise']['others_server']:.0%} of the server's, steal "
                    f"{figures['noise']['steal']:.1%}" + (": once more" if attempt < tries else "")
                )
            assert best is not None
            best["attempts"] = attempt
            runs[k].append(best)
    return [_median(several) for several in runs]


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Figure by figure, over the runs that have it."""
    row = dict(runs[0])
    for name, value in row.items():
        if isinstance(value, dict):
            row[name] = _median([run[name] for run in runs])
        elif isinstance(value, bool):
            row[name] = any(run[name] for run in runs)
        elif value is None or isinstance(value, (int, float)):
            there = [run[name] for run in runs if run[name] is not None]
            row[name] = statistics.median(there) if there else None
    return row | {"runs": len(runs)}


ACCURACY = (
    ("TTFT |err| p50", "ttft_error_p50", 3),
    ("p99", "ttft_error_p99", 3),
    ("TTFT p50 err", "ttft_p50_error", 3),
    ("p99 err", "ttft_p99_error", 3),
    ("TPOT |err| p99", "tpot_error_p99", 3),
    ("gap |err| p99", "gap_error_p99", 3),
    ("p99 gap", "gap_reported_p99", 2),
    ("true", "gap_true_p99", 2),
    ("longest", "gap_reported_max", 2),
    ("true", "gap_true_max", 2),
    ("late p50", "lateness_p50", 3),
    ("p99", "lateness_p99", 3),
)
LOAD = (
    ("sent/s", "rate", 1),
    ("plan", "rate_planned", 1),
    ("IoD 0.2s", "iod_0.2s", 2),
    ("plan", "iod_0.2s_planned", 2),
    ("IoD 1s", "iod_1s", 2),
    ("plan", "iod_1s_planned", 2),
    ("tokens/s", "tokens_per_s", 0),
    ("CPU s/1k tok", "cpu_s_per_1k_tokens", 4),
    ("core", "core_share", 2),
    ("start s", "start_s", 2),
    ("server late p99", "server_lateness_p99", 3),
)
LEGEND = """\
err: reported minus true; |err| is request by request (gap by gap), the others are differences of percentiles.
late: from a request's planned time to its arrival in the server's kernel. core: share of one core under load.
others: shares of the client's and the server's core that other processes took; steal: of both, by the host.
~ disturbed in every try (others over 5 % / 12 % where they could come first, steal over 2 %): the quietest
try is shown."""


def show(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Two tables for people, as lines."""
    return [*_table(rows, ACCURACY), "", *_table(rows, LOAD, ("others", "steal", "tries")), "", LEGEND]


def _table(
    rows: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str, int]], noise: Sequence[str] = ()
) -> list[str]:
    head = ["backend", "req/s", "done", *(title for title, _, _ in columns), *noise]
    lines = [head]
    for row in rows:
        line = [("~" if row["noisy"] else "") + row["backend"], f"{row['rate_asked']:g}"]
        line.append(f"{row['completed']:.0f}" if row["completed"] == row["requests"] else _of(row))
        line += ["-" if row[name] is None else f"{row[name]:.{digits}f}" for _, name, digits in columns]
        if noise:
            share = row["noise"]
            line.append(f"{share['others_client']:.1%}/{share['others_server']:.1%}")
            line += [f"{share['steal']:.1%}", f"{row['attempts']:.0f}"]
        lines.append(line)
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    return [
        "  ".join(
            f"{x:<{w}}" if k == 0 else f"{x:>{w}}" for k, (x, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def _of(row: dict[str, Any]) -> str:
    return f"{row['completed']:.0f}/{row['requests']:.0f}"

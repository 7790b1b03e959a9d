"""Synthetic run directories whose every figure is known beforehand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

T0_NS = 1_000_000_000_000_000
"""A monotonic clock of a machine that has been up for 11 days: engine stamps are large, as in real life."""
SECOND = 1_000_000_000


def ns(seconds: float) -> int:
    return round(seconds * SECOND)


def request(
    index: int,
    chunks: Sequence[tuple[float, int]] = (),
    *,
    intended: float = 0.0,
    send: float | None = None,
    outcome: str = "completed",
    **changes: Any,
) -> dict[str, Any]:
    """A line of requests.jsonl; chunks are (seconds from t0, tokens). It ends with its last chunk."""
    tokens = sum(count for _, count in chunks)
    sent = intended if send is None else send
    end = chunks[-1][0] if chunks else sent + 0.1
    row: dict[str, Any] = {
        "type": "request",
        "id": f"r{index:06d}",
        "attempt": 0,
        "tenant": "default",
        "request_class": "chat",
        "priority": 0,
        "session": None,
        "turn": 0,
        "stream": True,
        "intended_ns": ns(intended),
        "dispatch_ns": ns(sent),
        "send_ns": ns(sent),
        "headers_ns": ns(chunks[0][0]) if chunks else None,
        "first_event_ns": ns(chunks[0][0]) if chunks else None,
        "end_ns": ns(end),
        "chunk_ns": [ns(t) for t, _ in chunks],
        "chunk_tokens": [count for _, count in chunks],
        "prompt_tokens": 100,
        "planned_prompt_tokens": 100,
        "output_tokens": tokens if chunks else None,
        "token_source": "ids" if chunks else None,
        "token_mismatch": False,
        "max_tokens": max(tokens, 1),
        "stop_after": max(tokens, 1),
        "outcome": outcome,
        "reason": None,
        "status": 200,
        "finish_reason": "stop" if outcome == "completed" else None,
        "error": None,
    }
    return {**row, **changes}


def steady_requests(
    count: int = 40, *, gap: float = 0.02, tokens: int = 11, ttft: float = 0.2, every: float = 0.1
) -> list[dict[str, Any]]:
    """count answers of `tokens` tokens: TTFT `ttft`, TPOT `gap`, arrivals `every` seconds apart."""
    return [
        request(i, [(i * every + ttft + k * gap, 1) for k in range(tokens)], intended=i * every)
        for i in range(count)
    ]


def engine_request(row: dict[str, Any], *, admitted: float, **changes: Any) -> dict[str, Any]:
    """The engine's line for a client's row: it arrived with the send, its tokens left when the client saw
    them."""
    stamps = row["chunk_ns"]
    line: dict[str, Any] = {
        "seq_id": int(row["id"][1:]),
        "run": "synthetic",
        "id": row["id"],
        "attempt": row["attempt"],
        "tenant": row["tenant"],
        "request_class": row["request_class"],
        "priority": 0,
        "prompt_tokens": row["prompt_tokens"],
        "max_tokens": row["max_tokens"],
        "arrival_ns": T0_NS + row["send_ns"],
        "admitted_ns": T0_NS + ns(admitted),
        "first_token_ns": T0_NS + stamps[0] if stamps else None,
        "finish_ns": T0_NS + (stamps[-1] if stamps else row["end_ns"]),
        "finish_reason": "stop",
        "refusal": None,
        "output_tokens": row["output_tokens"],
        "preemptions": 0,
        "recomputed_tokens": 0,
        "abort_state": None,
        "abort_seen_ns": None,
        "wasted_tokens": 0,
    }
    return {**line, **changes}


def step(index: int, start: float, duration: float, **changes: Any) -> dict[str, Any]:
    """A row of steps.parquet: one sequence decodes one token."""
    row: dict[str, Any] = {
        "step": index,
        "start_ns": T0_NS + ns(start),
        "duration_ns": ns(duration),
        "host_gap_ns": 1_000_000,
        "num_seqs": 1,
        "prefill_tokens": 0,
        "decode_tokens": 1,
        "ended_rows": 0,
        "left_pad_tokens": 0,
        "recomputed_tokens": 0,
        "cached_tokens": 0,
        "backend_pad_rows": 0,
        "waiting": 0,
        "running": 1,
        "kv_live": 10,
        "kv_cached": 0,
        "kv_free": 90,
        "preemptions": 0,
        "refusals": 0,
        "ids": [0],
        "tokens": [1],
        "kind": [1],
        "preempted": [],
        "blocked": None,
    }
    return {**row, **changes}


def default_meta(**changes: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "schema_version": 1,
        "run": "synthetic",
        "started_at": "2026-01-01T00:00:00+00:00",
        "t0_ns": T0_NS,
        "load_end_ns": ns(10),
        "duration_s": 10.0,
        "complete": True,
        "incomplete_reason": None,
        "seed": 0,
        "length_mode": "stop_after",
        "engine": "continuous",
        "workload": "chat",
        "model": "tiny",
        "device": "cpu",
        "fingerprint": {"schedule": "s" * 64, "config": "c" * 64, "host": "h" * 64, "device": "d" * 64},
        "server": {"num_kv_blocks": 101, "block_size": 16, "scheduler": "continuous"},
        "host": {
            "cpu": "a CPU",
            "cores": 2,
            "memory_gb": 8.0,
            "os": "Linux",
            "python": "3.11",
            "packages": {},
        },
        "engine_cpu_cores": 1,
        "clock_pairs": [[T0_NS, 5 * T0_NS], [T0_NS + ns(10), 5 * T0_NS + ns(10)]],
        "slo": {"ttft_ms": 2000, "tpot_ms": 200},
        "planned": {"requests": None, "rate": 10.0, "length_scale": 1.0},
        "client": {"backend": "aiohttp", "loop_lag_ms": [0.1, 0.2, 0.3], "cpu_s": 0.5},
    }
    return {**meta, **changes}


def write_run(
    folder: Path,
    requests: Sequence[dict[str, Any]] = (),
    *,
    engine: Sequence[dict[str, Any]] | None = None,
    steps: Sequence[dict[str, Any]] | None = None,
    telemetry: Sequence[dict[str, Any]] | None = None,
    server_metrics: Sequence[dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
    schedule: bool = True,
    deadline_ms: float | None = None,
    name: str = "continuous",
    **meta: Any,
) -> Path:
    """Write a whole run directory and give its path. name is the engine's; meta overrides default_meta."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = default_meta(**{"engine": name, **meta})
    facts["planned"] = {**facts["planned"], "requests": len({row["id"] for row in requests})}
    (folder / "meta.json").write_text(json.dumps(facts))
    header = {"type": "header", "schema_version": 1, "run": facts["run"], "t0_ns": T0_NS}
    lines = [header, *requests, {"type": "footer", "records": len(requests)}]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if engine is not None:
        (folder / "engine_requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in engine))
    if config is not None:
        (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    if server_metrics is not None:
        scraped = "".join(json.dumps(line) + "\n" for line in server_metrics)
        (folder / "server_metrics.jsonl").write_text(scraped)
    if telemetry is not None:
        (folder / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in telemetry))
    if steps is not None:
        pq.write_table(pa.Table.from_pylist(list(steps)), folder / "steps.parquet")
    if schedule:
        write_schedule(folder / "schedule.parquet", requests, deadline_ms)
    return folder


def write_schedule(path: Path, requests: Sequence[dict[str, Any]], deadline_ms: float | None = None) -> None:
    """schedule.parquet with the columns that metrics read."""
    rows = [
        {
            "id": row["id"],
            "arrival_s": row["intended_ns"] / SECOND,
            "tenant": row["tenant"],
            "request_class": row["request_class"],
            "turn": row["turn"],
            "deadline_ms": deadline_ms,
        }
        for row in requests
    ]
    kinds = [("id", pa.string()), ("arrival_s", pa.float64()), ("tenant", pa.string())]
    kinds += [("request_class", pa.string()), ("turn", pa.int64()), ("deadline_ms", pa.float64())]
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(kinds)), path)


def write_step_stream(path: Path, steps: Sequence[dict[str, Any]], batch: int = 4) -> None:
    """steps.arrow as the engine appends it: an IPC stream of small batches."""
    table = pa.Table.from_pylist(list(steps))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        for part in table.to_batches(max_chunksize=batch):
            writer.write_batch(part)

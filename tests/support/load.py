"""Drives run_load in a test: requests in a line, a prompt book of counted ids, and what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.loadgen import LoadResult, LoadSettings, Target, run_load
from harness.loadgen.transport import Transport
from harness.records import OUTCOMES, RequestLog, RequestRecord, read_request_file
from workloads.schedule import Schedule, ScheduledRequest, Segment, request_id


class CountingPrompts:
    """Prompts of the right length: ids 0, 1, 2, ..."""

    def tokens(self, segments: Iterable[tuple[str, int]]) -> list[int]:
        return [i % 250 for i in range(sum(count for _, count in segments))]


@dataclass(frozen=True)
class Driven:
    result: LoadResult
    records: dict[str, RequestRecord]
    t0_ns: int
    closed: bool  # the log has its footer

    @property
    def only(self) -> RequestRecord:
        (record,) = self.records.values()
        return record


def request(index: int = 0, arrival_s: float = 0.0, stop_after: int = 4, **changes: Any) -> ScheduledRequest:
    values: dict[str, Any] = {
        "id": request_id(index),
        "arrival_s": arrival_s,
        "segments": (Segment(f"s{index}", 3),),
        "prompt_tokens": 3,
        "max_tokens": stop_after + 10,
        "stop_after": stop_after,
    }
    return ScheduledRequest(**{**values, **changes})


def every(seconds: float, count: int, **changes: Any) -> list[ScheduledRequest]:
    """`count` requests, one every `seconds`."""
    return [request(i, i * seconds, **changes) for i in range(count)]


async def drive(
    base_url: str,
    plan: Sequence[ScheduledRequest],
    folder: Path,
    *,
    target: Target | None = None,
    stop: asyncio.Event | None = None,
    on_event: Any = None,
    transport: Transport | None = None,
    **settings: Any,
) -> Driven:
    """Run the load and read its records back. Checks what must hold in every run: each request of the
    schedule has exactly one record, and the outcomes add up to the schedule."""
    path = folder / "requests.jsonl"
    path.unlink(missing_ok=True)
    t0_ns = time.monotonic_ns() + 20_000_000
    log = RequestLog(path, run="test", t0_ns=t0_ns)
    result = await run_load(
        Schedule(tuple(plan), name="test", seed=0),
        CountingPrompts(),
        target or Target(base_url, "m"),
        LoadSettings(run_id="test", **settings),
        log,
        t0_ns=t0_ns,
        stop=stop or asyncio.Event(),
        on_event=on_event,
        transport=transport,
    )
    file = read_request_file(path)
    records = {record.id: record for record in file.records}
    assert len(records) == len(file.records) == result.scheduled == sum(result.counts.values())
    assert set(result.counts) == set(OUTCOMES)
    for outcome in OUTCOMES:
        assert result.counts[outcome] == sum(r.outcome == outcome for r in file.records)
    for record in file.records:
        check(record)
    return Driven(result, records, t0_ns, file.closed)


def check(record: RequestRecord) -> None:
    """What holds for every record, however the request ended."""
    assert len(record.chunk_ns) == len(record.chunk_tokens)
    assert all(n > 0 for n in record.chunk_tokens)
    stamps = [record.dispatch_ns, record.send_ns, record.headers_ns, *record.chunk_ns, record.end_ns]
    happened = [s for s in stamps if s is not None]
    assert happened == sorted(happened), record
    assert (record.reason is None) == (record.outcome == "completed")
    assert (record.token_source is None) == (record.output_tokens is None)

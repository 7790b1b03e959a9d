"""Drives run_load in a test: requests in a line, a prompt book of counted ids, and what came of it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.loadgen import LoadResult, LoadSettings, Stop, Target, run_load
from harness.loadgen.run import choose_backend
from harness.records import OUTCOMES, RequestLog, RequestRecord, read_request_file
from workloads.schedule import ScheduledRequest, Segment, request_id


def backends() -> list[str]:
    """The backends that this machine has, by the names of load.backend."""
    try:
        from harness.loadgen.lean import lean_unavailable
    except ImportError:
        return ["aiohttp"]
    return ["aiohttp"] if lean_unavailable(Target("http://127.0.0.1:1", "m")) else ["aiohttp", "lean"]


class CountingPrompts:
    """Prompts of the right length: ids 0, 1, 2, ..."""

    def tokens(self, segments: Iterable[tuple[str, int]]) -> list[int]:
        return [i % 250 for i in range(sum(count for _, count in segments))]


@dataclass(frozen=True)
class Driven:
    result: LoadResult
    records: dict[str, RequestRecord]  # of each request the one that is final
    t0_ns: int
    closed: bool  # the log has its footer
    retries: list[RequestRecord]  # attempts that were followed by another one

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
    stop: Stop | None = None,
    on_event: Any = None,
    **settings: Any,
) -> Driven:
    """Run the load, in a thread beside the caller's event loop, and read its records back. Checks what must
    hold in every run: each request of the schedule has exactly one final record, and the outcomes add up to
    the schedule."""
    path = folder / "requests.jsonl"
    path.unlink(missing_ok=True)
    wanted, asked = target or Target(base_url, "m"), LoadSettings(run_id="test", **settings)
    choose_backend(wanted, asked)  # its import comes before the time that counts
    gc.collect()
    gc.freeze()  # the load's own collection is then quick, however much a suite has piled up
    t0_ns = time.monotonic_ns() + 20_000_000
    log = RequestLog(path, run="test", t0_ns=t0_ns)
    result = await asyncio.to_thread(
        run_load,
        tuple(plan),
        CountingPrompts(),
        wanted,
        asked,
        log,
        t0_ns=t0_ns,
        stop=stop or Stop(),
        on_event=on_event,
    )
    return driven_from(path, result, t0_ns)


def driven_from(path: Path, result: LoadResult, t0_ns: int) -> Driven:
    """The records of a load that has ended, checked."""
    file = read_request_file(path)
    last = [record for record in file.records if record.final]
    retries = [record for record in file.records if not record.final]
    records = {record.id: record for record in last}
    assert len(records) == len(last) == result.scheduled == sum(result.counts.values())
    assert set(result.counts) == set(OUTCOMES)
    for outcome in OUTCOMES:
        assert result.counts[outcome] == sum(r.outcome == outcome for r in last)
    assert result.retried == len(retries)
    assert result.sent_attempts == sum(r.send_ns is not None for r in file.records)
    assert result.sent == len({r.id for r in file.records if r.send_ns is not None})
    for record in retries:
        later = [r for r in file.records if r.id == record.id and r.attempt == record.attempt + 1]
        assert [r.intended_ns for r in later] == [record.intended_ns]
    for record in file.records:
        check(record)
    return Driven(result, records, t0_ns, file.closed, retries)


def check(record: RequestRecord) -> None:
    """What holds for every record, however the request ended."""
    assert len(record.chunk_ns) == len(record.chunk_tokens)
    assert all(n > 0 for n in record.chunk_tokens)
    stamps = [record.dispatch_ns, record.send_ns, record.headers_ns, *record.chunk_ns, record.end_ns]
    happened = [s for s in stamps if s is not None]
    assert happened == sorted(happened), record
    assert (record.reason is None) == (record.outcome == "completed")
    assert (record.token_source is None) == (record.output_tokens is None)

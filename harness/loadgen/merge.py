"""What several workers measured, as one load: one result, and one requests.jsonl in which every request that
was due has its last record.

Nothing is averaged: percentiles come from the merged records, later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.loadgen.call import never_sent
from harness.loadgen.settings import LoadResult, LoadSettings
from harness.request_log import (
    OUTCOMES,
    REQUESTS,
    RecordsError,
    RecordsWriteError,
    RequestFile,
    RequestLog,
    RequestRecord,
    is_closed,
    merge_parts,
    read_run_file,
)
from workloads.schedule import ScheduledRequest

NOT_RECORDED = "not_recorded"


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """One worker's part. result: None if it was lost. launched: as far as it said so itself."""

    requests: Sequence[ScheduledRequest]
    result: LoadResult | None
    launched: int


def conclude(
    folder: Path,
    settings: LoadSettings,
    parts: Sequence[Slice],
    t0_ns: int,
    load_end_ns: int,
    reason: str | None,
) -> LoadResult:
    """The result of all together, after requests.jsonl has been made whole. reason: why the load ended early.
    load_end_ns: from t0, for the case that some worker cannot say it."""
    results = [part.result for part in parts if part.result is not None]
    whole = len(results) == len(parts)
    result = merge_results(results, load_end_ns, reason)
    try:
        if whole and len(parts) == 1 and is_closed(folder / REQUESTS):
            return result
        file = _records(folder, settings.run_id, t0_ns)
        missing = not_recorded(file.records, due(parts, settings), settings, load_end_ns)
        if missing or len(parts) > 1:
            merge_parts(folder, file, missing=missing)
    except (RecordsError, OSError) as error:  # the disk takes no more: the parts are read as they are
        return replace(result, incomplete_reason=result.incomplete_reason or str(error))
    if whole and not missing:
        return result
    last = [record for record in (*file.records, *missing) if record.final]
    counts = Counter(record.outcome for record in last)
    sends = [record.send_ns for record in file.records if record.send_ns is not None]
    return replace(
        result,
        scheduled=len(last),
        counts={name: counts[name] for name in OUTCOMES},
        sent=len({record.id for record in file.records if record.send_ns is not None}),
        sent_attempts=len(sends),
        retried=sum(not record.final for record in file.records),
        last_send_ns=max(sends, default=None),
    )


def merge_results(results: Sequence[LoadResult], load_end_ns: int, reason: str | None) -> LoadResult:
    """Sums, and all samples together. load_end_ns: when there is no result at all."""
    reasons = [reason, *(result.incomplete_reason for result in results)]
    sends = [result.last_send_ns for result in results if result.last_send_ns is not None]
    steps = [r.clock_offset_step_ns for r in results if r.clock_offset_step_ns is not None]
    return LoadResult(
        scheduled=sum(result.scheduled for result in results),
        sent=sum(result.sent for result in results),
        counts={name: sum(result.counts[name] for result in results) for name in OUTCOMES},
        last_send_ns=max(sends, default=None),
        load_end_ns=max((result.load_end_ns for result in results), default=load_end_ns),
        incomplete_reason=next(filter(None, reasons), None),
        loop_lag_ms=tuple(lag for result in results for lag in result.loop_lag_ms),
        cpu_s=sum(result.cpu_s for result in results),
        notes=_each_once(note for result in results for note in result.notes),
        backend=_names(result.backend for result in results),
        stamps=_names(result.stamps for result in results),
        read_lag_ms=tuple(lag for result in results for lag in result.read_lag_ms),
        connections=sum(result.connections for result in results),
        sent_attempts=sum(result.sent_attempts for result in results),
        retried=sum(result.retried for result in results),
        clock_offset_step_ns=max(steps, key=abs, default=None),
    )


def due(parts: Sequence[Slice], settings: LoadSettings) -> list[ScheduledRequest]:
    """The requests that are owed a record. In a closed loop with a duration the schedule is a supply: there a
    worker with a result has recorded all that it took, and a lost one had taken as many as it said."""
    if settings.kind != "closed" or settings.duration_s is None:
        return [request for part in parts for request in part.requests]
    return [request for part in parts if part.result is None for request in part.requests[: part.launched]]


def not_recorded(
    records: Iterable[RequestRecord],
    requests: Iterable[ScheduledRequest],
    settings: LoadSettings,
    load_end_ns: int,
) -> list[RequestRecord]:
    """A last record for every request that has none: its worker died, or the disk was full. Whether it was
    sent is not known."""
    attempts: dict[str, int] = {}
    ended: set[str] = set()
    for record in records:
        attempts[record.id] = max(record.attempt, attempts.get(record.id, 0))
        if record.final:
            ended.add(record.id)
    return [
        _unknown(request, attempts.get(request.id, 0) + 1, settings, load_end_ns)
        for request in requests
        if request.id not in ended
    ]


def _unknown(
    request: ScheduledRequest, attempt: int, settings: LoadSettings, load_end_ns: int
) -> RequestRecord:
    planned = settings.kind == "open" and request.think_s is None
    intended_ns = round(request.arrival_s * 1e9) if planned else load_end_ns
    return never_sent(request, attempt, intended_ns, NOT_RECORDED)


def _records(folder: Path, run: str, t0_ns: int) -> RequestFile:
    """What is on file; an empty file where no worker came so far as to begin one."""
    try:
        return read_run_file(folder)
    except RecordsWriteError:
        raise
    except (FileNotFoundError, RecordsError):
        (folder / REQUESTS).unlink(missing_ok=True)
        RequestLog(folder / REQUESTS, run=run, t0_ns=t0_ns).close()
        return read_run_file(folder)


def _names(names: Iterable[str]) -> str:
    return "+".join(_each_once(names))


def _each_once(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))

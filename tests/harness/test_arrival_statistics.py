"""One schedule over 1, 2 and 4 workers is one traffic: what they send together has the law of the schedule.

On long schedules: cut into slices and put together again. On real sends: a short load by real processes.
Index of dispersion: variance over mean of the counts in windows, 1 for Poisson at every width.
Kolmogorov-Smirnov: the largest distance between the distribution of the gaps and an exponential one of their
mean."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from harness.loadgen import LoadSettings, Stop, Target
from harness.loadgen.job import Job
from harness.loadgen.processes import LoadProcesses
from harness.loadgen.slices import slices
from harness.metrics.arrivals import index_of_dispersion
from harness.records import read_requests
from harness.tokenizer import ByteTokenizer
from tests.support.load import request
from tests.support.script_process import ScriptProcess
from tests.support.script_server import answer
from workloads.arrivals import Arrivals, draw_arrivals
from workloads.schedule import ScheduledRequest

WORKERS = (1, 2, 4)
LOW, HIGH = 0.8, 1.25
SEED = 7


@cache
def plan(n: int, rate: float) -> tuple[ScheduledRequest, ...]:
    """n Poisson arrivals."""
    times = draw_arrivals(SEED, Arrivals("poisson"), rate=rate, requests=n, duration_s=None)
    return tuple(request(i, float(at), 1) for i, at in enumerate(times))


def arrivals(requests) -> np.ndarray:
    return np.array([r.arrival_s for r in requests])


def ks_distance(gaps: np.ndarray) -> float:
    """Between the empirical distribution of the gaps and the exponential one of the same mean."""
    steps = np.arange(gaps.size + 1) / gaps.size
    law = 1 - np.exp(-np.sort(gaps) / gaps.mean())
    return float(max((law - steps[:-1]).max(), (steps[1:] - law).max()))


def ks_limit(n: int) -> float:
    """The distance that n exponential gaps pass in one of 100 cases, their mean being estimated from them
    (Stephens 1974, table 1.3: (D - 0.2/n)(sqrt n + 0.26 + 0.5/sqrt n) above 1.308)."""
    return 1.308 / (math.sqrt(n) + 0.26 + 0.5 / math.sqrt(n)) + 0.2 / n


@pytest.mark.parametrize("workers", WORKERS)
def test_a_long_schedule_keeps_its_law_over_workers(workers: int) -> None:
    drawn = plan(60_000, 20.0)  # 3,000 s: 600 windows of 5 s, whose index has a standard error of 0.06
    parts = slices(drawn, [1] * workers)
    assert sum(map(len, parts)) == len(drawn)  # n exact
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    together = np.sort(np.concatenate([arrivals(part) for part in parts]))
    for width_s in (1.0, 5.0):
        index = index_of_dispersion(together, width_s)
        assert index is not None
        assert LOW <= index <= HIGH
    gaps = np.diff(together)
    assert (gaps > 0).all()
    assert np.unique(gaps).size == gaps.size  # drawn once, not the same stream in each worker
    assert ks_distance(gaps) < ks_limit(gaps.size)


def test_the_measures_tell_another_traffic_apart() -> None:
    """What goes wrong elsewhere: every worker its own copy of one stream, or its own regular clock."""
    drawn = arrivals(plan(20_000, 10.0))
    copies = np.sort(np.concatenate([drawn, drawn + 1e-4]))
    assert (index_of_dispersion(copies, 1.0) or 0) > HIGH
    assert ks_distance(np.diff(copies)) > ks_limit(copies.size)
    regular = np.arange(20_000) / 20.0
    assert (index_of_dispersion(regular, 1.0) or 0) < LOW
    assert ks_distance(np.diff(regular)) > ks_limit(regular.size)


def test_one_slice_keeps_its_share_of_every_stretch() -> None:
    drawn = plan(20_000, 20.0)
    whole = np.bincount((arrivals(drawn) // 5).astype(int))
    for part in slices(drawn, [1] * 4):
        counts = np.bincount((arrivals(part) // 5).astype(int), minlength=whole.size)
        assert (np.abs(counts - whole / 4) <= 1).all()


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptProcess]:
    with ScriptProcess() as process:
        process.play(answer(1))
        yield process


@pytest.mark.parametrize("workers", WORKERS)
def test_real_sends_keep_the_law_of_the_schedule(tmp_path: Path, server: ScriptProcess, workers: int) -> None:
    drawn = plan(1_000, 300.0)
    intended, sends = real_times(tmp_path, server, drawn, workers)
    # That of 16 windows varies by a third from drawing to drawing, so it is held to the schedule's own.
    index, own = index_of_dispersion(sends, 0.2), index_of_dispersion(arrivals(drawn), 0.2)
    assert index is not None
    assert own is not None
    assert LOW <= index / own <= HIGH
    for times in (intended, sends):
        gaps = np.diff(times)
        assert np.unique(gaps).size > 0.99 * gaps.size  # whole ns: two of a kind are chance
    # Of the times that the workers held: a machine that is busy with something else bunches the sends.
    assert ks_distance(np.diff(intended)) < ks_limit(len(drawn) - 1)
    assert (sends >= intended).all()  # the k-th send never comes before the k-th arrival


def real_times(
    folder: Path, server: ScriptProcess, drawn: tuple[ScheduledRequest, ...], workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """(intended, sent): seconds from the start, sorted, as the records of that many processes have them."""
    job = Job(
        target=Target(server.base_url, "m", tokenizer=ByteTokenizer()),
        settings=LoadSettings(run_id="run"),
        requests=drawn,
        seed=0,
        log=folder / "requests.jsonl",
        warm_up=drawn[:3],
    )
    with LoadProcesses() as load, Stop() as stop:
        load.prepare(job, workers=workers)
        assert len(load.pids) == workers
        assert load.wait_ready() is None
        result = load.run(time.monotonic_ns() + 100_000_000, stop)
    assert result.incomplete_reason is None
    records = read_requests(folder)
    assert len(records) == result.sent == len(drawn)  # n exact
    planned = {r.id: round(r.arrival_s * 1e9) for r in drawn}
    assert {record.id: record.intended_ns for record in records} == planned
    sends = np.sort([record.send_ns for record in records if record.send_ns is not None])
    return np.sort([record.intended_ns for record in records]) / 1e9, sends / 1e9

"""When requests leave: drawn schedules of every kind, and the same schedules as they were really sent."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from harness.conf import compose
from harness.loadgen.slices import slices
from harness.metrics.arrivals import index_of_dispersion
from harness.metrics.latency import per_request
from harness.metrics.run import load_run
from harness.metrics.windows import in_flight
from harness.plan import draw_schedule
from tests.support.golden import EARLY_MS, LATE_MS, Golden, assert_follows, last_token, measure
from tests.support.load import every, request
from tests.support.script_process import ScriptProcess
from tests.support.script_server import InTurn, Pausing, Script, ending, plain, timeline, tokens
from workloads.arrivals import Arrivals, draw_arrivals
from workloads.schedule import Schedule

NS = 1e9


def drawn(*overrides: str) -> Schedule:
    return draw_schedule(compose(["workload=chat", *overrides]))


def times_of(schedule: Schedule) -> np.ndarray:
    return np.array([r.arrival_s for r in schedule])


def cv_of(times: np.ndarray) -> float:
    gaps = np.diff(times)
    return float(gaps.std(ddof=1) / gaps.mean())


# What the schedule says.


class Arrival(NamedTuple):
    """What slices() looks at, without the rest of a request."""

    id: int
    arrival_s: float
    session: str | None = None


@functools.cache
def poisson(seed: int) -> list[Any]:
    """60,000 arrivals over 3,000 s: 600 windows of 5 s, whose dispersion then has a deviation of 0.06."""
    times = draw_arrivals(seed, Arrivals("poisson"), rate=20.0, requests=60_000, duration_s=None)
    return [Arrival(i, float(at)) for i, at in enumerate(times)]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_poisson_has_dispersion_one_at_every_worker_count(seed: int, workers: int) -> None:
    """vllm-project/vllm#28512: no two clients may run on one seed. One schedule is drawn and shared out, so
    what all workers send together is that schedule, and each of them sends an even share of it."""
    schedule = poisson(seed)
    parts = slices(schedule, [1] * workers)
    assert [len(part) for part in parts] == [60_000 // workers] * workers
    together = sorted((r for part in parts for r in part), key=lambda r: (r.arrival_s, r.id))
    assert [r.id for r in together] == [r.id for r in schedule]
    times = np.array([r.arrival_s for r in together])
    assert times[-1] > 2900
    for width_s in (0.2, 1.0, 5.0):
        dispersion = index_of_dispersion(times, width_s)
        assert dispersion is not None
        assert 0.8 <= dispersion <= 1.25
    assert len(np.unique(np.diff(times))) > 59_900  # equal gaps in plenty would be one seed used twice
    rates = [(len(part) - 1) / (part[-1].arrival_s - part[0].arrival_s) for part in parts]
    assert rates == pytest.approx([20 / workers] * workers, rel=0.02)


def test_constant_is_constant() -> None:
    """inference-sim/inference-sim#845: a normalised exponential under the name of constant."""
    constant = ("workload.arrivals.kind=constant", "workload.rate=50", "load.requests=2000")
    with pytest.raises(ValueError, match="kind=constant: factor, day and on_off swing the rate"):
        drawn(*constant)
    times = times_of(drawn(*constant, "workload.arrivals.factor=null"))
    assert len(times) == 2000
    assert cv_of(times) < 0.01
    assert (len(times) - 1) / (times[-1] - times[0]) == pytest.approx(50)


def bodies(schedule: Schedule) -> list[Any]:
    return [
        (r.id, r.segments, r.prompt_tokens, r.max_tokens, r.stop_after, r.cancel_kind, r.cancel_value)
        for r in schedule
    ]


def test_burstiness_is_compared_at_one_load() -> None:
    """ai-dynamo/aiperf#1188: the same n, horizon and bodies; only when within the horizon differs."""
    smooth, bursty = (
        drawn(
            "workload.arrivals.kind=gamma",
            f"workload.arrivals.cv={cv}",
            "workload.arrivals.pinned=true",
            "workload.rate=50",
            "load.requests=3000",
        )
        for cv in (0.5, 3)
    )
    assert bodies(smooth) == bodies(bursty)
    assert len(smooth) == len(bursty) == 3000
    for schedule in (smooth, bursty):
        assert schedule.requests[-1].arrival_s == pytest.approx(60.0)
        assert schedule.planned_rate == pytest.approx(50, rel=0.02)
    a, b = times_of(smooth), times_of(bursty)
    assert cv_of(a) == pytest.approx(0.5, rel=0.1)
    assert cv_of(b) == pytest.approx(3, rel=0.15)
    calm, wild = index_of_dispersion(a, 1.0), index_of_dispersion(b, 1.0)
    assert calm is not None
    assert wild is not None
    assert calm < 0.5
    assert wild > 4


# What was sent.


@pytest.fixture(scope="module")
def sent(server: ScriptProcess, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """400 Poisson arrivals at 200/s against a server that answers at once."""
    arrivals = poisson(0)[:400]
    scaled = [request(i, r.arrival_s / 10) for i, r in enumerate(arrivals)]
    folder: Path = tmp_path_factory.mktemp("sent")
    run = measure(server, timeline([(0.0, 1)]), scaled, folder, backend=backend)
    assert run.summary["counts"]["completed"] == len(run.truth.seen) == 400
    return run


def test_the_rate_sent_is_the_rate_asked_for(sent: Golden) -> None:
    """vllm-project/vllm#21104: relative sleeps lose 9 % of 200/s. Lateness does not add up: the last tenth
    leaves as punctually as the first, and the rate is the schedule's within what lateness alone explains."""
    late_ms = np.array([(s.received_ns - sent.t0_ns - r.intended_ns) / 1e6 for r, s in sent.pairs()])
    assert late_ms.min() > 0
    assert late_ms[-50:].min() < 20
    drift = np.median(late_ms[-50:]) - np.median(late_ms[:50])
    assert drift < 0.005 * 2000 + LATE_MS / 4  # 0.5 % of the schedule's 2 s, and a machine's mood
    true = np.sort([s.received_ns for s in sent.truth.seen]) / NS
    rate = (len(true) - 1) / (true[-1] - true[0])
    arrivals = sent.summary["arrivals"]
    assert arrivals["rate"] == pytest.approx(rate, rel=0.02)
    assert abs(arrivals["rate_error"]) < 0.05


def test_what_was_sent_has_the_dispersion_of_the_schedule(sent: Golden) -> None:
    """The summary's CV and dispersion are those of its sends, each of which lies between the planned arrival
    and the moment at which the server saw it come (a busy machine moves all three); beside them stand those
    of the schedule."""
    arrivals = sent.summary["arrivals"]
    planned = np.array([r.intended_ns for r, _ in sent.pairs()]) / NS
    sends = np.array([r.send_ns for r, _ in sent.pairs()]) / NS
    seen = np.array([s.received_ns - sent.t0_ns for _, s in sent.pairs()]) / NS
    assert len(planned) == 400
    assert (planned <= sends).all()
    assert (sends <= seen + EARLY_MS / 1e3).all()
    assert np.median(seen - sends) < LATE_MS / 1e3
    sends.sort()
    assert arrivals["cv"] == pytest.approx(cv_of(sends), rel=1e-3)
    assert arrivals["planned_cv"] == pytest.approx(cv_of(planned), rel=1e-3)
    assert arrivals["most_in_1s"] == max(int(((sends >= at) & (sends < at + 1)).sum()) for at in sends)
    # Ten windows say little about Poisson, and enough about whether both counted the same arrivals.
    for figure, times in ((arrivals["iod"]["0.2s"], sends), (arrivals["planned_iod"]["0.2s"], planned)):
        true = index_of_dispersion(times, 0.2)
        assert (figure is None) == (true is None)
        assert figure == pytest.approx(true, abs=0.5)


def test_waiting_behind_the_clients_own_cap_is_latency(
    server: ScriptProcess, backend: str, tmp_path: Path
) -> None:
    """vllm-project/vllm#54101 at a fifth of its times: service 100 ms, 50 requests/s, 8 requests, a cap of 1.
    There: mean E2E 506 ms by the tool, 1,932 ms by the schedule; p99 507 and 3,330 ms."""
    run = measure(server, timeline([(0.1, 1)]), every(0.02, 8), tmp_path, backend=backend, concurrency=1)
    assert run.truth.peak == 1
    e2e = run.summary["latency_ms"]["e2e"]
    true = run.true_ms(last_token)
    assert len(true) == e2e["from_intended"]["n"] == e2e["from_send"]["n"] == 8
    assert true.mean() >= (8 + 1) / 2 * 100 - 3.5 * 20 - 1
    assert_follows(e2e["from_intended"]["mean"], float(true.mean()))
    assert_follows(e2e["from_intended"]["p99"], float(np.quantile(true, 0.99)))
    served = np.array([(last_token(s) - s.received_ns) / 1e6 for _, s in run.pairs()])
    assert_follows(e2e["from_send"]["mean"], float(served.mean()))
    delay = run.summary["client"]["send_lag_ms"]["mean"]
    received = np.array([(s.received_ns - run.t0_ns - r.intended_ns) / 1e6 for r, s in run.pairs()])
    assert delay == pytest.approx(received.mean(), abs=LATE_MS)
    assert e2e["from_intended"]["mean"] - e2e["from_send"]["mean"] == pytest.approx(delay, abs=0.01)
    # There 1,932 of 506 ms, 3.8 times as much; without the wait both would be one.
    assert e2e["from_intended"]["mean"] / e2e["from_send"]["mean"] > 2.5


def test_every_arrival_behind_a_stall_is_accounted_for(
    server: ScriptProcess, backend: str, tmp_path: Path
) -> None:
    """vllm-project/vllm#45502: a rate, a cap, and a server that stalls for a second. What waited is deferred,
    what waited too long is shed, and with what was sent they are the schedule."""
    rule = Pausing(from_s=0.3, to_s=1.2, service_s=0.03)
    run = measure(server, rule, every(0.02, 100), tmp_path, backend=backend, concurrency=8, max_wait_s=0.6)
    counts, arrivals = run.summary["counts"], run.summary["arrivals"]
    assert counts["scheduled"] == 100 == counts["completed"] + counts["cut_off"]
    assert len(run.truth.seen) == counts["completed"]
    shed = {r.id for r in run.records.values() if r.reason == "shed"}
    assert 0 < len(shed) == arrivals["shed"] == counts["cut_off"] < 60
    assert {s.body["batchmark"]["id"] for s in run.truth.seen} == set(run.records) - shed
    deferred = [r for r in run.records.values() if r.send_ns and r.send_ns - r.intended_ns > 100e6]
    assert arrivals["deferred"] == len(deferred) > 10
    assert arrivals["planned_cv"] < 0.01 < arrivals["cv"]  # the plan was constant, the stall was the server's
    # Whoever was shed was due while the stall was on, and nobody was shed who had waited for less.
    for record in run.records.values():
        if record.send_ns is not None:
            assert record.send_ns - record.intended_ns < 0.6 * NS + LATE_MS * 1e6
        else:
            assert record.intended_ns > 0
    sends = np.sort([s.received_ns for s in run.truth.seen]) / NS
    busiest = max(int(((sends >= at) & (sends < at + 1)).sum()) for at in sends)
    assert arrivals["most_in_1s"] == pytest.approx(busiest, abs=5)
    assert busiest > 50  # the backlog left faster than the schedule's 50 in any second


def test_in_a_closed_loop_one_slow_answer_holds_one_place(
    server: ScriptProcess, backend: str, tmp_path: Path
) -> None:
    """ray-project/llmperf#43: a barrier in the client would make static batches of any server's stream."""
    quick, slow = timeline([(0.03, 1)]), timeline([(0.7, 1)])
    rule = InTurn([quick, quick, quick, slow, *([quick] * 200)])
    run = measure(server, rule, every(0.0, 80), tmp_path, backend=backend, kind="closed", concurrency=8)
    assert run.truth.peak == 8
    assert run.summary["counts"]["completed"] == len(run.truth.seen) == 80
    held = run.truth.seen[3]
    meanwhile = [s for s in run.truth.seen if held.received_ns < s.received_ns < last_token(held)]
    assert len(meanwhile) >= 28  # four rounds of the other seven


@pytest.mark.parametrize("cap", [4, None])
def test_requests_and_peak_are_those_of_the_server(
    server: ScriptProcess, backend: str, tmp_path: Path, cap: int | None
) -> None:
    """ray-project/llmperf#82, vllm-project/vllm#56653: no request doubled; the peak is a sweep over half-open
    intervals, so an answer that ends as the next begins is one under way, also at a whole second."""
    if cap:  # four places, always taken
        settings: dict[str, Any] = {"kind": "closed", "concurrency": cap}
        requests, peak = every(0.0, 40), cap
    else:  # waves of 7 and 5, the second 1 s after the first, when all of that are long through
        settings = {}
        requests, peak = [request(i, 0.0 if i < 7 else 1.0) for i in range(12)], 7
    run = measure(
        server,
        timeline([(0.25, 1)] if not cap else [(0.02, 1)]),
        requests,
        tmp_path,
        backend=backend,
        **settings,
    )
    asked = Counter(s.body["batchmark"]["id"] for s in run.truth.seen)
    assert asked == Counter(r.id for r in requests)
    assert run.result.sent == len(requests)
    _, level = in_flight(per_request(load_run(run.folder).requests))
    assert int(level.max()) == run.truth.peak == peak


def test_the_next_turn_comes_after_the_answer_and_the_thought(
    server: ScriptProcess, backend: str, tmp_path: Path
) -> None:
    """Multi-turn sessions: turn k + 1 is due think_s after turn k has ended, however long that took, and its
    latency counts from there."""
    think_s, turns, sessions = 0.15, 3, 4
    requests = [
        request(
            turn * sessions + k,
            0.05 * k + turn * think_s,
            session=f"s{k}",
            turn=turn,
            think_s=think_s if turn else None,
        )
        for turn in range(turns)
        for k in range(sessions)
    ]
    run = measure(server, timeline([(0.1, 1), (0.2, 1)]), requests, tmp_path, backend=backend)
    assert run.summary["counts"]["completed"] == len(run.truth.seen) == turns * sessions
    for k in range(sessions):
        chain = [run.truth.by_id(r.id) for r in requests if r.session == f"s{k}"]
        records = [run.records[r.id] for r in requests if r.session == f"s{k}"]
        assert len(chain) == turns
        for before, after, was, then in zip(chain, chain[1:], records, records[1:], strict=False):
            assert after.received_ns - last_token(before) >= think_s * NS
            assert was.end_ns is not None
            assert then.intended_ns == pytest.approx(was.end_ns + think_s * NS, abs=2e6)
    assert run.summary["latency_ms"]["e2e"]["from_intended"]["p50"] < 200 + LATE_MS * 2


def test_retries_are_counted_and_latency_keeps_the_first_attempts_time(
    server: ScriptProcess, backend: str, tmp_path: Path
) -> None:
    refuses = Script([plain(b"{}")], status=503, content_type="application/json")
    serves = Script([tokens(1, at_s=0.02), *ending(1)])
    rule = InTurn([refuses, serves])
    one = [request(0)]
    off = measure(server, rule, one, tmp_path / "off", backend=backend)
    assert (off.summary["counts"]["rejected"], len(off.truth.seen)) == (1, 1)
    run = measure(server, rule, one, tmp_path / "on", backend=backend, retries=2, retry_backoff_s=0.2)
    assert [s.body["batchmark"]["attempt"] for s in run.truth.seen] == [1, 2]
    assert (run.summary["counts"]["completed"], run.summary["client"]["retries"]) == (1, 1)
    true = (last_token(run.truth.seen[1]) - run.t0_ns) / 1e6
    assert true > 200
    assert_follows(run.summary["latency_ms"]["ttft"]["from_intended"]["p50"], true)
    assert run.summary["latency_ms"]["ttft"]["from_send"]["p50"] < 150

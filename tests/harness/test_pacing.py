"""When requests leave. Times are compared with the schedule and with the server's log."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.loadgen import LoadError, LoadSettings
from harness.loadgen import pacing as pacing_module
from harness.loadgen.pacing import Alarm
from tests.support.load import Driven, drive, every, request
from tests.support.script_server import Script, ScriptServer, answer, ending, tokens

NS = 1e9


Run = Callable[..., tuple[Driven, ScriptServer]]


@pytest.fixture
def run(backend: str) -> Run:
    """A load against a script, by each backend."""

    def run(script, folder: Path, schedule, **kwargs):
        async def go():
            async with ScriptServer(script) as server:
                return await drive(server.base_url, schedule, folder, backend=backend, **kwargs), server

        return asyncio.run(go())

    return run


@pytest.mark.parametrize("timerfd", [True, False])
def test_the_alarm_is_never_early(monkeypatch: pytest.MonkeyPatch, timerfd: bool) -> None:
    if not timerfd:
        monkeypatch.setattr(pacing_module, "_timerfd_create", lambda: None)

    async def go() -> list[int]:
        start = time.monotonic_ns()
        late = []
        with Alarm() as alarm:
            for k in range(-2, 60):
                target = start + k * 1_500_000
                await alarm.until(target)
                late.append(time.monotonic_ns() - target)
        return late

    late = asyncio.run(go())
    assert len(late) == 62
    assert min(late) >= 0


@pytest.mark.parametrize("timerfd", [True, False])
def test_the_alarm_can_be_woken_and_set_anew(monkeypatch: pytest.MonkeyPatch, timerfd: bool) -> None:
    """A wake ends the waiting at once; a ring that was meant for the time before is not heard."""
    if not timerfd:
        monkeypatch.setattr(pacing_module, "_timerfd_create", lambda: None)

    async def go() -> None:
        loop = asyncio.get_running_loop()
        with Alarm() as alarm:
            for _ in range(20):
                loop.call_later(0.002, alarm.wake)
                first_ns = time.monotonic_ns() + 2_300_000
                await alarm.until(first_ns)
                target_ns = first_ns + 20_000_000
                assert await alarm.until(target_ns)
                assert time.monotonic_ns() >= target_ns
            loop.call_later(0.01, alarm.wake)
            assert not await alarm.until(time.monotonic_ns() + 10**12)
            loop.call_later(0.01, alarm.wake)
            assert not await alarm.until(None)

    asyncio.run(go())


def test_lateness_of_one_arrival_is_not_handed_on(run: Run, tmp_path: Path) -> None:
    """vllm-project/vllm#21104: 400 arrivals at 200/s with a hold-up of 400 ms in the middle. Each intended
    time is the schedule's own; the backlog leaves at once, the arrivals after it are on time again, and so
    the rate of the whole is the schedule's."""
    hold_up_s, gap_s, launched = 0.4, 0.005, 0

    def on_event(what: str, record: object) -> None:
        nonlocal launched
        launched += what == "sent"
        if what == "sent" and launched == 200:
            time.sleep(hold_up_s)

    driven, _ = run(answer(1), tmp_path, every(gap_s, 400), on_event=on_event)
    records = sorted(driven.records.values(), key=lambda r: r.id)
    assert [r.intended_ns for r in records] == [round(k * gap_s * NS) for k in range(400)]
    late = [r.dispatch_ns - r.intended_ns for r in records if r.dispatch_ns is not None]
    assert len(late) == 400
    assert min(late) >= 0
    assert late[200] > 0.9 * hold_up_s * NS  # the hold-up was real
    # Relative sleeps would leave the whole second half that late, and more by the error of 400 timers.
    assert min(late[350:]) < late[200] / 3
    sends = [r.send_ns for r in records if r.send_ns is not None]
    rates = [k / (at - sends[0]) * NS for k, at in enumerate(sends) if k >= 350]
    assert max(rates) > 0.9 / gap_s


def test_a_platform_without_a_timerfd_keeps_its_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pacing_module, "_timerfd_create", lambda: None)

    async def go() -> Driven:
        async with ScriptServer(answer(2, 0.01)) as server:
            return await drive(server.base_url, every(0.007, 40), tmp_path, backend="aiohttp")

    driven = asyncio.run(go())
    assert driven.result.counts["completed"] == 40
    late = [r.dispatch_ns - r.intended_ns for r in driven.records.values() if r.dispatch_ns is not None]
    assert len(late) == 40
    assert min(late) >= 0


def test_every_arrival_is_sent_once_and_never_before_its_time(run: Run, tmp_path: Path) -> None:
    driven, server = run(answer(1), tmp_path, every(0.01, 100))
    assert driven.result.counts["completed"] == driven.result.sent == 100
    assert sorted(s.body["batchmark"]["id"] for s in server.seen) == sorted(driven.records)
    for record in driven.records.values():
        assert record.intended_ns == round(int(record.id[1:]) * 0.01 * NS)
        assert server.by_id(record.id).received_ns > driven.t0_ns + record.intended_ns
        assert record.dispatch_ns is not None
        assert record.dispatch_ns >= record.intended_ns


def test_no_arrival_waits_for_another_ones_answer(run: Run, tmp_path: Path) -> None:
    """The first answer takes longer than the whole schedule."""
    slow = Script([tokens(1, 0.6), *ending(1)])
    driven, server = run(lambda body, n: slow if n == 0 else answer(1), tmp_path, every(0.01, 20))
    first = server.by_id("r000000")
    assert len(first.sends) == 1
    assert all(s.received_ns < first.sends[0][0] for s in server.seen)
    assert driven.result.counts["completed"] == 20


def test_a_cap_is_seen_from_the_intended_time_and_not_from_the_send(run: Run, tmp_path: Path) -> None:
    """vllm-project/vllm#54101: 8 requests, service S, arrivals every S/5, a cap of 1. From the send every
    answer takes about S; from the schedule, request i takes S + i * 4/5 S."""
    service, gap = 0.1, 0.02
    driven, server = run(Script([tokens(1, service), *ending(1)]), tmp_path, every(gap, 8), concurrency=1)
    assert server.peak == 1
    from_intended, from_send, truth = [], [], []
    free_ns = 0
    for k, (name, record) in enumerate(sorted(driven.records.items())):
        seen = server.by_id(name)
        assert record.send_ns is not None
        assert record.intended_ns == round(k * gap * NS)
        assert record.send_ns >= free_ns  # its place came free with the end of the one before
        assert record.end_ns is not None
        free_ns = record.end_ns
        from_intended.append(record.chunk_ns[-1] - record.intended_ns)
        from_send.append(record.chunk_ns[-1] - record.send_ns)
        truth.append(seen.sends[-1][0] - driven.t0_ns - record.intended_ns)
    assert statistics.mean(from_intended) == pytest.approx(statistics.mean(truth), rel=0.1)
    assert statistics.mean(truth) > (service + 3.5 * (service - gap)) * NS * 0.99
    assert min(from_send) >= service * NS * 0.99
    assert statistics.median(from_send) < statistics.median(from_intended) / 2


def test_in_a_closed_loop_a_slow_answer_holds_only_its_own_place(run: Run, tmp_path: Path) -> None:
    """ray-project/llmperf#43: one slow answer among 8 places; the other 7 keep turning over."""
    slow = Script([tokens(1, 0.7), *ending(1)])
    quick = Script([tokens(1, 0.02), *ending(1)])
    driven, server = run(
        lambda body, n: slow if n == 3 else quick, tmp_path, every(0.0, 64), kind="closed", concurrency=8
    )
    assert server.peak == 8
    held = next(s for s in server.seen if s.sends and s.sends[0][0] - s.received_ns > 0.6 * NS)
    meanwhile = [s for s in server.seen if held.received_ns < s.received_ns < held.sends[0][0]]
    assert len(meanwhile) > 40
    assert driven.result.counts["completed"] == 64


def test_in_a_closed_loop_a_request_is_due_when_its_place_comes_free(run: Run, tmp_path: Path) -> None:
    driven, server = run(
        Script([tokens(1, 0.03), *ending(1)]), tmp_path, every(0.0, 9), kind="closed", concurrency=3
    )
    assert server.peak == 3
    records = sorted(driven.records.values(), key=lambda r: r.id)
    assert [r.intended_ns for r in records[:3]] == [0, 0, 0]
    ends = sorted(r.end_ns for r in records if r.end_ns is not None)
    for k, record in enumerate(records[3:]):
        # The fourth is due when the first place has come free, and so on: never before.
        assert ends[k] <= record.intended_ns
        assert record.dispatch_ns is not None
        assert record.dispatch_ns >= record.intended_ns
        under_way = [r for r in records if r.end_ns and r.intended_ns <= record.intended_ns < r.end_ns]
        assert len(under_way) <= 3


def test_duration_stops_the_sending_and_waits_for_the_answers(run: Run, tmp_path: Path) -> None:
    script = Script([tokens(1, 0.2), *ending(1)])
    driven, server = run(script, tmp_path, every(0.03, 40), duration_s=0.3)
    assert set(driven.records) == {f"r{i:06d}" for i in range(10)}
    assert driven.result.counts["completed"] == len(server.seen) == 10
    assert driven.result.incomplete_reason is None
    closed, server = run(script, tmp_path, every(0.0, 100), kind="closed", concurrency=2, duration_s=0.5)
    assert 2 <= closed.result.scheduled == len(server.seen) < 100
    assert closed.result.counts["completed"] == closed.result.scheduled
    assert all(r.intended_ns < 0.5 * NS for r in closed.records.values())


def test_a_closed_loop_that_runs_dry_says_so(run: Run, tmp_path: Path) -> None:
    driven, _ = run(answer(1), tmp_path, every(0.0, 3), kind="closed", concurrency=2, duration_s=30)
    assert driven.result.counts["completed"] == 3
    (note,) = driven.result.notes
    assert note.startswith("load.duration_s=30: all 3 requests had ended")


def test_requests_counts_the_first_n(run: Run, tmp_path: Path) -> None:
    for kind in ("open", "closed"):
        driven, server = run(answer(1), tmp_path, every(0.0, 9), requests=4, kind=kind, concurrency=2)
        assert set(driven.records) == {f"r{i:06d}" for i in range(4)}
        assert len(server.seen) == 4


def test_an_empty_schedule_is_an_empty_run(run: Run, tmp_path: Path) -> None:
    driven, _ = run(answer(1), tmp_path, [])
    assert (driven.result.scheduled, driven.records, driven.closed) == (0, {}, True)


def test_three_hundred_at_once(run: Run, tmp_path: Path) -> None:
    """A burst: no limit on connections, each one under way at the same time, none lost."""
    driven, server = run(Script([tokens(1, 3.0), *ending(1)]), tmp_path, every(0.0, 300))
    assert driven.result.counts["completed"] == 300
    assert server.peak > 250


def test_event_loop_lag_is_seen(run: Run, tmp_path: Path) -> None:
    def hold_up(what, record) -> None:
        if what == "ended":
            time.sleep(0.2)

    driven, _ = run(answer(1), tmp_path, [request(0), request(1, 0.5)], on_event=hold_up)
    assert max(driven.result.loop_lag_ms) > 100
    assert driven.result.cpu_s > 0
    assert driven.result.sent == 2


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"kind": "half-open"}, "load=half-open: choose from open, closed"),
        ({"kind": "closed"}, "load.concurrency=null"),
        ({"concurrency": 0}, "load.concurrency=0: needs a number above 0"),
        ({"timeout_s": -1}, "load.timeout_s=-1"),
        ({"duration_s": 0}, "load.duration_s=0"),
        ({"backend": "curl"}, "load.backend=curl: choose from auto, lean, aiohttp"),
        ({"retries": -1}, "load.retries=-1: needs a number of 0 or more"),
        ({"retry_backoff_s": -0.5}, "load.retry_backoff_s=-0.5"),
        ({"processes": 0}, "load.processes=0: needs auto or a number above 0"),
        ({"processes": "two"}, "load.processes=two: needs auto or a number above 0"),
        ({"max_wait_s": 1.0}, "load.max_wait_s=1: only load=open with load.concurrency"),
        ({"kind": "closed", "concurrency": 2, "max_wait_s": 1.0}, "load.max_wait_s=1"),
        ({"ramp_s": 5.0}, "load.ramp_s=5: is for load=closed"),
    ],
)
def test_settings_that_cannot_work(values, says: str) -> None:
    with pytest.raises(LoadError) as error:
        LoadSettings(run_id="x", **values)
    assert says in str(error.value)
    assert "\n" not in str(error.value)

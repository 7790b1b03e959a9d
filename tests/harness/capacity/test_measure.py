"""The loop over probes: engines in turn, bounded time, invalid probes, Ctrl-C; what is written."""

import json
import math

import pytest

from harness.capacity.cost import costs, per_million
from harness.capacity.measure import Arm, Budget, exit_code, measure
from harness.capacity.page import page_of, render
from harness.capacity.point import Point
from harness.capacity.prober import Interrupted, ProbeError
from harness.capacity.result import to_json
from harness.capacity.search import Rules
from harness.capacity.table import print_result
from harness.cli import INCONCLUSIVE, INVALID, PASS, REGRESSION

ABOUT = {
    "workload": "w", "model": "m", "seed": 0, "slo_text": "", "virtual": True,
    "started_at": "2026-01-01T00:00",
    "cost_device_hour": 3.6,
    "limits": {"attainment": 0.99, "ttft_ms": 1, "tpot_ms": 1, "itl_p99_ms": None, "queue_delay_p50_ms": 1},
}  # fmt: skip


class Engine:
    """Holds up to `capacity`; each probe takes its arrivals and 2 s of a clock that only probes move."""

    takes_its_arrivals = True

    def __init__(self, capacity, time, log=None, invalid=(), interrupt=math.inf):
        self.capacity, self.time, self.log = capacity, time, [] if log is None else log
        self.invalid, self.interrupt, self.count = set(invalid), interrupt, 0

    def saturate(self, requests):
        self.time[0] += 8
        return self.capacity * 1.1

    def probe(self, rate, repeat, requests):
        self.count += 1
        if self.count >= self.interrupt:
            raise Interrupted
        self.log.append((self, rate, repeat, requests))
        seconds = requests / rate + 2
        self.time[0] += seconds
        why = ("client_bound: late",) if self.count in self.invalid else ()
        pressure = 0.2 if rate <= self.capacity else 4.0
        flow = {"output_tokens_per_s": 9.0, "total_tokens_per_s": 90.0, "tokens_per_request": (10.0, 100.0)}
        return Point(
            rate, repeat, repeat, requests, {"slo": pressure}, seconds=seconds, invalid_reasons=why, **flow
        )


def go(arms, seconds=1e6, saved=None, **budget):
    time = arms[0].prober.time
    save = (lambda a: saved.append(sum(len(x.points) for x in a))) if saved is not None else lambda a: None
    measure(
        arms, Rules(), Budget(seconds, 20, **budget), say=lambda line: None, save=save, clock=lambda: time[0]
    )


def test_engines_take_turns_on_the_same_requests_and_the_slow_one_has_fewer():
    time, log = [0.0], []
    arms = [Arm(name, Engine(c, time, log)) for name, c in (("a", 10.0), ("b", 11.0), ("slow", 1.0))]
    saved = []
    go(arms, saved=saved)
    for arm in arms:
        assert arm.interval.low <= arm.prober.capacity < arm.interval.high
        assert arm.interval.within(0.05)
        assert arm.ended == "resolved"
    assert exit_code(arms) == PASS
    assert [engine for engine, *_ in log[:3]] == [arm.prober for arm in arms]
    assert len({arm.requests for arm in arms[:2]}) == 1
    assert arms[2].requests == 100 < arms[0].requests
    repeats = {(id(engine), rate): 0 for engine, rate, *_ in log}
    for engine, rate, repeat, _ in log:  # each repeat of a rate has other requests
        assert repeat == repeats[id(engine), rate]
        repeats[id(engine), rate] += 1
    assert saved[:3] == [1, 2, 3]
    assert saved[-1] == len(log)


def test_the_time_is_kept_and_what_was_probed_stays():
    time = [0.0]
    arms = [Arm("a", Engine(10.0, time))]
    go(arms, seconds=100)
    assert time[0] <= 100
    assert arms[0].ended == "time"
    assert arms[0].points
    assert any("capacity.max_minutes" in note for note in to_json(arms, ABOUT, None)["arms"][0]["notes"])
    none = [Arm("a", Engine(10.0, [0.0]))]
    go(none, seconds=20)
    assert exit_code(none) == INCONCLUSIVE


def test_an_invalid_probe_is_tried_once_more_and_a_second_one_ends_its_engine_alone():
    time = [0.0]
    arms = [Arm("a", Engine(10.0, time, invalid=(2,))), Arm("b", Engine(5.0, time, invalid=(3, 4)))]
    go(arms)
    assert arms[0].ended == "resolved"
    assert not any(point.invalid_reasons for point in arms[0].points)
    assert arms[1].ended == "invalid"
    assert "twice" in arms[1].reason
    assert len(arms[1].points) == 2
    assert exit_code(arms) == INVALID


def test_an_interruption_keeps_the_points_and_says_so():
    time = [0.0]
    arms = [Arm("a", Engine(10.0, time, interrupt=4)), Arm("b", Engine(10.0, time))]
    saved = []
    go(arms, saved=saved)
    assert [arm.ended for arm in arms] == ["interrupted", "interrupted"]
    assert [len(arm.points) for arm in arms] == [3, 3]
    assert saved[-1] == 6
    assert exit_code(arms) == INVALID


def test_a_server_that_dies_in_the_closed_loop_does_not_end_the_others():
    class Dead(Engine):
        def saturate(self, requests):
            raise ProbeError("the server died")

    time = [0.0]
    arms = [Arm("dead", Dead(1.0, time)), Arm("a", Engine(10.0, time))]
    go(arms)
    assert arms[0].reason == "the server died"
    assert arms[1].ended == "resolved"
    assert exit_code(arms) == INVALID


def test_an_slo_that_no_rate_keeps_is_a_miss():
    class Hopeless(Engine):
        def probe(self, rate, repeat, requests):
            return Point(rate, repeat, repeat, requests, {"slo": 5.0}, seconds=1.0)

    arms = [Arm("a", Hopeless(10.0, [0.0]))]
    go(arms)
    assert arms[0].ended == "out_of_reach"
    assert exit_code(arms) == REGRESSION


@pytest.mark.parametrize(("virtual", "ended", "code"), [(True, "out_of_reach", 1), (False, "time", 4)])
def test_arrivals_in_virtual_time_use_up_no_minutes(virtual, ended, code):
    class Hopeless(Engine):
        takes_its_arrivals = not virtual

        def probe(self, rate, repeat, requests):
            length = 0.1 if virtual else requests / rate
            self.time[0] += length
            return Point(rate, repeat, repeat, requests, {"slo": 50.0}, seconds=length)

    arms = [Arm("a", Hopeless(10.0, [0.0]))]
    go(arms, seconds=200)
    assert (arms[0].ended, exit_code(arms)) == (ended, code)
    (note, *_) = to_json(arms, ABOUT, None)["arms"][0]["notes"]
    assert ("no rate held down to" in note) is not virtual


def test_an_engine_without_gaps_is_said_not_to_be_held_to_their_limit():
    arms = [Arm("static", Engine(10.0, [0.0]))]
    go(arms)
    limited = ABOUT | {"limits": ABOUT["limits"] | {"itl_p99_ms": 50.0}}
    told = [any("itl_p99_ms" in note for note in to_json(arms, about, None)["arms"][0]["notes"])
            for about in (ABOUT, limited)]  # fmt: skip
    assert told == [False, True]


def test_points_for_the_curve_are_multiples_of_the_capacity():
    arms = [Arm("a", Engine(10.0, [0.0]))]
    go(arms, curve=(0.5, 1.5))
    low = arms[0].interval.low
    assert [point.rate for point in arms[0].points[-2:]] == pytest.approx([0.5 * low, 1.5 * low], rel=1e-3)


def test_what_tokens_cost():
    assert per_million(1.20, 1000 / 3.6) == pytest.approx(1.20)
    assert per_million(None, 5.0) is None
    assert per_million(1.0, 0.0) is None
    held = Point(2.0, 0, 0, 100, {"slo": 0.5}, tokens_per_request=(10.0, 100.0))
    found = costs(3.6, [held])
    assert found["per_million_output"] == pytest.approx(50.0)
    assert found["per_million_total"] == pytest.approx(5.0)


def test_the_result_on_file_on_the_terminal_and_on_the_page(capsys):
    arms = [Arm("continuous", Engine(10.0, [0.0]))]
    go(arms, curve=(1.5,))
    value = to_json(arms, ABOUT, 3.6)
    again = json.loads(json.dumps(value, allow_nan=False))
    arm = again["arms"][0]
    assert set(arm["capacity"]) == {"rps", "low", "high"}
    assert arm["capacity"]["rps"] == arm["capacity"]["low"] <= 10.0 < arm["capacity"]["high"]
    assert arm["limited_by"] == ["slo"]
    wanted = {"rate", "attainment", "ttft_p99", "tpot_p99", "goodput_rps", "queue_delay_p50", "run", "ok"}
    assert all(wanted <= set(point) for point in arm["points"])
    assert arm["cost"]["per_million_output"] == pytest.approx(
        3.6 / 3600 / (10 * arm["capacity"]["rps"]) * 1e6
    )
    print_result(again)
    shown = capsys.readouterr().out
    assert f"{arm['capacity']['rps']:.3g}" in shown
    content = page_of(again)
    pressure = next(figure for figure in content["figures"] if figure["title"] == "Pressure")
    drawn = sorted(zip(pressure["data"][1]["x"], pressure["data"][1]["y"], strict=True))
    assert drawn == [(point["rate"], point["pressure"]) for point in arm["points"]]
    html = render(content)
    assert "<script>" in html
    assert "http://" not in html.split("<script>")[0]

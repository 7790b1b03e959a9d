"""What --dry-run says: how long it will take, how much is asked for, and which percentiles will not hold."""

import json
import re
from collections import Counter

import pytest

from harness.cli import main
from harness.conf import compose
from harness.eta import CLOSE_S, START_S, Eta, Pace, closed, duration, eta, find_pace, opened
from harness.plan import describe, describe_sweep, draw_schedule, peak
from harness.samples import SHOWN, describe_needs, needs
from workloads.schedule import Schedule, ScheduledRequest, Segment

FLOORS = {"interval": [6, 36, 72, 368, 3688], "mlperf": [11, 64, 130, 662, 6636]}


def request(number, arrival_s, *, answer=10, prompt=5, **more):
    return ScheduledRequest(
        id=f"r{number:06d}",
        arrival_s=arrival_s,
        segments=(Segment(f"s{number}", prompt),),
        prompt_tokens=prompt,
        max_tokens=answer,
        stop_after=answer,
        **more,
    )


def schedule(*requests):
    return Schedule(requests=tuple(requests), name="made", seed=0)


def steady(n, **more):
    return [request(i, float(i), **more) for i in range(n)]


def test_the_floors_are_those_of_the_two_rules():
    rows = needs(schedule(*steady(20)))
    assert {row.rule: list(row.floors.values()) for row in rows} == FLOORS
    assert all(list(row.requests.values()) == FLOORS[row.rule] for row in rows), "everyone is a sample"
    assert all(row.request_class is None for row in rows), "one class is all"


def test_only_who_streams_and_stays_is_a_sample():
    rows = [
        *(request(i, 0.0) for i in range(50)),
        *(request(i, 0.0, stream=False) for i in range(50, 80)),
        *(request(i, 0.0, cancel_kind="after_s", cancel_value=1.0) for i in range(80, 100)),
    ]
    row = needs(schedule(*rows))[0]
    assert (row.samples, row.planned) == (50, 100)
    assert list(row.requests.values()) == [2 * n for n in FLOORS["interval"]]
    assert row.lacking == ["p95", "p99"]
    assert row.cure == 736
    whole = needs(schedule(*(request(i, 0.0, stream=False) for i in range(50))))[0]
    assert whole.samples == 50, "where nobody streams, E2E is what there is"


def test_the_rarest_class_decides():
    rows = [request(i, 0.0, request_class="rare" if i % 10 == 0 else "common") for i in range(1000)]
    text = "\n".join(describe_needs(schedule(*rows), 100.0, 10.0))
    by_rule = {(r.rule, r.request_class): r for r in needs(schedule(*rows))}
    assert set(by_rule) == {(rule, name) for rule in FLOORS for name in (None, "rare")}
    assert list(by_rule["interval", "rare"].requests.values()) == [10 * n for n in FLOORS["interval"]]
    assert by_rule["interval", None].lacking == []
    assert by_rule["interval", "rare"].lacking == ["p99"]
    assert "lacks      p99 of class rare, the rarest, by interval: 100 samples planned" in text
    assert "load.requests=3680 (6.3 min) would do" in text  # 3,680 at 10 a second, and 10 s around them


def test_a_class_of_which_nobody_stays_lacks_everything():
    rows = [request(i, 0.0, request_class="a") for i in range(99)]
    gone = request(99, 0.0, request_class="b", cancel_kind="after_s", cancel_value=1.0)
    row = needs(schedule(*rows, gone))[-2]
    assert (row.request_class, row.samples) == ("b", 0)
    assert row.lacking == ["p50", "p90", "p95", "p99"]
    assert row.requests["p50"] == 600


def test_a_plan_that_lacks_nothing_says_so():
    assert describe_needs(schedule(*steady(700)), 1.0, 1.0)[-1] == "lacks      nothing up to p99"


def test_the_peak_is_what_the_busiest_second_asks_for():
    rows = [request(0, 0.5), request(1, 3.1, answer=20), request(2, 3.9, prompt=7), request(3, 4.0)]
    assert peak(schedule(*rows)) == (
        "peak       42 tokens/s asked for in second 3, by 2 requests (30 of answers); mean 14 tokens/s"
    )


def test_the_drain_is_that_of_the_answer_that_ends_last():
    pace = Pace(1.0, 0.1, "made up")
    assert opened(schedule(request(0, 0.0, answer=90), request(1, 2.0)), pace) == (2.0, pytest.approx(8.0))
    turns = [
        request(0, 0.0, session="s"),
        request(1, 5.0, session="s", turn=1, think_s=5.0),
        request(2, 9.0, session="s", turn=2, think_s=4.0),
    ]
    # 0 to 2, 7 to 9, 13 to 15: a turn waits for the answer before it.
    assert opened(schedule(*turns), pace) == (pytest.approx(13.0), pytest.approx(2.0))


def test_a_closed_loop_shares_the_answers_out():
    pace = Pace(1.0, 0.1, "made up")
    cfg = compose(["load=closed", "load.concurrency=4"])
    assert closed(cfg, schedule(*steady(40)), pace) == (pytest.approx(18.0), pytest.approx(2.0))
    cfg = compose(["load=closed", "load.concurrency=4", "load.duration_s=7"])
    assert closed(cfg, schedule(*steady(40)), pace) == (7.0, pytest.approx(2.0))


def test_the_parts_of_the_estimate_add_up_and_it_says_where_the_pace_is_from(tmp_path):
    cfg = compose(["experiment=smoke", f"output.dir={tmp_path}", "slo.ttft_ms=500", "slo.tpot_ms=20"])
    drawn = draw_schedule(cfg)
    guess = eta(cfg, drawn)
    assert guess.start_s == START_S["tiny"]
    assert guess.load_s == drawn.requests[-1].arrival_s
    last = max(r.arrival_s + 0.5 + 0.02 * r.stop_after for r in drawn)
    assert guess.drain_s == pytest.approx(last - guess.load_s)
    assert guess.total_s == pytest.approx(guess.start_s + last + CLOSE_S)
    assert "as slow as the SLO allows (500 ms, then 20 ms a token), since no run of this kind" in str(guess)


def finished(folder, name, **changes):
    figures = {"ttft": {"from_intended": {"p90": 80.0}}, "tpot": {"p90": 4.0}, "normalized": {"p90": 9.0}}
    summary = {"valid": True, "engine": "continuous", "workload": "rag", "model": "tiny", "run": {"id": name}}
    (folder / name).mkdir()
    text = json.dumps({**summary, "latency_ms": figures, **changes})
    (folder / name / "summary.json").write_text(text)


def test_the_pace_is_that_of_the_newest_valid_run_of_this_kind(tmp_path):
    cfg = compose([f"output.dir={tmp_path}"])
    finished(tmp_path, "20260101-old")
    finished(tmp_path, "20260102-good")
    finished(tmp_path, "20260103-invalid", valid=False)
    finished(tmp_path, "20260104-other", engine="static")
    finished(tmp_path, "20260105-odd", latency_ms=None)
    (tmp_path / "20260106-broken").mkdir()
    (tmp_path / "20260106-broken" / "summary.json").write_text("{")
    assert find_pace(cfg) == Pace(0.08, 0.004, "as in run 20260102-good (p90)")


def test_answers_that_came_whole_have_a_pace_too(tmp_path):
    none = {"from_intended": {"p90": None}}
    figures = {"ttft": none, "tpot": {"p90": None}, "normalized": {"p90": 9.0}}
    finished(tmp_path, "20260101-drained", engine="static", latency_ms=figures)
    cfg = compose([f"output.dir={tmp_path}", "engine=static"])
    assert find_pace(cfg) == Pace(0.0, 0.009, "as in run 20260101-drained (p90)")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (99.4, "99 s"), (99.6, "1.7 min"), (5400, "90.0 min"), (7200, "2.0 h")],
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_dry_run_prints_the_whole_plan_and_runs_nothing(capsys, tmp_path):
    out_dir = tmp_path / "runs"
    assert main(["--dry-run", "+workload=rag", "+engine=chunked", f"output.dir={out_dir}"]) == 0
    out = capsys.readouterr().out
    drawn = draw_schedule(compose(["workload=rag", "engine=chunked"]))
    assert not out_dir.exists()
    by_class = Counter(r.request_class for r in drawn)
    for line in (
        f"workload   rag: 200 requests, open loop at {drawn.planned_rate:.3g} requests/s for",
        "classes    " + ", ".join(f"{n} {name}" for name, n in by_class.items()),
        "engine     chunked: scheduler=chunked",
        "client     1 load process (load.processes=auto), backend auto",
        "time       about ",
        f"schedule   seed 0, sha256 {drawn.sha256()}",
    ):
        assert line in out
    parts = r"start-up \d+ s, arrivals \d+ s, drain \d+ s, results \d+ s; answers as slow as the SLO allows"
    assert re.search(parts, out)
    assert re.search(r"peak +\d+ tokens/s asked for in second \d+, by \d+ requests", out)
    table = {line.split(":")[0].strip(): line for line in out.splitlines() if ": samples" in line}
    for rule, floors in FLOORS.items():
        assert [int(n) for n in table[rule].split("samples")[1].split()] == floors
    assert re.search(r"lacks +.*p99 of class web, the rarest, by interval: \d+ samples", out)
    assert re.search(rf"^ +{' +'.join(re.escape(name) for name in SHOWN)}$", out, re.M)


def test_dry_run_of_a_sweep_prints_every_point_and_the_total(capsys, tmp_path):
    args = ["-m", "--dry-run", "+experiment=smoke", "engine=static,chunked", "workload.rate=2,8"]
    assert main([*args, f"output.dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    points = [f"engine={e} workload.rate={r}" for e in ("static", "chunked") for r in (2, 8)]
    for number, point in enumerate(points, 1):
        assert f"run {number} of 4: {point}\n" in out
    assert out.count("time       about ") == 4
    head, *each = out[out.index("sweep      ") :].splitlines()
    assert re.fullmatch(r"sweep +4 runs one after the other: about [\d.]+ (s|min)", head)
    assert [line.split("  ")[-1] for line in each] == points
    assert all(re.match(r" +\d+ s  engine=", line) for line in each)


def test_the_total_of_a_sweep_is_the_sum_of_its_runs(tmp_path):
    configs = [compose([f"workload.rate={r}", f"output.dir={tmp_path}"]) for r in (1, 4)]
    total = sum(eta(cfg, draw_schedule(cfg)).total_s for cfg in configs)
    text = describe_sweep(configs, [["workload.rate=1"], ["workload.rate=4"]])
    assert f"2 runs one after the other: about {duration(total)}\n" in text
    assert describe(configs[1], draw_schedule(configs[1])) in text


def test_an_eta_reads_as_a_sentence():
    assert str(Eta(6.0, 40.0, 3.0, 4.0, "as in run x (p90)")) == (
        "about 53 s: start-up 6 s, arrivals 40 s, drain 3 s, results 4 s; answers as in run x (p90)"
    )


def test_traffic_in_words():
    def words(*overrides):
        cfg = compose(["workload=chat", "load.requests=40", *overrides])
        return describe(cfg, draw_schedule(cfg)).splitlines()[0]

    assert words("load.concurrency=4").endswith(" s, at most 4 under way")
    assert re.search(r"40 requests, open loop at [\d.]+ requests/s for [\d.]+ s$", words())
    turns = words("experiment=sessions")
    assert re.search(r"open loop, \d+ sessions within [\d.]+ s at the earliest$", turns)
    assert words("load=closed", "load.concurrency=3").endswith("closed loop of 3 clients")


def test_a_foreign_server_has_a_plan_too(capsys, tmp_path):
    args = ["+engine=openai", "engine.base_url=http://192.0.2.1:8000", f"output.dir={tmp_path}"]
    assert main(["--dry-run", *args]) == 0, "nothing is asked of the server"
    out = capsys.readouterr().out
    assert "engine     http://192.0.2.1:8000 (not ours" in out
    assert "start-up 3 s" in out
    assert "client     1 load process" in out


def test_a_plan_for_a_device_that_is_not_here_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("harness.plan.GPU_DEVICES", (str(tmp_path / "gpu"),))
    args = ["--dry-run", "+experiment=smoke", "device=cuda"]
    for more in ([], ["-m", "seed=1,2"]):
        assert main([*args, *more]) == 2
        out, err = capsys.readouterr()
        assert out.startswith(("workload ", "run 1 of 2"))
        assert re.fullmatch(r"error: device=cuda: no GPU is seen .*\n", err)
    (tmp_path / "gpu").touch()
    assert main(args) == 0

"""Golden: engines in virtual time whose capacity is known by arithmetic, found through the whole command."""

import errno
import json

import pytest

from harness.capacity.command import main, read
from harness.capacity.measure import Arm, Budget, measure
from harness.capacity.search import Rules
from harness.capacity.virtual import Virtual
from harness.cli import guard
from harness.conf import UsageError

ONE_AT_A_TIME = (
    *("+workload=short", "workload.stream_fraction=1", "workload.max_tokens=exact"),
    *("workload.arrivals.kind=poisson", "engine.max_num_seqs=1"),
    "workload.classes.short.output.points=[[0,1],[100,9]]",
)


def capacity(tmp_path, capsys, *args):
    code = main([*args, f"output.dir={tmp_path}"])
    out = capsys.readouterr().out
    folder = out.splitlines()[-1].removeprefix("results: ")
    return code, json.loads((tmp_path / folder.rpartition("/")[2] / "capacity.json").read_text())


def one_server(*args, pass_s, requests):
    """One request at a time, so many seconds a pass."""
    asked = read([*ONE_AT_A_TIME, "engine=continuous", *args], "capacity", virtual=True)
    cfg = next(iter(asked.engines.values()))
    arm = Arm("one", Virtual(cfg, asked.limits, cost=lambda rows, tokens: pass_s))
    measure([arm], Rules(probes=14), Budget(1e9, 20, requests=requests), say=lambda line: None)
    return arm


def test_a_queue_without_chance_has_the_capacity_of_its_arithmetic():
    """Every answer has 10 tokens of 10 ms each, so 10 requests/s are served. Of n arrivals at r > 10 a second
    the i-th waits i (1/10 - 1/r): 99 % of them keep a TTFT of 1 s up to the r at which that is what the
    198th of 200 waits, less its first pass."""
    arm = one_server(
        *("workload.arrivals.kind=constant", "capacity.queue_delay_p50_ms=null"),
        "workload.classes.short.output.points=[[0,10],[100,10]]",
        "slo.ttft_ms=1000",
        pass_s=0.01,
        requests=200,
    )
    truth = 1 / (0.1 - 0.99 / 197)
    assert arm.guess == pytest.approx(10, rel=0.02)
    assert arm.interval.low <= truth <= arm.interval.high
    assert arm.interval.high / arm.interval.low < 1.12
    assert {name for point in arm.points for name in point.over} >= {"slo"}


def test_without_a_latency_limit_the_growth_of_the_queue_finds_the_rate_of_service():
    far = ("slo.ttft_ms=1000000", "slo.tpot_ms=1000000", "capacity.queue_delay_p50_ms=null")
    arm = one_server(*far, pass_s=0.01, requests=150)
    assert arm.interval.low * 0.85 <= arm.guess <= arm.interval.high
    assert {name for point in arm.points for name in point.over} == {"growth"}


def test_a_tighter_slo_has_less_capacity_and_a_faster_machine_more():
    def found(ttft_ms, pass_s):
        return one_server(
            f"slo.ttft_ms={ttft_ms}", "slo.attainment=0.9", pass_s=pass_s, requests=100
        ).interval

    loose, tight, fast = found(400, 0.01), found(60, 0.01), found(400, 0.005)
    assert tight.high < loose.low
    assert fast.low > 1.5 * loose.low


def test_the_command_gives_capacities_side_by_side(tmp_path, capsys):
    args = (
        "--virtual",
        "+workload=short",
        "engines=[static,continuous]",
        "capacity.requests=100",
        "capacity.tolerance=0.2",
        "capacity.repeats=2",
    )
    code, value = capacity(tmp_path, capsys, *args, "slo.ttft_ms=300", "cost.device_hour=1.2")
    assert code == 0
    static, continuous = value["arms"]
    assert static["capacity"]["high"] < continuous["capacity"]["low"]
    assert continuous["cost"]["per_million_output"] < static["cost"]["per_million_output"]
    assert all(len({point["requests"] for point in arm["points"]}) == 1 for arm in value["arms"])
    seeds = [{point["seed"] for point in arm["points"]} for arm in value["arms"]]
    assert seeds[0] <= {0, 1, 2}
    assert seeds[1] <= {0, 1, 2}


def test_the_crossover_command_says_who_is_better_throughout(tmp_path, capsys):
    args = (
        "crossover",
        "--virtual",
        "+workload=short",
        "engines=[static,continuous]",
        "rounds=3",
        "points=2",
    )
    code, value = capacity(
        tmp_path, capsys, *args, "metric=normalized_p50", "capacity.requests=60", "range=[20,60]"
    )
    assert code == 0
    assert value["crossover"]["kind"] == "none"
    assert value["crossover"]["by"] == "continuous"
    assert "no crossover in [20, 60]" in value["text"]
    assert len(value["runs"]) == 2 * 3 * 2


@pytest.mark.parametrize(
    ("root", "args", "names"),
    [
        ("capacity", ["engines=static"], "engines="),
        ("capacity", ["engines=[static,static]"], "twice"),
        ("capacity", ["engines=[nope]"], "nope"),
        ("capacity", ["load=closed"], "load=open"),
        ("capacity", ["load.utilization=0.8"], "load.utilization"),
        ("capacity", ["workload.arrivals.kind=at_once"], "poisson"),
        ("capacity", ["capacity.itl_p99_ms=50"], "capacity.itl_p99_ms=50: --virtual has no gaps"),
        ("capacity", ["capacity.curve=[0]"], "capacity.curve"),
        ("capacity", ["capacity.repeats=0"], "capacity.repeats=0"),
        ("capacity", ["cost.device_hour=-1"], "cost.device_hour=-1"),
        ("capacity", ["engine=openai", "engine.base_url=http://127.0.0.1:1"], "--virtual"),
    ],
)
def test_what_cannot_work_is_one_line(root, args, names):
    from harness.capacity.run import probers

    with pytest.raises(UsageError, match=names) as caught, probers(read(args, root, virtual=True), None):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["engines=[static]"], "two engines"),
        (["engines=[static,chunked]", "metric=p99"], "metric=p99"),
        (["engines=[static,chunked]", "metric=tpot_p99"], "drained"),
        (["engines=[continuous,chunked]", "metric=itl_p99"], "metric=itl_p99: --virtual has no itl"),
        (["engines=[continuous,chunked]", "range=[3]"], "range="),
        (["engines=[continuous,chunked]", "over=prompt_mix", "+workload=short"], "one class"),
    ],
)
def test_a_crossover_that_cannot_work_is_one_line(args, names):
    from harness.capacity.crossing import check

    with pytest.raises(UsageError, match=names):
        check(read(args, "crossover", virtual=True))


def test_the_share_of_long_prompts_moves_the_weights_and_nothing_else():
    from harness.capacity.crossing import long_class, moved
    from harness.plan import draw_schedule

    asked = read(
        ["+workload=rag", "engines=[continuous,chunked]", "over=prompt_mix"], "crossover", virtual=True
    )
    cfg = asked.engines["chunked"]
    assert long_class(cfg) == "web"
    schedule = draw_schedule(moved(cfg, "prompt_mix", 0.6, 0, 400))
    share = sum(request.request_class == "web" for request in schedule) / 400
    assert share == pytest.approx(0.6, abs=0.08)
    rest = [request.request_class for request in schedule if request.request_class != "web"]
    assert rest.count("retrieval") > 2.5 * rest.count("plain") > 0


def test_a_dry_run_says_the_plan_and_the_time_and_does_nothing(tmp_path, capsys):
    assert main(["+workload=chat", "engines=[static,chunked]", "--dry-run", f"output.dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "at most 12.0 min" in out
    assert main(["crossover", "+workload=chat", "engines=[static,chunked]", "--dry-run"]) == 0
    assert "shuffled" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["capacity", "crossover"])
def test_a_page_that_finds_no_room_does_not_hide_where_the_results_are(tmp_path, capsys, monkeypatch, kind):
    def full(html, path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("workloads.page.frame.write_page", full)
    asked = ["--virtual", "+workload=short", "capacity.requests=40", f"output.dir={tmp_path}"]
    if kind == "capacity":
        asked += ["engine=continuous", "capacity.tolerance=0.5", "capacity.repeats=1"]
    else:
        asked = ["crossover", *asked, "engines=[static,continuous]", "rounds=2", "points=2", "range=[20,60]"]
    assert guard(lambda: main(asked)) == 3
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1].startswith(f"results: {tmp_path}")
    assert shown.err.splitlines()[-1].endswith("report.html: No space left on device")

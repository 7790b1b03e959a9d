from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.workload_configs import workload
from workloads import WorkloadError, draw
from workloads.convert import convert, lost, options, write
from workloads.fitting.preset import fit_trace
from workloads.prompts import PromptBook
from workloads.readers import read_trace

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


def real(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not there; it is a public trace that this repository does not ship")
    return path


@pytest.fixture
def azure(tmp_path):
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2024-05-12 00:00:{2 * i:02d},{100 * (i + 1)},{10 * (i + 1)}" for i in range(10)]
    path = tmp_path / "azure.csv"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def mooncake(tmp_path):
    rows = [
        {"timestamp": 500, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]},
        {"timestamp": 1500, "input_length": 1024, "output_length": 10, "hash_ids": [0, 1]},
        {"timestamp": 2500, "input_length": 2000, "output_length": 30, "hash_ids": [0, 1, 3, 4]},
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def trace(path, **changes):
    return workload("trace", path=str(path), **changes)


def test_azure_replays_with_its_own_timestamps(azure):
    schedule = draw(trace(azure), seed=0)
    assert [r.arrival_s for r in schedule] == [2.0 * i for i in range(10)]
    assert [r.prompt_tokens for r in schedule] == [100 * (i + 1) for i in range(10)]
    assert [r.stop_after for r in schedule] == [10 * (i + 1) for i in range(10)]
    assert {r.max_tokens for r in schedule} == {112}, "p99 of the answers is 99.1, up to a multiple of 16"
    assert schedule.planned_rate == 0.5
    assert len({r.segments[0].segment_id for r in schedule}) == 10, "no two prompts share anything"


def test_speed_scale_limit_and_rate(azure):
    fast = draw(trace(azure, speed=4, length_scale=0.5, limit=6), seed=0)
    assert [r.arrival_s for r in fast] == [0.5 * i for i in range(6)]
    assert [r.prompt_tokens for r in fast] == [50 * (i + 1) for i in range(6)]
    assert [r.stop_after for r in fast] == [5 * (i + 1) for i in range(6)]
    at_rate = draw(trace(azure, rate=8), seed=0)
    assert at_rate.planned_rate == pytest.approx(8)
    assert at_rate.requests[-1].arrival_s == pytest.approx(9 / 8)
    assert len(draw(trace(azure), seed=0, requests=3)) == 3
    assert [r.arrival_s for r in draw(trace(azure), seed=0, duration_s=5)] == [0, 2, 4]
    assert len(draw(trace(azure, requests=4), seed=0)) == 4


def test_caps_are_kept_and_said(azure):
    schedule = draw(trace(azure, input__cap=450, output__cap=50), seed=0)
    assert [r.prompt_tokens for r in schedule] == [100, 200, 300, 400, *[450] * 6]
    assert max(r.max_tokens for r in schedule) == 50
    assert "6 of 10 prompts cut to workload.input.cap=450" in schedule.notes[0]
    assert "5 of 10 answers cut" in schedule.notes[1]


def test_cancellations_and_declared_lengths_apply_to_traces_too(azure):
    schedule = draw(trace(azure, cancel__after_s__share=1.0, max_tokens="exact"), seed=0)
    assert {r.cancel_kind for r in schedule} == {"after_s"}
    assert all(r.max_tokens == r.stop_after for r in schedule)


@pytest.mark.parametrize(("scale", "block", "last"), [(1, 512, [76, 512, 464]), (0.25, 128, [19, 128, 116])])
def test_mooncake_blocks_share_their_tokens_at_every_scale(mooncake, scale, block, last):
    schedule = draw(trace(mooncake, length_scale=scale), seed=0)
    assert [r.arrival_s for r in schedule] == [0.0, 1.0, 2.0]
    for request, tail in zip(schedule, last, strict=True):
        assert [s.tokens for s in request.segments] == [block] * (len(request.segments) - 1) + [tail]
    book = PromptBook(np.arange(5000), schedule.seed)
    first, second, third = (book.tokens(r.segments) for r in schedule)
    assert first[: 2 * block] == second == third[: 2 * block]
    assert first[2 * block : 2 * block + 10] != third[2 * block : 2 * block + 10]


def test_a_cut_mooncake_prompt_keeps_its_beginning(mooncake):
    schedule = draw(trace(mooncake, input__cap=600), seed=0)
    assert [[(s.segment_id, s.tokens) for s in r.segments] for r in schedule] == [
        [("trace/block/0", 512), ("trace/block/1", 88)]
    ] * 3


def test_skipped_rows_are_counted(azure):
    with azure.open("a") as f:
        f.write("\nnot,a,row\n")
    with pytest.raises(WorkloadError, match=r"line 12, column TIMESTAMP.*workload.on_bad_row=skip"):
        draw(trace(azure), seed=0)
    schedule = draw(trace(azure, on_bad_row="skip"), seed=0)
    assert (len(schedule), schedule.skipped_rows) == (10, 1)
    assert "line 12" in schedule.notes[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": None}, "workload.path=null"),
        ({"speed": 0}, "workload.speed=0: needs a number above 0"),
        ({"speed": 2, "rate": 3}, "workload.rate=3: workload.speed=2 is set as well"),
        ({"rate": 3, "limit": 1}, "workload.rate=3: the rows of this trace have one time"),
        ({"limit": 0}, "workload.limit=0: needs a whole number of 1 or more"),
        ({"on_bad_row": "ignore"}, "workload.on_bad_row=ignore: choose from error, skip"),
        ({"format": "burst"}, "workload.format=burst: choose from auto, aiperf, azure, bailian, burstgpt"),
        ({"replay": "open"}, "workload.replay=open: choose from auto, times, sessions"),
        ({"replay": "sessions"}, "workload.replay=sessions: the azure trace has no sessions"),
        ({"spread_ticks": 3}, "workload.spread_ticks=3: needs true or false"),
    ],
)
def test_wrong_settings_are_named(azure, changes, words):
    with pytest.raises(WorkloadError, match=words):
        draw(workload("trace", **{"path": str(azure), **changes}), seed=0)


def test_convert_there_and_back(azure, mooncake, tmp_path):
    before = read_trace(azure)
    write(convert(before, "mooncake"), tmp_path / "as.jsonl.gz")
    after = read_trace(tmp_path / "as.jsonl.gz")
    assert (before.time_ns - before.time_ns[0]).tolist() == after.time_ns.tolist()
    assert before.input_tokens.tolist() == after.input_tokens.tolist()
    assert before.output_tokens.tolist() == after.output_tokens.tolist()
    ids = after.blocks.ids.tolist()
    assert ids == list(range(len(ids))), "blocks of a trace that has none are shared by nobody"
    write(convert(read_trace(mooncake), "azure"), tmp_path / "as.csv")
    back = read_trace(tmp_path / "as.csv")
    assert back.time_ns.tolist() == [500_000_000, 1_500_000_000, 2_500_000_000]
    with pytest.raises(WorkloadError, match=r"--out=.*exists"):
        write(convert(before, "azure"), tmp_path / "as.csv")
    with pytest.raises(WorkloadError, match="choose from azure, mooncake"):
        convert(before, "burstgpt")


def test_convert_makes_blocks_of_512_tokens_of_what_prompts_share(agents, tmp_path):
    trace = read_trace(agents)
    rows = [json.loads(line) for line in convert(trace, "mooncake")]
    assert [len(row["hash_ids"]) for row in rows] == [-(-row["input_length"] // 512) for row in rows]
    first, second, third = (row["hash_ids"] for row in rows[:3])
    assert (second[:1], third[:1]) == (first[:1], first[:1])
    assert len({*first, *second, *third}) == 2 + 2 + 1
    assert {row["timestamp"] for row in rows} == {0}
    assert "has no times" in lost(trace, "mooncake")[-1]
    with pytest.raises(WorkloadError, match="--to=azure: the weka trace has no times"):
        convert(trace, "azure")
    small = [{"timestamp": i, "input_length": 1040, "output_length": 1} for i in range(3)]
    ids = [list(range(65)), [*range(64), 99], [*range(31), *range(200, 234)]]
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join(json.dumps({**row, "hash_ids": i}) for row, i in zip(small, ids, strict=True)))
    blocks = [json.loads(line)["hash_ids"] for line in convert(read_trace(path), "mooncake")]
    assert blocks == [[0, 1, 2], [0, 1, 3], [4, 5, 6]], "sizes of 16: a block of 512 is 32 of them"


def test_other_tools_are_told_how_to_read_it():
    lines = options("t.jsonl", "mooncake")
    assert [line.split()[0] for line in lines] == ["vLLM", "AIPerf", "SGLang", "GuideLLM"]
    assert "--timed-trace-chunk-hash-size 512 --timed-trace-sec-multiplier 0.001" in lines[0]
    assert all("t.jsonl" in line for line in lines)
    assert options("t.csv", "azure") == []


def test_stamps_on_a_coarse_grid_are_spread_within_it(tmp_path):
    path = tmp_path / "grid.jsonl"
    stamps = [3000 * (i // 5) + (i // 5) % 3 for i in range(100)]  # 5 a tick, each some ms late
    row = {"input_length": 10, "output_length": 5}
    path.write_text("\n".join(json.dumps({"timestamp": at, **row}) for at in stamps))
    assert read_trace(path).tick_s() == 3.0
    spread, other = (draw(trace(path), seed=seed).columns.arrival_s for seed in (0, 1))
    assert (np.diff(spread) > 0).all()
    assert spread[0] == 0, "times count from the first row"
    later = spread - np.array(stamps) / 1e3  # than the stamp, less the first row's own
    assert later.max() - later.min() <= 3.01
    assert spread.tolist() != other.tolist()
    as_recorded = draw(trace(path, spread_ticks=False), seed=0).columns.arrival_s
    assert as_recorded.tolist() == [at / 1e3 for at in stamps]
    path.write_text("\n".join(json.dumps({"timestamp": 1000 * i, **row}) for i in range(100)))
    assert read_trace(path).tick_s() is None, "one a second may be what was sent"


@pytest.fixture
def agents(tmp_path):
    head = "trace,agent,input_tokens,output_tokens,prefix_hit_tokens,turn,think_time_s,input_types"
    rows = ["1,main,1000,10,0,0,0,text", "1,main,1500,20,960,1,4,tool_result", "1,main,700,5,640,2,9,text"]
    path = tmp_path / "agents.csv"
    path.write_text("\n".join([head, *rows, "2,main,300,7,0,0,0,text", "2,main,900,8,256,1,2,text"]))
    return path


def test_sessions_are_replayed_in_closed_loops_of_their_think_times(agents):
    schedule = draw(trace(agents, rate=0.5, input__cap=None, max_tokens="exact"), seed=0)
    rows = {(r.session, r.turn): r for r in schedule}
    assert [rows["1/main", turn].think_s for turn in range(3)] == [None, 4.0, 9.0]
    assert rows["2/main", 1].think_s == 2.0
    starts = [rows[session, 0].arrival_s for session in ("1/main", "2/main")]
    assert 0 < starts[0] < starts[1]
    assert rows["1/main", 2].arrival_s == pytest.approx(starts[0] + 13), "at the earliest"
    assert [r.arrival_s for r in schedule] == sorted(r.arrival_s for r in schedule)
    assert {r.tenant for r in schedule} == {"1", "2"}
    assert {r.request_class for r in schedule} == {"text", "tool_result"}
    with pytest.raises(WorkloadError, match=r"workload.rate=null: the weka trace has no times"):
        draw(trace(agents), seed=0)
    with pytest.raises(WorkloadError, match=r"workload.replay=times: the weka trace has no times across"):
        draw(trace(agents, replay="times", rate=1), seed=0)


def test_recorded_reuse_becomes_equal_tokens(agents):
    schedule = draw(trace(agents, rate=0.5, input__cap=None), seed=0)
    book = PromptBook(np.arange(5000), schedule.seed)
    prompts = {(r.session, r.turn): list(book.tokens(r.segments)) for r in schedule}
    first, second, third = (prompts["1/main", turn] for turn in range(3))
    assert [len(first), len(second), len(third)] == [1000, 1500, 700]
    assert second[:1000] == first, "it reused all whole blocks: the session goes on"
    assert third[:640] == first[:640]
    assert third[640:660] != first[640:660], "what it did not reuse is new"
    assert prompts["2/main", 1][:256] == prompts["2/main", 0][:256]
    assert prompts["2/main", 0][:20] != first[:20]


def test_recorded_sessions_may_run_by_their_own_times_too(tmp_path):
    rows = ["Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type"]
    rows += ["10,7,4,A,10,2,Conversation log", "11,,0,A,9,2,API log", "20,7,1,A,30,4,Conversation log"]
    path = tmp_path / "burst.csv"
    path.write_text("\n".join(rows))
    by_times = draw(trace(path), seed=0)
    assert [(r.arrival_s, r.session, r.turn, r.think_s) for r in by_times] == [
        (0.0, "7", 0, None),
        (1.0, None, 0, None),
        (10.0, "7", 1, None),
    ]
    closed = draw(trace(path, replay="sessions", speed=2), seed=0)
    assert [(r.arrival_s, r.session, r.turn, r.think_s) for r in closed] == [
        (0.0, "7", 0, None),
        (0.5, None, 0, None),
        (6.0, "7", 1, 6.0),
    ]


def test_lengths_without_times_arrive_at_once_or_at_a_rate(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "100,20\n" * 400)
    schedule = draw(trace(path), seed=0)
    assert {r.arrival_s for r in schedule} == {0.0}
    assert any("all arrive at once" in note for note in schedule.notes)
    assert draw(trace(path, rate=4), seed=0).planned_rate == pytest.approx(4, rel=0.2)


def test_azure_2023_conversations():
    path = real("azure2023_conv.csv.gz")
    recorded = read_trace(path)
    fit = fit_trace(recorded)
    # Published facts of the file: rows, mean rate, quantiles.
    assert (fit.rows, round(fit.span_s)) == (19_366, 3502)
    assert recorded.input_tokens.mean() == pytest.approx(1154.7, abs=0.05)
    assert dict(fit.lengths.output)[50] == 129
    assert fit.arrivals.cv == pytest.approx(1.09, abs=0.01)
    assert fit.arrivals.dispersion[60.0] == pytest.approx(16.1, abs=0.3)
    schedule = draw(trace(path, limit=500, speed=2), seed=0)
    assert len(schedule) == 500
    assert schedule.requests[1].arrival_s == pytest.approx(4.314579 / 2)
    assert schedule.skipped_rows == 0


def test_azure_2023_code():
    fit = fit_trace(read_trace(real("azure2023_code.csv.gz")))
    assert fit.rows == 8819
    assert fit.arrivals.cv == pytest.approx(13.15, abs=0.05)


def test_mooncake_conversations():
    path = real("mooncake_conversation.jsonl.gz")
    recorded = read_trace(path)
    assert len(recorded) == 12_031
    fit = fit_trace(recorded)
    assert any("grid of 3 s" in note for note in fit.notes)
    assert fit.prefixes.hit_rate == pytest.approx(0.374, abs=0.001)
    schedule = draw(trace(path, input__cap=None, limit=2000), seed=0)
    seen: set[str] = set()
    hits = total = 0
    for request in schedule:
        total += len(request.segments)
        hits += sum(s.segment_id in seen for s in request.segments)
        seen.update(s.segment_id for s in request.segments)
    assert {r.segments[0].segment_id for r in schedule} == {"trace/block/0"}
    assert 0.15 < hits / total < 0.37

"""What is read from each kind of server's /metrics, and what is made of it at the end of a run."""

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.metrics.server_metrics import read_server_metrics, summarise_server_metrics
from harness.prometheus import FIGURES, MetricsError, parse
from tests.support.metrics_texts import SGLANG, TGI, UNKNOWN, VLLM_V0, VLLM_V1

CALM = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

EXPECTED = {
    "vllm v1": (
        *("vllm", VLLM_V1),
        (9, 2, 0.5, 3, 12345678, 1024, 400, 100, 4.0, 8, 1.5, 8),
    ),
    "vllm v0": ("vllm", VLLM_V0, (1, 0, 0.125, 0, 10, 20, 4, 1, None, None, 0.5, 2)),
    "sglang": ("sglang", SGLANG, (16, 128, 0.28, 6, 8000, 7557, 8000, 2000, 1.0, 10, 20.0, 10)),
    "tgi": ("tgi", TGI, (12, 3, 0.25, None, 900, 450, None, None, 0.018, 9, None, None)),
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_server_reads_the_same(kind):
    dialect, text, values = EXPECTED[kind]
    reading = parse(text.encode())
    assert reading.dialect == dialect
    assert reading.values == dict(zip(FIGURES, values, strict=True))
    assert set(reading.reasons) == {figure for figure, value in reading.values.items() if value is None}
    assert parse(text.replace("\n", "\r\n").encode()) == reading


def test_reasons_name_what_is_missing():
    assert parse(VLLM_V0.encode()).reasons == dict.fromkeys(("queue_time_s_sum", "queue_time_s_count")) | {
        f"queue_time_s_{part}": f"the server shows no vllm:request_queue_time_seconds_{part}"
        for part in ("sum", "count")
    }
    assert parse(TGI.encode()).reasons["preemptions_total"] == "tgi has no such figure"


def test_an_unknown_server_lists_its_names():
    reading = parse(UNKNOWN.encode())
    assert reading.dialect is None
    assert set(reading.values.values()) == {None}
    assert set(reading.reasons) == set(FIGURES)
    assert "batchmark, vllm, sglang, tgi" in reading.reasons["running"]
    assert reading.names == ("http_requests_total", "go_goroutines")
    assert len(parse("".join(f"n{i} 1\n" for i in range(5000)).encode()).names) == 100


@pytest.mark.parametrize(
    ("value", "reason"), [("NaN", "is not a number"), ("+Inf", "is not a number"), ("63.5", "outside 0 to 1")]
)
def test_a_value_that_cannot_be_is_null(value, reason):
    reading = parse(f"vllm:kv_cache_usage_perc {value}\nvllm:num_requests_running 2\n".encode())
    assert reading.values["kv_usage"] is None
    assert reason in reading.reasons["kv_usage"]
    assert reading.values["running"] == 2


def test_a_share_of_nothing_is_null():
    reading = parse(b"tgi_batch_current_max_tokens 0\ntgi_batch_max_total_tokens 0\n")
    assert reading.values["kv_usage"] is None
    assert "is not a number" in reading.reasons["kv_usage"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"# only a comment\n",
        b"<!DOCTYPE html>\n<html><body>vllm:num_requests_running 3</body></html>\n",
        b'{"detail":"Not Found"}',
        b"Not Found\n",
        b"\xff\xfe\x00v",
        b'vllm:num_requests_running{model_name="m 3\n',
        b"vllm:num_requests_running{} three\n",
        b"vllm:num_requests_running 3\nvllm:num_requests_wai",
    ],
)
def test_what_is_not_prometheus_text_is_an_error(body):
    with pytest.raises(MetricsError):
        parse(body)


@CALM
@given(st.integers(0, len(VLLM_V1)), st.binary(max_size=30), st.integers(0, 40))
def test_a_damaged_text_gives_figures_or_a_metrics_error(at, what, cut):
    body = VLLM_V1.encode()
    damaged = body[:at] + what + body[at + cut :]
    try:
        reading = parse(damaged)
    except MetricsError:
        return
    assert list(reading.values) == list(FIGURES)
    for figure, value in reading.values.items():
        assert (value is None) == (figure in reading.reasons)
        assert value is None or math.isfinite(value)


def row(t, **values):
    return (
        {"t_ns": int(t * 1e9), "took_ms": 1.0, "error": None, "dialect": "vllm"}
        | dict.fromkeys(FIGURES)
        | values
    )


def test_summary_of_known_rows():
    rows = [
        row(-0.1, running=0, waiting=0, kv_usage=0.0, generation_tokens_total=1000, queue_time_s_sum=2.0)
        | {"queue_time_s_count": 10, "prefix_cache_queries_total": 50, "prefix_cache_hits_total": 10},
        {"t_ns": 400_000_000, "took_ms": 400.0, "error": "no answer within 0.4 s"},
        row(0.9, running=4, waiting=2, kv_usage=0.5, generation_tokens_total=1600, queue_time_s_sum=2.5)
        | {"queue_time_s_count": 12, "prefix_cache_queries_total": 90, "prefix_cache_hits_total": 40},
        row(1.4, running=8, waiting=1, kv_usage=0.7, generation_tokens_total=1900, queue_time_s_sum=3.0)
        | {"queue_time_s_count": 14, "prefix_cache_queries_total": 150, "prefix_cache_hits_total": 60},
    ]
    found = summarise_server_metrics(rows)
    reasons = found.pop("null_reasons")
    assert found == {
        "dialect": "vllm",
        "scrapes": 4,
        "failed": 1,
        "start_s": -0.1,
        "end_s": 1.4,
        "running": {"mean": 4.0, "max": 8},
        "waiting": {"mean": 1.0, "max": 2},
        "kv_usage": {"mean": pytest.approx(0.4), "max": 0.7},
        "preemptions": None,
        "prompt_tokens": None,
        "generation_tokens": 900,
        "prefix_cache_queries": 100,
        "prefix_cache_hits": 50,
        "prefix_cache_hit_rate": 0.5,
        "queue_time_ms": {"n": 4, "mean": 250.0},
        "ttft_ms": {"n": None, "mean": None},
    }
    assert set(reasons) == {"preemptions", "prompt_tokens", "ttft_ms"}
    assert reasons["preemptions"] == "no such figure on the /metrics of this server (vllm)"


def test_a_window_takes_gauges_inside_and_counters_between_the_rows():
    rows = [row(float(t), running=t, generation_tokens_total=100 * t * t) for t in range(6)]
    found = summarise_server_metrics(rows, 1.5, 4.25)
    assert (found["start_s"], found["end_s"], found["scrapes"]) == (1.5, 4.25, 3)
    assert found["running"] == {"mean": 3.0, "max": 4}
    assert found["generation_tokens"] == pytest.approx((1600 + 0.25 * 900) - (100 + 0.5 * 300))
    wide = summarise_server_metrics(rows, -10.0, 99.0)
    assert (wide["start_s"], wide["end_s"], wide["generation_tokens"]) == (0.0, 5.0, 2500)
    before = summarise_server_metrics(rows, 50.0, 60.0)
    assert before["scrapes"] == 0
    assert "not scraped" in before["null_reasons"]["generation_tokens"]
    assert before["running"] == {"mean": None, "max": None}


def test_a_counter_that_goes_back_is_null_and_one_that_comes_later_began_at_zero():
    rows = [row(0, generation_tokens_total=900), row(1, generation_tokens_total=5, prompt_tokens_total=7)]
    found = summarise_server_metrics(rows)
    assert found["generation_tokens"] is None
    assert "went back" in found["null_reasons"]["generation_tokens"]
    assert found["prompt_tokens"] == 7


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "were not scraped"),
        ([{"t_ns": 0, "error": "HTTP 404"}] * 3, "HTTP 404"),
        ([row(0) | {"dialect": None}] * 2, "none of those that are known"),
    ],
)
def test_a_summary_without_figures_says_why(rows, reason):
    found = summarise_server_metrics(rows)
    assert found["scrapes"] == len(rows)
    for name in ("running", "preemptions", "prefix_cache_hit_rate", "ttft_ms"):
        assert reason in found["null_reasons"][name]
        value = found[name]
        assert value is None or set(value.values()) == {None}


@CALM
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["t_ns", "error", "dialect", *FIGURES]),
            st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.none(), max_size=1),
        ),
        max_size=6,
    )
)
def test_whatever_a_file_holds_each_null_has_its_reason(rows):
    found = summarise_server_metrics(rows)
    reasons = found.pop("null_reasons")
    for name, value in found.items():
        part = value if isinstance(value, dict) else {"": value}
        assert (None in part.values()) == (name in reasons), name


def test_one_scrape_has_no_difference():
    found = summarise_server_metrics([row(0, generation_tokens_total=900, running=1)])
    assert found["running"] == {"mean": 1.0, "max": 1}
    assert found["null_reasons"]["generation_tokens"] == "one scrape has no difference"


def test_lines_that_a_kill_cut_off_are_left_out(tmp_path):
    whole = json.dumps(row(0, running=1))
    (tmp_path / "server_metrics.jsonl").write_text(f'{whole}\n[1]\n{{"t_ns":"x"}}\n{whole[:30]}')
    assert read_server_metrics(tmp_path) == [row(0, running=1)]

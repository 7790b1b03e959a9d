"""How requests end and what is counted: failures that must not flatter, ends of the run, token counts by
source, streams that hold tokens back, lengths that are not what was asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.loadgen import Target
from harness.loadgen.answer import Answer
from harness.metrics import build_summary
from tests.support import run_factory
from tests.support.golden import LATE_MS, Golden, assert_follows, first_token, measure
from tests.support.load import every, request
from tests.support.script_process import ScriptProcess
from tests.support.script_server import (
    DONE,
    AsAsked,
    ById,
    InTurn,
    Script,
    Step,
    chat,
    completion,
    ending,
    refusal,
    timeline,
    tokens,
    usage,
)
from workloads.schedule import Segment, request_id

QUICK = timeline([(0.05, 1), (0.1, 1)])


def figures(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every number or null of a part of the summary, with its path; `n`, `reliable` and `zero_share` are no
    latencies."""
    if not isinstance(value, dict):
        return [(path, value)]
    skipped = ("n", "reliable", "ci95", "zero_share")
    return [f for k, v in value.items() if k not in skipped for f in figures(v, f"{path}.{k}")]


# Failures.


@pytest.mark.parametrize("status", [500, 503])
def test_failures_do_not_improve_latency(
    server: ScriptProcess, backend: str, tmp_path: Path, status: int
) -> None:
    """SemiAnalysisAI/InferenceX#357: 30 % are refused at once, the others wait 100 ms for a token."""
    rule = ById({request_id(i): refusal(status) for i in range(0, 30, 3)}, timeline([(0.1, 1)]))
    run = measure(server, rule, every(0.01, 30), tmp_path, backend=backend)
    kind = "failed" if status == 500 else "rejected"
    counts = run.summary["counts"]
    assert (counts[kind], counts["completed"], counts["scheduled"]) == (10, 20, 30)
    latency = run.summary["latency_ms"]
    served = [r.id for r in run.records.values() if r.outcome == "completed"]
    true = np.array(
        [(first_token(s) - run.t0_ns - r.intended_ns) / 1e6 for r, s in run.pairs() if r.id in served]
    )
    assert latency["ttft"]["from_intended"]["n"] == len(true) == 20
    assert_follows(latency["ttft"]["from_intended"]["p50"], float(np.median(true)))
    for name in ("adj_ttft", "adj_e2e"):
        assert latency[name]["n"] == 30
        assert latency[name]["p50"] >= latency["ttft"]["from_intended"]["p50"]
        for figure in ("p90", "p95", "p99", "max", "mean"):
            assert latency[name][figure] is None
            assert "infinite" in run.summary["null_reasons"][f"latency_ms.{name}.{figure}"]
    if status == 500:
        assert not run.summary["valid"]
        assert any(reason.startswith("errors: 10 of 30") for reason in run.summary["invalid_reasons"])
    assert run.summary["throughput"]["slo_attainment"] == pytest.approx(2 / 3, abs=1e-4)


@pytest.mark.parametrize("script", [refusal(429), Script([tokens(1), Step("reset")])])
def test_when_all_fail_nothing_took_any_time(
    server: ScriptProcess, backend: str, tmp_path: Path, script: Script
) -> None:
    """Every latency is null with its reason, never 0, and the run is no success."""
    run = measure(server, script, every(0.01, 12), tmp_path, backend=backend)
    assert len(run.truth.seen) == run.summary["counts"]["scheduled"] == 12
    assert run.summary["counts"]["completed"] == 0
    found = figures(run.summary["latency_ms"])
    assert len(found) > 60
    assert [path for path, value in found if value is not None] == []
    assert run.summary["null_reasons"]["latency_ms.ttft.from_intended"] == "no completed request"
    assert "no request completed" in run.summary["invalid_reasons"]
    assert run.summary["throughput"]["requests_per_s"] == 0
    assert run.summary["throughput"]["goodput_rps"] == 0


def test_a_success_without_a_token_is_not_instant(
    server: ScriptProcess, backend: str, tmp_path: Path
) -> None:
    """vllm-project/vllm-omni#7058: HTTP 200, no token, counted there as a TTFT of 0."""
    rule = InTurn([*([QUICK] * 5), Script(ending(0))])
    run = measure(server, rule, every(0.05, 10), tmp_path, backend=backend)
    ttft = run.summary["latency_ms"]["ttft"]["from_intended"]
    assert run.summary["counts"]["completed"] == 10
    assert ttft["n"] == 5
    assert ttft["p50"] >= 50 - 1


# The end of the run, and every way to end before it.


ENDS: dict[str, tuple[Script, dict[str, Any], str]] = {
    "whole": (QUICK, {}, "completed"),
    "broken": (Script([tokens(1), Step("reset", 0.02)]), {}, "failed"),
    "refused": (refusal(429, code="queue_full"), {}, "rejected"),
    "slow": (Script([tokens(1), Step("hang")]), {"timeout_s": 0.3}, "timed_out"),
    "impatient": (
        Script([tokens(1), Step("hang")]),
        {"cancel_kind": "after_s", "cancel_value": 0.2},
        "cancelled",
    ),
    # 200 tokens over 2 s: the run ends in the middle of them.
    "long": (timeline([(0.1 + 0.01 * k, 1) for k in range(200)]), {}, "cut_off"),
}
STOPPED_S = 1.0


@pytest.fixture(scope="module")
def stopped(server: ScriptProcess, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """A run that is ended after a second: five of each kind, and three that would have come later."""
    requests, rule = [], {}
    for name, (script, changes, _) in ENDS.items():
        for _ in range(5):
            index = len(requests)
            requests.append(request(index, 0.01 * index, stop_after=200, request_class=name, **changes))
            rule[request_id(index)] = script
    requests += [request(len(requests) + k, 30.0 + k, request_class="never") for k in range(3)]
    folder = tmp_path_factory.mktemp("stopped")
    return measure(server, ById(rule), requests, folder, backend=backend, stop_after_s=STOPPED_S)


def test_every_request_ends_in_one_of_six_ways(stopped: Golden) -> None:
    """vllm-project/guidellm#77, #514: scheduled = completed + failed + timed_out + rejected + cancelled +
    cut_off, in the run and in every class of it."""
    counts = stopped.summary["counts"]
    outcomes = ("completed", "failed", "timed_out", "rejected", "cancelled", "cut_off")
    assert counts["scheduled"] == sum(counts[name] for name in outcomes) == 33
    assert [counts[name] for name in outcomes] == [5, 5, 5, 5, 5, 8]
    for name, (_, _, outcome) in ENDS.items():
        of_class = stopped.of_class(name)["counts"]
        assert (of_class["scheduled"], of_class[outcome]) == (5, 5)
    reasons = sorted(r.reason or "" for r in stopped.records.values() if r.outcome == "cut_off")
    assert reasons == ["in_flight"] * 5 + ["not_sent"] * 3
    assert len(stopped.truth.seen) == 30
    assert not stopped.summary["run"]["complete"]
    assert any("incomplete" in reason for reason in stopped.summary["invalid_reasons"])


def test_tokens_of_answers_that_were_cut_off_count_by_their_own_time(stopped: Golden) -> None:
    """vllm-project/guidellm#529: unfinished requests lowered the throughput. What had arrived is counted;
    what the server sent after the client had hung up is not."""
    total = 0
    for record, seen in stopped.pairs():
        if record.send_ns is None:
            continue
        got = sum(record.chunk_tokens)
        sent = sum(n for _, n in seen.sends)
        total += got
        assert got <= sent
        if record.request_class == "long":
            end_ns = stopped.t0_ns + (record.end_ns or 0)
            before = sum(n for ns, n in seen.sends if ns < end_ns - LATE_MS * 1e6)
            assert 20 < before <= got < 200
    window = stopped.summary["window"]
    rate = stopped.summary["throughput"]["output_tokens_per_s"]
    assert rate * (window["end_s"] - window["start_s"]) == pytest.approx(total, rel=1e-3)
    long_rate = stopped.of_class("long")["throughput"]["output_tokens_per_s"]
    assert long_rate > 0.5 * rate
    # Their latency is unknown, and so in no percentile.
    assert stopped.of_class("long")["latency_ms"]["e2e"]["from_intended"]["n"] == 0


# Counts.


class CountsCalls:
    """A tokenizer that would add a begin-of-sequence id to every text that it is given; it remembers them."""

    name = "counting"
    exact = True

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def count(self, text: str) -> int:
        self.texts.append(text)
        return len(text.split())


def test_counts_come_from_usage_then_ids_then_one_retokenisation(
    server: ScriptProcess, backend: str, tmp_path: Path
) -> None:
    """inference-perf#364, vllm-project/vllm#45739: never chunk by chunk, and the summary says from where."""
    words = [tokens(1, with_ids=False, text=f"word{k} ") for k in range(6)]
    scripts = [
        Script([tokens(3), *ending(3)]),  # usage, and ids agree
        Script([tokens(3), *ending(5)]),  # usage, and ids do not
        Script([tokens(3), tokens(2), *ending(5, with_usage=False)]),  # ids
        Script([*words, *ending(6, with_usage=False)]),  # neither
    ]
    tokenizer = CountsCalls()
    target = Target(server.base_url, "m", dialect="openai", tokenizer=tokenizer)
    run = measure(server, InTurn(scripts), every(0.15, 4), tmp_path, backend=backend, target=target)
    assert len(run.truth.seen) == run.summary["counts"]["completed"] == 4
    got = [(r.output_tokens, r.token_source, r.token_mismatch) for _, r in sorted(run.records.items())]
    assert got == [(3, "usage", False), (5, "usage", True), (5, "ids", False), (6, "retokenised", False)]
    assert tokenizer.texts == ["".join(f"word{k} " for k in range(6))]
    assert run.summary["token_source"] == {"usage": 2, "ids": 1, "retokenised": 1, "mismatches": 1}


def test_a_stream_that_holds_tokens_back_is_named(
    server: ScriptProcess, backend: str, tmp_path: Path
) -> None:
    """tenstorrent/tt-inference-server#4681: five events in one write leave gaps of nothing between them.
    mlcommons/endpoints#380: a chunk of twenty tokens is honest about it, and no token's time."""
    five = b"".join(completion("x", [k]) for k in range(5))
    held = Script([*(Step("tokens", 0.05, five, 5) for _ in range(4)), *ending(20)])
    bundled = timeline([(0.05 * k, 20) for k in range(4)])
    runs = {
        name: measure(server, script, every(0.02, 20), tmp_path / name, backend=backend)
        for name, script in (("held", held), ("bundled", bundled))
    }
    found = {name: (run.summary["client"], " ".join(run.summary["warnings"])) for name, run in runs.items()}
    assert [len(run.truth.seen) for run in runs.values()] == [20, 20]
    assert [sum(sum(r.chunk_tokens) for r in run.records.values()) for run in runs.values()] == [400, 1600]
    client, warnings = found["held"]
    assert client["gaps_under_0.1ms_share"] > 0.6
    assert client["coalesced_share"] > 0.6
    assert client["tokens_per_chunk"] == pytest.approx(1)
    assert "gaps are under 0.1 ms" in warnings
    assert "tokens a chunk" not in warnings
    client, warnings = found["bundled"]
    assert client["gaps_under_0.1ms_share"] < 0.3
    assert client["tokens_per_chunk"] == pytest.approx(20)
    assert "20 tokens a chunk" in warnings


def test_prompt_lengths_are_those_of_the_plan_or_are_said_not_to_be(
    server: ScriptProcess, backend: str, tmp_path: Path
) -> None:
    """vllm-project/vllm#10847: the server counts the ids that came; ours are exact."""
    lengths = [3, 50, 700, 4000]
    requests = [
        request(i, 0.02 * i, prompt_tokens=n, segments=(Segment(f"s{i}", n),)) for i, n in enumerate(lengths)
    ]
    run = measure(server, AsAsked(), requests, tmp_path / "exact", backend=backend)
    assert [len(s.body["prompt"]) for s in run.truth.seen] == lengths
    assert [r.prompt_tokens for _, r in sorted(run.records.items())] == lengths
    assert run.summary["prompt_tokens"]["planned"] == run.summary["prompt_tokens"]["counted"] == sum(lengths)
    assert run.summary["prompt_tokens"]["off"] == 0
    other = measure(server, AsAsked(short=1), requests, tmp_path / "off", backend=backend)
    assert other.summary["prompt_tokens"]["counted"] == sum(lengths) - 4
    assert other.summary["prompt_tokens"]["off"] == 4


# Whatever comes.


EVENTS = st.lists(
    st.one_of(
        st.integers(0, 40).map(lambda n: completion("x" * n, list(range(n)))),
        st.integers(0, 3).map(lambda n: completion("word " * n)),
        st.sampled_from(
            [{"role": "assistant"}, {"content": ""}, {"content": "a"}, {"reasoning_content": "r"}]
        ).map(chat),
        st.integers(0, 60).map(usage),
        st.just(completion(finish="stop")),
        st.just(b": comment\n\n"),
        st.just(b"data: {\n\n"),
        st.just(DONE),
    ),
    max_size=12,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(answers=st.lists(EVENTS, min_size=1, max_size=3), same_time=st.booleans())
def test_any_answer_gives_numbers_or_null(
    tmp_path_factory: pytest.TempPathFactory, answers: list[list[bytes]], same_time: bool
) -> None:
    """sgl-project/sglang#26497: ZeroDivisionError where a chunk brought no token. Any chunks, also
    all at one moment, makes a summary of finite numbers and nulls, and every null has its reason."""
    rows = []
    for index, events in enumerate(answers):
        answer = Answer(stream=True, keep_text=False)
        answer.begin(1_000, 200, "text/event-stream")
        for k, piece in enumerate(events):
            if not answer.feed(2_000 + (0 if same_time else k * 1_000_000), piece):
                break
        verdict = answer.finish()
        rows.append(
            run_factory.request(
                index,
                outcome=verdict.outcome,
                reason=verdict.reason,
                chunk_ns=list(answer.chunk_ns),
                chunk_tokens=list(answer.chunk_tokens),
                first_event_ns=answer.first_event_ns,
                headers_ns=answer.headers_ns,
                output_tokens=answer.usage_output,
                token_source="usage" if answer.usage_output is not None else None,
                end_ns=100_000_000,
            )
        )
    folder = run_factory.write_run(tmp_path_factory.mktemp("any"), rows)
    summary = build_summary(folder)
    json.dumps(summary, allow_nan=False)
    assert sum(summary["counts"][k] for k in ("completed", "failed", "rejected")) == len(answers)
    for path, value in figures(summary["latency_ms"], "latency_ms"):
        assert value is None or (math.isfinite(value) and value >= 0), path
        if value is None:
            parents = [path.rsplit(".", k)[0] for k in range(len(path.split(".")))]
            assert any(parent in summary["null_reasons"] for parent in parents), path

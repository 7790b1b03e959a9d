"""What is a token, and when did it come: one run over sockets, whose request classes are a dozen kinds of
answers, all under way side by side. Each figure of summary.by_class is held to the server's own log.

Times of the plan are those of the faults they come from, where these are short; a fault is then told from
its cure by at least 150 ms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.golden import (
    EARLY_MS,
    LATE_MS,
    Golden,
    assert_follows,
    first_token,
    last_token,
    measure,
    true_gaps_ms,
)
from tests.support.load import request
from tests.support.script_process import ScriptProcess
from tests.support.script_server import (
    COMMENT,
    DONE,
    ById,
    Script,
    Seen,
    Step,
    chat,
    completion,
    delta,
    ending,
    plain,
    sse,
    timeline,
    tokens,
    usage,
)
from workloads.schedule import request_id

N = 10
"""Answers of each class, spread over SPREAD_S, so that one hold-up of the machine cannot move a median."""
SPREAD_S = 0.6
SLO = {"ttft_ms": 150.0, "tpot_ms": 12.0}


def call_delta(at_s: float, **function: str) -> Step:
    return delta(at_s, tool_calls=[{"index": 0, "function": function}])


def counted(n: int) -> dict[str, Any]:
    return {"usage": {"completion_tokens": n, "prompt_tokens": 3}}


def reasoning_usage(output: int, reasoning: int) -> bytes:
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    return sse({"choices": [], "usage": {"completion_tokens": output, "prompt_tokens": 3, **details}})


SCRIPTS: dict[str, Script] = {
    # The role at once, an empty text, then the first text: chunked prefill's early chunks.
    "role": Script(
        [
            plain(chat({"role": "assistant"}), at_s=0.01),
            plain(chat({"content": ""}), at_s=0.02),
            delta(0.5, content="a"),
            delta(0.55, content="b"),
            plain(chat({}, finish="stop")),
            plain(usage(2)),
            plain(DONE),
        ]
    ),
    "bundles": timeline([(0.3 + 0.4 * k, 20) for k in range(5)]),
    "late_first": timeline([(1.0 + 0.01 * k, 1) for k in range(10)]),
    # Usage alone in a chunk: before the first token, beside each token, and after the last one.
    "usage": Script(
        [
            plain(usage(0), at_s=0.01),
            *(tokens(1, at_s=0.3 + 0.04 * k, **counted(k + 1)) for k in range(5)),
            plain(completion(finish="length")),
            plain(usage(5), at_s=0.8),
            plain(DONE, at_s=1.1),
        ]
    ),
    "reasoning": Script(
        [
            plain(chat({"role": "assistant", "content": None}), at_s=0.01),
            *(delta(0.2 + 0.002 * k, reasoning_content="r") for k in range(200)),
            *(delta(0.8 + 0.01 * k, content="t") for k in range(5)),
            plain(chat({}, finish="stop")),
            plain(reasoning_usage(205, 200)),
            plain(DONE),
        ]
    ),
    "tool": Script(
        [
            plain(chat({"role": "assistant", "content": None}), at_s=0.01),
            call_delta(0.3, name="look_up", arguments=""),
            *(call_delta(0.32 + 0.02 * k, arguments="{") for k in range(4)),
            plain(chat({}, finish="tool_calls")),
            plain(usage(5)),
            plain(DONE),
        ]
    ),
    # Means alike, one pause: 99 gaps of 5 ms and one of 505 ms; 100 gaps of 10 ms.
    "stalled": timeline([(0.1 + 0.005 * k + (0.5 if k >= 20 else 0.0), 1) for k in range(101)]),
    "uniform": timeline([(0.1 + 0.01 * k, 1) for k in range(101)]),
    "drained": timeline([(0.4, 20)]),
    "silent": Script([plain(COMMENT, at_s=0.05), *ending(0)]),
}


@pytest.fixture(scope="module")
def golden(server: ScriptProcess, backend: str, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    requests, rule = [], {}
    for i in range(N):
        for k, (name, script) in enumerate(SCRIPTS.items()):
            index = len(requests)
            arrival_s = SPREAD_S * (i + k / len(SCRIPTS)) / N
            requests.append(request(index, arrival_s, stop_after=250, request_class=name))
            rule[request_id(index)] = script
    folder: Path = tmp_path_factory.mktemp("tokens")
    run = measure(server, ById(rule), requests, folder, backend=backend, slo=SLO)
    assert len(run.truth.seen) == len(requests) == N * len(SCRIPTS)
    assert {name: run.of_class(name)["counts"]["completed"] for name in SCRIPTS} == dict.fromkeys(SCRIPTS, N)
    return run


def block(golden: Golden, name: str, figure: str) -> dict[str, Any]:
    """A block of by_class.NAME.latency_ms by its dotted path, over all of the class."""
    value = golden.of_class(name)["latency_ms"]
    for part in figure.split("."):
        value = value[part]
    return value


def of_all(golden: Golden, name: str, figure: str) -> dict[str, Any]:
    value = block(golden, name, figure)
    assert value["n"] == N
    return value


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "silent"])
def test_first_and_last_token_of_every_kind(golden: Golden, name: str) -> None:
    ttft, e2e = of_all(golden, name, "ttft.from_intended"), of_all(golden, name, "e2e.from_intended")
    assert_follows(ttft["p50"], float(np.median(golden.true_ms(first_token, name))))
    assert_follows(e2e["p50"], float(np.median(golden.true_ms(last_token, name))))
    # From the send it is the same less the way there, which the server's log bounds from the other side.
    served = [(first_token(s) - s.received_ns) / 1e6 for _, s in golden.pairs(name)]
    assert_follows(of_all(golden, name, "ttft.from_send")["p50"], float(np.median(served)))
    for record, seen in golden.pairs(name):
        assert record.send_ns is not None
        assert golden.t0_ns + record.send_ns <= seen.received_ns
        assert list(record.chunk_tokens) == [n for _, n in seen.sends]
        late = [golden.t0_ns + ours - ns for ours, (ns, _) in zip(record.chunk_ns, seen.sends, strict=True)]
        assert min(late) >= -EARLY_MS * 1e6


def test_a_role_chunk_is_no_first_token(golden: Golden) -> None:
    """vllm-project/vllm#15106."""
    role = golden.true_ms(lambda seen: seen.plain_ns[0], "role")
    assert_follows(of_all(golden, "role", "ttfc.from_intended")["p50"], float(np.median(role)))
    assert of_all(golden, "role", "ttfc.from_intended")["p50"] < 250
    assert block(golden, "role", "ttft.from_intended")["p50"] >= 500 - EARLY_MS
    assert block(golden, "role", "icl")["max"] < 400  # the wait for the first token is no gap either


def test_bundled_tokens_have_a_pace_per_token_and_gaps_per_chunk(golden: Golden) -> None:
    """vllm-project/vllm#27485: 5 chunks of 20 tokens, 400 ms apart: 20 ms a token, and not 16.2."""
    gaps = [true_gaps_ms(seen) for _, seen in golden.pairs("bundles")]
    pace = float(np.median([each.sum() / 80 for each in gaps]))
    assert of_all(golden, "bundles", "tpot")["p50"] == pytest.approx(pace, abs=1.5)
    icl, itl = block(golden, "bundles", "icl"), block(golden, "bundles", "itl")
    assert (icl["n"], itl["n"]) == (4 * N, 99 * N)
    assert icl["p50"] == pytest.approx(float(np.median(np.concatenate(gaps))), abs=LATE_MS)
    assert itl["zero_share"] == pytest.approx(95 / 99, abs=1e-4)
    assert itl["p90"] == 0
    assert itl["max"] > 300


def test_time_to_the_first_token_is_no_gap(golden: Golden) -> None:
    """vllm-project/vllm#7242: a first token after a second, then one each 10 ms."""
    for figure in ("itl", "icl"):
        gaps = block(golden, "late_first", figure)
        assert gaps["n"] == 9 * N
        assert gaps["max"] < 500
        assert gaps["p50"] < 100
    assert of_all(golden, "late_first", "ttft.from_intended")["p50"] >= 1000 - EARLY_MS


def test_usage_is_no_token_wherever_it_comes(golden: Golden) -> None:
    """sgl-project/genai-bench#44: TTFT, last token and the pace are those of the five tokens."""
    for record, seen in golden.pairs("usage"):
        assert record.chunk_tokens == (1,) * 5
        assert (record.output_tokens, record.token_source, record.token_mismatch) == (5, "usage", False)
        assert record.end_ns is not None
        assert golden.t0_ns + record.end_ns >= seen.plain_ns[-1] - EARLY_MS * 1e6  # [DONE] ends it, no token
    assert block(golden, "usage", "ttft.from_intended")["p50"] >= 300 - EARLY_MS
    assert block(golden, "usage", "e2e.from_intended")["p50"] < 800
    pace = float(np.median([true_gaps_ms(seen).sum() / 4 for _, seen in golden.pairs("usage")]))
    assert of_all(golden, "usage", "tpot")["p50"] == pytest.approx(pace, abs=LATE_MS / 4)


def test_reasoning_is_tokens_and_the_first_answer_has_a_time_of_its_own(golden: Golden) -> None:
    """kubernetes-sigs/inference-perf#559: 200 deltas of reasoning, then text."""

    def first_text(seen: Seen) -> int:
        return seen.sends[200][0]

    assert_follows(
        of_all(golden, "reasoning", "ttfo.from_intended")["p50"],
        float(np.median(golden.true_ms(first_text, "reasoning"))),
    )
    ttft = of_all(golden, "reasoning", "ttft.from_intended")["p50"]
    assert ttft < 500 < 800 - EARLY_MS <= block(golden, "reasoning", "ttfo.from_intended")["p50"]
    for record, _ in golden.pairs("reasoning"):
        assert (record.output_tokens, record.reasoning_tokens) == (205, 200)
        assert len(record.chunk_ns) == 205
    # Where there is no reasoning the two are one.
    assert (
        block(golden, "uniform", "ttfo.from_intended")["p50"]
        == block(golden, "uniform", "ttft.from_intended")["p50"]
    )


def test_tool_calls_are_tokens(golden: Golden) -> None:
    """sgl-project/sglang#36272: the name of the function is the first one."""
    for record, _ in golden.pairs("tool"):
        assert record.chunk_tokens == (1,) * 5
        assert record.output_tokens == 5
    assert 300 - EARLY_MS <= block(golden, "tool", "ttft.from_intended")["p50"] < 450


def test_a_mean_hides_a_stall_and_three_figures_do_not(golden: Golden) -> None:
    """inference-sim/inference-sim#433: 99 short gaps and one long one against 100 of the mean length."""
    true = {name: [true_gaps_ms(seen) for _, seen in golden.pairs(name)] for name in ("stalled", "uniform")}
    for name, gaps in true.items():
        mean = float(np.mean([each.mean() for each in gaps]))
        assert block(golden, name, "itl")["n"] == 100 * N
        assert block(golden, name, "itl")["mean"] == pytest.approx(mean, abs=1.0)
    means = [block(golden, name, "itl")["mean"] for name in true]
    assert means[0] == pytest.approx(means[1], abs=4.0)
    stalled, uniform = golden.of_class("stalled"), golden.of_class("uniform")
    assert stalled["stalls"]["count"] >= N
    longest = max(float(each.max()) for each in true["stalled"])
    assert stalled["stalls"]["longest_ms"] == pytest.approx(longest, abs=LATE_MS)
    assert stalled["stalls"]["seconds"] > 0.45 * N
    assert uniform["stalls"]["longest_ms"] < 400
    assert uniform["stalls"]["seconds"] < 0.2 * stalled["stalls"]["seconds"]
    assert stalled["fluidity"] < uniform["fluidity"] - 0.05


def test_a_drained_answer_has_no_pace_and_a_silent_one_no_time(golden: Golden) -> None:
    reasons = golden.summary["null_reasons"]
    for figure in ("tpot", "itl", "icl"):
        assert block(golden, "drained", figure)["p50"] is None
        assert "drained" in reasons[f"by_class.drained.latency_ms.{figure}"]
    assert block(golden, "drained", "normalized")["n"] == N
    for figure in ("ttft.from_intended", "e2e.from_intended", "tpot", "itl", "normalized"):
        assert block(golden, "silent", figure)["p50"] is None
        assert f"by_class.silent.latency_ms.{figure}" in reasons
    assert golden.of_class("silent")["counts"]["completed"] == N


def test_every_token_of_the_run_is_counted_once(golden: Golden) -> None:
    true = sum(n for seen in golden.truth.seen for _, n in seen.sends)
    ours = sum(sum(record.chunk_tokens) for record in golden.records.values())
    assert ours == true == N * (2 + 100 + 10 + 5 + 205 + 5 + 101 + 101 + 20)
    window = golden.summary["window"]
    length = window["end_s"] - window["start_s"]
    assert golden.summary["throughput"]["output_tokens_per_s"] * length == pytest.approx(true, rel=1e-3)
    counts = golden.summary["token_source"]
    assert (counts["usage"], counts["mismatches"]) == (N * len(SCRIPTS), 0)

"""Latency by hand: the conformance vectors of the field's tools, and the faults they were caught at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.metrics.latency import chunk_table, gap_table, latency_blocks, per_request
from harness.metrics.run import request_frame
from harness.metrics.stalls import deadline_table, deadlines, fluidity, stalls
from harness.metrics.throughput import throughput
from harness.metrics.windows import load_window
from tests.support.run_factory import ns, request

SLO = {"ttft_ms": 2000, "tpot_ms": 200}


def figures(*rows: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    frame = request_frame(rows)
    return latency_blocks(frame, per_request(frame, SLO))


def smoothness(rows: list[dict[str, Any]], slo: dict[str, Any]) -> tuple[float | None, str | None]:
    requests = request_frame(rows)
    return fluidity(deadline_table(requests, per_request(requests, slo), slo), "no pace")


def test_one_token_a_chunk() -> None:
    """Sent at 0, first token at 1.0 s, last at 3.0 s, 101 tokens."""
    blocks, _ = figures(request(0, [(1.0 + 0.02 * k, 1) for k in range(101)]))
    assert blocks["ttft"]["from_intended"]["p50"] == pytest.approx(1000)
    assert blocks["tpot"]["p50"] == pytest.approx(20.0)
    assert blocks["itl"]["p50"] == pytest.approx(20.0)
    assert blocks["itl"]["n"] == 100
    assert blocks["itl"]["zero_share"] == 0
    assert blocks["e2e"]["from_intended"]["p50"] == pytest.approx(3000)
    assert blocks["normalized"]["p50"] == pytest.approx(29.7, abs=0.005)


def test_tokens_in_bundles() -> None:
    """100 tokens in 5 chunks of 20, 400 ms apart: the pace is 20 ms, not 16.2, and gaps are per chunk."""
    blocks, _ = figures(request(0, [(1.0 + 0.4 * k, 20) for k in range(5)]))
    assert blocks["icl"]["p50"] == pytest.approx(400)
    assert blocks["icl"]["n"] == 4
    assert blocks["tpot"]["p50"] == pytest.approx(20.0)
    assert blocks["itl"]["n"] == 99  # n - 1 gaps: 4 of 400 ms and 19 zeros in each bundle
    assert blocks["itl"]["zero_share"] == pytest.approx(95 / 99)
    assert blocks["itl"]["p50"] == 0
    assert blocks["itl"]["max"] == pytest.approx(400)
    assert blocks["itl"]["mean"] == pytest.approx(1600 / 99)


def test_a_role_chunk_is_not_the_first_token() -> None:
    row = request(0, [(0.5, 1), (0.6, 1)], first_event_ns=ns(0.01), headers_ns=ns(0.01))
    blocks, _ = figures(row)
    assert blocks["ttft"]["from_intended"]["p50"] == pytest.approx(500)


def test_a_usage_chunk_at_the_end_is_no_token() -> None:
    blocks, _ = figures(request(0, [(0.5, 1), (0.6, 1)], end_ns=ns(5)))
    assert blocks["e2e"]["from_intended"]["p50"] == pytest.approx(600)
    assert blocks["tpot"]["p50"] == pytest.approx(100)


def test_ttft_is_no_gap() -> None:
    blocks, _ = figures(request(0, [(5.0 + 0.01 * k, 1) for k in range(10)]))
    assert blocks["itl"]["max"] == pytest.approx(10)
    assert blocks["icl"]["max"] == pytest.approx(10)


def test_waiting_behind_the_clients_own_cap_counts() -> None:
    """Service 500 ms, 10 requests/s, 8 requests, one at a time: E2E is 506 ms from the send, 1,932 from the
    arrival."""
    rows = []
    free = 0.0
    for i in range(8):
        sent = max(i * 0.1, free)
        free = sent + 0.506
        rows.append(request(i, [(free, 5)], intended=i * 0.1, send=sent))
    blocks, _ = figures(*rows)
    assert blocks["e2e"]["from_send"]["mean"] == pytest.approx(506)
    assert blocks["e2e"]["from_intended"]["mean"] == pytest.approx(1927, abs=1)
    assert blocks["e2e"]["from_intended"]["max"] == pytest.approx(3348, abs=1)


def test_a_drained_answer_has_no_pace() -> None:
    blocks, reasons = figures(*(request(i, [(2.0, 30)]) for i in range(3)))
    for name in ("tpot", "itl", "icl"):
        assert blocks[name]["n"] == 0
        assert blocks[name]["p50"] is None
        assert reasons[name].startswith("drained")
    assert blocks["itl"]["zero_share"] is None
    assert blocks["normalized"]["p50"] == pytest.approx(2000 / 30)
    assert blocks["ttft"]["from_intended"]["p50"] == pytest.approx(2000)


def test_a_whole_body_has_no_first_token() -> None:
    blocks, reasons = figures(request(0, [(2.0, 30)], stream=False))
    assert blocks["ttft"]["from_intended"]["p50"] is None
    assert reasons["ttft.from_intended"] == reasons["tpot"] == "not streamed"
    assert blocks["e2e"]["from_intended"]["p50"] == pytest.approx(2000)


def test_a_completed_answer_without_tokens_is_not_instant() -> None:
    blocks, reasons = figures(request(0, []))
    assert blocks["ttft"]["from_intended"]["p50"] is None
    assert blocks["e2e"]["from_intended"]["p50"] is None
    assert reasons["ttft.from_intended"] == "no token arrived"


def test_failures_do_not_improve_latency() -> None:
    """30 of 100 refused at once: plain figures cover what was served, adj_ ones say what a user may
    expect."""
    served = [request(i, [(1.0, 1), (1.1, 1)]) for i in range(70)]
    refused = [request(70 + i, outcome="rejected", status=503) for i in range(30)]
    blocks, reasons = figures(*served, *refused)
    assert blocks["e2e"]["from_intended"]["n"] == 70
    assert blocks["adj_e2e"]["n"] == blocks["adj_ttft"]["n"] == 100
    assert blocks["adj_e2e"]["p50"] == pytest.approx(1100)
    assert blocks["adj_e2e"]["p90"] is blocks["adj_ttft"]["p99"] is None
    assert reasons["adj_e2e.p90"].startswith("infinite")
    assert "adj_e2e.p50" not in reasons


@pytest.mark.parametrize("outcome", ["failed", "timed_out", "rejected"])
def test_when_all_fail_nothing_is_fast(outcome: str) -> None:
    blocks, reasons = figures(*(request(i, outcome=outcome) for i in range(400)))
    for name in ("tpot", "itl", "icl", "normalized"):
        assert blocks[name]["p99"] is None
        assert reasons[name] == "no completed request"
    assert blocks["ttft"]["from_send"]["p50"] is blocks["adj_ttft"]["p50"] is None


def test_who_gave_up_after_the_limit_counts_as_missed() -> None:
    """Half of the users hang up before a first token. At 0.5 s nothing was lost by the engine; at 3 s the
    limit of 2 s was, and leaving them out would flatter the engine that made them wait."""
    served = [request(i, [(1.0, 1), (1.1, 1)]) for i in range(10)]

    def attainment(*hung_up: dict[str, Any]) -> float:
        requests = request_frame([*served, *hung_up])
        frame = per_request(requests, SLO)
        window = load_window(requests)
        return throughput(frame, chunk_table(requests), None, window)[0]["slo_attainment"]

    early = [request(10 + i, outcome="cancelled", end_ns=ns(0.5)) for i in range(10)]
    late = [request(10 + i, outcome="cancelled", end_ns=ns(3.0)) for i in range(10)]
    late_first = [request(10 + i, [(2.5, 1)], outcome="cancelled", end_ns=ns(2.6)) for i in range(10)]
    good_first = [request(10 + i, [(0.5, 1)], outcome="cancelled", end_ns=ns(2.6)) for i in range(10)]
    assert attainment(*early) == attainment(*good_first) == 1.0
    assert attainment(*late) == attainment(*late_first) == 0.5


def test_hang_ups_and_the_runs_end_are_not_failures() -> None:
    rows = [request(0, [(1.0, 1)])]
    rows += [request(1, outcome="cancelled"), request(2, outcome="cut_off", reason="in_flight")]
    frame = per_request(request_frame(rows), SLO)
    assert frame["issued"].tolist() == [True, False, False]
    shed = per_request(request_frame([request(0, outcome="cut_off", reason="shed")]), SLO)
    assert shed["issued"].tolist() == [True]
    assert shed["met"].tolist() == [False]


def test_the_last_attempt_is_the_request() -> None:
    first = request(0, outcome="failed")
    frame = request_frame([{**request(0, [(1.0, 1)]), "attempt": 1}, first])
    assert frame["outcome"].tolist() == ["completed"]


@pytest.mark.parametrize(
    ("chunks", "stream", "met"),
    [
        ([(1.9, 1), (2.0, 1)], True, True),
        ([(2.1, 1), (2.2, 1)], True, False),  # TTFT
        ([(1.0, 1), (1.25, 1)], True, False),  # TPOT
        ([(1.9, 20)], True, True),  # drained in time
        ([(2.1, 20)], True, False),  # drained too late
        ([(1.9, 20)], False, True),
        ([(2.1, 20)], False, False),
        ([], True, False),
    ],
)
def test_slo(chunks: list[tuple[float, int]], stream: bool, met: bool) -> None:
    assert per_request(request_frame([request(0, chunks, stream=stream)]), SLO)["met"].tolist() == [met]


def test_chunks_of_a_server_that_does_not_count_are_stretched() -> None:
    frame = request_frame([request(0, [(1.0, 1), (2.0, 1)], output_tokens=50, token_source="usage")])
    assert chunk_table(frame)["scaled"].tolist() == [25.0, 25.0]
    assert per_request(frame, SLO)["tpot_ms"].tolist() == pytest.approx([1000 / 49])


def test_one_long_pause_is_a_stall_and_a_slow_pace_is_none() -> None:
    """99 gaps of 20 ms and one of 2 s against 100 of 40 ms: the means are alike, the pauses are not."""
    pause = np.cumsum([0.5, *[0.02] * 50, 2.0, *[0.02] * 49])
    even = np.cumsum([0.5, *[0.0398] * 100])
    bumpy, smooth = ([request(0, [(t, 1) for t in times])] for times in (pause, even))
    means = [figures(*rows)[0]["itl"]["mean"] for rows in (bumpy, smooth)]
    assert means[0] == pytest.approx(means[1], rel=0.01)
    found, none = (stalls(request_frame(rows), "")[0] for rows in (bumpy, smooth))
    assert (found["count"], found["threshold_ms"]) == (1, pytest.approx(100))
    assert found["seconds"] == pytest.approx(2.0)
    assert found["longest_ms"] == pytest.approx(2000)
    assert (none["count"], none["seconds"], none["threshold_ms"]) == (0, 0.0, pytest.approx(199))
    slo = {"ttft_ms": 600, "tpot_ms": 50}
    index = [smoothness(rows, slo)[0] for rows in (bumpy, smooth)]
    assert index[1] == 1.0
    assert index[0] is not None
    assert index[0] < 0.95


def test_stalls_of_answers_that_never_ended_count() -> None:
    row = request(0, [(0.1, 1), (0.2, 1), (9.0, 1)], outcome="timed_out")
    assert stalls(request_frame([row]), "")[0]["longest_ms"] == pytest.approx(8800)


def test_deadlines_by_hand() -> None:
    """TTFT 100, then 10 a token. Early by 60: slack. A gap of 75 needs 10 + 60 and is late:
    floor((75-60)/10) = 1."""
    assert deadlines(40, np.array([75.0]), np.array([1, 1]), 100, 10) == (1, 2)
    assert deadlines(40, np.array([70.0]), np.array([1, 1]), 100, 10) == (0, 2)
    # The first token 35 late: 1 + floor(35/10) = 4 deadlines missed; then two in time.
    assert deadlines(135, np.array([10.0, 9.0]), np.array([1, 1, 1]), 100, 10) == (4, 6)
    # 5 tokens at once are early by 4 x 10, which pays for a gap of 50.
    assert deadlines(100, np.array([50.0]), np.array([5, 1]), 100, 10) == (0, 6)


@st.composite
def any_row(draw: Any) -> dict[str, Any]:
    """A record as any server may cause it: chunks of 0 or many tokens, no chunks, counts that disagree,
    nulls."""
    size = draw(st.integers(0, 6))
    stamps = sorted(draw(st.lists(st.integers(0, 10**11), min_size=size, max_size=size)))
    tokens = draw(st.lists(st.integers(0, 50), min_size=size, max_size=size))
    outcome = draw(st.sampled_from(["completed", "failed", "timed_out", "rejected", "cancelled", "cut_off"]))
    maybe = st.none() | st.integers(0, 10**11)
    row = request(draw(st.integers(0, 30)), outcome=outcome)
    return {
        **row,
        "chunk_ns": stamps,
        "chunk_tokens": tokens,
        "stream": draw(st.booleans()),
        "send_ns": draw(maybe),
        "end_ns": draw(maybe),
        "first_event_ns": draw(maybe),
        "first_output_ns": draw(maybe),
        "reasoning_tokens": draw(st.none() | st.integers(0, 50)),
        "final": draw(st.booleans()),
        "reads": draw(st.integers(0, 9)),
        "coalesced": draw(st.integers(0, 9)),
        "output_tokens": draw(st.none() | st.integers(0, 200)),
        "reason": draw(st.none() | st.sampled_from(["shed", "in_flight", "queue_full"])),
        "status": draw(st.none() | st.integers(200, 503)),
    }


@given(st.lists(any_row(), max_size=8))
@settings(max_examples=40, deadline=None)
def test_any_chunk_sequence_gives_numbers_or_null(rows: list[dict[str, Any]]) -> None:
    requests = request_frame(rows)
    frame = per_request(requests, SLO)
    assert len(frame) == len({row["id"] for row in rows})
    pace = frame["tpot_ms"].to_numpy()
    assert not np.isinf(pace).any()
    assert (pace[np.isfinite(pace)] >= 0).all()
    blocks, reasons = latency_blocks(requests, frame)
    for name, block in blocks.items():
        for part in block.values() if name in ("ttft", "ttfc", "ttfo", "e2e") else [block]:
            for figure in ("mean", "p50", "p90", "p95", "p99", "max"):
                value = part[figure]
                assert value is None or np.isfinite(value)
                assert value is not None or part["n"] == 0 or name.startswith("adj_")
    assert (blocks["itl"]["n"] == 0) == ("itl" in reasons)
    gaps = gap_table(requests)
    assert (gaps["gap_ms"].dropna() >= 0).all()
    found, _ = stalls(requests, "none")
    assert (found["count"] is None) == gaps.empty
    index, _ = fluidity(deadline_table(requests, frame, SLO), "none")
    assert index is None or 0 <= index <= 1


def test_first_chunk_first_token_and_first_output_are_three_times() -> None:
    """Role chunk at 10 ms, first reasoning delta at 500 ms, first text at 900 ms."""
    row = request(0, [(0.5, 1), (0.7, 1), (0.9, 1)], intended=0.0, send=0.002)
    row |= {"first_event_ns": ns(0.01), "first_output_ns": ns(0.9)}
    blocks, reasons = figures(row)
    assert [blocks[name]["from_intended"]["p50"] for name in ("ttfc", "ttft", "ttfo")] == pytest.approx(
        [10, 500, 900]
    )
    assert blocks["ttfo"]["from_send"]["p50"] == pytest.approx(898)
    assert not {"ttfc.from_send", "ttfo.from_send"} & set(reasons)
    older, why = figures({**row, "first_output_ns": None})
    assert older["ttfo"]["from_intended"]["p50"] is None
    assert "no reasoning" in why["ttfo.from_intended"]
    assert older["ttft"]["from_intended"]["p50"] == pytest.approx(500)

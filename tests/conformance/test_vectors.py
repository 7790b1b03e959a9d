"""One name, many formulas: what each tool of the field would report for the same two answers, and which of
our figures is the same quantity. (harness.metrics alone; the second answer again over sockets in
test_tokens.py.)

The formulas are those of the tools' sources: vLLM and SGLang `benchmark_serving`, genai-perf, inference-perf
and MLPerf LoadGen (TPOT), AIPerf `inter_token_latency`, mlcommons/endpoints, GuideLLM `request_stats`,
llmperf and llm-load-test (e2e / n), fw-ai `load_test.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from harness.metrics.latency import latency_blocks, per_request
from harness.metrics.run import request_frame
from tests.support.run_factory import ns, request


@dataclass(frozen=True)
class Answer:
    """Sent at 0; (seconds, tokens) of each chunk; the stream ends `trailer` seconds after the last."""

    chunks: tuple[tuple[float, int], ...]
    trailer: float = 0.0

    @property
    def n(self) -> int:
        return sum(count for _, count in self.chunks)

    @property
    def first(self) -> float:
        return self.chunks[0][0]

    @property
    def last(self) -> float:
        return self.chunks[-1][0]

    @property
    def end(self) -> float:
        return self.last + self.trailer

    @property
    def gaps(self) -> list[float]:
        times = [at for at, _ in self.chunks]
        return [b - a for a, b in pairwise(times)]


def vllm_tpot(a: Answer) -> float:
    return (a.last - a.first) / (a.n - 1)


def vllm_itl_p50(a: Answer) -> float:
    return statistics.median(a.gaps)


def aiperf_inter_token_latency(a: Answer) -> float:
    return (a.last - a.first) / (a.n - a.chunks[0][1])


def endpoints_tpot(a: Answer) -> float:
    return (a.end - a.first) / (a.n - a.chunks[0][1])


def guidellm_time_per_output_token(a: Answer) -> float:
    return a.last / a.n


def guidellm_inter_token_latency(a: Answer) -> float:
    return (a.last - a.first) / (a.n - 1)


def llmperf_inter_token_latency(a: Answer) -> float:
    return a.end / a.n


def inference_perf_ntpot(a: Answer) -> float:
    return a.end / a.n


def inference_perf_itl_p50(a: Answer) -> float:
    """Token by token: a chunk of m tokens is one gap and m - 1 zeros."""
    expanded = list(a.gaps) + [0.0] * sum(count - 1 for _, count in a.chunks)
    return statistics.median(expanded)


def fwai_latency_per_token(a: Answer) -> float:
    return (a.end - a.first) / a.n


SINGLES = Answer(tuple((1.0 + 0.02 * k, 1) for k in range(101)))
BUNDLES = Answer(tuple((1.0 + 0.4 * k, 20) for k in range(5)))
TRAILED = Answer(SINGLES.chunks, trailer=0.5)

# tool's figure, answer, its value in ms, ours of the same value (None: we report no such figure)
VECTORS: list[tuple[Callable[[Answer], float], Answer, float, str | None]] = [
    (vllm_tpot, SINGLES, 20.0, "tpot"),
    (vllm_itl_p50, SINGLES, 20.0, "icl"),
    (aiperf_inter_token_latency, SINGLES, 20.0, "tpot"),
    (endpoints_tpot, SINGLES, 20.0, "tpot"),
    (endpoints_tpot, TRAILED, 25.0, None),
    (guidellm_time_per_output_token, SINGLES, 29.7, "normalized"),
    (guidellm_inter_token_latency, SINGLES, 20.0, "tpot"),
    (llmperf_inter_token_latency, SINGLES, 29.7, "normalized"),
    (inference_perf_ntpot, SINGLES, 29.7, "normalized"),
    (inference_perf_itl_p50, SINGLES, 20.0, "itl"),
    (fwai_latency_per_token, SINGLES, 19.8, None),
    (vllm_tpot, BUNDLES, 16.2, None),
    (vllm_itl_p50, BUNDLES, 400.0, "icl"),
    (aiperf_inter_token_latency, BUNDLES, 20.0, "tpot"),
    (inference_perf_itl_p50, BUNDLES, 0.0, "itl"),
    (guidellm_time_per_output_token, BUNDLES, 26.0, "normalized"),
    (guidellm_inter_token_latency, BUNDLES, 16.2, None),
    (llmperf_inter_token_latency, BUNDLES, 26.0, "normalized"),
    (fwai_latency_per_token, BUNDLES, 16.0, None),
]


def ours(answer: Answer, copies: int = 1) -> dict[str, Any]:
    rows = [request(i, answer.chunks, end_ns=ns(answer.end)) for i in range(copies)]
    frame = request_frame(rows)
    blocks, _ = latency_blocks(frame, per_request(frame, {}))
    return blocks


@pytest.mark.parametrize(
    ("tool", "answer", "value_ms", "name"),
    VECTORS,
    ids=[
        f"{tool.__name__}-{a.n}-in-{len(a.chunks)}" + "-trailed" * (a.trailer > 0) for tool, a, *_ in VECTORS
    ],
)
def test_what_each_tool_reports(
    tool: Callable[[Answer], float], answer: Answer, value_ms: float, name: str | None
) -> None:
    assert tool(answer) * 1e3 == pytest.approx(value_ms, abs=0.05)
    blocks = ours(answer, copies=3)
    if name is not None:
        assert blocks[name]["n"] >= 3
        assert blocks[name]["p50"] == pytest.approx(tool(answer) * 1e3, abs=1e-6)
    else:  # no block of ours may give such a number under another name
        mine = [blocks[key]["p50"] for key in ("tpot", "itl", "icl", "normalized")]
        assert len(mine) == 4
        assert all(abs(value - tool(answer) * 1e3) > 0.1 for value in mine)


def test_a_trailer_moves_no_figure_of_ours() -> None:
    """endpoints' TPOT ends with the answer's last byte: a late [DONE] is no slower token."""
    plain, trailed = ours(SINGLES), ours(TRAILED)
    assert plain["tpot"]["n"] == 1
    for name in ("tpot", "itl", "icl", "normalized"):
        assert trailed[name] == plain[name]
    assert trailed["e2e"] == plain["e2e"]


def test_bundles_are_told_apart_from_a_pace() -> None:
    """Both paces are 20 ms a token; what the reader sees is 5 jumps of 400 ms."""
    singles, bundles = ours(SINGLES), ours(BUNDLES)
    assert singles["tpot"]["p50"] == pytest.approx(bundles["tpot"]["p50"]) == pytest.approx(20.0)
    assert (singles["icl"]["n"], bundles["icl"]["n"]) == (100, 4)
    assert bundles["icl"]["p50"] == pytest.approx(400.0)
    assert (singles["itl"]["n"], bundles["itl"]["n"]) == (100, 99)
    assert singles["itl"]["zero_share"] == 0
    assert bundles["itl"]["zero_share"] == pytest.approx(95 / 99)
    assert bundles["itl"]["mean"] == pytest.approx(1600 / 99)


def test_percentiles_say_by_which_rule() -> None:
    """Linear between order statistics, and not the nearest rank or the upper neighbour: 1..4 -> p50 2.5."""
    rows = [request(i, [(float(i + 1), 1), (float(i + 1) + 0.1, 1)]) for i in range(4)]
    frame = request_frame(rows)
    blocks, _ = latency_blocks(frame, per_request(frame, {}))
    block = blocks["ttft"]["from_intended"]
    assert block["n"] == 4
    assert block["p50"] == pytest.approx(2500.0)
    assert block["p90"] == pytest.approx(float(np.quantile([1, 2, 3, 4], 0.9)) * 1e3)

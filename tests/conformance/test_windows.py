"""Which part of a run a figure is about: a synthetic run whose plateau is known, with a ramp before it and a
drain behind it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from harness.metrics import build_summary
from harness.report import print_summary
from harness.table import console_for
from tests.support.run_factory import request, write_run

RAMP_S, PLATEAU_S, SERVICE_S = 10.0, 60.0, 2.0
RATE, TOKENS = 10.0, 20
PLATEAU_TOKENS_PER_S = RATE * TOKENS


def ramped() -> list[dict[str, Any]]:
    """The rate climbs from 0 to 10/s in 10 s and stays for 60 s; an answer takes 2 s, a token each 0.1 s."""
    climbing = [math.sqrt(2 * k * RAMP_S / RATE) for k in range(int(RATE * RAMP_S / 2))]
    level = [RAMP_S + k / RATE for k in range(int(RATE * PLATEAU_S))]
    gap = SERVICE_S / TOKENS
    return [
        request(i, [(at + gap * (k + 1), 1) for k in range(TOKENS)], intended=at)
        for i, at in enumerate([*climbing, *level])
    ]


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return build_summary(write_run(tmp_path_factory.mktemp("ramp"), ramped()))


def test_the_steady_window_has_the_plateaus_throughput_and_the_run_has_less(summary: dict[str, Any]) -> None:
    """sgl-project/sglang#30918, vllm-project/vllm#26943: ramp and drain inside the average."""
    steady, whole = summary["steady"]["throughput"], summary["throughput"]
    assert summary["counts"]["completed"] == 650
    assert steady["output_tokens_per_s"] == pytest.approx(PLATEAU_TOKENS_PER_S, rel=0.01)
    assert steady["requests_per_s"] == pytest.approx(RATE, rel=0.01)
    true = 650 * TOKENS / (RAMP_S + PLATEAU_S + SERVICE_S)
    assert whole["output_tokens_per_s"] == pytest.approx(true, rel=0.01)
    assert whole["output_tokens_per_s"] < 0.95 * steady["output_tokens_per_s"]


def test_warm_up_steady_state_and_drain_have_bounds_rules_and_numbers(summary: dict[str, Any]) -> None:
    window, steady = summary["window"], summary["steady"]["window"]
    parts = [summary["warmup"], steady, summary["drain"]]
    assert parts[0]["start_s"] == window["start_s"]
    assert parts[2]["end_s"] == window["end_s"]
    for before, after in ((parts[0], parts[1]), (parts[1], parts[2])):
        assert before["end_s"] == after["start_s"]
    assert RAMP_S - 0.5 <= steady["start_s"] <= RAMP_S + SERVICE_S + 0.5
    assert steady["end_s"] == pytest.approx(RAMP_S + PLATEAU_S, abs=0.5)
    assert len({part["rule"] for part in [window, *parts]}) == 4
    for name in ("requests", "completed", "output_tokens"):
        assert sum(part[name] for part in parts) == window[name]
    assert (window["requests"], window["output_tokens"]) == (650, 650 * TOKENS)


def blocks(value: Any, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(value, dict):
        return []
    if "p50" in value and "mean" in value:
        return [(path, value)]
    return [found for key, part in value.items() for found in blocks(part, f"{path}.{key}")]


def test_every_figure_has_its_number_of_samples_and_its_window(
    summary: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """triton-inference-server/perf_analyzer#393: confusing windows. In the summary each block has its n, each
    part its window; in the table each row has its n, and window and steady part their bounds."""
    found = blocks(summary)
    assert len(found) > 30
    assert all(isinstance(block["n"], int) for _, block in found)
    assert all(block["p50"] is None for _, block in found if block["n"] == 0)
    steady = dict(blocks(summary["steady"]["latency_ms"]))
    assert steady[".ttft.from_intended"]["n"] == summary["steady"]["window"]["requests"] < 650
    print_summary(summary, console_for(None))
    text = capsys.readouterr().out
    header = next(line for line in text.splitlines() if line.startswith("latency, ms"))
    assert header.split()[2] == "n"
    rows = {
        line.split()[0]: line.split() for line in text.splitlines() if line[:4] in ("TTFT", "TPOT", "E2E ")
    }
    assert {name: row[1] for name, row in rows.items()} == {"TTFT": "650", "TPOT": "650", "E2E": "650"}
    flat = " ".join(text.split())
    assert "window 0.0 to 71.9 s, 650 requests" in flat
    assert f"{summary['steady']['window']['requests']} requests" in flat.partition(" steady ")[2]

"""The gate: one test for each way out, and what the intervals decide."""

from __future__ import annotations

import copy
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from harness.gate import (
    INCONCLUSIVE,
    INVALID,
    PASS,
    REGRESSION,
    USAGE,
    Baseline,
    BaselineError,
    Limit,
    assess,
    gate,
    interval,
    load_baseline,
    main,
)
from harness.metrics import build_summary, write_summary
from harness.metrics.percentiles import describe
from tests.support.run_factory import default_meta, request, steady_requests, write_run

TTFT = "latency_ms.ttft.from_intended.p50"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `good` and the baseline that was written from it."""
    folder = tmp_path_factory.mktemp("gate")
    write_summary(write_run(folder / "good", steady_requests(80)))
    path = folder / "baselines" / "chat.json"
    assert main([str(folder / "good"), "--baseline", str(path), "--write-baseline"]) == PASS
    return folder


@pytest.fixture
def good(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "good", tmp_path / "good"))


@pytest.fixture
def baseline(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(made / "baselines" / "chat.json", tmp_path))


Run = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(folder: Path, baseline: Path) -> tuple[int, dict[str, Any], str]:
        """(exit code, the JSON line, the table)."""
        capsys.readouterr()
        table = io.StringIO()
        code = main(
            [str(folder), "--baseline", str(baseline)], Console(file=table, width=80, highlight=False)
        )
        line = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert line["exit"] == code
        return code, line, table.getvalue()

    return call


def test_the_same_run_passes(good: Path, baseline: Path, run: Run) -> None:
    code, line, table = run(good, baseline)
    assert (code, line["gate"]) == (PASS, "pass")
    assert {m["verdict"] for m in line["metrics"]} == {"pass"}
    assert "TPOT p50, ms" in table
    assert "…" not in table
    assert max(map(len, table.splitlines())) <= 80


def test_a_slower_run_is_a_regression(tmp_path: Path, baseline: Path, run: Run) -> None:
    slow = write_run(tmp_path / "slow", steady_requests(80, gap=0.026))  # no summary.json: built from records
    code, line, table = run(slow, baseline)
    assert (code, line["gate"]) == (REGRESSION, "regression")
    verdicts = {m["metric"]: m["verdict"] for m in line["metrics"]}
    assert verdicts["latency_ms.tpot.p50"] == "regression"
    assert verdicts[TTFT] == "pass"
    tpot = next(m for m in line["metrics"] if m["metric"] == "latency_ms.tpot.p50")
    assert tpot == {
        "metric": "latency_ms.tpot.p50",
        "better": "lower",
        "gate": True,
        "baseline": 20.0,
        "now": 26.0,
        "change": 0.3,
        "limit": 23.0,
        "verdict": "regression",
        "reason": None,
    }
    assert "regression" in table


def test_a_faster_run_is_better(tmp_path: Path, baseline: Path, run: Run) -> None:
    code, line, _ = run(write_run(tmp_path / "fast", steady_requests(80, gap=0.01)), baseline)
    assert code == PASS
    assert {m["metric"]: m["verdict"] for m in line["metrics"]}["latency_ms.tpot.p50"] == "better"


def test_fewer_completions_are_a_regression(tmp_path: Path, baseline: Path, run: Run) -> None:
    rows = steady_requests(80)
    rows[3:6] = [request(i, outcome="rejected", intended=i * 0.1) for i in range(3, 6)]
    code, line, _ = run(write_run(tmp_path / "refuses", rows), baseline)
    assert code == REGRESSION
    verdicts = {m["metric"]: m["verdict"] for m in line["metrics"]}
    assert verdicts["counts.completed"] == "regression"
    assert verdicts["throughput.slo_attainment"] == "noise"  # 77 of 80: it could be chance


def test_an_invalid_run_exits_3(tmp_path: Path, baseline: Path, run: Run) -> None:
    bad = write_run(tmp_path / "bad", steady_requests(80), complete=False, incomplete_reason="server_died")
    code, line, table = run(bad, baseline)
    assert (code, line["gate"], line["metrics"]) == (INVALID, "invalid", [])
    assert "incomplete: server_died" in line["reasons"]
    assert "INVALID incomplete: server_died" in table


@pytest.mark.parametrize(
    ("part", "code"),
    [("schedule", INVALID), ("config", INVALID), ("host", INCONCLUSIVE), ("device", INCONCLUSIVE)],
)
def test_another_fingerprint_is_named(tmp_path: Path, baseline: Path, run: Run, part: str, code: int) -> None:
    prints = {**default_meta()["fingerprint"], part: "other"}
    slow = write_run(tmp_path / "other", steady_requests(80, gap=0.03), fingerprint=prints)
    found, line, _ = run(slow, baseline)
    assert found == code
    assert len(line["reasons"]) == 1
    assert f"fingerprint.{part} differs" in line["reasons"][0]
    assert bool(line["metrics"]) is (code == INCONCLUSIVE)  # another machine: shown, and judged by nobody


def test_a_null_metric_is_inconclusive_with_its_reason(tmp_path: Path, baseline: Path, run: Run) -> None:
    rows = [request(i, [(i * 0.1 + 0.2, 11)], intended=i * 0.1) for i in range(80)]
    code, line, table = run(write_run(tmp_path / "drained", rows), baseline)
    assert code == INCONCLUSIVE
    tpot = next(m for m in line["metrics"] if m["metric"] == "latency_ms.tpot.p50")
    assert (tpot["verdict"], tpot["now"], tpot["change"]) == ("inconclusive", None, None)
    assert tpot["reason"].startswith("drained")
    assert "drained" in table


def test_too_few_samples_are_inconclusive(tmp_path: Path, baseline: Path, run: Run) -> None:
    code, line, _ = run(write_run(tmp_path / "few", steady_requests(5)), edited(baseline, only=TTFT))
    assert code == INCONCLUSIVE
    assert line["metrics"][0]["reason"] == "too few samples for a 95 % interval"


def edited(path: Path, only: str, **changes: Any) -> Path:
    data = json.loads(path.read_text())
    data["metrics"] = {only: {**data["metrics"][only], **changes}}
    out = path.with_name("edited.json")
    out.write_text(json.dumps(data))
    return out


def test_a_regression_outranks_what_is_inconclusive(good: Path, baseline: Path) -> None:
    summary = build_summary(good)
    held = load_baseline(baseline)
    limits = {TTFT: Limit(100.0, "lower", 0.1), "steps.batch_size_mean": Limit(4.0, "higher", 0.1)}
    result = gate(summary, Baseline(held.run, held.fingerprint, limits))
    assert [v.verdict for v in result.figures] == ["regression", "inconclusive"]
    assert result.exit == REGRESSION


def summary_with(values: np.ndarray) -> dict[str, Any]:
    return {"latency_ms": {"ttft": {"from_intended": describe(values)}}, "null_reasons": {}}


def test_past_the_limit_without_support_of_the_interval_is_noise() -> None:
    """A p50 20 % up from a wide sample: within what one run says of itself. From a narrow one: a
    regression."""
    limit = Limit(100.0, "lower", 0.10)
    wide = summary_with(np.linspace(20, 220, 21))
    narrow = summary_with(np.linspace(115, 125, 21))
    assert assess(wide, TTFT, limit).verdict == "noise"
    assert assess(narrow, TTFT, limit).verdict == "regression"
    held = Limit(100.0, "lower", 0.10, ci95=(80.0, 119.0))  # the baseline was as unsure
    assert assess(narrow, TTFT, held).verdict == "noise"


def test_the_interval_alone_is_no_regression() -> None:
    """5 % up and sure of it, under a limit of 10 %: not worth a red light."""
    assert (
        assess(summary_with(np.linspace(104.9, 105.1, 400)), TTFT, Limit(100.0, "lower", 0.10)).verdict
        == "pass"
    )


@pytest.mark.parametrize(
    ("now", "limit", "verdict"),
    [
        (89.0, Limit(100.0, "higher", 0.10), "regression"),
        (91.0, Limit(100.0, "higher", 0.10), "pass"),
        (111.0, Limit(100.0, "higher", 0.10), "better"),
        (0.97, Limit(1.0, "higher", 0.0, 0.02), "regression"),
        (0.99, Limit(1.0, "higher", 0.0, 0.02), "pass"),
        (6.0, Limit(1.0, "lower", 0.10, 5.0), "pass"),  # the larger of the two tolerances
        (6.2, Limit(1.0, "lower", 0.10, 5.0), "regression"),
        (0.0, Limit(0.0, "lower", 0.0, 0.0), "pass"),
        (1.0, Limit(0.0, "lower", 0.0, 0.0), "regression"),
    ],
)
def test_tolerances(now: float, limit: Limit, verdict: str) -> None:
    summary = {"throughput": {"requests_per_s": now}, "null_reasons": {}}
    assert assess(summary, "throughput.requests_per_s", limit).verdict == verdict


def test_a_share_has_an_interval_too() -> None:
    """Attainment of 50 % of 100 requests is known to about 10 points: 45 % is noise, 30 % is not."""

    def run(share: float) -> dict[str, Any]:
        counts = {"completed": 100, "failed": 0, "timed_out": 0, "rejected": 0}
        rates = {"slo_attainment": share, "goodput_rps": 2 * share}
        return {"counts": counts, "throughput": rates, "null_reasons": {}}

    for path, value in (("throughput.slo_attainment", 0.5), ("throughput.goodput_rps", 1.0)):
        held = interval(run(0.5), path)
        assert held is not None
        assert [v / value for v in held] == pytest.approx([0.8077, 1.1923], abs=1e-3)
        limit = Limit(value, "higher", 0.05, ci95=held)
        words = [assess(run(share), path, limit).verdict for share in (0.49, 0.45, 0.30)]
        assert words == ["pass", "noise", "regression"]


def test_two_runs_of_one_thing_pass_and_a_slow_down_does_not() -> None:
    """100 pairs of 150 lognormal samples: at least 95 A/A pairs pass, at least 95 with +50 % fail."""
    rng = np.random.default_rng(5)

    def verdict(factor: float) -> str:
        first, second = (summary_with(rng.lognormal(5, 0.5, 150) * f) for f in (1.0, factor))
        block = first["latency_ms"]["ttft"]["from_intended"]
        limit = Limit(block["p50"], "lower", 0.15, ci95=tuple(block["ci95"]["p50"]))
        return assess(second, TTFT, limit).verdict

    alike = [verdict(1.0) for _ in range(100)]
    slower = [verdict(1.5) for _ in range(100)]
    assert sum(v != "regression" for v in alike) >= 95
    assert sum(v == "regression" for v in slower) >= 95


def test_write_baseline_keeps_metrics_and_tolerances(tmp_path: Path, good: Path, baseline: Path) -> None:
    data = json.loads(baseline.read_text())
    assert data["metrics"][TTFT]["ci95"] == [200.0, 200.0]
    assert data["metrics"][TTFT]["n"] == 80
    assert data["fingerprint"] == default_meta()["fingerprint"]
    assert "latency_ms.ttft.from_intended.p99" not in data["metrics"]  # 80 samples know no p99
    assert "steps.useful_token_fraction" not in data["metrics"]  # a server without step records
    path = edited(baseline, TTFT, relative=0.5, value=1.0)
    assert main([str(good), "--baseline", str(path), "--write-baseline"]) == PASS
    again = json.loads(path.read_text())["metrics"]
    assert list(again) == [TTFT]
    assert (again[TTFT]["relative"], again[TTFT]["value"]) == (0.5, 200.0)


def test_an_invalid_run_makes_no_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = write_run(tmp_path / "bad", [request(0, outcome="failed")])
    path = tmp_path / "b.json"
    assert main([str(bad), "--baseline", str(path), "--write-baseline"]) == INVALID
    assert not path.exists()
    assert "no baseline" in capsys.readouterr().err


def test_usage_errors(tmp_path: Path, good: Path, baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(good), "--baseline", str(tmp_path / "none.json")]) == USAGE
    assert main([str(tmp_path / "nowhere"), "--baseline", str(baseline)]) == USAGE
    (good / "summary.json").write_text("[]")
    assert main([str(good), "--baseline", str(baseline)]) == USAGE
    assert main([str(good)]) == USAGE
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4
    assert all(line.startswith("error: ") for line in errors)


WHOLE: dict[str, Any] = {
    "schema_version": 1,
    "valid": True,
    "invalid_reasons": [],
    "run": {"id": "r", "fingerprint": dict.fromkeys(("schedule", "config", "host", "device"), "x")},
    "counts": dict.fromkeys(("completed", "failed", "timed_out", "rejected"), 1),
}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "null", "[" * 100_000, b"\xff\xfe"),
        *(json.dumps({k: v for k, v in WHOLE.items() if k != name}) for name in WHOLE),
        *(json.dumps({**WHOLE, name: None}) for name in WHOLE),
        *(json.dumps({**WHOLE, name: {}}) for name in WHOLE),
    ],
    ids=lambda text: repr(text)[:30],
)
@pytest.mark.parametrize("write", [[], ["--write-baseline"]], ids=["gate", "write"])
def test_a_summary_that_is_cut_or_edited_is_a_usage_error(
    good: Path, baseline: Path, capsys: pytest.CaptureFixture[str], text: str | bytes, write: list[str]
) -> None:
    (good / "summary.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    before = baseline.read_bytes()
    assert main([str(good), "--baseline", str(baseline), *write]) == USAGE
    assert capsys.readouterr().err.startswith(f"error: {good}/summary.json: is no summary")
    assert baseline.read_bytes() == before


def test_a_reader_that_has_gone_changes_no_exit_code(good: Path, baseline: Path) -> None:
    changed = json.loads(baseline.read_text())
    changed["fingerprint"]["schedule"] = "another"
    baseline.write_text(json.dumps(changed))
    command = [sys.executable, "-m", "harness.gate", str(good), "--baseline", str(baseline)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as `| true` does
        said = process.stderr.read()
    assert said == b""
    assert process.returncode == INVALID


BROKEN: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.update(schema_version=2), "schema_version=2, needs 1"),
    (lambda d: d.pop("fingerprint"), "fingerprint needs schedule, config, host, device"),
    (lambda d: d["fingerprint"].pop("host"), "fingerprint needs"),
    (lambda d: d.update(metrics={}), "at least one metric"),
    (lambda d: d["metrics"].update(x=3), "metrics.x: needs an object"),
    (lambda d: d["metrics"][TTFT].update(value="fast"), f"metrics.{TTFT}.value='fast', needs a number"),
    (lambda d: d["metrics"][TTFT].update(value=True), "needs a number"),
    (lambda d: d["metrics"][TTFT].update(value=float("nan")), "value=nan, needs a number"),
    (lambda d: d["metrics"][TTFT].update(value=10**400), "needs a number"),
    (lambda d: d["metrics"][TTFT].update(better="up"), "needs lower or higher"),
    (lambda d: d["metrics"][TTFT].update(relative=-1), "needs a number of 0 or more"),
    (lambda d: d["metrics"][TTFT].update(tolerance=1), "tolerance: no such key; there are value"),
    (lambda d: d["metrics"][TTFT].update(ci95=[1]), "needs [low, high] or null"),
    (lambda d: [d["metrics"][TTFT].pop(k) for k in ("relative", "absolute")], "needs a tolerance"),
]


@pytest.mark.parametrize(("breaks", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_baseline_says_what_is_wrong(
    baseline: Path, breaks: Callable[..., Any], message: str
) -> None:
    data = copy.deepcopy(json.loads(baseline.read_text()))
    breaks(data)
    baseline.write_text(json.dumps(data))
    with pytest.raises(BaselineError) as error:
        load_baseline(baseline)
    assert message in str(error.value)
    assert str(baseline) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000], ids=lambda text: text[:3])
def test_a_baseline_that_is_no_object(baseline: Path, text: str) -> None:
    baseline.write_text(text)
    with pytest.raises(BaselineError):
        load_baseline(baseline)

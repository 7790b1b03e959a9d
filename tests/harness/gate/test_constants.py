"""Constants and rules against a single run: alone, and beside a baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.gate import INCONCLUSIVE, INVALID, PASS, REGRESSION, USAGE, main
from harness.metrics import write_summary
from tests.support.gated import gated, of_another
from tests.support.run_factory import steady_requests, write_run

TPOT, TTFT = "latency_ms.tpot.p50", "latency_ms.ttft.from_intended.p50"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with a TPOT p50 of 26 ms (25.4 to 26.6), and the baseline of one with 20 ms."""
    return gated(tmp_path_factory.mktemp("constants"), unknown=False)


def held(run: Path, rules: str, folder: Path, *options: str) -> tuple[int, list[str]]:
    path = folder / "rules.yaml"
    path.write_text(rules)
    return main([str(run), "--rules", str(path), *options]), [str(path)]


def line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


@pytest.mark.parametrize(
    ("limit", "word", "code"),
    [
        (30, "pass", PASS),
        (26, "pass", PASS),
        (25.8, "inconclusive", INCONCLUSIVE),
        (20, "regression", REGRESSION),
    ],
)
def test_a_constant_fails_only_if_the_interval_excludes_it(
    stored: tuple[Path, Path], tmp_path: Path, capsys: Any, limit: float, word: str, code: int
) -> None:
    rules = f"metrics: {{{TPOT}: {{better: lower, limit: {limit}}}}}"
    assert held(stored[0], rules, tmp_path)[0] == code
    said = line(capsys)
    assert (said["baseline"], said["metrics"][0]["verdict"]) == (str(tmp_path / "rules.yaml"), word)
    assert (said["metrics"][0]["baseline"], said["metrics"][0]["limit"]) == (None, limit)


def test_higher_is_better_without_an_interval(stored: tuple[Path, Path], tmp_path: Path) -> None:
    rules = "metrics: {{throughput.output_tokens_per_s: {{better: higher, limit: {}}}}}"
    assert held(stored[0], rules.format(100), tmp_path)[0] == PASS
    assert held(stored[0], rules.format(110), tmp_path)[0] == REGRESSION
    assert held(stored[0], rules.format("110, gate: false"), tmp_path)[0] == PASS


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize(
    ("path", "hint"),
    [(f"{TPOT}0", f"; did you mean {TPOT}?"), ("latency_ms", ""), ("run.id", ""), ("é.p50", "")],
)
def test_a_name_that_is_no_figure_is_a_mistake_and_not_inconclusive(
    stored: tuple[Path, Path], tmp_path: Path, capsys: Any, path: str, hint: str, baseline: bool
) -> None:
    """Inconclusive is a warning in most pipelines: such a gate would never fail again."""
    options = ["--baseline", str(stored[1])] if baseline else []
    rules = f"metrics: {{{path}: {{better: lower, limit: 20}}}}"
    code, (file,) = held(stored[0], rules, tmp_path, *options, "--inconclusive", "pass")
    said = capsys.readouterr().err
    assert code == USAGE
    assert said.startswith(f"error: {file}: metrics.{path}: summary.json has no such figure{hint}")


def test_a_figure_that_was_not_measured_is_inconclusive(
    stored: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    rules = "metrics: {utilization.gpu_util_pct: {better: higher, limit: 20}}"
    assert held(stored[0], rules, tmp_path)[0] == INCONCLUSIVE
    assert line(capsys)["metrics"][0]["verdict"] == "inconclusive"


def test_its_files_for_ci(stored: tuple[Path, Path], tmp_path: Path) -> None:
    rules = f"metrics: {{{TPOT}: {{better: lower, limit: 20}}}}"
    names = ("markdown", "junit", "gab-smaller", "bencher", "pytorch")
    options = [word for name in names for word in (f"--{name}", str(tmp_path / name))]
    assert held(stored[0], rules, tmp_path, *options)[0] == REGRESSION
    assert (
        "| TPOT p50, ms | - | 26.0 | 25.4 to 26.6 | - | 20.0 | **regression** |"
        in (tmp_path / "markdown").read_text()
    )
    assert 'type="regression"' in (tmp_path / "junit").read_text()
    assert "regression against the constant 20" in (tmp_path / "gab-smaller").read_text()
    record = json.loads((tmp_path / "pytorch").read_text())[0]
    assert record["metric"]["target_value"] == 20
    assert "baseline" not in record["metric"]["extra_info"]


def test_an_invalid_run_and_rules_without_a_constant(
    tmp_path: Path, stored: tuple[Path, Path], capsys: Any
) -> None:
    bad = write_run(tmp_path / "bad", steady_requests(80), complete=False, incomplete_reason="server_died")
    write_summary(bad)
    assert held(bad, f"metrics: {{{TPOT}: {{better: lower, limit: 20}}}}", tmp_path)[0] == INVALID
    capsys.readouterr()
    assert held(stored[0], f"metrics: {{{TPOT}: {{better: lower, relative: 0.1}}}}", tmp_path)[0] == USAGE
    assert "no metric has a limit" in capsys.readouterr().err


def test_rules_beside_a_baseline(stored: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    """Their tolerances replace the baseline's, and their constants hold as well."""
    run, baseline = stored
    options = ("--baseline", str(baseline))
    wide = "metrics: {{{}: {{better: lower, relative: 0.5, limit: {}}}}}"
    assert held(run, wide.format(TPOT, 30), tmp_path, *options)[0] == PASS
    capsys.readouterr()
    assert held(run, wide.format(TPOT, 22), tmp_path, *options)[0] == REGRESSION
    assert line(capsys)["metrics"][0]["limit"] == 22
    only = f"metrics: {{{TPOT}: {{better: lower, relative: 0.1, gate: false}}}}"
    assert held(run, only, tmp_path, *options)[0] == PASS
    assert line(capsys)["metrics"][0]["verdict"] == "regression"
    missing = "metrics: {stalls.count: {better: lower, relative: 0.1}}"
    assert held(run, missing, tmp_path, *options)[0] == USAGE
    assert "metrics.stalls.count" in capsys.readouterr().err


def test_on_another_machine_constants_still_hold(
    stored: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(stored[1].read_bytes())
    options = ("--baseline", str(of_another(other, "host")))
    rules = "metrics: {{{}: {{better: lower, limit: 22}}, {}: {{better: lower, relative: 0.1}}}}"
    assert held(stored[0], rules.format(TPOT, TTFT), tmp_path, *options)[0] == REGRESSION
    words = {metric["metric"]: metric["verdict"] for metric in line(capsys)["metrics"]}
    assert words == {TTFT: "not judged", TPOT: "regression"}


def test_a_baseline_is_written_by_rules(stored: tuple[Path, Path], tmp_path: Path) -> None:
    rules = f"metrics: {{{TPOT}: {{better: lower, relative: 0.3}}}}"
    path = tmp_path / "b.json"
    assert held(stored[0], rules, tmp_path, "--baseline", str(path), "--write-baseline")[0] == PASS
    metrics = json.loads(path.read_text())["metrics"]
    assert {name: entry["relative"] for name, entry in metrics.items()} == {TPOT: 0.3}

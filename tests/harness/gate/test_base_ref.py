"""`--base-ref`: two revisions in interleaved rounds, each in its own tree, and nothing left behind."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from harness.formats.files import FORMATS
from harness.gate import INCONCLUSIVE, INVALID, PASS, REGRESSION, USAGE, command, main
from harness.gate.revision import PREFIX, head_tree
from harness.gate.rounds import absolute
from tests.support.revisions import change, commit, git, repository, worktrees

TPOT = "latency_ms.tpot.p50"
Gate = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return repository(tmp_path / "repo")


@pytest.fixture
def gate(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Gate:
    monkeypatch.setattr(command, "head_tree", functools.partial(head_tree, repo))

    def call(*options: str, ref: str = "main") -> tuple[int, dict[str, Any], str]:
        """(exit code, the JSON line, what was said)."""
        code = main(["--base-ref", ref, *options, "--", f"output.dir={tmp_path / 'out'}"])
        said = capsys.readouterr()
        assert worktrees(repo) == 1
        assert not left_behind()
        return code, json.loads(said.out.splitlines()[-1]) if said.out else {}, said.err

    return call


def left_behind() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{PREFIX}{os.getpid()}-*"))


def verdicts(line: dict[str, Any]) -> dict[str, str]:
    return {metric["metric"]: metric["verdict"] for metric in line["metrics"]}


def test_the_same_passes_and_each_side_ran_its_own_tree(gate: Gate, repo: Path) -> None:
    code, line, said = gate("--rounds", "4")
    assert (code, line["gate"]) == (PASS, "pass")
    assert set(verdicts(line).values()) == {"pass"}
    assert "; the same commit" in said
    record = json.loads((Path(line["results"]) / "gate.json").read_text())
    orders = [done["order"] for done in record["rounds"]]
    assert all(second == first[::-1] for first, second in zip(orders[::2], orders[1::2], strict=True))
    for done in record["rounds"]:
        trees = {
            side: (Path(line["results"]) / run / "tree").read_text() for side, run in done["runs"].items()
        }
        assert trees["head"] == str(repo)
        assert PREFIX in trees["base"]
        assert not Path(trees["base"]).exists()
    assert record["base"]["sha"] == record["head"]["sha"] == git(repo, "rev-parse", "HEAD").strip()


def test_a_slower_commit_is_a_regression_in_every_form(gate: Gate, repo: Path, tmp_path: Path) -> None:
    git(repo, "checkout", "--quiet", "-b", "slow")
    commit(repo, factor=1.15)
    options = [word for name in FORMATS for word in (f"--{name}", str(tmp_path / name))]
    code, line, _ = gate("--rounds", "5", *options)
    assert (code, line["gate"]) == (REGRESSION, "regression")
    tpot = next(metric for metric in line["metrics"] if metric["metric"] == TPOT)
    assert tpot["verdict"] == "regression"
    assert tpot["effect"][0] > 0.07
    assert tpot["change"] == pytest.approx(0.15, abs=0.03)
    assert tpot["now"] / tpot["baseline"] == pytest.approx(1 + tpot["change"], rel=1e-4)
    assert len(tpot["rounds"]) == 5
    assert verdicts(line)["throughput.output_tokens_per_s"] == "regression"
    assert verdicts(line)["counts.failed"] == "pass"
    suite = ET.parse(tmp_path / "junit").getroot()[0]
    assert (suite.attrib["failures"], suite.attrib["errors"]) == ("2", "0")
    failure = next(case.find("failure") for case in suite if case.get("name") == TPOT)
    assert failure is not None
    assert "99.5 % interval of the change +" in failure.attrib["message"]
    assert "5 rounds" in failure.attrib["message"]
    text = (tmp_path / "markdown").read_text()
    assert "against main (" in text
    assert f"| TPOT p50, ms | {tpot['baseline']:.2f} | {tpot['now']:.2f} |" in text
    smaller = json.loads((tmp_path / "gab-smaller").read_text())
    assert next(entry for entry in smaller if TPOT in entry["name"])["value"] == tpot["now"]
    measures = json.loads((tmp_path / "bencher").read_text())["rag/continuous/tiny"]
    assert measures[TPOT]["lower_value"] < tpot["now"] < measures[TPOT]["upper_value"]
    metrics = [r["metric"] for r in json.loads((tmp_path / "pytorch").read_text())]
    assert next(m for m in metrics if m["name"] == TPOT)["benchmark_values"] == tpot["rounds"]


def test_the_working_tree_is_measured_and_said(gate: Gate, repo: Path) -> None:
    change(repo, factor=1.3)
    code, line, said = gate("--rounds", "4")
    assert code == REGRESSION
    assert "and 1 uncommitted change\n" in said
    assert "the same commit" not in said
    assert json.loads((Path(line["results"]) / "gate.json").read_text())["head"]["dirty"] == 1


def test_noise_is_inconclusive_and_says_what_would_do(gate: Gate, repo: Path) -> None:
    change(repo, noise=0.2)
    code, line, _ = gate("--rounds", "3")
    assert (code, line["gate"], line["exit"]) == (INCONCLUSIVE, "inconclusive", 4)
    tpot = next(metric for metric in line["metrics"] if metric["metric"] == TPOT)
    assert tpot["verdict"] == "inconclusive"
    assert tpot.get("needed", 1000) > 3
    code, line, _ = gate("--rounds", "3", "--inconclusive", "pass")
    assert (code, line["gate"], line["exit"]) == (PASS, "inconclusive", 0)


def test_rounds_are_added_until_it_is_decided(gate: Gate, repo: Path) -> None:
    commit(repo, noise=0.05)
    code, line, _ = gate("--rounds", "2", "--until", "decided", "--max-rounds", "40")
    assert code == PASS
    assert 2 < line["valid_rounds"] < 40


def test_a_head_that_is_never_valid_ends_it_soon(gate: Gate, repo: Path) -> None:
    change(repo, valid=False)
    code, line, _ = gate("--rounds", "5")
    assert (code, line["gate"], line["metrics"]) == (INVALID, "invalid", [])
    assert line["reasons"] == ["2 of 2 rounds are invalid", "head: client_bound"]


def test_other_traffic_is_no_comparison(gate: Gate, repo: Path) -> None:
    change(repo, schedule="another")
    code, line, _ = gate()
    assert code == INVALID
    assert "fingerprint.schedule differs" in line["reasons"][0]


def test_a_side_that_measures_nothing_is_invalid_with_its_last_words(gate: Gate, repo: Path) -> None:
    change(repo, exit=1, says="Segmentation fault")
    code, line, _ = gate()
    assert code == INVALID
    assert "head: no results, exit code 1: Segmentation fault" in line["reasons"]


def test_a_side_that_refuses_its_settings_is_a_usage_error(gate: Gate, repo: Path) -> None:
    commit(repo, exit=2, says="error: engine.new=1: no such setting")
    change(repo)
    code, _, said = gate()
    assert code == USAGE
    assert said.splitlines()[-1] == "error: base: engine.new=1: no such setting"


def test_rules_of_ones_own(gate: Gate, repo: Path, tmp_path: Path) -> None:
    change(repo, factor=1.3)
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "metrics:\n"
        f"  {TPOT}: {{better: lower, relative: 0.05, gate: false}}\n"
        "  latency_ms.normalized.p50: {better: lower, limit: 20}\n"
    )
    code, line, _ = gate("--rounds", "3", "--rules", str(rules))
    assert code == PASS  # the regression is reported only
    assert verdicts(line) == {TPOT: "regression", "latency_ms.normalized.p50": "pass"}
    rules.write_text("metrics: {latency_ms.normalized.p50: {better: lower, limit: 9}}")
    assert gate("--rounds", "3", "--rules", str(rules))[0] == REGRESSION
    rules.write_text("metrics: {latency_ms.tpot.p5: {better: lower, relative: 0.05}}")
    code, _, said = gate("--rounds", "2", "--rules", str(rules))
    assert code == USAGE
    assert (
        "metrics.latency_ms.tpot.p5: summary.json has no such figure; did you mean latency_ms.tpot.p50?"
        in said
    )


def test_a_revision_that_is_not_there(gate: Gate) -> None:
    code, _, said = gate(ref="nowhere")
    assert code == USAGE
    assert said.startswith("error: --base-ref nowhere: no such revision in this clone; fetch it first")
    assert len(said.splitlines()) == 1


def test_outside_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(command, "head_tree", functools.partial(head_tree, tmp_path))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert main(["--base-ref", "main"]) == USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"error: --base-ref: {tmp_path} is not in a git checkout")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base-ref", "main", "--rounds", "1"], "--rounds 1: needs 2 or more"),
        (["--base-ref", "main", "RUN"], "RUN: --base-ref measures its own runs"),
        (["--base-ref", "main", "--baseline", "b.json"], "leave --baseline out"),
        (["--base-ref", "main", "--max-rounds", "9"], "--max-rounds 9: goes with --until decided"),
        (["--base-ref", "main", "--until", "decided", "--max-rounds", "3"], "is less than --rounds 5"),
        (["--base-ref", "main", "engine=nope"], "engine=nope: no such engine"),
        (["--base-ref", "main", "--", "engine.max_num_seqs=0"], "engine.max_num_seqs"),
        (["RUN", "--baseline", "b.json", "--rounds", "3"], "--rounds: goes with --base-ref"),
        (["RUN", "--baseline", "b.json", "--", "seed=1"], "seed=1: overrides go with --base-ref"),
        (["RUN"], "needs RUN with --baseline FILE or --rules FILE, or --base-ref"),
        (["RUN", "--rules", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], message: str, capsys: Any) -> None:
    assert main(options) == USAGE
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1


def test_paths_in_overrides_are_those_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ü ü.csv").touch()
    steps = "workload.rate={kind: steps, steps: [" + "[2.5, 1], " * 40 + "[2.5, 30]]}"  # too long for a name
    kept = [steps, "seed=1", "workload.path=not-there.csv", "workload.path=a\0b.csv", "model"]
    assert absolute(["workload.path='ü ü.csv'", *kept]) == [f"workload.path='{tmp_path / 'ü ü.csv'}'", *kept]


SCRIPT = """
import functools, sys
from pathlib import Path
from harness.cli import guard
from harness.gate import command
from harness.gate.revision import head_tree
command.head_tree = functools.partial(head_tree, Path(sys.argv[1]))
sys.exit(guard(lambda: command.main(["--base-ref", "main", "--", "output.dir=" + sys.argv[2]])))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_nothing_is_left_behind(repo: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM clean up. SIGKILL takes the run along; the next gate removes the worktree."""
    commit(repo, sleep_s=20)
    out = tmp_path / "out"
    command = [sys.executable, "-c", SCRIPT, str(repo), str(out)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        while not list(out.glob("*/*/run0/pid")):
            assert process.poll() is None
            time.sleep(0.02)
        assert worktrees(repo) == 2
        run = os.pidfd_open(int(next(out.glob("*/*/run0/pid")).read_text()))
        process.send_signal(number)
        told, said = process.communicate(timeout=20)
    ended, _, _ = select.select([run], [], [], 15)  # well before its 20 s of sleep are over
    os.close(run)
    assert ended
    if number == signal.SIGKILL:
        assert worktrees(repo) == 2
        commit(repo, exit=2)
        said = subprocess.run(command, stderr=subprocess.PIPE, text=True).stderr
        assert "which a gate that was killed has left behind" in said
    else:
        assert process.returncode == INVALID
        line = json.loads(told.splitlines()[-1])
        assert (line["gate"], line["exit"], line["valid_rounds"]) == ("invalid", INVALID, 0)
        assert "interrupted after 0 rounds; nothing is judged" in line["reasons"][0]
        kept = json.loads((Path(line["results"]) / "gate.json").read_text())
        assert kept["reasons"] == line["reasons"]
    assert worktrees(repo) == 1
    assert not list(Path(tempfile.gettempdir()).glob(f"{PREFIX}{process.pid}-*"))

"""The workflows under docs/ci: YAML of the right shape, and their own commands run on a stored run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml

from harness.conf import compose
from harness.gate import INCONCLUSIVE, INVALID, PASS, REGRESSION
from harness.gate.command import parser
from tests.support import revisions
from tests.support.gated import gated, of_another

ROOT = Path(__file__).parents[2]
CI = ROOT / "docs" / "ci"
BASELINE = "results/baselines/rag.json"


def parsed(name: str) -> dict[str, Any]:
    data = yaml.safe_load((CI / name).read_text())
    assert isinstance(data, dict)
    return data


def github_steps(name: str = "baseline") -> dict[str, dict[str, Any]]:
    job = parsed("github-actions.yml")["jobs"][name]
    assert job["defaults"]["run"]["shell"] == "bash"
    return {step["name"]: step for step in job["steps"] if "name" in step}


def github_env(name: str) -> dict[str, str]:
    return dict(parsed("github-actions.yml")["jobs"][name]["env"])


def gitlab_job(name: str = "batchmark") -> dict[str, Any]:
    job: dict[str, Any] = parsed("gitlab-ci.yml")[name]
    return job


SCRIPTS = {
    "github": [github_steps()[name]["run"] for name in ("Environment", "Run", "Gate")],
    "gitlab": list(gitlab_job()["script"]),
}

AGAINST_BASE = {
    "github": (github_steps("gate")["Gate"]["run"], github_env("gate")),
    "gitlab": (gitlab_job("batchmark-gate")["script"][1], gitlab_job("batchmark-gate")["variables"]),
}
SMALL = {
    "ROUNDS": "--rounds 2",
    "TRAFFIC": "+experiment=smoke +workload=rag +engine=continuous load.requests=8",
}


@pytest.mark.parametrize("system", SCRIPTS)
def test_they_set_up_and_run_what_there_is(system: str) -> None:
    setup, *rest = SCRIPTS[system]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert setup.split()[0] == "make"
    assert setup.split()[1] in targets
    line = next(line for line in "\n".join(rest).splitlines() if " -m harness " in line)
    config = compose(shlex.split(line.partition("|")[0])[3:])  # refuses what no setting is
    assert (config.workload.name, config.engine.name) == ("rag", "continuous")
    assert github_env("baseline")["BASELINE"] == gitlab_job()["variables"]["BASELINE"] == BASELINE
    assert (ROOT / BASELINE).is_file()


@pytest.mark.parametrize("system", AGAINST_BASE)
def test_the_traffic_of_a_pull_request_is_what_the_gate_takes(system: str) -> None:
    script, env = AGAINST_BASE[system]
    options = vars(parser().parse_args(["--base-ref", "main", *env["ROUNDS"].split()]))
    assert options["until"] == "decided"
    config = compose(env["TRAFFIC"].split())
    assert (config.workload.name, config.engine.name) == ("rag", "continuous")
    assert '--base-ref "$BASE" $ROUNDS' in script
    assert "-- $TRAFFIC" in script


@pytest.mark.e2e
def test_the_job_of_a_pull_request_measures_two_revisions(tmp_path: Path) -> None:
    """Its own line in a repository whose head has one commit more than its base, with real servers; smaller.
    Made of the sources, since a checkout for tests may be shallow or without its history."""
    clone, script = tmp_path / "clone", AGAINST_BASE["github"][0]
    for package in ("engines", "harness", "kernels", "workloads"):
        shutil.copytree(ROOT / package, clone / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", ".gitignore"):
        shutil.copy(ROOT / name, clone / name)
    revisions.git(clone, "init", "--quiet", "--initial-branch=main")
    revisions.commit(clone)
    base = revisions.git(clone, "rev-parse", "HEAD").strip()
    revisions.commit(clone, says="changed")
    python = clone / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    summary = tmp_path / "summary.md"
    env = {**os.environ, **SMALL, "BASE": base, "GITHUB_STEP_SUMMARY": str(summary)}
    env |= {"TMPDIR": str(tmp_path)}  # a host lock of its own: these runs are not about times
    env.pop("PYTHONPATH", None)
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=300)
    line = json.loads(
        done.stdout.splitlines()[-1] if "::" not in done.stdout else done.stdout.splitlines()[-2]
    )
    assert line["gate"] in ("pass", "inconclusive", "invalid"), done.stderr  # two rounds of a busy machine
    assert done.returncode == (INVALID if line["gate"] == "invalid" else PASS)
    record = json.loads((Path(line["results"]) / "gate.json").read_text())
    assert record["base"]["sha"] == base != record["head"]["sha"]
    assert {side for made in record["rounds"] for side in made["runs"]} == {"base", "head"}
    for made in record["rounds"]:
        for run in made["runs"].values():
            assert (Path(line["results"]) / run / "summary.json").is_file()
    assert f"### Gate: {line['gate']}, rag/continuous/tiny" in summary.read_text()
    assert ET.parse(clone / "gate/junit.xml").getroot().attrib["failures"] == "0"
    trees = subprocess.check_output(["git", "-C", clone, "worktree", "list"], text=True)
    assert len(trees.splitlines()) == 1


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ci")
    gated(folder)
    return folder


def job(folder: Path, stored: Path, baseline: Path, system: str) -> subprocess.CompletedProcess[str]:
    """Run the job's scripts but `make`, in a folder whose `harness` has made the stored run before."""
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\n"
        f'if [ "$2" = harness ]; then echo "results: {stored}/run"; exit; fi\n'
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    places = {name: str(folder / name.lower()) for name in ("GITHUB_ENV", "GITHUB_OUTPUT")}
    env = {
        **os.environ,
        **places,
        "GITHUB_STEP_SUMMARY": str(folder / "gate/summary.md"),
        "PYTHONPATH": str(ROOT),
        "BASELINE": str(baseline),
    }
    for script in SCRIPTS[system][1:]:
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
        if done.returncode:
            return done
        for name in ("GITHUB_ENV", "GITHUB_OUTPUT"):
            if Path(places[name]).exists():
                env.update(line.split("=", 1) for line in Path(places[name]).read_text().splitlines())
    return done


@pytest.mark.parametrize("system", SCRIPTS)
def test_a_regression_fails_the_job_and_leaves_its_files(tmp_path: Path, stored: Path, system: str) -> None:
    done = job(tmp_path, stored, stored / "chat.json", system)
    assert done.returncode == REGRESSION, done.stderr
    suite = ET.parse(tmp_path / "gate/junit.xml").getroot()[0]
    assert suite.attrib["failures"] == "1"
    assert "### Gate: regression" in (tmp_path / "gate/summary.md").read_text()
    for name in ("bencher.json", "pytorch.json"):
        assert "latency_ms.tpot.p50" in (tmp_path / "gate" / name).read_text()
    if system == "github":
        assert (tmp_path / "github_output").read_text() == "smaller=true\nbigger=true\n"


def test_github_warns_of_what_is_inconclusive(tmp_path: Path, stored: Path) -> None:
    held = tmp_path / "held.json"
    held.write_bytes((stored / "chat.json").read_bytes())
    done = job(tmp_path, stored, of_another(held, "host"), "github")
    assert done.returncode == PASS
    assert "::warning::" in done.stdout
    assert not (tmp_path / "github_output").exists()  # no chart of another machine's figures


def test_gitlab_allows_what_is_inconclusive_and_nothing_else(tmp_path: Path, stored: Path) -> None:
    assert gitlab_job()["allow_failure"] == {"exit_codes": INCONCLUSIVE}
    held = tmp_path / "held.json"
    held.write_bytes((stored / "chat.json").read_bytes())
    assert job(tmp_path, stored, of_another(held, "schedule"), "gitlab").returncode == INVALID


def test_what_is_kept_and_charted_is_what_the_gate_writes() -> None:
    steps, gitlab = github_steps(), gitlab_job()
    gate = steps["Gate"]["run"]
    charts = {
        step["with"]["tool"]: step["with"]["output-file-path"]
        for step in steps.values()
        if "github-action-benchmark" in step.get("uses", "")
    }
    assert f"--gab-smaller {charts['customSmallerIsBetter']}" in gate
    assert f"--gab-bigger {charts['customBiggerIsBetter']}" in gate
    assert "gate/" in steps["Keep the reports and the records"]["with"]["path"].split()
    assert f"--junit {gitlab['artifacts']['reports']['junit']}" in SCRIPTS["gitlab"][1]
    assert gitlab["artifacts"]["when"] == "always"

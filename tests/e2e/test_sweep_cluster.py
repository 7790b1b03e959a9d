"""Sweeps through Hydra's launcher plugins, on the one host that a test has: a Ray cluster of one node, and
submitit's local executor in Slurm's place. `make ray-check` brings the plugins and runs these."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile

import pytest

from tests.support.harness_command import SHORT, HarnessCommand, meta, results

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(("launcher", "package"), [("ray", "ray"), ("submitit_local", "submitit")])
def test_every_point_of_a_sweep_is_a_job_and_jobs_on_one_host_never_overlap(tmp_path, launcher, package):
    if importlib.util.find_spec(package) is None:
        assert not os.environ.get("BATCHMARK_REQUIRE_RAY"), f"{package} is not installed"
        pytest.skip(f"{package} is not installed: no sweep over many hosts; make ray-check does it")
    sweep = ("-m", *SHORT, "engine=chunked", "seed=1,2", f"hydra/launcher={launcher}")
    sweep = (*sweep, f"sweep.dir={tmp_path / 'sweep'}")
    short = {"RAY_TMPDIR": tempfile.gettempdir()}  # the path of a socket has room for 107 characters
    code, out, stderr = HarnessCommand(tmp_path, *sweep, env=short).finish()
    assert code in (0, 3), stderr  # a busy machine may make a run invalid
    folder = results(out)
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    assert [run["overrides"] for run in runs] == [["seed=1"], ["seed=2"]]
    found = [meta(folder / run["run"]) for run in runs]
    assert [one["seed"] for one in found] == [1, 2]
    assert all(one["complete"] for one in found)
    spans = sorted((one["t0_ns"], one["t0_ns"] + one["load_end_ns"]) for one in found)
    assert spans[0][1] < spans[1][0]
    assert (folder / "report.html").is_file()
    assert not (folder / "points").exists()

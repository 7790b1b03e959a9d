"""`python -m harness.capacity` as a user calls it: a real server that stays, real probes, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.support.harness_command import PATIENCE_S, ROOT, gone, results, wait_for

pytestmark = pytest.mark.e2e
SMALL = (
    *("+workload=short", "+engine=continuous", "engine.kv_memory_gb=0.1", "capacity.requests=40"),
    *("slo.ttft_ms=60000", "slo.tpot_ms=60000", "slo.attainment=0.5", "capacity.queue_delay_p50_ms=null"),
    "capacity.growth=1",  # a machine that others use must not fail a rate
)


def command(folder: Path, *args: str) -> subprocess.Popen[str]:
    (folder / "tmp").mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp"), "CI": "true"}
    return subprocess.Popen(
        [sys.executable, "-m", "harness.capacity", *args, f"output.dir={folder / 'runs'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=folder,
        start_new_session=True,
    )


def found(folder: Path) -> dict:
    return json.loads((folder / "capacity.json").read_text())


def test_probes_are_whole_runs_on_one_server_and_an_interruption_keeps_them(tmp_path):
    process = command(tmp_path, *SMALL, "capacity.max_minutes=10", "cost.device_hour=1")
    folder = wait_for(lambda: next(iter((tmp_path / "runs").glob("*-capacity-*")), None), "a folder")
    path = folder / "capacity.json"
    wait_for(lambda: path.exists() and len(found(folder)["arms"][0]["points"]) > 1, "two probes")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3, err
    assert results(out) == folder
    arm = found(folder)["arms"][0]
    assert arm["ended"] == "interrupted"
    for point in arm["points"]:
        summary = json.loads((folder / point["run"] / "summary.json").read_text())
        assert summary["counts"]["completed"] == 40
        assert summary["throughput"]["goodput_rps"] == pytest.approx(point["goodput_rps"])
        assert point["ok"]
        assert point["attainment"] == 1
    servers = {
        json.loads((folder / p["run"] / "meta.json").read_text())["server"]["pid"] for p in arm["points"]
    }
    assert len(servers) == 1
    assert gone(servers.pop())
    for point in arm["points"]:  # n requests take exactly n / rate seconds
        arrivals = pd.read_parquet(folder / point["run"] / "schedule.parquet")["arrival_s"]
        assert 40 / arrivals.max() == pytest.approx(point["rate"])
    assert (folder / "report.html").stat().st_size > 1_000_000
    assert arm["cost"]["per_million_output"] > 0

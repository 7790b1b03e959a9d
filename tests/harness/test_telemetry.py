import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from harness import telemetry
from harness.records import TELEMETRY_COLUMNS, read_telemetry
from harness.telemetry import GpuMeter, Telemetry


def _sample(tmp_path, monkeypatch, seconds=0.3, **options):
    monkeypatch.setattr(telemetry, "PERIOD_NS", 20_000_000)
    t0_ns = time.monotonic_ns()
    with Telemetry(tmp_path / "telemetry.jsonl", t0_ns=t0_ns, **options) as meter:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(10_000))
    return meter, [json.loads(line) for line in (tmp_path / "telemetry.jsonl").read_text().splitlines()]


def test_samples_are_in_order_counted_from_t0_and_fit_the_record(tmp_path, monkeypatch):
    meter, rows = _sample(tmp_path, monkeypatch, server_pid=os.getpid(), gpu=False)
    assert len(rows) >= 2
    assert all(set(row) == set(TELEMETRY_COLUMNS) for row in rows)
    times = [row["t_ns"] for row in rows]
    assert times == sorted(times)
    assert 0 < times[0] < 60e9
    assert all(row["client_rss_mb"] > 1 and row["server_rss_mb"] > 1 for row in rows)
    assert max(row["client_cpu_pct"] for row in rows) > 0
    assert all(row["gpu_util_pct"] is None for row in rows)
    assert len(read_telemetry(tmp_path)) == len(rows)
    assert len(meter.clock_pairs) >= 2
    assert meter.clock_pairs == sorted(meter.clock_pairs)


def test_a_server_counts_with_its_children(tmp_path, monkeypatch):
    """The reference server computes in a child: a parent that only waits would look idle."""
    busy = "held = bytearray(50_000_000)\nwhile True: pass"
    idle = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {busy!r}]).pid, flush=True)"
    )
    idle += "; sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", idle], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        child = int(parent.stdout.readline())
        try:
            _, rows = _sample(tmp_path, monkeypatch, server_pid=parent.pid, gpu=False)
        finally:
            os.kill(child, signal.SIGKILL)
            parent.stdin.close()
    assert max(row["server_cpu_pct"] for row in rows) > 0
    assert max(row["server_rss_mb"] for row in rows) > 50


def test_a_server_that_is_gone_is_null_never_zero(tmp_path, monkeypatch):
    _, rows = _sample(tmp_path, monkeypatch, seconds=0.1, server_pid=2**22 + 1, gpu=False)
    assert rows
    assert all(row["server_cpu_pct"] is None and row["server_rss_mb"] is None for row in rows)
    _, rows = _sample(tmp_path, monkeypatch, seconds=0.1, server_pid=None, gpu=False)
    assert rows[-1]["server_cpu_pct"] is None


def test_a_full_disk_ends_the_sampling_not_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "PERIOD_NS", 10_000_000)
    with Telemetry(tmp_path / "missing" / "telemetry.jsonl", t0_ns=0, server_pid=None, gpu=False) as meter:
        time.sleep(0.05)
    assert isinstance(meter.error, OSError)


class _NVMLError(Exception):
    pass


def _fake_nvml(log):
    def refuse(_):
        raise _NVMLError("not supported")

    return SimpleNamespace(
        NVMLError=_NVMLError,
        nvmlInit=lambda: log.append("init"),
        nvmlShutdown=lambda: log.append("shutdown"),
        nvmlDeviceGetHandleByIndex=lambda index: f"index {index}",
        nvmlDeviceGetHandleByUUID=lambda name: f"uuid {name}",
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=37),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=2_500_000_000),
        nvmlDeviceGetPowerUsage=refuse,
    )


@pytest.mark.parametrize(
    ("visible", "handle"), [(None, "index 0"), ("3,1", "index 3"), ("GPU-ab,1", "uuid GPU-ab")]
)
def test_the_gpu_that_the_server_sees_is_read_and_what_it_lacks_is_null(monkeypatch, visible, handle):
    log = []
    monkeypatch.setitem(sys.modules, "pynvml", _fake_nvml(log))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = GpuMeter()
    assert gpu._handle == handle
    assert gpu.read() == {"gpu_util_pct": 37.0, "gpu_memory_gb": 2.5, "gpu_power_w": None}
    gpu.close()
    assert log == ["init", "shutdown"]


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert set(GpuMeter().read().values()) == {None}

"""CPU, memory and GPU during a run: real processes, and an NVML that gives known values."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from harness import sampler, telemetry
from harness.records import TELEMETRY_COLUMNS, read_telemetry
from harness.telemetry import GPU_COLUMNS, GpuMeter, ProcessMeter, Telemetry

SPIN = "held = bytearray(50_000_000)\nwhile True: pass"


def _rows(folder):
    lines = (folder / "telemetry.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be under way


def _sample(tmp_path, monkeypatch, *, rows=4, busy=True, gpu=False, **options):
    """At least `rows` samples of a machine that works meanwhile."""
    monkeypatch.setattr(telemetry, "PERIOD_NS", 20_000_000)
    with Telemetry(tmp_path / "telemetry.jsonl", t0_ns=time.monotonic_ns(), gpu=gpu, **options) as meter:
        _until(lambda: meter.rows >= rows, busy=busy)
    return meter, _rows(tmp_path)


def _until(holds, *, busy=False):
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "it never happened"
        if busy:
            sum(range(10_000))
        else:
            time.sleep(0.005)


@pytest.fixture
def children():
    started = []

    def start(code, **options):
        started.append(subprocess.Popen([sys.executable, "-c", code], **options))
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.wait()


def test_samples_are_in_order_counted_from_t0_and_fit_the_record(tmp_path, monkeypatch):
    meter, rows = _sample(tmp_path, monkeypatch, rows=telemetry.CLOCK_EVERY + 2, server_pid=os.getpid())
    assert all(set(row) == set(TELEMETRY_COLUMNS) for row in rows)
    times = [row["t_ns"] for row in rows]
    assert times == sorted(times)
    assert 0 < times[0] < 60e9
    assert all(row["client_rss_mb"] > 1 and row["server_rss_mb"] > 1 for row in rows)
    assert max(row["client_cpu_pct"] for row in rows) > 0
    assert all(row[column] is None for row in rows for column in GPU_COLUMNS)
    assert set(meter.reasons) == set(GPU_COLUMNS)
    assert len(read_telemetry(tmp_path)) == len(rows) == meter.rows
    assert len(meter.clock_pairs) >= 3  # the first, one on the way, the last
    assert meter.clock_pairs == sorted(meter.clock_pairs)
    assert meter.meta() == {"rows": len(rows), "cpu_s": pytest.approx(meter.cpu_s, abs=1e-3)} | {
        "reasons": meter.reasons
    }


def test_what_is_on_file_is_added_to(tmp_path, monkeypatch):
    (tmp_path / "telemetry.jsonl").write_text('{"t_ns":-5}\n')
    _, rows = _sample(tmp_path, monkeypatch, server_pid=None)
    assert rows[0] == {"t_ns": -5}
    assert len(rows) >= 5


def test_a_server_counts_with_its_children_also_those_that_come_later(tmp_path, monkeypatch, children):
    """The reference server computes in a child: a parent that only waits would look idle."""
    monkeypatch.setattr(telemetry, "TREE_EVERY", 2)

    def grown(rows):
        return rows[-1]["server_rss_mb"] - rows[0]["server_rss_mb"]

    code = f"""if True:
        import subprocess, sys
        sys.stdin.readline()
        child = subprocess.Popen([sys.executable, "-c", {SPIN!r}])
        print(child.pid, flush=True)
        sys.stdin.read()
        child.kill()
    """
    parent = children(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    monkeypatch.setattr(telemetry, "PERIOD_NS", 20_000_000)
    path = tmp_path / "telemetry.jsonl"
    with Telemetry(path, t0_ns=0, server_pid=parent.pid, gpu=False) as meter:
        _until(lambda: meter.rows >= 2)
        parent.stdin.write("\n")
        parent.stdin.flush()
        int(parent.stdout.readline())
        _until(lambda: grown(_rows(tmp_path)) > 50 and _rows(tmp_path)[-1]["server_cpu_pct"] > 20)
    parent.stdin.close()
    parent.wait(30)
    rows = _rows(tmp_path)
    assert rows[0]["server_rss_mb"] < 40
    assert grown(rows) > 50
    assert not any(column.startswith("server") for column in meter.reasons)


def test_load_workers_count_as_the_client_and_one_that_ends_no_longer(children):
    workers = [children(SPIN) for _ in range(2)]
    meter = ProcessMeter([os.getpid(), *(worker.pid for worker in workers)])
    alone = ProcessMeter([os.getpid()])
    _until(lambda: meter.read()[1] - alone.read()[1] > 100)
    for worker in workers:
        worker.kill()
    _until(lambda: meter.read()[1] - alone.read()[1] < 1)  # zombies now: they hold nothing
    assert meter.read()[0] is not None


def test_the_cpu_of_a_process_that_always_computes_is_what_the_kernel_counts(children):
    import psutil

    spin = children("import time\nwhile True: pass")
    meter = ProcessMeter([spin.pid])
    meter.read()
    start, at = psutil.Process(spin.pid).cpu_times(), time.monotonic()
    seconds, begin = 0.0, at
    while at < begin + 1.0:
        time.sleep(0.05)
        last, at = at, time.monotonic()
        seconds += meter.read()[0] / 100 * (at - last)
    end = psutil.Process(spin.pid).cpu_times()
    used = end.user + end.system - start.user - start.system
    assert used > 0.02
    assert seconds == pytest.approx(used, rel=0.1, abs=0.03)


@pytest.mark.parametrize(
    ("pid", "reason"), [(2**22 + 1, "gone"), (None, "the server is not a process of this run")]
)
def test_a_server_that_cannot_be_read_is_null_never_zero_and_says_why(tmp_path, monkeypatch, pid, reason):
    meter, rows = _sample(tmp_path, monkeypatch, server_pid=pid)
    assert all(row["server_cpu_pct"] is None and row["server_rss_mb"] is None for row in rows)
    assert reason in meter.reasons["server_cpu_pct"]
    assert reason in meter.reasons["server_rss_mb"]


def test_a_full_disk_ends_the_sampling_not_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "PERIOD_NS", 10_000_000)
    with Telemetry(tmp_path / "missing" / "telemetry.jsonl", t0_ns=0, server_pid=None, gpu=False) as meter:
        _until(lambda: meter.error is not None)
    assert "telemetry.jsonl cannot be written: No such file" in meter.reasons["telemetry"]
    with Telemetry(_full_disk(), t0_ns=0, server_pid=None, gpu=False) as meter:
        _until(lambda: meter.error is not None)
    assert "No space left" in meter.reasons["telemetry"]


def _full_disk():
    from pathlib import Path

    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("no /dev/full here")
    return path


def test_a_fault_in_a_reading_is_told_and_ends_only_the_sampling(tmp_path, monkeypatch):
    monkeypatch.setattr(ProcessMeter, "read", lambda self: 1 / 0)
    monkeypatch.setattr(telemetry, "PERIOD_NS", 10_000_000)
    with Telemetry(tmp_path / "telemetry.jsonl", t0_ns=0, server_pid=None, gpu=False) as meter:
        _until(lambda: "telemetry" in meter.reasons)
    assert meter.reasons["telemetry"] == "ended by ZeroDivisionError: division by zero"


def test_a_reading_that_hangs_does_not_hang_the_run(tmp_path, monkeypatch):
    release = time.monotonic() + 20

    def hang(self):
        while time.monotonic() < release:
            time.sleep(0.01)
        return None, None

    monkeypatch.setattr(sampler, "JOIN_S", 0.05)
    monkeypatch.setattr(telemetry, "PERIOD_NS", 10_000_000)
    monkeypatch.setattr(ProcessMeter, "read", hang)
    with Telemetry(tmp_path / "telemetry.jsonl", t0_ns=0, server_pid=None, gpu=False) as meter:
        time.sleep(0.05)
    assert time.monotonic() < release
    release = 0
    assert "hung" in meter.reasons["telemetry"]
    meter._thread.join()


def test_a_long_run_doubles_its_period_instead_of_filling_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "ROWS_PER_RATE", 4)
    _, rows = _sample(tmp_path, monkeypatch, rows=12, server_pid=None, busy=False)
    assert rows[11]["t_ns"] / 1e6 >= 4 * (20 + 40 + 80)  # however late a wait ends, none ends early


def test_a_kill_leaves_whole_lines(tmp_path, children):
    code = f"""if True:
        import time
        from pathlib import Path
        from harness import telemetry
        telemetry.PERIOD_NS = 2_000_000
        path = Path({str(tmp_path / "telemetry.jsonl")!r})
        with telemetry.Telemetry(path, t0_ns=0, server_pid=None, gpu=False):
            time.sleep(60)
    """
    child = children(code)
    path = tmp_path / "telemetry.jsonl"
    _until(lambda: path.exists() and path.read_bytes().count(b"\n") > 20)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert len(read_telemetry(tmp_path)) == path.read_bytes().count(b"\n") > 20


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    def __str__(self):
        return "Not Supported"


class FakeNvml:
    """Two devices of known values; a reading is a number, an error to raise, or a list of both, in turn."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported

    def __init__(self, **readings):
        self.log = []
        self.init_error = None
        self.count = 2
        self.readings = {"util": 37, "memory": 2_500_000_000, "power": 250_000, "energy": 1_000} | readings

    def nvmlInit(self):
        self.log.append("init")
        if self.init_error:
            raise self.init_error

    def nvmlShutdown(self):
        self.log.append("shutdown")

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= self.count:
            raise NVMLError("Invalid Argument")
        return f"index {index}"

    def nvmlDeviceGetHandleByUUID(self, name):
        return f"uuid {name}"

    def _reading(self, name, handle):
        self.log.append((name, handle))
        value = self.readings[name]
        if isinstance(value, dict):
            value = value[handle]
        if isinstance(value, list):
            value = value.pop(0)
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self._reading("util", handle))

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=self._reading("memory", handle))

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._reading("power", handle)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self._reading("energy", handle)


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def use(**readings):
        fake = FakeNvml(**readings)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return use


def test_one_gpu_is_read_in_the_units_of_the_record(nvml):
    fake = nvml(energy=[1_000_000, 1_025_000, 1_050_500])
    gpu = GpuMeter("cuda")
    first = {"gpu_util_pct": 37.0, "gpu_memory_gb": 2.5, "gpu_power_w": 250.0, "gpu_energy_j": 0.0}
    assert gpu.read() == first
    assert gpu.read() == first | {"gpu_energy_j": 25.0}
    assert gpu.read() == first | {"gpu_energy_j": 50.5}
    assert gpu.reasons == {}
    gpu.close()
    assert fake.log[0] == "init"
    assert fake.log[-1] == "shutdown"
    assert {handle for name, handle in fake.log[1:-1]} == {"index 0"}


def test_several_gpus_are_a_mean_of_utilization_and_sums_with_each_beside(nvml):
    nvml(
        util={"index 0": 30, "index 1": 80},
        memory={"index 0": 1_000_000_000, "index 1": 3_000_000_000},
        power={"index 0": 100_000, "index 1": 400_000},
        energy={"index 0": [0, 10_000], "index 1": [7_000_000, 7_040_000]},
    )
    gpu = GpuMeter(True)
    gpu.read()
    assert gpu.read() == {
        "gpu_util_pct": 55.0,
        "gpu_memory_gb": 4.0,
        "gpu_power_w": 500.0,
        "gpu_energy_j": 50.0,
        "gpus": [[30.0, 1.0, 100.0, 10.0], [80.0, 3.0, 400.0, 40.0]],
    }


def test_a_sum_that_lacks_a_device_is_null(nvml):
    nvml(power={"index 0": 100_000, "index 1": NVMLError_NotSupported()})
    gpu = GpuMeter(True)
    row = gpu.read()
    assert row["gpu_power_w"] is None
    assert [each[2] for each in row["gpus"]] == [100.0, None]
    assert row["gpu_memory_gb"] == 5.0
    assert gpu.reasons == {"gpu_power_w": "NVML: Not Supported"}


def test_a_reading_that_is_not_supported_is_null_with_its_reason_and_not_asked_again(nvml):
    fake = nvml(energy=NVMLError_NotSupported(), util=[NVMLError("GPU is lost"), 50])
    gpu = GpuMeter("cuda")
    assert [gpu.read()["gpu_util_pct"], gpu.read()["gpu_util_pct"]] == [None, 50.0]  # a passing error
    assert gpu.read.__self__.reasons == {
        "gpu_energy_j": "NVML: Not Supported",
        "gpu_util_pct": "NVML: GPU is lost",
    }
    assert [name for name, _ in fake.log[1:]].count("energy") == 1


def test_a_library_older_than_the_energy_counter(nvml, monkeypatch):
    nvml()
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetTotalEnergyConsumption")
    gpu = GpuMeter("cuda")
    assert gpu.read()["gpu_energy_j"] is None
    assert "nvmlDeviceGetTotalEnergyConsumption" in gpu.reasons["gpu_energy_j"]


def test_an_energy_counter_that_wraps_counts_that_interval_with_its_power(nvml, monkeypatch):
    clock = [0]
    monkeypatch.setattr(telemetry.time, "monotonic_ns", lambda: clock[0])
    nvml(energy=[2**32 - 20_000, 2**32 - 10_000, 15_000, 40_000])
    gpu = GpuMeter("cuda")
    seen = []
    for _ in range(4):
        clock[0] += 100_000_000
        seen.append(gpu.read()["gpu_energy_j"])
    assert seen == [0.0, 10.0, 35.0, 60.0]  # 250 W x 0.1 s where it went back
    assert "went back" in gpu.reasons["gpu_energy_j"]


def test_an_energy_counter_that_goes_back_without_power_is_null_from_there(nvml):
    nvml(energy=[5_000, 6_000, 0, 1_000], power=NVMLError_NotSupported())
    gpu = GpuMeter("cuda")
    assert [gpu.read()["gpu_energy_j"] for _ in range(4)] == [0.0, 1.0, None, None]
    assert "null from there" in gpu.reasons["gpu_energy_j"]


def test_a_reading_of_energy_that_fails_once_loses_no_joule(nvml):
    nvml(energy=[1_000, NVMLError("Timeout"), 4_000])
    gpu = GpuMeter("cuda")
    assert [gpu.read()["gpu_energy_j"] for _ in range(3)] == [0.0, None, 3.0]


@pytest.mark.parametrize(
    ("visible", "asked", "handles"),
    [
        (None, "cuda", ["index 0"]),
        (None, "cuda:1", ["index 1"]),
        (None, True, ["index 0", "index 1"]),
        ("1,0", "cuda", ["index 1"]),
        ("1,0", "cuda:1", ["index 0"]),
        ("GPU-ab,1", "cuda", ["uuid GPU-ab"]),
        ("GPU-ab, 1", True, ["uuid GPU-ab", "index 1"]),
        ("0,-1,1", True, ["index 0"]),
    ],
)
def test_the_gpus_that_the_server_sees_are_read(nvml, monkeypatch, visible, asked, handles):
    fake = nvml()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    GpuMeter(asked).read()
    assert [handle for name, handle in fake.log[1:] if name == "util"] == handles


@pytest.mark.parametrize(
    ("asked", "visible", "reason"),
    [
        (False, None, "no GPU is known"),
        (None, None, "no GPU is known"),
        ("cpu", None, "the device is a CPU"),
        ("cuda:5", None, "cuda:5 of 2"),
        ("cuda", "7", "Invalid Argument"),
        ("cuda", "", "hides every GPU"),
        (True, "-1", "hides every GPU"),
    ],
)
def test_no_gpu_is_null_with_a_reason(nvml, monkeypatch, asked, visible, reason):
    nvml()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = GpuMeter(asked)
    assert gpu.read() == dict.fromkeys(GPU_COLUMNS)
    assert set(gpu.reasons) == set(GPU_COLUMNS)
    assert all(reason in why for why in gpu.reasons.values())
    gpu.close()


def test_without_a_driver_or_the_library_there_is_no_gpu(nvml, monkeypatch):
    fake = nvml()
    fake.init_error = NVMLError("NVML Shared Library Not Found")
    gpu = GpuMeter("cuda")
    assert gpu.read() == dict.fromkeys(GPU_COLUMNS)
    assert "Shared Library Not Found" in gpu.reasons["gpu_util_pct"]
    gpu.close()
    assert fake.log == ["init"]  # what never began is not ended
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpu = GpuMeter("cuda")
    assert set(gpu.read().values()) == {None}
    assert "NVML cannot be used" in gpu.reasons["gpu_power_w"]


def test_the_reasons_of_the_gpu_are_those_of_the_telemetry(nvml, tmp_path, monkeypatch):
    nvml(energy=NVMLError_NotSupported())
    meter, rows = _sample(tmp_path, monkeypatch, server_pid=os.getpid(), gpu="cuda")
    assert all(row["gpu_power_w"] == 250.0 and row["gpu_energy_j"] is None for row in rows)
    assert meter.reasons == {"gpu_energy_j": "NVML: Not Supported"}
    assert all(set(row) == set(TELEMETRY_COLUMNS) for row in rows)

"""What the machine does during a run: CPU and memory of server and client, and the GPU, four times a second.

Appended line by line to telemetry.jsonl, so a kill loses nothing. What cannot be read is null, never 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.host import clock_pair

PERIOD_NS = 250_000_000
CLOCK_EVERY = 8
"""A clock pair every 8th sample (2 s): enough to see a step of the wall clock, and to map kernel stamps."""


class Telemetry:
    """A sampling thread for the length of a `with`. t_ns counts from t0_ns, like the client's stamps."""

    def __init__(self, path: Path, *, t0_ns: int, server_pid: int | None, gpu: bool) -> None:
        self.clock_pairs: list[tuple[int, int]] = [clock_pair()]
        self.error: OSError | None = None
        self._path = path
        self._t0_ns = t0_ns
        self._server_pid = server_pid
        self._gpu = gpu
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Telemetry:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.clock_pairs.append(clock_pair())

    def _run(self) -> None:
        server = _ProcessMeter(self._server_pid, children=True)
        client = _ProcessMeter(os.getpid())
        gpu = GpuMeter() if self._gpu else None
        count = 0
        try:
            with open(self._path, "ab", buffering=0) as file:
                due = time.monotonic_ns()
                while True:
                    due += PERIOD_NS  # the first interval is a whole one: CPU per cent needs two readings
                    if self._stop.wait(max(0, due - time.monotonic_ns()) / 1e9):
                        return
                    server_cpu, server_rss = server.read()
                    client_cpu, client_rss = client.read()
                    row: dict[str, Any] = {
                        "t_ns": time.monotonic_ns() - self._t0_ns,
                        "server_cpu_pct": server_cpu,
                        "server_rss_mb": server_rss,
                        "client_cpu_pct": client_cpu,
                        "client_rss_mb": client_rss,
                        **(gpu.read() if gpu else NO_GPU),
                    }
                    file.write(json.dumps(row).encode() + b"\n")
                    count += 1
                    if count % CLOCK_EVERY == 0:
                        self.clock_pairs.append(clock_pair())
        except OSError as error:  # a full disk must not end the run; the reader sees fewer rows
            self.error = error
        finally:
            if gpu:
                gpu.close()


NO_GPU: dict[str, float | None] = {"gpu_util_pct": None, "gpu_memory_gb": None, "gpu_power_w": None}


class _ProcessMeter:
    """CPU (per cent of one core, all threads together) and resident memory (MB) of a process, and of the
    children that it has at the start: looking for new ones reads the whole process table."""

    def __init__(self, pid: int | None, children: bool = False) -> None:
        import psutil

        self._gone = (psutil.Error, OSError)
        self._processes: list[psutil.Process] = []
        if pid is not None:
            with contextlib.suppress(*self._gone):
                parent = psutil.Process(pid)
                self._processes = [parent, *(parent.children(recursive=True) if children else [])]
                for process in self._processes:
                    process.cpu_percent(None)  # the first call only starts the interval

    def read(self) -> tuple[float | None, float | None]:
        if not self._processes:
            return None, None
        try:
            cpu = sum(process.cpu_percent(None) for process in self._processes)
            return round(cpu, 1), round(sum(p.memory_info().rss for p in self._processes) / 1e6, 1)
        except self._gone:
            return None, None


class GpuMeter:
    """The first GPU that the server may see, through NVML. Every reading that the driver lacks is null."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no driver, no library: there is no GPU to read
            return
        self._nvml = pynvml
        with contextlib.suppress(pynvml.NVMLError):
            self._handle = self._find()

    def _find(self) -> Any:
        """NVML numbers all devices of the host; CUDA_VISIBLE_DEVICES names the ones a process sees."""
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        if first.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(first))
        return self._nvml.nvmlDeviceGetHandleByUUID(first)

    def read(self) -> dict[str, float | None]:
        if self._handle is None:
            return NO_GPU
        n, h = self._nvml, self._handle
        return {
            "gpu_util_pct": self._value(lambda: float(n.nvmlDeviceGetUtilizationRates(h).gpu)),
            "gpu_memory_gb": self._value(lambda: round(n.nvmlDeviceGetMemoryInfo(h).used / 1e9, 3)),
            "gpu_power_w": self._value(lambda: n.nvmlDeviceGetPowerUsage(h) / 1e3),
        }

    def _value(self, read: Any) -> float | None:
        try:
            return read()
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

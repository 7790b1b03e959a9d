"""What the machine does during a run: CPU and memory of server and client, and the GPUs, ten times a second.

A row of telemetry.jsonl has the columns of records.TELEMETRY_COLUMNS; with more than one GPU also `gpus`, a
list of [util_pct, memory_gb, power_w, energy_j] per device. What cannot be read is null, never 0, and
`reasons` says why, by column. CPU per cent come from the kernel's ticks (10 ms): one row is in steps of 10 %,
the mean over rows is not.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness.host import clock_pair
from harness.sampler import Sampler

PERIOD_NS = 100_000_000
CLOCK_EVERY = 20
"""A clock pair every 20th sample (2 s): enough to see a step of the wall clock, and to map kernel stamps."""
TREE_EVERY = 50
"""Samples between two looks for new children (5 s): each reads the whole process table."""
MAX_GPUS = 16

GPU_COLUMNS = ("gpu_util_pct", "gpu_memory_gb", "gpu_power_w", "gpu_energy_j")
SERVER_COLUMNS = ("server_cpu_pct", "server_rss_mb")
CLIENT_COLUMNS = ("client_cpu_pct", "client_rss_mb")


class Telemetry(Sampler):
    """server_pid: the server with all its children; None where it is not ours. client_pids: load workers;
    this process is counted with them. gpu: the server's device ("cpu", "cuda", "cuda:1"), True for every
    GPU that this process may see, False or None for none."""

    name = "telemetry"

    def __init__(
        self,
        path: Path,
        *,
        t0_ns: int,
        server_pid: int | None,
        gpu: str | bool | None,
        client_pids: Iterable[int] = (),
    ) -> None:
        super().__init__(path, t0_ns=t0_ns)
        self.period_ns = PERIOD_NS
        self.clock_pairs: list[tuple[int, int]] = [clock_pair()]
        self._server_pid = server_pid
        self._client_pids = list(dict.fromkeys((os.getpid(), *client_pids)))
        self._gpu = gpu

    def open(self) -> bool:
        if self._server_pid is None:
            self._missing(SERVER_COLUMNS, "the server is not a process of this run")
        self._server = ProcessMeter([] if self._server_pid is None else [self._server_pid], tree=True)
        self._client = ProcessMeter(self._client_pids)
        self._gpus = GpuMeter(self._gpu)
        return True

    def sample(self, t_ns: int) -> dict[str, Any]:
        server_cpu, server_rss = self._server.read()
        client_cpu, client_rss = self._client.read()
        if server_cpu is None and self._server_pid is not None:
            self._missing(SERVER_COLUMNS, "the server's process is gone or not ours to read")
        if client_cpu is None:
            self._missing(CLIENT_COLUMNS, "the client's processes cannot be read")
        if self.rows % CLOCK_EVERY == CLOCK_EVERY - 1:
            self.clock_pairs.append(clock_pair())
        return {
            "server_cpu_pct": server_cpu,
            "server_rss_mb": server_rss,
            "client_cpu_pct": client_cpu,
            "client_rss_mb": client_rss,
            **self._gpus.read(),
        }

    def close(self) -> None:
        self._gpus.close()
        self.reasons.update(self._gpus.reasons)
        self.clock_pairs.append(clock_pair())

    def _missing(self, columns: Iterable[str], reason: str) -> None:
        for column in columns:
            self.reasons.setdefault(column, reason)


class ProcessMeter:
    """CPU (per cent of one core, all threads together) and resident memory (MB) of processes that live.

    With tree, their children too, also those that come later. One that ends is no longer counted; null when
    none is left. Memory that processes share is counted in each."""

    def __init__(self, pids: Iterable[int], tree: bool = False) -> None:
        import psutil

        self._gone = (psutil.Error, OSError)
        self._tree = tree
        self._reads = 0
        self._roots: list[psutil.Process] = []
        self._processes: dict[int, psutil.Process] = {}
        for pid in pids:
            with contextlib.suppress(*self._gone):
                self._roots.append(psutil.Process(pid))
        self._look()

    def _look(self) -> None:
        for root in self._roots:
            with contextlib.suppress(*self._gone):
                for process in (root, *(root.children(recursive=True) if self._tree else ())):
                    if process.pid not in self._processes:
                        process.cpu_percent(None)  # the first call only starts the interval
                        self._processes[process.pid] = process

    def read(self) -> tuple[float | None, float | None]:
        self._reads += 1
        if self._tree and self._reads % TREE_EVERY == 0:
            self._look()
        cpu, rss, read = 0.0, 0, False
        for pid, process in list(self._processes.items()):
            try:
                used, held = process.cpu_percent(None), process.memory_info().rss
            except self._gone:
                del self._processes[pid]
                continue
            if held == 0:  # ended, and not yet waited for
                continue
            cpu, rss, read = cpu + used, rss + held, True
        return (round(cpu, 1), round(rss / 1e6, 1)) if read else (None, None)


class GpuMeter:
    """GPUs through NVML. Utilization is the mean over them; memory, power and energy are sums.

    Energy (J) counts from the first reading, by the driver's counter of mJ (Volta and later). Where
    that counter goes back (it wrapped, the driver was loaded anew), that interval counts with its power.
    """

    def __init__(self, gpu: str | bool | None) -> None:
        self.reasons: dict[str, str] = {}
        self._nvml: Any = None
        self._devices: list[_Device] = []
        reason = self._find(gpu)
        if reason is not None:
            self.reasons.update(dict.fromkeys(GPU_COLUMNS, reason))

    def _find(self, gpu: str | bool | None) -> str | None:
        """Open the devices; or why there are none to read."""
        if not gpu:
            return "no GPU is known to serve this run"
        if gpu == "cpu":
            return "the device is a CPU"
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # no library, no driver, a driver that is not fit
            return f"NVML cannot be used: {error}"
        self._nvml = pynvml
        try:
            self._devices = [_Device(pynvml, handle, self.reasons) for handle in self._handles(gpu)]
        except Exception as error:
            return f"NVML finds no such GPU: {error}"
        return None if self._devices else "CUDA_VISIBLE_DEVICES hides every GPU"

    def _handles(self, gpu: str | bool) -> list[Any]:
        """NVML numbers all devices of the host; CUDA_VISIBLE_DEVICES names those that a process sees."""
        n = self._nvml
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        if listed is None:
            names = [str(index) for index in range(n.nvmlDeviceGetCount())]
        else:
            names = [name.strip() for name in listed.split(",")]
            end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
            names = names[:end]  # CUDA reads the list up to the first name that is none
        if gpu is not True and names:
            index = int(str(gpu).partition(":")[2] or 0)
            if index >= len(names):
                raise LookupError(f"{gpu} of {len(names)} that are visible")
            names = [names[index]]
        return [
            n.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else n.nvmlDeviceGetHandleByUUID(name)
            for name in names[:MAX_GPUS]
        ]

    def read(self) -> dict[str, Any]:
        each = [device.read() for device in self._devices]
        utils, *sums = zip(*each, strict=True) if each else [()] * len(GPU_COLUMNS)
        row: dict[str, Any] = dict.fromkeys(GPU_COLUMNS)
        if utils and None not in utils:
            row["gpu_util_pct"] = round(math.fsum(utils) / len(utils), 1)
        for column, values in zip(GPU_COLUMNS[1:], sums, strict=True):
            if values and None not in values:  # a sum that lacks a device would look like a saving
                row[column] = round(math.fsum(values), 3)
        if len(each) > 1:
            row["gpus"] = each
        return row

    def close(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()


class _Device:
    """One GPU. A reading that the driver lacks is None, with its reason in `reasons`, and is not asked again
    once it is known not to be supported."""

    def __init__(self, nvml: Any, handle: Any, reasons: dict[str, str]) -> None:
        self._nvml = nvml
        self._handle = handle
        self._reasons = reasons
        self._unsupported: set[str] = set()
        self._energy_j: float | None = None
        self._counter_mj: int | None = None
        self._at_ns = 0

    def read(self) -> list[float | None]:
        """util_pct, memory_gb, power_w, energy_j."""
        n, h = self._nvml, self._handle
        power = self._value("gpu_power_w", lambda: n.nvmlDeviceGetPowerUsage(h) / 1e3)
        return [
            self._value("gpu_util_pct", lambda: float(n.nvmlDeviceGetUtilizationRates(h).gpu)),
            self._value("gpu_memory_gb", lambda: round(n.nvmlDeviceGetMemoryInfo(h).used / 1e9, 3)),
            power,
            self._energy(power),
        ]

    def _energy(self, power_w: float | None) -> float | None:
        counter = self._value(
            "gpu_energy_j", lambda: int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        )
        if counter is None:
            return None
        now, before = time.monotonic_ns(), self._counter_mj
        elapsed_s, self._at_ns, self._counter_mj = (now - self._at_ns) / 1e9, now, counter
        if before is None:
            self._energy_j = 0.0
        elif self._energy_j is not None and counter >= before:
            self._energy_j += (counter - before) / 1e3
        elif self._energy_j is not None:
            self._energy_j = None if power_w is None else self._energy_j + power_w * elapsed_s
            how = "null from there" if power_w is None else "that interval counts with its power"
            self._reasons["gpu_energy_j"] = f"the driver's counter went back; {how}"
        return None if self._energy_j is None else round(self._energy_j, 3)

    def _value(self, column: str, read: Callable[[], Any]) -> Any:
        if column in self._unsupported:
            return None
        try:
            return read()
        except self._nvml.NVMLError as error:
            if isinstance(error, getattr(self._nvml, "NVMLError_NotSupported", ())):
                self._unsupported.add(column)
            self._reasons.setdefault(column, f"NVML: {error}")
        except Exception as error:  # a library older than the call
            self._unsupported.add(column)
            self._reasons.setdefault(column, f"NVML: {error}")
        return None

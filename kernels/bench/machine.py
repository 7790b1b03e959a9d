"""What this machine can do: the rate at which it reads memory and the rate of its matrix products. Both with
the threads of the process that measures, so that shares of them mean something."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from kernels.cpu import memory
from kernels.cpu.library import available

LEAST_BYTES = 256 * 2**20
ROUNDS = 5
PRODUCTS = ((512, 2048, 2048), (1024, 4096, 4096), (1024, 1024, 4096))
"""Rows, inputs, outputs: large enough for any library, small enough for a laptop."""


@dataclass(frozen=True, slots=True)
class Machine:
    """read_gb_s: on a CPU the best of three ways to read a buffer that no cache holds; on CUDA what a copy
    moves, both directions counted. gflop_s: the best of F.linear over PRODUCTS, in dtype."""

    read_gb_s: float
    gflop_s: float
    dtype: str
    threads: int
    cache_bytes: int
    buffer_bytes: int

    def as_dict(self) -> dict[str, float | str | int]:
        return asdict(self)


def measure_machine(device: torch.device, dtype: torch.dtype, buffer_bytes: int | None = None) -> Machine:
    size = buffer_bytes or rotation_bytes(device)
    return Machine(
        read_gb_s=read_bandwidth(device, size),
        gflop_s=matrix_rate(device, dtype),
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        cache_bytes=cache_bytes(device),
        buffer_bytes=size,
    )


def read_bandwidth(device: torch.device, size: int) -> float:
    """GB/s over a buffer of `size` bytes: the median of a product with a vector, of a dot product, or of our
    own loop of loads, whichever reads fastest here."""
    x = torch.ones(size // 4 // 4096, 4096, device=device)
    if device.type == "cuda":
        other = torch.empty_like(x)
        return 2 * x.numel() * 4 / median_seconds(lambda: other.copy_(x), device) / 1e9
    vector, halves = torch.ones(4096), x.view(-1)[: x.numel() // 2 * 2].view(2, -1)
    ways: list[Callable[[], object]] = [
        lambda: torch.mv(x, vector),
        lambda: torch.dot(halves[0], halves[1]),
    ]
    if available():
        ways.append(lambda: memory.read(x))
    return max(x.numel() * 4 / median_seconds(way, device) / 1e9 for way in ways)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """GFLOP/s of the best product."""
    rates = []
    for rows, inputs, outputs in PRODUCTS:
        x = torch.randn(rows, inputs, device=device).to(dtype)
        weight = torch.randn(outputs, inputs, device=device).to(dtype)
        seconds = median_seconds(partial(F.linear, x, weight), device)
        rates.append(2 * rows * inputs * outputs / seconds / 1e9)
    return max(rates)


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    run()
    return statistics.median(seconds(run, device) for _ in range(ROUNDS))


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one call: the host's clock on a CPU, a pair of events on CUDA."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def rotation_bytes(device: torch.device) -> int:
    """So many bytes that no cache holds them: twice the last level, at least 256 MiB."""
    return max(LEAST_BYTES, 2 * cache_bytes(device))


def cache_bytes(device: torch.device) -> int:
    """The last level of cache as the system reports it; 0 where it does not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for entry in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = entry.read_text().strip()
        scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * scale)
    return max(sizes, default=0)

"""Time the attention backends over every case and head shape, round by round in turn."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle

import torch

import kernels
from kernels.bench.cases import (
    CASES,
    DECODE,
    PREFILL,
    SHAPES,
    Case,
    Pool,
    Shape,
    checked,
    contiguous,
    gathered,
    paged,
)
from kernels.bench.machine import Machine, measure_machine, rotation_bytes, seconds
from kernels.interface import AttentionBackend

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COMPARISONS = {"sdpa": contiguous, "gather": gathered}
"""torch's SDPA on contiguous memory, and after a gather of the blocks. Lines beside the backends."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SAMPLE_S = 0.01
"""A sample is as many calls as take this long, each on other blocks."""
DECODE_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Line:
    """One backend in one case. ms: the median over rounds; quartiles: of it."""

    shape: str
    case: str
    backend: str
    ms: float
    ms_min: float
    ms_max: float
    ms_quartiles: tuple[float, float]
    gb_s: float
    gflop_s: float
    share_of_bandwidth: float
    share_of_matrix_rate: float
    copies: int
    error: float | None

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, over the median."""
        return (self.ms_quartiles[1] - self.ms_quartiles[0]) / 2 / self.ms


def shapes_of(names: list[str]) -> list[Shape]:
    """Presets by name, others as heads,kv_heads,dim. Raises ValueError, one line."""
    found = []
    for name in names:
        if name in SHAPES:
            found.append(SHAPES[name])
            continue
        parts = name.split(",")
        if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
            raise ValueError(f"--shapes {name}: choose from {', '.join(SHAPES)}, or give heads,kv_heads,dim")
        heads, kv_heads, dim = map(int, parts)
        if heads % kv_heads:
            raise ValueError(f"--shapes {name}: {heads} heads are no multiple of {kv_heads} kv_heads")
        found.append(Shape("custom", heads, kv_heads, dim))
    return found


def backends_of(names: list[str] | None, device: str, dtype: torch.dtype) -> list[AttentionBackend]:
    """The named ones; by default all that run here. Raises ValueError or RuntimeError, one line."""
    if names is not None:
        return [kernels.get_backend(name, device, dtype) for name in names]
    found = []
    for name in kernels.BACKENDS:
        if name != "auto":
            try:
                found.append(kernels.get_backend(name, device, dtype))
            except (ValueError, RuntimeError, ImportError):
                continue  # not made for this device, or not to be built here
    return found


def measure(
    args: argparse.Namespace, shapes: list[Shape], backends: list[AttentionBackend]
) -> Iterator[Machine | Line]:
    """First the machine, then line by line."""
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    size = args.rotate_mb * 2**20 if args.rotate_mb else rotation_bytes(device)
    machine = measure_machine(device, dtype, size)
    yield machine
    for shape in shapes:
        pool = Pool(shape, args.block_size, size, dtype, device)
        for case in CASES:
            calls: dict[str, list[Callable[[], object]]] = {
                backend.name: [*paged(backend, pool, case)] for backend in backends
            }
            errors = {backend.name: error_of(backend, pool, case) for backend in backends}
            calls |= {name: make(pool, case) for name, make in COMPARISONS.items()}
            for name, times in interleaved(calls, args.rounds, device).items():
                yield _line(shape, case, name, times, machine, len(calls[name]), errors.get(name), dtype)


def error_of(backend: AttentionBackend, pool: Pool, case: Case) -> float:
    """The largest difference from the torch reference on the first batch."""
    found, expected = checked(backend, pool, case)
    return float((found.float() - expected.float()).abs().max())


def interleaved(
    calls: dict[str, list[Callable[[], object]]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of a call, for each name and round. A sample goes on where the last one has stopped, so that
    the whole pool is read before anything is read again."""
    turns = {name: cycle(several) for name, several in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    counts = {}
    for name, turn in turns.items():
        next(turn)()
        once = min(seconds(next(turn), device) for _ in range(2))
        counts[name] = max(1, min(1000, round(SAMPLE_S / once)))
    for _ in range(rounds):
        for name, turn in turns.items():
            count = counts[name]

            def sample(turn: Iterator[Callable[[], object]] = turn, count: int = count) -> None:
                for _ in range(count):
                    next(turn)()

            times[name].append(seconds(sample, device) / count)
    return times


def _line(
    shape: Shape,
    case: Case,
    name: str,
    times: list[float],
    machine: Machine,
    copies: int,
    error: float | None,
    dtype: torch.dtype,
) -> Line:
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, method="inclusive") if len(times) > 1 else [median] * 3
    gb_s = case.kv_bytes(shape, dtype.itemsize) / median / 1e9
    gflop_s = case.flops(shape) / median / 1e9
    return Line(
        shape=shape.name if shape.name in SHAPES else f"{shape.heads},{shape.kv_heads},{shape.dim}",
        case=case.name,
        backend=name,
        ms=median * 1e3,
        ms_min=min(times) * 1e3,
        ms_max=max(times) * 1e3,
        ms_quartiles=(low * 1e3, high * 1e3),
        gb_s=gb_s,
        gflop_s=gflop_s,
        share_of_bandwidth=gb_s / machine.read_gb_s,
        share_of_matrix_rate=gflop_s / machine.gflop_s,
        copies=copies,
        error=error,
    )


HEAD = f"{'case':<24}{'backend':<9}{'ms':>9}{'+-':>6}{'GB/s':>8}{'share':>7}{'GFLOP/s':>9}{'share':>7}"


def row(line: Line) -> str:
    return (
        f"{line.case:<24}{line.backend:<9}{line.ms:>9.3f}{line.spread:>6.0%}{line.gb_s:>8.2f}"
        f"{line.share_of_bandwidth:>7.0%}{line.gflop_s:>9.1f}{line.share_of_matrix_rate:>7.0%}"
    )


def as_dict(line: Line) -> dict[str, object]:
    return {key: float(f"{v:.6g}") if isinstance(v, float) else v for key, v in asdict(line).items()}


def wrong(lines: list[Line], dtype: torch.dtype) -> list[str]:
    """Backends whose result is not the reference's."""
    return [
        f"{line.shape}, {line.case}: {line.backend} is {line.error:.2g} off the torch reference"
        for line in lines
        if line.error is not None and not line.error <= TOLERANCE[dtype]
    ]


def missed(lines: list[Line], backend: str) -> list[str]:
    """The goals of the CPU kernel in float32 that this run did not reach, one line each: decode at 60 % of
    the read bandwidth and ahead of both SDPA lines, a prompt of 1,024 no slower than SDPA on contiguous
    memory."""
    at = {(line.shape, line.case, line.backend): line for line in lines}
    found = []
    for shape in dict.fromkeys(line.shape for line in lines):
        decode = at[shape, DECODE, backend]
        if decode.share_of_bandwidth < DECODE_SHARE:
            found.append(
                f"{shape}, {DECODE}: {decode.share_of_bandwidth:.0%} of the read bandwidth, "
                f"needs {DECODE_SHARE:.0%}"
            )
        for case, others in ((DECODE, ("sdpa", "gather")), (PREFILL, ("sdpa",))):
            for other in others:
                ratio = at[shape, case, other].ms / at[shape, case, backend].ms
                if ratio < 1.0:
                    found.append(f"{shape}, {case}: {ratio:.2f}x of {other}, needs at least 1.00x")
    return found

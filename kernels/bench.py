"""Time the attention backends: `python -m kernels.bench`. A table for people, then one JSON line for
machines.

Every case runs on one cache; the backends take turns, `--rounds` times, and the median counts. GB/s is the
keys and values that the rows read once, over the time; `share` is that over the bandwidth at which this
machine sums a large tensor. GFLOP/s counts 4 D operations per visible (query, key, head). `--step` times
whole decode steps instead.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Read when torch loads its OpenMP runtime: threads that wait must not spin on a core that someone else needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import kernels
from kernels.interface import AttentionBackend

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A ragged batch: (queries, context with them) of every row."""

    name: str
    rows: tuple[tuple[int, int], ...]

    def flops(self, heads: int, dim: int) -> int:
        visible = sum(n * length - n * (n - 1) // 2 for n, length in self.rows)
        return 4 * heads * dim * visible

    def kv_bytes(self, kv_heads: int, dim: int, itemsize: int) -> int:
        return 2 * kv_heads * dim * itemsize * sum(length for _, length in self.rows)


CASES = (
    Case("decode 1 x 1024", ((1, 1024),)),
    Case("decode 16 x 1024", ((1, 1024),) * 16),
    Case("decode 32 x 256", ((1, 256),) * 32),
    Case("prefill 1 x 512", ((512, 512),)),
    Case("prefill 1 x 3072", ((3072, 3072),)),
    Case("mixed 15 + 512 of 2048", ((1, 1024),) * 15 + ((512, 2048),)),
)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.step:
        # Against the direction of imports, hence by name and only when it is asked for.
        return importlib.import_module("engines.step_bench").main(args)
    if args.heads % args.kv_heads:
        print(f"--heads={args.heads}: needs a multiple of --kv-heads={args.kv_heads}", file=sys.stderr)
        return 2
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        backends = [kernels.get_backend(name, args.device, DTYPES[args.dtype]) for name in args.backends]
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    bandwidth = _read_bandwidth(args.device)
    print(
        f"heads {args.heads}/{args.kv_heads} x {args.dim}, block {args.block_size}, {args.dtype} on "
        f"{args.device}, {torch.get_num_threads()} threads, median of {args.rounds}; "
        f"this machine reads {bandwidth:.1f} GB/s"
    )
    print(f"{'case':<24}{'backend':<9}{'ms':>10}{'GB/s':>9}{'share':>8}{'GFLOP/s':>10}")
    results: list[dict[str, Any]] = []
    for case in CASES:
        seconds = _measure(case, backends, args)
        for backend, times in zip(backends, seconds, strict=True):
            median = statistics.median(times)
            gb_s = case.kv_bytes(args.kv_heads, args.dim, DTYPES[args.dtype].itemsize) / median / 1e9
            gflop_s = case.flops(args.heads, args.dim) / median / 1e9
            print(
                f"{case.name:<24}{backend.name:<9}{median * 1e3:>10.3f}{gb_s:>9.2f}{gb_s / bandwidth:>8.0%}"
                f"{gflop_s:>10.1f}"
            )
            results.append(
                {"case": case.name, "backend": backend.name, "ms": median * 1e3, "ms_min": min(times) * 1e3}
                | {"gb_s": gb_s, "gflop_s": gflop_s}
            )
    setting = {k: v for k, v in vars(args).items() if k not in ("step", "model", "batches", "threads")}
    print(
        json.dumps(
            {"bench": "attention", "threads": torch.get_num_threads(), "read_gb_s": bandwidth, **setting}
            | {"results": results}
        )
    )
    return 0


def _measure(case: Case, backends: list[AttentionBackend], args: argparse.Namespace) -> list[list[float]]:
    """Seconds of every round, backend by backend."""
    random = torch.Generator().manual_seed(0)
    dtype, device, size = DTYPES[args.dtype], torch.device(args.device), args.block_size
    widths = [-(-length // size) for _, length in case.rows]
    caches = kernels.allocate_kv(1 + sum(widths), size, args.kv_heads, args.dim, dtype, device)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=random))
    free = (
        torch.randperm(sum(widths), generator=random) + 1
    ).int()  # scattered, as after some minutes of service
    table = torch.zeros(len(case.rows), max(widths), dtype=torch.int32)
    for row, (width, blocks) in enumerate(zip(widths, free.split(widths), strict=True)):
        table[row, :width] = blocks
    queries = [n for n, _ in case.rows]
    q = torch.randn(sum(queries), args.heads, args.dim, generator=random).to(dtype).to(device)
    out = torch.empty_like(q)
    cu_q = torch.tensor([0, *queries]).cumsum(0).int().to(device)
    kv_len = torch.tensor([length for _, length in case.rows]).int().to(device)
    table = table.to(device)

    def call(backend: AttentionBackend) -> Callable[[], None]:
        return lambda: backend.paged_attention(
            q, *caches, cu_q, kv_len, table, args.dim**-0.5, max(queries), out
        )

    calls = [call(backend) for backend in backends]
    for run in calls:
        run()
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(args.rounds):
        for run, times in zip(calls, seconds, strict=True):
            times.append(_seconds(run, device))
    return seconds


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _read_bandwidth(device: str) -> float:
    """GB/s at which a tensor too large for any cache is summed."""
    x = torch.ones(2**26, device=device)
    times = [_seconds(x.sum, torch.device(device)) for _ in range(7)]
    return x.numel() * 4 / statistics.median(times[2:]) / 1e9


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench",
        description="Time the attention backends: a table for people, then one JSON line for machines.",
    )
    parser.add_argument("--backends", nargs="+", default=["auto", "torch"], choices=kernels.BACKENDS)
    parser.add_argument("--heads", type=int, default=9, help="query heads (SmolLM2-135M: 9)")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64, help="head size")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="default: what torch chooses")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--step", action="store_true", help="time whole decode steps over their linear layers"
    )
    parser.add_argument("--model", default="smollm2", help="with --step: the model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="with --step: batch sizes")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

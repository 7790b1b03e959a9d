"""Compile the Triton kernels for GPUs that are not there: `python -m kernels.triton.aot` (the covering cases
that the tests compile) or `--all` (the whole grid). Prints a table; exit code 1 where a case does not hold.

Each case goes through the launch code that serving uses, on small CPU tensors, with a driver that only names
a GPU: the variants are those that a server would compile. A case holds when
- there is a cubin, and its shared memory is within what a block may have on that GPU;
- it spills at most SPILL_BYTES of registers a thread;
- attention multiplies on the tensor cores: mma or wgmma in bf16, fp16 or, three to a product, tf32;
- attention in 16 bit over blocks of 8 or more copies its keys in pieces of 16 bytes (cp.async).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import torch

from kernels.command import guard

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one block may have, by compute capability (CUDA C++ Programming Guide)."""
SPILL_BYTES = 128
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DECODES = ("decode", "split")
ATTENTION = ("prefill", "window", *DECODES)
FUSED = ("write_kv", "rope_write_kv", "rms_norm", "add_rms_norm", "silu_mul")


@dataclass(frozen=True, slots=True)
class Case:
    kernel: str
    capability: int
    dtype: str
    dim: int
    group: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Built:
    """One compiled variant. A case may need two (a split decode and its reduction)."""

    name: str
    shared: int  # bytes
    registers: int
    spilled: int  # bytes a thread
    mma: int
    mma_kind: str  # dtype of the first product, "" without one
    wide_copies: int  # cp.async of 16 bytes
    cubin_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    case: Case
    built: tuple[Built, ...]
    faults: tuple[str, ...]
    seconds: float


def grid(
    kernels: Sequence[str], dims: Sequence[int], groups: Sequence[int], blocks: Sequence[int]
) -> list[Case]:
    return [Case(*point) for point in itertools.product(kernels, (80, 90), DTYPES, dims, groups, blocks)]


def all_cases() -> list[Case]:
    """Every combination that serving may meet; group and block change nothing in the row-wise kernels."""
    dims, groups, blocks = (64, 80, 96, 128, 256), (1, 3, 4, 7, 8), (1, 16, 24, 256)
    return [
        *grid(ATTENTION, dims, groups, blocks),
        *grid(("rope_write_kv",), dims, groups, blocks),
        *grid(("write_kv",), dims, (1,), blocks),
        *grid(("rms_norm", "add_rms_norm", "silu_mul"), dims, (1,), (16,)),
    ]


def covering(cases: Iterable[Case]) -> list[Case]:
    """A subset in which every pair of values that occurs together in `cases` still does (greedy; in an order
    drawn once, so that it does not lean towards the first value of each)."""
    cases = sorted(cases, key=str)
    random.Random(0).shuffle(cases)
    names = [field.name for field in fields(Case)]

    def pairs(case: Case) -> set[tuple]:
        values = [(name, getattr(case, name)) for name in names]
        return set(itertools.combinations(values, 2))

    left = {case: pairs(case) for case in cases}
    missing = set().union(*left.values())
    chosen = []
    while missing:
        best = max(left, key=lambda case: len(left[case] & missing))
        missing -= left.pop(best)
        chosen.append(best)
    return chosen


def ci_cases() -> list[Case]:
    """At most 60 that cover the grid: pairwise for attention, and with fewer groups for the small kernels."""
    cases = all_cases()
    attention = [case for case in cases if case.kernel in ATTENTION]
    small = [case for case in cases if case.kernel in FUSED and case.group in (1, 7)]
    return covering(attention) + covering(small)


def run(cases: Sequence[Case], workers: int | None = None) -> Iterator[Outcome]:
    """Compile in processes of their own, with a cache that is thrown away. Outcomes in the order of cases."""
    workers = workers or len(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory(prefix="batchmark-aot-") as cache,
        ProcessPoolExecutor(
            workers, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare, initargs=(cache,)
        ) as pool,
    ):
        yield from pool.map(compile_case, cases)


def _prepare(cache: str) -> None:
    """Of a worker: before Triton is imported, no interpreter and a cache of its own."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches every worker: it ends at once
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache
    torch.set_num_threads(1)
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        _compiled.append(launch(self, *args, grid=grid, warmup=True, **kwargs))
        return _compiled[-1]

    JITFunction.run = compile_only


_compiled: list[Any] = []


class _Named:
    """As much of a Triton driver as compiling asks for: which GPU it is."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps compiled variants by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def compile_case(case: Case) -> Outcome:
    """In a worker that _prepare made."""
    from triton.runtime.driver import driver

    started = time.perf_counter()
    driver.set_active(_Named(case.capability))
    _compiled.clear()
    faults, built = [], []
    try:
        _call(case)
        built = [_look_at(kernel) for kernel in _compiled]
        faults = [fault for one in built for fault in _faults(case, one)]
        if not built:
            faults = ["no kernel was launched"]
    except Exception as error:
        faults = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
    return Outcome(case, tuple(built), tuple(faults), time.perf_counter() - started)


def _call(case: Case) -> None:
    """The call of a server, on tensors of the right dtypes and shapes."""
    from kernels.triton import attention, cache, rows

    dtype, dim, kv_heads, size = DTYPES[case.dtype], case.dim, 2, case.block_size
    tokens, heads, blocks = 8, kv_heads * case.group, 4
    q, k = torch.zeros(tokens, heads, dim, dtype=dtype), torch.zeros(tokens, kv_heads, dim, dtype=dtype)
    k_cache = torch.zeros(blocks, kv_heads, dim, size, dtype=dtype)
    v_cache = torch.zeros(blocks, kv_heads, size, dim, dtype=dtype)
    slot, table = torch.zeros(tokens, dtype=torch.int64), torch.zeros(32, dim)
    if case.kernel in ATTENTION:
        decode = case.kernel in DECODES
        attention.paged_attention(
            q,
            k_cache,
            v_cache,
            torch.zeros(tokens + 1, dtype=torch.int32),
            torch.zeros(tokens, dtype=torch.int32),
            torch.zeros(tokens, 8192 // size, dtype=torch.int32),
            dim**-0.5,
            1 if decode else tokens,
            q.clone(),
            window=4096 if case.kernel == "window" else 0,
            split_programs=10**6 if case.kernel == "split" else 0,
        )
    elif case.kernel == "write_kv":
        cache.write_kv(k, k, k_cache, v_cache, slot)
    elif case.kernel == "rope_write_kv":
        cache.rope_write_kv(q, k, k.clone(), table, table, slot, k_cache, v_cache, slot)
    elif case.kernel == "rms_norm":  # per head, as Qwen3
        rows.rms_norm(q, q, None, torch.zeros(dim, dtype=dtype), 1e-5)
    elif case.kernel == "add_rms_norm":
        x = torch.zeros(tokens, 32 * dim, dtype=dtype)
        rows.rms_norm(x, x.clone(), x.clone(), torch.zeros(32 * dim, dtype=dtype), 1e-5)
    else:
        rows.silu_mul(torch.zeros(tokens, 32 * dim, dtype=dtype), torch.zeros(tokens, 64 * dim, dtype=dtype))


def _look_at(kernel: Any) -> Built:
    import triton

    ptx, cubin = kernel.asm["ptx"], kernel.asm.get("cubin", b"")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))  # type: ignore[index]
    products = re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.\S*?\.(bf16|f16|tf32)\.", ptx)
    return Built(
        name=kernel.metadata.name,
        shared=kernel.metadata.shared,
        registers=registers,
        spilled=stack,
        mma=len(products),
        mma_kind=products[0] if products else "",
        wide_copies=len(re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*, 0x10", ptx)),
        cubin_bytes=len(cubin),
    )


def _faults(case: Case, built: Built) -> Iterator[str]:
    limit = SHARED_LIMIT[case.capability]
    if not built.cubin_bytes:
        yield "no cubin"
    if built.shared > limit:
        yield f"shared memory {built.shared} of {limit} bytes"
    if built.spilled > SPILL_BYTES:
        yield f"{built.spilled} bytes of registers spilled"
    if built.name == "attention_kernel":
        if built.mma_kind != {"bf16": "bf16", "fp16": "f16", "fp32": "tf32"}[case.dtype]:
            yield f"products in {built.mma_kind or 'no matrix instruction'}"
        if case.dtype != "fp32" and case.block_size % 8 == 0 and not built.wide_copies:
            yield "no copies of 16 bytes"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.triton.aot", description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="the whole grid instead of the covering cases")
    parser.add_argument("--kernel", nargs="+", choices=ATTENTION + FUSED, help="only these")
    parser.add_argument("--workers", type=int, help="processes (default: one a core)")
    args = parser.parse_args(argv)
    cores = os.cpu_count() or 1
    if args.workers is not None and not 1 <= args.workers <= cores:
        parser.error(f"--workers {args.workers}: needs 1 to {cores}, the cores of this machine")
    if importlib.util.find_spec("triton") is None:
        parser.error("Triton is not installed; pip install -e '.[gpu]' -c constraints.txt")
    cases = all_cases() if args.all else ci_cases()
    cases = [case for case in cases if not args.kernel or case.kernel in args.kernel]
    print(f"{'kernel':14} {'sm':3} {'dtype':5} {'dim':>4} {'group':>5} {'block':>5}   ", end="")
    print("registers, bytes spilled, bytes shared, matrix instructions, 16-byte copies")
    failed = 0
    for outcome in run(cases, args.workers):
        case = outcome.case
        failed += bool(outcome.faults)
        numbers = "; ".join(
            f"{b.registers:3} {b.spilled:3} {b.shared:6} {b.mma:4} {b.wide_copies:3}" for b in outcome.built
        )
        print(
            f"{case.kernel:14} {case.capability:3} {case.dtype:5} {case.dim:4} {case.group:5} "
            f"{case.block_size:5}   {numbers}{''.join('  FAULT: ' + fault for fault in outcome.faults)}",
            flush=True,
        )
    print(f"{len(cases)} cases, {failed} with a fault")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(guard(main))

"""The checks of `make gpu-check` that run in a process of their own: kernels against float64, loops and
graphs against each other, and the goals for one layer. Each gives `Check`s; sizes are small with `dry`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from engines.runner import ModelRunner, build_runner  # before torch: it sets how OpenMP waits

# isort: split
import torch

import kernels
from engines.config import EngineConfig
from engines.graphs import DecodeGraphs
from engines.overlap import build_engine
from engines.request import Request
from kernels.interface import AttentionBackend
from kernels.reference import TorchBackend

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error over the largest value of the float64 result, by the dtype of the inputs."""
SAME_PADDED = 0.95
"""Share of greedy tokens that must be those of unpadded passes: another row count is another product kernel,
so a near tie may fall the other way."""
DECODE_SHARE, PREFILL_SHARE = 0.8, 0.55


@dataclass(frozen=True)
class Check:
    what: str
    value: float | str | None
    goal: str
    ok: bool


@dataclass(frozen=True)
class Case:
    name: str
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    rows: tuple[tuple[int, int], ...]  # queries, context with them
    window: int = 0


def cases(dry: bool) -> list[Case]:
    if dry:
        rows = ((1, 40), (5, 5), (1, 1), (20, 33))
        return [Case("mixed", 6, 2, 16, 16, rows), Case("window", 4, 4, 8, 7, rows, window=9)]
    decodes = tuple((1, n) for n in (1, 17, 255, 256, 1024, 4097))
    mixed = (*decodes, (64, 64), (33, 700), (512, 2048))
    found = []
    for heads, kv_heads, dim in ((9, 3, 64), (10, 5, 80), (12, 4, 96), (32, 8, 128), (8, 1, 256)):
        for block_size in (16, 32) if dim == 128 else (16,):
            name = f"({heads}, {kv_heads}, {dim}) block {block_size}"
            found.append(Case(f"decode {name}", heads, kv_heads, dim, block_size, decodes))
            found.append(Case(f"mixed {name}", heads, kv_heads, dim, block_size, mixed))
    found.append(Case("long decode", 32, 8, 128, 16, ((1, 16384), (1, 30))))
    found.append(Case("window", 32, 8, 128, 16, mixed, window=300))
    return found


def backends_on(device: torch.device, dtype: torch.dtype) -> dict[str, AttentionBackend | str]:
    """Every backend by name, or why it does not run there."""
    found: dict[str, AttentionBackend | str] = {}
    for name in kernels.BACKENDS:
        if name != "auto":
            try:
                found[name] = kernels.get_backend(name, device, dtype)
            except (ValueError, RuntimeError) as error:
                found[name] = " ".join(str(error).split())
    return found


@torch.inference_mode()
def check_kernels(device: torch.device, dry: bool) -> list[Check]:
    """Every backend over every case, in every dtype that it takes."""
    checks = []
    dtypes = (torch.float32, torch.bfloat16) if dry else tuple(TOLERANCE)
    for dtype in dtypes:
        for name, backend in backends_on(device, dtype).items():
            what = f"{name} {str(dtype).removeprefix('torch.')}"
            if isinstance(backend, str):
                absent = device.type == "cuda" and name == "triton"
                checks.append(Check(what, backend, "runs, or says why not", not absent))
                continue
            worst, where = 0.0, ""
            for case in cases(dry):
                error = relative_error(backend, case, dtype, device)
                if not error <= worst:  # a NaN too
                    worst, where = error, case.name
            goal = TOLERANCE[dtype]
            checks.append(Check(f"{what}, worst: {where}", worst, f"<= {goal:g} of float64", worst <= goal))
    return checks


def relative_error(backend: AttentionBackend, case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """Writes the newest tokens and attends, with NaN in every block that no row owns; against the float64
    reference on the same inputs."""
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device).to(dtype)

    size, queries = case.block_size, [n for n, _ in case.rows]
    widths = [-(-length // size) for _, length in case.rows]
    shape = (2 + sum(widths), size, case.kv_heads, case.dim)
    caches = kernels.allocate_kv(*shape, dtype, device)
    for cache in caches:
        cache[1:] = normal(*cache[1:].shape)
        cache[-1] = float("nan")
    table = torch.zeros(len(widths), max(widths), dtype=torch.int32)
    blocks = (torch.randperm(sum(widths), generator=torch.Generator().manual_seed(0)) + 1).int()
    for row, (width, own) in enumerate(zip(widths, blocks.split(widths), strict=True)):
        table[row, :width] = own
    slots = [
        int(table[row, at // size]) * size + at % size
        for row, (n, length) in enumerate(case.rows)
        for at in range(length - n, length)
    ]
    slot = torch.tensor([*slots, -1], device=device)
    k, v = (normal(len(slot), case.kv_heads, case.dim) for _ in range(2))
    q = normal(sum(queries), case.heads, case.dim)
    arrays = (
        torch.tensor([0, *queries]).cumsum(0).int().to(device),
        torch.tensor([length for _, length in case.rows]).int().to(device),
        table.to(device),
        case.dim**-0.5,
        max(queries),
    )
    wide = [cache.double() for cache in caches]
    expected, found = torch.empty_like(q, dtype=torch.float64), torch.empty_like(q)
    TorchBackend().write_kv(k.double(), v.double(), wide[0], wide[1], slot)
    TorchBackend().paged_attention(q.double(), wide[0], wide[1], *arrays, expected, window=case.window)
    backend.write_kv(k, v, caches[0], caches[1], slot)
    backend.paged_attention(q, caches[0], caches[1], *arrays, found, window=case.window)
    written = all(torch.equal(a[:-1].double(), b[:-1]) for a, b in zip(caches, wide, strict=True))
    error = (found.double() - expected).abs().max() / expected.abs().max()
    return float(error) if written else float("nan")


def check_loops(device: torch.device, dry: bool) -> list[Check]:
    """Greedy tokens in float32: graphs over the sizes that occur, padded ones, and the overlapped loop, each
    against plain passes. All requests come at once and end by max_tokens, so the batches are the same."""
    limits: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 256, "num_kv_blocks": 200, "threads": 1}
    base = EngineConfig("gpu_check", "chunked", max_num_batched_tokens=96, cuda_graphs=False, **limits)
    model = {"name": "tiny", "id": None, "weights": "random", "impl": "lean"}
    runner = build_runner(model, base, device.type, "float32")
    plain = generate(runner, base)
    overlapped = generate(runner, EngineConfig(**{**asdict(base), "overlap": True}))
    checks = [_same("overlap = plain", plain, overlapped, 1.0)]
    for sizes, least in ((tuple(range(1, 7)), 1.0), ((6,), SAME_PADDED)):
        if device.type == "cuda":
            cfg = EngineConfig(**{**asdict(base), "cuda_graphs": None, "cuda_graph_sizes": sizes})
            graphed = build_runner(model, cfg, device.type, "float32")
        else:
            graphed = runner
            with torch.inference_mode():
                runner._graphs = DecodeGraphs(
                    lambda inputs: runner._forward(inputs, inputs.token_ids.shape[0], 1),
                    sizes,
                    -(-base.max_model_len // base.block_size),
                    runner.loaded.config.vocab,
                    torch.float32,
                    device,
                    lambda work: work,
                )
        for overlap in (False, True):
            cfg = EngineConfig(**{**asdict(base), "overlap": overlap})
            name = f"graphs {sizes} = plain" + (", overlapped" if overlap else "")
            checks.append(_same(name, plain, generate(graphed, cfg), least))
        info = graphed.info()["graphs"]
        replayed = info.get("replayed", 0)
        checks.append(Check(f"graphs {sizes} replayed", replayed or info.get("why"), "> 0", replayed > 0))
    runner.close()
    return checks


def generate(runner: ModelRunner, cfg: EngineConfig) -> list[list[int]]:
    engine = build_engine(cfg, runner, num_kv_blocks=runner.num_kv_blocks)
    random = np.random.default_rng(0)
    lengths = ((1, 20), (15, 9), (16, 17), (90, 24), (33, 12), (64, 30), (200, 8), (7, 21))
    ids = [engine.add(Request(random.integers(0, 256, n).tolist(), limit)) for n, limit in lengths]
    answers: dict[int, list[int]] = {seq_id: [] for seq_id in ids}
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            answers[output.seq_id] += output.token_ids
        engine.check_integrity()
    engine.end()
    return list(answers.values())


def _same(what: str, one: list[list[int]], two: list[list[int]], least: float) -> Check:
    """At the same places; and each answer begins alike."""
    pairs = [(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True)]
    share = sum(a == b for a, b in pairs) / len(pairs)
    begin = all(x[0] == y[0] for x, y in zip(one, two, strict=True))
    return Check(what, round(share, 4), f">= {least:g} of the tokens", share >= least and begin)


@torch.inference_mode()
def check_goals(device: torch.device, dry: bool) -> list[Check]:
    """One layer of an 8B model: decodes at 16k context over the speed of a copy, a prompt of 4k tokens over
    the rate of a matrix product. `dry`: the same on the CPU, small, and held to nothing."""
    backend = kernels.get_backend("auto", device, torch.bfloat16)
    context, rows, prompt, side, size = (256, 2, 64, 256, 2**20) if dry else (16384, 8, 4096, 8192, 2**30)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / seconds(lambda: target.copy_(source), device)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * side**3 / seconds(lambda: a @ b, device)
    decode = attention_seconds(backend, [(1, context)] * rows, device)
    read = rows * context * 2 * 8 * 128 * 2 / decode
    prefill = attention_seconds(backend, [(prompt, prompt)], device)
    done = 4 * 32 * 128 * prompt * (prompt + 1) / 2 / prefill
    held = 0.0 if dry else 1.0
    return [
        _share(f"decode attention, {rows} x {context}", read / copy, DECODE_SHARE * held, "of copying"),
        _share(f"prefill attention, {prompt}", done / rate, PREFILL_SHARE * held, "of the matrix rate"),
        Check("copy, GB/s", round(copy / 1e9, 1), "measured", True),
        Check("bf16 product, TFLOP/s", round(rate / 1e12, 2), "measured", True),
    ]


def _share(what: str, value: float, goal: float, of: str) -> Check:
    return Check(f"{what}, share {of}", round(value, 3), f">= {goal:g}", value >= goal)


def attention_seconds(backend: AttentionBackend, rows: list[tuple[int, int]], device: torch.device) -> float:
    """Of (32, 8, 128) in bfloat16, blocks of 16, scattered."""
    widths = [-(-length // 16) for _, length in rows]
    caches = kernels.allocate_kv(1 + sum(widths), 16, 8, 128, torch.bfloat16, device)
    for cache in caches:
        cache.normal_()
    table = (torch.randperm(sum(widths)) + 1).int().view(len(rows), -1).to(device)
    queries = [n for n, _ in rows]
    q = torch.randn(sum(queries), 32, 128, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    cu_q = torch.tensor([0, *queries]).cumsum(0).int().to(device)
    kv_len = torch.tensor([length for _, length in rows]).int().to(device)
    return seconds(
        lambda: backend.paged_attention(
            q, caches[0], caches[1], cu_q, kv_len, table, 128**-0.5, max(queries), out
        ),
        device,
    )


def seconds(work: Callable[[], object], device: torch.device, rounds: int = 15) -> float:
    """Median, after three runs that warm up. Events on CUDA."""
    import time

    taken = []
    for turn in range(rounds + 3):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
        if turn < 3:
            taken.clear()
    return statistics.median(taken)


STAGES: dict[str, Callable[[torch.device, bool], list[Check]]] = {
    "kernels": check_kernels,
    "loops": check_loops,
    "goals": check_goals,
}

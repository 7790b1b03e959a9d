"""What the engine costs: the time of one decode step over the time of its matrix products alone.

    python -m kernels.bench --step [--model smollm2] [--batches 1 8 32 64] [--context 256] [--dtype bfloat16]

A step is `ModelRunner.run` as the engine calls it: arrays to tensors, every layer, sampling, ids back to the
host. Beside it, round by round, the same model's linear layers alone, as torch.nn.functional.linear over the
unpadded batch in the same dtype: what an engine on plain torch cannot go below. The two alternate, so that a
slow moment of the machine meets both; medians are reported. `bound` is the time in which this machine reads
the step's weights and KV once, at the bandwidth that this process has measured: what no engine goes below
while nothing of them stays in a cache. On the CPU a profile of further steps, whose layers run operation by
operation for it, says where their time goes.
Last line: JSON."""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engines.runner import ModelRunner, build_runner, resolve_device  # before torch: it sets how OpenMP waits

# isort: split
import torch
import torch.nn.functional as F

from engines.batch import RaggedBatch
from engines.config import ConfigError, EngineConfig
from engines.model.config import ModelConfig
from engines.model.lean import LeanModel
from engines.model.loader import WEIGHTS
from kernels.bench.machine import Machine, measure_machine

DTYPES = ("float32", "bfloat16")
"""Both by default on a CPU."""
RATIO = 1.25
"""The goal: a step over its linear layers."""
PROFILED = 10  # steps
PARTS = ("linear", "attention", "small ops", "sampling")
ABOVE = ("engines/model/lean.py", "engines/runner.py")
"""Who calls the parts of a step."""
_PER_ROUND = 3  # alternations


def main(args: argparse.Namespace | Sequence[str] | None = None) -> int:
    """args: a command line, or what `kernels.bench` has parsed of one (model, batches, rounds, threads,
    device, dtype); the other options then keep their defaults."""
    if isinstance(args, argparse.Namespace):
        args = argparse.Namespace(**{**vars(parser().parse_args([])), **vars(args)})
    else:
        args = parser().parse_args(args)
    try:
        results = [_measure_dtype(args, dtype) for dtype in _dtypes(args)]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(results[0] if len(results) == 1 else {"bench": "steps", "results": results}))
    missed = any(row["ratio"] > RATIO for result in results for row in result["rows"])
    return 1 if args.check and missed else 0


def _dtypes(args: argparse.Namespace) -> Sequence[str]:
    if args.dtype is not None:
        return [args.dtype]
    return DTYPES if resolve_device(args.device).type == "cpu" else ["auto"]


def _measure_dtype(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    config = EngineConfig(
        name="step_bench",
        scheduler="chunked",
        max_num_seqs=max(args.batches),
        max_num_batched_tokens=max(512, *args.batches),
        max_model_len=args.context + 1,
        kv_memory_gb=args.kv_memory_gb,
        threads=args.threads,
    )
    model_cfg = {"name": args.model, "id": args.id, "impl": args.impl, "weights": args.weights}
    runner = build_runner(model_cfg, config, args.device, dtype)
    try:
        info = runner.info()
        size = None if args.rotate_mb is None else args.rotate_mb * 2**20
        machine = measure_machine(torch.device(info["device"]), getattr(torch, info["dtype"]), size)
        result = measure(runner, config, args.batches, args.context, args.rounds, machine)
    finally:
        runner.close()
    print_table(result)
    return result


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench --step", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("--model", default="smollm2", choices=sorted(WEIGHTS))
    parser.add_argument("--id", help="hub id or folder, for --model hf")
    parser.add_argument("--weights", help="real, or dummy for random weights at the model's shape")
    parser.add_argument("--impl", default="lean", choices=["lean", "hf"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=256, help="tokens that each sequence has already")
    parser.add_argument("--rounds", type=int, default=5, help=f"each of {_PER_ROUND} alternations")
    parser.add_argument("--threads", type=int, help="default: all cores but one")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", help="default: float32 and bfloat16 on a CPU, bfloat16 on CUDA")
    parser.add_argument("--check", action="store_true", help=f"exit 1 where a ratio is above {RATIO}")
    parser.add_argument(
        "--rotate-mb", type=int, help="buffer of the bandwidth; default: twice the last cache"
    )
    parser.add_argument("--kv-memory-gb", type=float, default=4.0)
    return parser


def measure(
    runner: ModelRunner,
    config: EngineConfig,
    batches: Sequence[int],
    context: int,
    rounds: int,
    machine: Machine,
) -> dict[str, Any]:
    """Times in milliseconds, per batch size. Raises ConfigError when the KV pool is too small."""
    info, shape = runner.info(), runner.loaded.config
    dtype, device = getattr(torch, info["dtype"]), torch.device(info["device"])
    layers = linear_weights(shape, dtype, device)
    weight_bytes = sum(w.numel() for w in layers) * dtype.itemsize
    rows = []
    for batch in batches:
        step = decode_step(runner, config, batch, context)
        products = linear_pass(layers, batch, dtype, device)
        step_ms, linear_ms = interleaved_medians([step, products], rounds, device)
        read = weight_bytes + batch * (context + 1) * shape.kv_bytes_per_token(dtype.itemsize)
        bound_ms = read / machine.read_gb_s / 1e6
        row = {
            "batch": batch,
            "step_ms": round(step_ms, 3),
            "linear_ms": round(linear_ms, 3),
            "ratio": round(step_ms / linear_ms, 3),
            "tokens_per_s": round(batch / step_ms * 1e3, 1),
            "bound_ms": round(bound_ms, 3),
            "share_of_bound": round(bound_ms / step_ms, 3),
        }
        if device.type == "cpu" and isinstance(runner.loaded.model, LeanModel):
            with runner.loaded.model.one_by_one():
                row |= {"parts": parts_of(step)}
        rows.append(row)
    return {
        "bench": "step",
        "model": runner.loaded.name,
        "context": context,
        "rounds": rounds,
        **info,
        "weight_bytes": weight_bytes,
        "machine": machine.as_dict(),
        "rows": rows,
    }


def parts_of(step: Callable[[], object]) -> dict[str, float]:
    """Shares of a step's time, by a profile of what the model and the runner call: products, attention, the
    small fused operations, sampling; `rest` is Python and torch around them."""
    profile = cProfile.Profile()
    for _ in range(PROFILED):
        profile.runcall(step)
    stats: Any = pstats.Stats(profile)
    spent = dict.fromkeys(PARTS, 0.0)
    for callee, (*_, callers) in stats.stats.items():
        part = _part(*callee)
        if part is not None:
            spent[part] += sum(of[3] for caller, of in callers.items() if caller[0].endswith(ABOVE))
    spent["rest"] = stats.total_tt - sum(spent.values())
    return {part: round(of / stats.total_tt, 3) for part, of in spent.items()}


def _part(file: str, line: int, function: str) -> str | None:
    if file.endswith("/sampler.py") or "argmax" in function:
        return "sampling"
    if function == "paged_attention":
        return "attention"
    if file.endswith("/linear.py") or "_linear" in function:
        return "linear"
    return "small ops" if "/kernels/" in file else None


def decode_step(runner: ModelRunner, config: EngineConfig, batch: int, context: int) -> Callable[[], object]:
    """One decode of `batch` sequences whose token sits at position `context`, over blocks that are filled
    first."""
    size = config.block_size
    blocks_each = -(-(context + 1) // size)
    if batch * blocks_each >= runner.num_kv_blocks:
        raise ConfigError(f"--batches {batch} --context {context}: needs more KV than --kv-memory-gb gives")
    order = np.random.default_rng(0).permutation(batch * blocks_each) + 1
    table = order.reshape(batch, blocks_each).astype(np.int32)
    ids = np.arange(7, 7 + context + 1, dtype=np.int64) % min(runner.loaded.config.vocab, 256)
    positions = np.arange(context + 1, dtype=np.int64)
    slots = table.astype(np.int64)[:, positions // size] * size + positions % size
    for row in range(batch):
        for first in range(0, context, config.max_num_batched_tokens):
            last = min(context, first + config.max_num_batched_tokens)
            runner.run(
                RaggedBatch(
                    token_ids=ids[first:last],
                    positions=positions[first:last],
                    slot_mapping=slots[row, first:last],
                    cu_q=np.array([0, last - first], np.int32),
                    kv_len=np.array([last], np.int32),
                    block_table=table[row : row + 1],
                    sample_rows=np.empty(0, np.int64),
                )
            )
    decode = RaggedBatch(
        token_ids=np.full(batch, ids[-1]),
        positions=np.full(batch, context, np.int64),
        slot_mapping=np.ascontiguousarray(slots[:, context]),
        cu_q=np.arange(batch + 1, dtype=np.int32),
        kv_len=np.full(batch, context + 1, np.int32),
        block_table=table,
        sample_rows=np.arange(batch, dtype=np.int64),
    )
    return lambda: runner.run(decode)


def linear_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Weights of the model's products, in order, each layer its own, so that they stream from memory as the
    model's do: [out, in] for fused QKV, O, fused gate-up and down, then the head."""
    q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, ffn = config.hidden, config.ffn
    shapes = [(q_size + 2 * kv_size, hidden), (hidden, q_size), (2 * ffn, hidden), (hidden, ffn)]
    shapes = shapes * config.layers + [(config.vocab, hidden)]
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02, generator=generator)
        for shape in shapes
    ]


def linear_pass(
    weights: Sequence[torch.Tensor], batch: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    inputs = {w.shape[1]: torch.randn(batch, w.shape[1], device=device).to(dtype) for w in weights}

    @torch.inference_mode()
    def run() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    return run


def interleaved_medians(
    functions: Sequence[Callable[[], object]], rounds: int, device: torch.device
) -> list[float]:
    """Milliseconds of each, taken in turn."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(2 + rounds * _PER_ROUND):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn >= 2:  # the first two warm the caches up
                taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in times]


def print_table(result: dict[str, Any]) -> None:
    r = result
    print(
        f"{r['model']} on {r['device']}, {r['dtype']}, {r['threads']} thread(s), attention {r['attention']},"
    )
    print(f"context {r['context']}, {r['determinism']}, rows padded to a multiple of {r['row_multiple']}")
    print(f"reads {r['machine']['read_gb_s']:.1f} GB/s, weights {r['weight_bytes'] / 1e6:.0f} MB a step")
    print(
        f"{'batch':>6} {'step ms':>9} {'linear ms':>10} {'ratio':>6} {'tokens/s':>9} {'bound ms':>9} "
        f"{'share':>6}   where a step's time goes"
    )
    for row in result["rows"]:
        parts = ", ".join(f"{part} {share:.0%}" for part, share in row.get("parts", {}).items())
        print(
            f"{row['batch']:>6} {row['step_ms']:>9.2f} {row['linear_ms']:>10.2f} {row['ratio']:>6.2f} "
            f"{row['tokens_per_s']:>9.1f} {row['bound_ms']:>9.2f} {row['share_of_bound']:>6.0%}   {parts}"
        )


if __name__ == "__main__":
    sys.exit(main())

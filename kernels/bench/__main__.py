"""Time the attention backends: `python -m kernels.bench`. A table for people, then one JSON line for
machines.

Every case runs over ever other blocks of a pool that no cache holds (--rotate-mb); the backends take turns,
--rounds times, the median counts, and +- is half the distance between the quartiles.
GB/s is the keys and values that the rows see once, over the time; GFLOP/s counts 4 D operations for every
visible (query, key, head). The shares are of what this process reads from memory and of its F.linear, both
measured first. `sdpa` is torch's on contiguous memory, `gather` copies the blocks together before it.
--step times whole decode steps instead, --machine only the machine."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence

import torch

import kernels
from kernels.bench import attention
from kernels.bench.cases import SHAPES, Shape, pool_bytes
from kernels.bench.machine import Machine, measure_machine, rotation_bytes
from kernels.command import INVALID, PASS, REGRESSION, USAGE, guard
from kernels.cpu.isa import candidates
from kernels.memory import available_memory


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        _check(args)
        if args.step:
            # Against the direction of imports, hence by name and only when it is asked for.
            return int(importlib.import_module("engines.step_bench").main(args))
        args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
        device, dtype = torch.device(args.device), attention.DTYPES[args.dtype]
        size = args.rotate_mb * 2**20 if args.rotate_mb else None
        if args.machine:
            print(json.dumps({"bench": "machine", **measure_machine(device, dtype, size).as_dict()}))
            return PASS
        shapes = attention.shapes_of(args.shapes)
        backends = attention.backends_of(args.backends, args.device, dtype)
        _check_room(shapes, args.block_size, size or rotation_bytes(device), dtype, device)
    except (ValueError, RuntimeError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return USAGE
    lines: list[attention.Line] = []
    machine: Machine | None = None
    for found in attention.measure(args, shapes, backends):
        if isinstance(found, Machine):
            machine = found
            _print_head(args, machine)
        else:
            if not lines or lines[-1].shape != found.shape:
                print(f"\n{SHAPES.get(found.shape, found.shape)}\n{attention.HEAD}")
            print(attention.row(found), flush=True)
            lines.append(found)
    assert machine is not None
    wrong = attention.wrong(lines, dtype)
    missed = attention.missed(lines, backends[0].name) if args.check else []
    for text in wrong + missed:
        print(f"MISSED {text}" if text in missed else f"WRONG {text}")
    setting = {
        "device": args.device,
        "dtype": args.dtype,
        "block_size": args.block_size,
        "rounds": args.rounds,
    }
    result = {"bench": "attention", **setting, "machine": machine.as_dict(), "wrong": wrong, "missed": missed}
    print(json.dumps(result | {"results": [attention.as_dict(line) for line in lines]}))
    return INVALID if wrong else REGRESSION if missed else PASS


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError for what cannot work; sets the threads."""
    kind = args.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device {args.device}: choose from cpu, cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {args.device}: torch sees no CUDA device here; use --device cpu")
    if args.device == "cpu":
        candidates()
    for name in ("rounds", "threads", "rotate_mb", "block_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: needs at least 1")
    if args.step and (min(args.batches) < 1 or args.context < 1):
        raise ValueError(
            f"--batches {' '.join(map(str, args.batches))}, --context {args.context}: need at least 1"
        )
    if args.rotate_mb and args.rotate_mb * 2**20 > available_memory(torch.device(args.device)):
        raise ValueError(f"--rotate-mb {args.rotate_mb}: more than the memory that is free here")
    if args.check and not args.step and (args.device != "cpu" or args.dtype not in (None, "float32")):
        raise ValueError("--check: the goals are of float32 on the CPU; leave out --device and --dtype")
    if args.threads and not args.step:
        torch.set_num_threads(args.threads)


def _check_room(
    shapes: Sequence[Shape], block_size: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raises ValueError where the pool of a shape is more than the memory holds."""
    for shape in shapes:
        needed, free = pool_bytes(shape, block_size, size, dtype), available_memory(device)
        if needed > free:
            raise ValueError(
                f"--block-size {block_size}, --shapes {shape}: {needed / 1e9:.3g} GB of KV, "
                f"and {free / 1e9:.3g} GB are free"
            )


def _print_head(args: argparse.Namespace, machine: Machine) -> None:
    print(
        f"{args.dtype} on {args.device}, {machine.threads} thread(s), blocks of {args.block_size}, median of "
        f"{args.rounds}"
    )
    print(
        f"this machine reads {machine.read_gb_s:.1f} GB/s and multiplies at {machine.gflop_s:.0f} GFLOP/s; "
        f"last cache {machine.cache_bytes / 2**20:.0f} MiB"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--backends", nargs="+", choices=kernels.BACKENDS, help="default: all that run on the device"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=list(SHAPES),
        metavar="SHAPE",
        help=f"heads, as {', '.join(SHAPES)} (all by default), or heads,kv_heads,dim",
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", choices=sorted(attention.DTYPES), help="default: float32 on the CPU")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="default: what torch chooses; --step: all cores but one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rotate-mb", type=int, help="KV to rotate over; default: twice the last cache")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    parser.add_argument(
        "--machine", action="store_true", help="only bandwidth and matrix rate, as one JSON line"
    )
    step = parser.add_argument_group("--step")
    step.add_argument("--step", action="store_true", help="whole decode steps over their linear layers")
    step.add_argument("--model", default="smollm2")
    step.add_argument("--id", help="hub id or folder, for --model hf")
    step.add_argument("--weights", help="real, or dummy for random weights at the model's shape")
    step.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    step.add_argument("--context", type=int, default=256, help="tokens that each sequence has already")
    return parser


if __name__ == "__main__":
    raise SystemExit(guard(main))

"""The command line: `python -m harness.peers transformers`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.cli import INVALID, PASS, REGRESSION, put, say
from harness.conf import UsageError
from harness.peers.limit import decoder_of, limit_seconds
from harness.peers.ours import ServerSide
from harness.peers.sides import ChildSide, PeerError, Round
from harness.peers.table import BASE, lines, summary
from harness.peers.traffic import Ask, draw, shortened, tokens_of
from harness.server_process import child_environment

PEERS = {"transformers": ("generate", "generate_batch"), "vllm": ("vllm",)}
OURS = ("continuous", "chunked")
SIDES = (*OURS, *(side for sides in PEERS.values() for side in sides))
BYTES = {"float32": 4, "bfloat16": 2}
WARM_UP_TOKENS = 4
WHOLE_PROMPTS_TOKENS = 4096
"""The token budget of an iteration, where the engine's preset has no smaller one."""
TINY_VOCAB = 384
MACHINE_TIMEOUT_S = 300.0
SMOKE = {
    "model": "tiny",
    "dtype": "float32",
    "streams": 4,
    "rounds": 1,
    "prompts": [4, 16],
    "outputs": [2, 8],
    "rotate_mb": 16,
}

DESCRIPTION = """\
Our engines beside other systems, on the same weights, prompts and output lengths, in interleaved rounds.

  python -m harness.peers transformers              32 streams at once, SmolLM2 in bfloat16 (`make model`)
  python -m harness.peers transformers --streams 1
  python -m harness.peers transformers vllm         where vLLM is installed
  python -m harness.peers transformers --smoke      model=tiny, a few tokens: does it run?

Our engines answer through their HTTP server, streamed over real sockets, to a client on the same cores;
transformers (`generate`, left-padded batches of --streams; `generate_batch`, its continuous batching) and
vLLM (its offline class) are called in a process each. All use the same number of threads, and one works at a
time. Output tokens/s count what each request asked for. The limit is what no system exceeds by the machine's
measured bandwidth and matrix rate (docs/benches.md). Ends with one JSON line.
"""


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    if "--smoke" in given:
        parser.set_defaults(**SMOKE)
    args = parser.parse_args(given)
    _check(args)
    from harness.host import HostLock
    from harness.interrupt import Interruption

    folder = Path(tempfile.mkdtemp(prefix="batchmark-peers-"))
    try:
        with Interruption(), HostLock() as lock:
            lock.acquire(say)
            result = compare(args, folder)
    except KeyboardInterrupt:
        say("interrupted: nothing is reported")
        return INVALID
    except PeerError as error:
        say(f"error: {error}")
        return INVALID
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for line in lines(result):
        put(line)
    slow = [name for name in OURS if name in result["sides"] and _below(result["sides"][name], args.at_least)]
    for name in slow:
        put(f"MISSED {name}: {result['sides'][name]['ratio']:.2f}x of {BASE}, needs {args.at_least:.2f}x")
    put(json.dumps(result))
    return REGRESSION if slow else PASS


def _below(side: Mapping[str, Any], at_least: float | None) -> bool:
    return at_least is not None and side["ratio"] is not None and side["ratio"] < at_least


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything that is measured, as the JSON line has it. Raises PeerError, UsageError, ConfigError."""
    from harness.host import facts

    checkpoint, config = _checkpoint(args.model)
    threads = args.threads or len(os.sched_getaffinity(0))
    vocab = TINY_VOCAB if config is None else int(config["vocab_size"])
    asks = draw(args.requests or args.streams, args.prompts, args.outputs, vocab, args.seed)
    with contextlib.ExitStack() as stack:
        sides = _start(args, checkpoint, threads, folder, stack)
        about = {side.name: dict(side.wait_ready()) for side in sides}
        before = measure_machine(args.dtype, threads, args.rotate_mb)
        rounds = take_turns(sides, asks, args.rounds)
        closed = {side.name: side.close() for side in sides}
        after = measure_machine(args.dtype, threads, args.rotate_mb)
    machine = {key: max(before[key], after[key]) for key in ("read_gb_s", "gflop_s")}
    limit = None
    if config is not None:
        seconds = limit_seconds(asks, args.streams, decoder_of(config), machine, BYTES[args.dtype])
        limit = tokens_of(asks) / seconds
    return {
        "bench": "peers",
        "model": args.model,
        "dtype": args.dtype,
        "threads": threads,
        "streams": args.streams,
        "requests": len(asks),
        "rounds": args.rounds,
        "seed": args.seed,
        "prompts": list(args.prompts),
        "outputs": list(args.outputs),
        "prompt_tokens": sum(len(ask.prompt) for ask in asks),
        "output_tokens": tokens_of(asks),
        "machine": machine,
        "limit_tokens_per_s": limit,
        "sides": summary(rounds, limit, closed),
        "about": about,
        "host": facts(),
    }


def take_turns(
    sides: Sequence[ServerSide | ChildSide], asks: Sequence[Ask], rounds: int
) -> dict[str, list[Round]]:
    """A short round each to warm up, then `rounds` of them, each begun by another side. Raises PeerError."""
    for side in sides:
        _checked(side, shortened(asks, WARM_UP_TOKENS))
    found: dict[str, list[Round]] = {side.name: [] for side in sides}
    for turn in range(rounds):
        first = turn % len(sides)
        for side in (*sides[first:], *sides[:first]):
            done = _checked(side, asks)
            say(f"round {turn + 1} of {rounds}, {side.name}: {done.tokens / done.seconds:.1f} tokens/s")
            found[side.name].append(done)
    return found


def _checked(side: ServerSide | ChildSide, asks: Sequence[Ask]) -> Round:
    done = side.run(asks)
    lengths, wanted = [len(answer) for answer in done.answers], [ask.output for ask in asks]
    if lengths != wanted:
        raise PeerError(f"{side.name}: answered {sum(lengths)} tokens where {sum(wanted)} were asked for")
    return done


def measure_machine(dtype: str, threads: int, rotate_mb: int | None) -> dict[str, float]:
    """read_gb_s and gflop_s, by `python -m kernels.bench --machine`. Raises PeerError."""
    command = [sys.executable, "-m", "kernels.bench", "--machine", "--dtype", dtype]
    command += ["--threads", str(threads)]
    command += [] if rotate_mb is None else ["--rotate-mb", str(rotate_mb)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=child_environment(),
        timeout=MACHINE_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise PeerError(
            f"kernels.bench --machine: {(done.stderr.strip() or 'failed').splitlines()[-1][:300]}"
        )
    return dict(json.loads(done.stdout))


def _checkpoint(model: str) -> tuple[Path | None, dict[str, Any] | None]:
    """The folder that every side loads, and its config.json; neither for tiny, which is made from the seed.
    Raises ConfigError where it is not there."""
    if model == "tiny":
        return None, None
    from engines.model.smollm2 import ensure_smollm2

    folder = ensure_smollm2()
    return folder, json.loads((folder / "config.json").read_text())


def _start(
    args: argparse.Namespace, checkpoint: Path | None, threads: int, folder: Path, stack: contextlib.ExitStack
) -> list[ServerSide | ChildSide]:
    """All of them at once; stack ends them."""
    longest = args.prompts[1] + args.outputs[1]
    overrides = {
        "model": args.model,
        "dtype": args.dtype,
        "device": "cpu",
        "seed": args.seed,
        "engine.threads": threads,
        "engine.max_num_seqs": args.streams,
        "engine.max_model_len": longest,
        "engine.num_kv_blocks": (longest // 16 + 2) * args.streams + 1,
    }
    options = {
        "folder": None if checkpoint is None else str(checkpoint),
        "dtype": args.dtype,
        "threads": threads,
        "streams": args.streams,
        "max_model_len": longest,
        "max_batch_tokens": max(WHOLE_PROMPTS_TOKENS, longest),
        "seed": args.seed,
    }
    sides: list[ServerSide | ChildSide] = []
    for name in args.sides or [*OURS, *(side for peer in args.peers for side in PEERS[peer])]:
        if name in OURS:
            texts = [f"{key}={value}" for key, value in overrides.items()]
            sides.append(ServerSide(name, texts, args.streams, folder))
        else:
            sides.append(ChildSide(name, options))
        stack.callback(sides[-1].close)
    return sides


def _check(args: argparse.Namespace) -> None:
    """Raises UsageError."""
    for name in ("streams", "rounds", "requests", "threads", "rotate_mb"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: needs at least 1")
    if args.seed < 0:
        raise UsageError(f"--seed {args.seed}: needs 0 or above")
    for name in ("prompts", "outputs"):
        low, high = getattr(args, name)
        if not 1 <= low <= high:
            raise UsageError(f"--{name} {low} {high}: needs two lengths from 1 on, the shorter one first")
    if args.prompts[1] + args.outputs[1] > WHOLE_PROMPTS_TOKENS:
        raise UsageError(
            f"--prompts {args.prompts[1]}, --outputs {args.outputs[1]}: at most {WHOLE_PROMPTS_TOKENS} in all"
        )
    for peer in args.peers:
        if importlib.util.find_spec(peer) is None:
            raise UsageError(f"{peer}: the package is not installed here; install it, or leave it out")
    cores = os.cpu_count() or 1
    if args.threads is not None and args.threads > cores:
        raise UsageError(f"--threads {args.threads}: this machine has {cores} cores; use at most that")
    for side in args.sides or ():
        if side not in SIDES:
            raise UsageError(f"--sides {side}: choose from {', '.join(SIDES)}")
    if len(set(args.sides or ())) < len(args.sides or ()):
        raise UsageError(f"--sides {' '.join(args.sides)}: name each side once")
    if args.at_least is not None and not args.at_least > 0:
        raise UsageError(f"--at-least {args.at_least:g}: needs a ratio above 0")
    if args.at_least is not None and args.sides and BASE not in args.sides:
        raise UsageError(f"--at-least {args.at_least:g}: needs {BASE} among --sides")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.peers",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("peers", nargs="+", choices=sorted(PEERS), help="who to compare with")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help=f"only these of {', '.join(SIDES)}")
    parser.add_argument("--model", default="smollm2", choices=["smollm2", "tiny"])
    parser.add_argument("--dtype", default="bfloat16", choices=list(BYTES))
    parser.add_argument("--streams", type=int, default=32, help="requests at once")
    parser.add_argument("--requests", type=int, help="of a round; default: one for each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of every side; default: all cores")
    parser.add_argument("--prompts", type=int, nargs=2, default=[64, 192], metavar=("MIN", "MAX"))
    parser.add_argument("--outputs", type=int, nargs=2, default=[32, 96], metavar=("MIN", "MAX"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--at-least", type=float, metavar="RATIO", help="exit 1 where one of our engines is below it"
    )
    parser.add_argument(
        "--rotate-mb", type=int, help="buffer of the bandwidth; default: twice the last cache"
    )
    parser.add_argument("--smoke", action="store_true", help="short: model=tiny, 4 streams, one round")
    return parser

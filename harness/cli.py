"""The command line of a run and of a sweep: `python -m harness [-m] [--dry-run] key=value…`.

Nothing heavy is imported before the arguments have been understood: `--help` needs neither Hydra nor pandas.
Whatever the user got wrong is one line on standard error and exit code 2; a traceback means a bug (or
BATCHMARK_DEBUG=1 is set, which always shows one).
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

import harness
from harness.conf import GROUPS, UsageError, choices

PASS, REGRESSION, USAGE, INVALID, INCONCLUSIVE = 0, 1, 2, 3, 4
SEVERITY = (PASS, INCONCLUSIVE, REGRESSION, INVALID, USAGE)
"""Exit codes from best to worst."""
DEBUG = "BATCHMARK_DEBUG"

HELP = """\
usage: python -m harness [-m] [--dry-run] [key=value ...]

Replay a workload against a batching engine and report throughput, TTFT, TPOT and the tail.

  python -m harness +workload=rag +engine=continuous                    one run
  python -m harness -m +workload=rag +engine=static,continuous,chunked  a sweep; ends with a comparison
  python -m harness +engine=openai engine.base_url=http://host:port     a server that is already running
  python -m harness +workload=trace workload.path=FILE model=smollm2    a trace, with a real model
  python -m harness +workload=my.yaml +engine=chunked                   a workload of your own (workloads fit)

options
  -m, --multirun   every combination of comma lists, choice(a,b) and range(start,stop,step)
  --dry-run        print the whole plan, how long it takes and which percentiles will hold, and stop
  --version        print the version and stop
  -h, --help       print this and stop

choices (`+engine=x` and `engine=x` mean the same)
{groups}

main settings
  seed=0                         the one seed: arrivals, lengths, prompts and patience
  device=auto dtype=auto         auto, cpu or cuda; auto, fastest, float32, bfloat16 or float16
  workload.rate                  requests/s, or '{{kind: ramp, from: 1, to: 10, over_s: 60}}'
  workload.length_scale          all lengths times this
  load.requests load.duration_s  how many, or for how long
  load.utilization               workload.rate as a share of the capacity that harness.capacity has found here
  load.concurrency               clients at once (load=closed), or a cap on what is under way (load=open)
  load.timeout_s                 the client's patience for a whole answer
  load.processes load.backend    processes that share the load; lean or aiohttp (auto: what is needed)
  engine.max_num_seqs engine.max_num_batched_tokens engine.max_model_len
  engine.num_kv_blocks engine.block_size engine.prefill_chunk_size engine.reservation
  engine.threads engine.cpu_affinity engine.overlap engine.determinism
  engine.max_waiting_requests engine.queue_timeout_ms
  engine.base_url engine.model engine.tokenizer engine.api engine.api_key_env   (engine=openai)
  model.id model.weights         a hub id or folder (model=hf); real or dummy
  slo.ttft_ms slo.tpot_ms        limits that goodput counts against; slo.enforce=true exits 1 on a miss
  output.dir output.text         where runs go; keep the answers' text
  sweep.dir sweep.resume         with -m: its folder; finished points are not measured again (auto, false)
  hydra/launcher=ray             with -m: over many hosts; also submitit_slurm (docs/sweeps.md)
  server.host server.port        where our own server listens; port 0 picks a free one

other commands (each has --help)
{commands}

exit codes: 0 pass, 1 regression or SLO miss (slo.enforce=true), 2 usage error, 3 run invalid, 4 inconclusive
The last line that a run prints is `results: <folder>`.
"""

COMMANDS = {
    "harness.compare": "arms in interleaved rounds on warm servers: who wins on what, with intervals",
    "harness.gate": "has it become worse? against a baseline, constants or another git revision",
    "harness.capacity": "the highest rate within an SLO, crossover of two engines, cost of a million tokens",
    "harness.comparison": "runs side by side, ratios to the first",
    "harness.dashboard": "one HTML page for runs; --serve DIR lists all, live; --export DIR: PNG or SVG",
    "harness.calibrate": "how far the client's own figures can be trusted on this machine",
    "harness.report": "print a run's table again",
    "harness.peers": "our engines beside transformers (and vLLM) on the same weights",
    "workloads": "show a workload's schedule; fit or convert a trace",
    "engines.explain": "one request's life: its waits, pieces, stalls and whose prompt caused them",
    "engines.server": "the server on its own, OpenAI-compatible",
    "kernels.bench": "time the attention kernels; --step: whole decode steps; --machine: its limits",
}


USAGE_ERRORS = {
    "engines.config": "ConfigError",
    "workloads.errors": "WorkloadError",
    "harness.loadgen.settings": "LoadError",
    "harness.tokenizer": "TokenizerError",
}
RECORD_ERRORS = {"harness.records": "RecordsError", "harness.dashboard.page": "DashboardError"}


@dataclass(frozen=True, slots=True)
class Arguments:
    """The command line, taken apart. overrides: everything of the form key=value."""

    overrides: list[str]
    multirun: bool = False
    dry_run: bool = False
    help: bool = False
    version: bool = False


def parse(argv: list[str]) -> Arguments:
    """Raises UsageError for an option that does not exist."""
    flags = {"multirun": False, "dry_run": False, "help": False, "version": False}
    names = {"-m": "multirun", "--multirun": "multirun", "--dry-run": "dry_run", "--version": "version"}
    names |= {"-h": "help", "--help": "help"}
    overrides = []
    for arg in argv:
        if not arg.startswith("-"):
            overrides.append(arg)
        elif arg in names:
            flags[names[arg]] = True
        else:
            raise UsageError(
                f"{arg}: no such option; there are {', '.join(names)} and overrides such as seed=1"
            )
    return Arguments(overrides, **flags)


def help_text() -> str:
    groups = "\n".join(
        f"  {group + '=':13} {', '.join(choices(group))}" for group in GROUPS if choices(group)
    )
    commands = "\n".join(f"  python -m {name:20} {what}" for name, what in COMMANDS.items())
    return HELP.format(groups=groups, commands=commands)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    return guard(lambda: _main(sys.argv[1:] if argv is None else argv))


def guard(command: Callable[[], int]) -> int:
    """Run a command; what the user can mend and what the disk refuses become one line and an exit code."""
    try:
        return command()
    except KeyboardInterrupt:
        say("interrupted before the load began; nothing was measured")
        return INVALID
    except BrokenPipeError:
        mute()
        return PASS
    except Exception as error:
        if _was_interrupted():
            say("interrupted before the load began; nothing was measured")
            return INVALID
        code = USAGE if is_usage_error(error) else INVALID if is_of_the_disk(error) else None
        if code is None or DEBUG in os.environ:
            raise
        say(f"error: {in_words(error)}")
        return code


def in_words(error: Exception) -> str:
    """An exception in one line; one of the system without its number."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def say(line: str) -> None:
    """For people, beside the results: one line on standard error."""
    print(line, file=sys.stderr, flush=True)


_SAID: set[str] = set()


def say_once(line: str) -> None:
    """What every run of a comparison, a search or an experiment would say again: once in a command, though
    another run counts otherwise ("1 of 40 answers cut", "3 of 120 answers cut")."""
    kind = re.sub(r"\d+ of \d+", "", line)
    if kind not in _SAID:
        _SAID.add(kind)
        say(line)


def put(line: str) -> None:
    """One line of the results on standard output. That nobody reads it any more changes no exit code."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        mute()


def mute() -> None:
    """The reader of standard output has gone (`| head`): from here on it leads nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_usage_error(error: Exception) -> bool:
    return isinstance(error, UsageError) or _is_one_of(error, USAGE_ERRORS)


def _was_interrupted() -> bool:
    """Whether a signal raised KeyboardInterrupt: an extension that was being loaded gives an ImportError."""
    module = sys.modules.get("harness.interrupt")
    return module is not None and module.Interruption.raised


def is_of_the_disk(error: Exception) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
    return _is_one_of(error, RECORD_ERRORS) or (isinstance(error, OSError) and error.errno in full)


def _is_one_of(error: Exception, names: dict[str, str]) -> bool:
    """Every package has its own exceptions; one whose module is not loaded was not raised."""
    return any(
        isinstance(error, getattr(sys.modules[module], name))
        for module, name in names.items()
        if module in sys.modules
    )


def _main(argv: list[str]) -> int:
    arguments = parse(argv)
    if arguments.help:
        print(help_text(), end="")
        return PASS
    if arguments.version:
        print(f"batchmark {harness.__version__}")
        return PASS
    overrides = [*arguments.overrides, "dry_run=true"] if arguments.dry_run else arguments.overrides
    if arguments.multirun:
        from harness.sweep import run_sweep

        return run_sweep(overrides)
    from harness.conf import compose
    from harness.run import run
    from harness.sweep.settings import is_of_sweep

    if of_sweep := next(filter(is_of_sweep, overrides), None):
        raise UsageError(f"{of_sweep}: is a setting of a sweep; needs -m")
    return run(compose(overrides)).exit_code

"""`python -m workloads show NAME|TRACE ... [KEY=VALUE ...]`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads import output
from workloads.errors import WorkloadError
from workloads.page.traffic import Traffic, of_schedule, of_trace
from workloads.schedule import Schedule

if TYPE_CHECKING:
    from rich.console import Console

Load = Callable[[str, Sequence[str]], Any]


def show(args: argparse.Namespace, load: Load, console: Console) -> int:
    """load: a workload's node from its name or YAML file and settings. Raises WorkloadError."""
    from workloads.report import print_schedule

    names, settings = sort_out(args.names)
    traces = [name for name in names if is_trace(name)]
    for option, value in (("--duration", args.duration), ("--out", args.out), *((s, s) for s in settings)):
        if value is not None and traces:
            raise WorkloadError(
                f"{option}: {traces[0]} is a trace, shown as it was recorded; to see a replay of it: "
                f"show trace path={traces[0]}"
            )
    if args.out and len(names) > 1:
        raise WorkloadError(f"--out={args.out}: one file takes one schedule, not {len(names)}")
    output.refuse("--out", args.out, replace=True)
    output.refuse("--page", args.page, replace=True)
    shown: list[Traffic] = []
    schedules: list[Schedule] = []
    for name, label in zip(names, labels(names), strict=True):
        if name in traces:
            shown.append(of_trace(_trace(name, args.requests), label))
        else:
            schedules.append(_draw(load(name, settings), args))
            if args.page or len(names) > 1:
                shown.append(of_schedule(schedules[-1], label))
    if args.out:
        output.write("--out", args.out, schedules[0].to_parquet, replace=True)
    if len(schedules) == len(names) == 1:
        print_schedule(schedules[0], console)
    else:
        from workloads.page.terminal import print_traffic

        print_traffic(shown, console)
    if args.page:
        from workloads.page.document import write

        write(shown, Path(args.page))
        console.print(f"page: {args.page}", highlight=False, soft_wrap=True, markup=False)
    return 0


def sort_out(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(names, settings): a setting has a = and is no file."""
    settings = [a for a in arguments if "=" in a and not Path(a).exists()]
    names = [a for a in arguments if a not in settings]
    if not names:
        raise WorkloadError(f"show {' '.join(arguments)}: needs a workload or a trace before its settings")
    return names, settings


def is_trace(name: str) -> bool:
    """A file or folder, or what looks like one."""
    if name.endswith((".yaml", ".yml")):
        return False
    return "/" in name or Path(name).is_file() or name.endswith((".csv", ".jsonl", ".json", ".gz"))


def labels(names: Sequence[str]) -> list[str]:
    """The last part of a path, without its endings; numbered where two are the same."""
    made: list[str] = []
    for name in names:
        short = Path(name).name.removesuffix(".gz")
        for ending in (".csv", ".jsonl", ".json", ".yaml", ".yml"):
            short = short.removesuffix(ending)
        short = short or name
        made.append(short if short not in made else f"{short} ({len(made) + 1})")
    return made


def _draw(node: Any, args: argparse.Namespace) -> Schedule:
    from workloads.presets import draw

    return draw(node, seed=args.seed, requests=args.requests, duration_s=args.duration)


def _trace(path: str, limit: int | None) -> Any:
    from workloads.readers import read_trace

    if limit is not None and limit < 1:
        raise WorkloadError(f"--requests={limit}: needs a whole number of 1 or more")
    return read_trace(path, limit=limit)

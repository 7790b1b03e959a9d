"""`python -m workloads`: see a workload before running it, fit a trace, convert a trace."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib.resources import as_file, files
from io import TextIOWrapper
from types import FrameType
from typing import Any

from workloads import output
from workloads.errors import TraceError, WorkloadError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for a usage error, which is one line on standard error."""
    args = _parser().parse_args(argv)
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except WorkloadError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, head for one, has seen enough
        _mute()
        return 0
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        print(f"error: standard output: cannot be written ({exc.strerror})", file=sys.stderr)
        _mute()
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workloads", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="lengths, arrivals, reuse, sessions and users of traffic")
    show.add_argument(
        "names",
        nargs="+",
        metavar="NAME|TRACE|KEY=VALUE",
        help="workloads of harness/conf/workload (rag, chat, ...), their own YAML files, or traces, side by "
        "side; settings to change in all of the workloads: rate=8 length_scale=1",
    )
    show.add_argument(
        "-o", "--page", metavar="FILE.html", help="write charts too, as one page that opens from disk"
    )
    show.add_argument("--seed", type=int, default=0)
    show.add_argument("--requests", type=int, help="draw this many; of a trace, read this many rows")
    show.add_argument("--duration", type=float, metavar="SECONDS", help="draw arrivals up to this time")
    show.add_argument("--out", metavar="FILE", help="write the schedule of one workload as parquet too")
    show.set_defaults(run=_show)
    check = commands.add_parser(
        "check", help="hold what presets draw, at full size, against their files and sources"
    )
    check.add_argument("names", nargs="*", metavar="NAME", help="presets; none: all of them")
    check.add_argument("--seed", type=int, default=0)
    check.add_argument("--requests", type=int, default=20_000, help="of each preset (%(default)s)")
    check.set_defaults(run=_check)
    fit = commands.add_parser("fit", help="a preset whose traffic is like a trace's")
    fit.add_argument("-o", "--out", metavar="FILE", help="write the preset to this new YAML file")
    fit.add_argument("--name", default="fitted", help="of the workload; part of the ids of its prompts")
    fit.add_argument(
        "--check", action="store_true", help="draw as many requests and compare, figure by figure"
    )
    fit.add_argument("--replicas", type=int, default=200, help="draws of the arrivals for --check")
    fit.add_argument("--seed", type=int, default=0, help="of the requests that --check draws")
    fit.add_argument("--table", metavar="FILE", help="write the length tables alone to this new YAML file")
    fit.add_argument("--source", default="", help="with --table: where the trace is from")
    fit.add_argument("--licence", default="", help="with --table: its licence")
    fit.add_argument("--memory-gb", type=float, help="KV memory to suggest engine settings for")
    fit.add_argument(
        "--kv-bytes-per-token", type=int, default=131_072, help="of the model; default: Llama 3 8B in bf16"
    )
    fit.set_defaults(run=_fit)
    convert = commands.add_parser("convert", help="write a trace in a format that other tools replay")
    convert.add_argument("--to", choices=("azure", "mooncake"), required=True)
    convert.add_argument(
        "--out", metavar="FILE", help="a new file, gzipped if it ends in .gz; default: standard output"
    )
    convert.set_defaults(run=_convert)
    for command in (fit, convert):
        command.add_argument("trace", metavar="TRACE", help="a file or folder, as in docs/workloads.md")
        command.add_argument("--format", default="auto", help="of the trace; default: told by its content")
        command.add_argument("--limit", type=int, help="read this many rows")
        command.add_argument("--on-bad-row", choices=("error", "skip"), default="error")
    return parser


def _mute() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show(args: argparse.Namespace) -> int:
    from rich.console import Console

    from workloads.page.command import show

    return show(args, load_workload, _console(Console))


def _check(args: argparse.Namespace) -> int:
    from rich.console import Console

    from workloads.check import check
    from workloads.report import print_checks

    console = _console(Console)
    failed = 0
    for name in args.names or [n for n in names() if n != "trace"]:
        workload = load_workload(name, [])
        if workload["kind"] != "preset":
            raise WorkloadError(f"{name}: is no preset, and has nothing to be checked against")
        checks = check(workload, seed=args.seed, requests=args.requests)
        print_checks(name, checks, console)
        failed += sum(not one.ok for one in checks)
    console.print(f"{failed} checks failed" if failed else "every check holds")
    return 1 if failed else 0


def _fit(args: argparse.Namespace) -> int:
    from rich.console import Console

    from workloads.fitting.command import fit, refuse

    refuse(args)
    return fit(args, _read(args), _console(Console))


def _convert(args: argparse.Namespace) -> int:
    from workloads.convert import convert, lost, options, write

    output.refuse("--out", args.out)
    trace = _read(args)
    lines = convert(trace, args.to)
    for note in (*lost(trace, args.to), *trace.notes):
        print(f"note: {note}", file=sys.stderr)
    for line in options(args.out or "FILE", args.to):
        print(line, file=sys.stderr)
    if args.out:
        write(lines, args.out)
    else:
        sys.stdout.writelines(lines)
    return 0


def names() -> list[str]:
    """Of the workloads in harness/conf."""
    folder = files("harness.conf") / "workload"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_workload(name: str, settings: Sequence[str]) -> Any:
    """The node of `harness/conf/workload/<name>.yaml` with `key=value` settings on top. Raises
    WorkloadError."""
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
    from yaml import YAMLError

    if name.endswith((".yaml", ".yml")):
        from harness.conf import UsageError, load_workload_file

        try:
            node: Any = load_workload_file(name)
        except UsageError as exc:
            raise WorkloadError(str(exc)) from exc
    elif name not in names():
        raise WorkloadError(
            f"workload={name}: choose from {', '.join(names())}, or a file FILE.yaml; a setting is KEY=VALUE"
        )
    else:
        with as_file(files("harness.conf") / "workload" / f"{name}.yaml") as path:
            node = OmegaConf.load(path)
    for setting in settings:
        if "=" not in setting:
            raise WorkloadError(f"{setting}: needs the form KEY=VALUE")
    OmegaConf.set_struct(node, True)
    for setting in settings:
        try:
            node.merge_with(OmegaConf.from_dotlist([setting.removeprefix("workload.")]))
            OmegaConf.to_container(node, resolve=True)
        except ConfigKeyError as exc:
            known = ", ".join(sorted(map(str, node)))
            key = getattr(exc, "full_key", None) or setting
            raise WorkloadError(f"workload.{key} is not a setting of {name}; choose from: {known}") from exc
        except (OmegaConfBaseException, YAMLError) as exc:
            reason = " ".join(str(exc).splitlines()[:1]) or type(exc).__name__
            raise WorkloadError(f"{setting}: cannot be read ({reason}); quote odd values") from exc
    try:
        return OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as exc:
        reason = " ".join(str(exc).splitlines()[:1])
        raise WorkloadError(f"workload={name}: cannot be read ({reason})") from exc


def _read(args: argparse.Namespace) -> Any:
    from workloads.readers import read_trace

    if args.limit is not None and args.limit < 1:
        raise WorkloadError(f"--limit={args.limit}: needs a whole number of 1 or more")
    try:
        return read_trace(args.trace, format=args.format, limit=args.limit, on_bad_row=args.on_bad_row)
    except TraceError as exc:
        raise exc.advised("--on-bad-row skip") from exc


def _console(kind: Any) -> Any:
    # A pipe has no width; give the tables the room they need instead of 80 columns.
    console = kind() if sys.stdout.isatty() else kind(width=150)
    console.on_broken_pipe = _reader_gone  # rich itself would leave with code 1, which says regression
    return console


def _reader_gone() -> None:
    raise BrokenPipeError


def _leave(number: int, frame: FrameType | None) -> None:
    """A signal. Not as KeyboardInterrupt, which an extension that is being loaded makes an ImportError of."""
    output.clean()
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, _leave)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not where it was closed
            stream.reconfigure(errors="backslashreplace")  # file names need not be UTF-8
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.exit(main())

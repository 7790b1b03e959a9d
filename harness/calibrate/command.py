"""The command line: `python -m harness.calibrate`."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli import INVALID, PASS, REGRESSION, put, say
from harness.conf import UsageError

if TYPE_CHECKING:
    from harness.calibrate.table import Cores

MOST_REQUESTS = 16_000
MIN_REQUESTS = 20

DESCRIPTION = """\
How far the load generator's own figures can be trusted on this machine, measured against a server of known
truth (C++, compiled on first use; Linux, from a clone).

  python -m harness.calibrate --table                      reported against true, at 5 to 800 requests/s
  python -m harness.calibrate --table --backend lean aiohttp --rates 100 400 --repeat 3
  python -m harness.calibrate --table --pattern stall      every 32nd gap 300 ms longer
  python -m harness.calibrate +workload=chat workload.rate=20 load.requests=400
                                                           the client's own bias under this very schedule,
                                                           kept for later runs on this machine
  python -m harness.calibrate --coordinated-omission       waiting in the client must not look quick

Every mode ends with one JSON line. docs/measuring.md says how to read the figures.
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    if args.overrides and (args.table or args.coordinated_omission):
        raise UsageError(f"{args.overrides[0]}: overrides describe a run; leave out --table and the like")
    if not (args.overrides or args.table or args.coordinated_omission):
        raise UsageError(
            "nothing to do: give --table, --coordinated-omission or a run's overrides; see --help"
        )
    from harness.host import HostLock
    from harness.loadgen.processes import WorkerError

    with HostLock() as lock:
        lock.acquire(say)
        mode = _omission if args.coordinated_omission else _table if args.table else _bias
        try:
            return mode(args)
        except WorkerError as error:
            say(f"error: {error}")
            return INVALID


def _table(args: argparse.Namespace) -> int:
    from harness.calibrate.startup import start_to_first_request
    from harness.calibrate.table import Case, measure_all, show
    from harness.host import facts

    cores, host = _cores(args.cores), facts()
    cases = [
        Case(
            backend=backend,
            rate=rate,
            requests=min(max(MIN_REQUESTS, round(rate * args.seconds)), args.requests),
            tokens=args.tokens,
            pattern=args.pattern,
            seed=args.seed,
        )
        for rate in args.rates
        for backend in args.backend
    ]
    first = cases[0]
    put(
        f"{first.tokens} tokens a request, TTFT {first.ttft_ms:g} ms, gap {first.gap_ms:g} ms "
        f"({args.pattern}), Poisson, {args.seconds:g} s a rate, median of {args.repeat}; client on core "
        f"{cores.client}{' with real-time priority' if args.realtime else ''}, server on core "
        f"{cores.server}; times in ms"
    )
    rows = measure_all(cases, cores, repeat=args.repeat, tries=args.tries, realtime=args.realtime)
    for line in show(rows):
        put(line)
    start = start_to_first_request(cores.server, runs=args.starts) if args.starts else {}
    if start.get("at_server") is not None:
        put(
            f"from the start of `python -m harness` against a URL to its first request "
            f"{start['at_server']:.2f} s, to the first measured one {start['of_load'] or float('nan'):.2f} s"
        )
    setting = {k: v for k, v in vars(args).items() if k not in ("table", "coordinated_omission", "overrides")}
    put(json.dumps({"bench": "client", "host": host, **setting, "start_s": start, "results": rows}))
    return (
        PASS
        if all(row["completed"] == row["requests"] and not row["mismatched"] for row in rows)
        else REGRESSION
    )


def _omission(args: argparse.Namespace) -> int:
    from harness.calibrate.omission import CaseError, report, run_case

    tolerance = args.tolerance_ms
    try:
        views = run_case(args.backend[0])
    except CaseError as error:
        say(f"error: {error}")
        return INVALID
    lines, value = report(views, tolerance)
    good = all(view.agrees(tolerance) for view in views)
    for line in lines:
        put(line)
    put(json.dumps({"bench": "coordinated_omission", "tolerance_ms": tolerance, "agrees": good, **value}))
    return PASS if good else REGRESSION


def _bias(args: argparse.Namespace) -> int:
    from harness.calibrate.own import measure_bias
    from harness.calibrate.store import save_calibration
    from harness.conf import compose
    from harness.host import facts
    from harness.plan import draw_schedule
    from harness.target import load_settings

    cfg, host, cores = compose(args.overrides), facts(), _cores(args.cores)
    schedule = draw_schedule(cfg)
    settings = load_settings(cfg, "calibrate")
    # The server of known truth has no route for WebSockets.
    bias = measure_bias(cfg, schedule.over_http(), settings, cores, faster=not args.once, tries=args.tries)
    value: dict[str, Any] = {"workload": schedule.name, "load": settings.kind, **bias}
    rate = schedule.planned_rate if settings.kind == "open" else None
    path = save_calibration(host, bias["backend"], rate, value)
    for name, figure in value.items():
        put(f"{name:<22}{_shown(figure)}")
    put(json.dumps({"bench": "client_bias", "kept": str(path), **value}))
    return PASS if bias["completed"] else REGRESSION


def _shown(figure: Any) -> str:
    if isinstance(figure, dict):
        return ", ".join(f"{name} {value:.3g}" for name, value in figure.items())
    if isinstance(figure, float):
        return f"{figure:.4g}"
    return "-" if figure is None else str(figure)


def _cores(text: str | None) -> Cores:
    from harness.calibrate.table import Cores

    if not hasattr(os, "sched_getaffinity") or not Path("/proc/stat").exists():
        raise UsageError(f"calibrate pins processes and reads /proc: needs Linux, this is {sys.platform}")
    here = sorted(os.sched_getaffinity(0))
    if text is None:
        if len(here) == 1:
            say("warning: client and server share the only core; their figures disturb each other")
        return Cores(client=here[-1], server=here[0])
    try:
        client, server = (int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--cores={text}: needs two numbers, CLIENT,SERVER") from None
    if not {client, server} <= set(here):
        raise UsageError(f"--cores={text}: choose from {', '.join(map(str, here))}")
    return Cores(client, server)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.calibrate",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", help="key=value, as for `python -m harness`")
    parser.add_argument("--table", action="store_true", help="reported against true figures, rate by rate")
    parser.add_argument("--coordinated-omission", action="store_true", help="exit 0 iff both views are right")
    parser.add_argument("--backend", nargs="+", default=["lean"], choices=("auto", "lean", "aiohttp"))
    parser.add_argument("--cores", help="CLIENT,SERVER (default: the last and the first that may be used)")
    parser.add_argument("--tries", type=_whole, default=3, help="of a measurement that others disturbed")
    table = parser.add_argument_group("with --table")
    table.add_argument("--rates", type=_positive, nargs="+", default=[5, 20, 50, 100, 200, 400, 800])
    table.add_argument("--seconds", type=_positive, default=20.0, help="of load a rate")
    table.add_argument("--requests", type=_whole, default=MOST_REQUESTS, help="a rate at most")
    table.add_argument("--tokens", type=_whole, default=64, help="a request")
    table.add_argument("--pattern", default="constant", choices=("constant", "stall"))
    table.add_argument("--repeat", type=_whole, default=1, help="rounds over all rates; medians are shown")
    table.add_argument(
        "--realtime",
        action="store_true",
        help="the client goes before every ordinary process, as the server does: for a shared machine",
    )
    table.add_argument("--starts", type=_whole_or_0, default=3, help="runs that time the start; 0: none")
    table.add_argument("--seed", type=_whole_or_0, default=0)
    own = parser.add_argument_group("with overrides")
    own.add_argument("--once", action="store_true", help="do not look for the highest rate that is held")
    omission = parser.add_argument_group("with --coordinated-omission")
    omission.add_argument("--tolerance-ms", type=_positive, default=10.0)
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: needs a number above 0")
    return value


def _whole(text: str) -> int:
    return _whole_from(1, text)


def _whole_or_0(text: str) -> int:
    return _whole_from(0, text)


def _whole_from(least: int, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text}: needs a whole number from {least}")
    return int(text)

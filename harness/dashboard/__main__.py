"""One page of a run, or of several side by side, that opens from disk; its figures as files; or a live list
of all runs. `python -m harness.dashboard RUN [RUN ...] -o report.html`"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from harness.cli import DEBUG, put, say
from harness.dashboard.export import FORMATS, GROUNDS, WIDTH, ExportError, export_page
from harness.dashboard.page import DashboardError, render, write_dashboard

PORT = 8765


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.dashboard", description=__doc__)
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run directory, or a result file of another tool; the first is the reference",
    )
    parser.add_argument("-o", "--out", default="report.html", help="the page to write (default: %(default)s)")
    parser.add_argument("--export", metavar="DIR", help="write each figure as a file of its own, no page")
    parser.add_argument("--format", choices=FORMATS, default="png", help="of --export (default: %(default)s)")
    parser.add_argument("--width", type=int, default=WIDTH, help="of --export, pixels (default: %(default)s)")
    parser.add_argument("--theme", choices=sorted(GROUNDS), default="light", help="of --export")
    parser.add_argument(
        "--serve", metavar="DIR", help="list all runs below DIR in a browser, live, until Ctrl-C"
    )
    parser.add_argument("--host", default="127.0.0.1", help="of --serve (default: %(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="of --serve; 0 picks a free one (%(default)s)")
    args = parser.parse_args(argv)
    if args.serve is not None:
        return _serve(args)
    if not args.runs:
        parser.error("needs a run directory, or --serve DIR")
    runs = [Path(run) for run in args.runs]
    try:
        if args.export is None:
            put(str(write_dashboard(runs, Path(args.out))))
            return 0
        folder = Path(args.export)
        for path in export_page(render(runs), folder, format=args.format, width=args.width, theme=args.theme):
            put(str(path))
    except (DashboardError, ExportError) as exc:
        say(f"error: {exc}")
        return 2
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        if DEBUG in os.environ:
            raise
        # As --serve says it: a compare.json that was edited, or records of another version.
        say(f"error: cannot be shown: {type(exc).__name__}: {' '.join(str(exc).split())[:200]}")
        return 2
    return 0


def _serve(args: argparse.Namespace) -> int:
    from harness.dashboard.serve import ServeError, serve

    try:
        serve(
            Path(args.serve), args.host, args.port, lambda url: put(f"{args.serve}: {url} (Ctrl-C ends it)")
        )
    except ServeError as exc:
        say(f"error: {exc}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

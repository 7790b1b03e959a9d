"""`python -m harness.dashboard RUN [RUN ...] -o report.html`"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.cli import put
from harness.dashboard.page import DashboardError, write_dashboard


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.dashboard", description=__doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run directory, or a result file of another tool; the first is the reference",
    )
    parser.add_argument("-o", "--out", default="report.html", help="the page to write (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        put(str(write_dashboard([Path(run) for run in args.runs], Path(args.out))))
    except DashboardError as exc:
        print(exc, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m harness.exchange import FILE` and `python -m harness.exchange export RUN --to vllm -o FILE`."""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.cli import in_words, put
from harness.exchange.export import FORMATS
from harness.exchange.reading import imported, is_result
from harness.exchange.result import ASSUMPTIONS, ResultError
from harness.metrics.run import load_run
from harness.metrics.summary import save_summary, summarize, to_json
from harness.report import print_summary
from harness.request_log import RecordsWriteError
from workloads import output


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.exchange",
        description="Results of other load generators in our terms, and ours in theirs. Exit 0; 2: no such "
        "result. docs/foreign-results.md has the mapping.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    bring = verbs.add_parser("import", help="print a result in our terms and keep it as a run directory")
    bring.add_argument("file", metavar="FILE", help="a result file; FILE#2: the second result in it")
    bring.add_argument(
        "--assume", nargs="+", default=[], choices=tuple(ASSUMPTIONS), metavar="FACT",
        help="what you know and the file does not say: "
        + "; ".join(f"{name}: {what}" for name, what in ASSUMPTIONS.items()),
    )  # fmt: skip
    bring.add_argument("-o", "--out", type=Path, default=Path("results/runs"), help="where (%(default)s)")
    take = verbs.add_parser("export", help="write a run in another tool's format")
    take.add_argument("run", metavar="RUN", help="a run directory")
    take.add_argument("--to", choices=tuple(FORMATS), required=True)
    take.add_argument("-o", "--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        if args.verb == "import":
            return bring_in(args.file, tuple(args.assume), args.out)
        return write_out(args.run, args.to, args.out)
    except (OSError, ResultError, RecordsWriteError) as error:
        print(f"error: {in_words(error)}", file=sys.stderr)
        return 2


def bring_in(file: str, assume: tuple[str, ...], out: Path) -> int:
    summary = imported(file, assume)
    print_summary(summary)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", str(summary["run"]["id"])).strip("-.")[:80]
    folder = out / f"imported-{name}-{uuid.uuid4().hex[:6]}"
    meta: dict[str, Any] = {"schema_version": 1, "imported": summary["run"]["source"]}
    try:
        folder.mkdir(parents=True)
        output.whole(folder / "meta.json", (json.dumps(meta, indent=2) + "\n").encode("utf-8"))
    except OSError as error:
        raise ResultError(f"-o {out}: cannot be written ({error.strerror or error})") from error
    save_summary(summary, folder)
    put(f"results: {folder}")
    return 0


def write_out(run_dir: str, to: str, out: Path) -> int:
    if is_result(run_dir):
        raise ResultError(f"{run_dir}: a file; export takes a run directory (import makes one of a file)")
    run = load_run(run_dir)
    if run.imported is None and not run.meta.get("run"):
        raise ResultError(f"{run_dir}: not a run directory: it has no meta.json")
    engine = run.config.get("engine")
    api = engine.get("api", "completions") if isinstance(engine, dict) else None
    text = to_json(FORMATS[to](summarize(run), api))
    try:
        output.whole(out, text.encode("utf-8"))
    except OSError as error:
        raise ResultError(f"cannot write {out}: {error.strerror or error}") from error
    put(f"results: {out}")
    return 0

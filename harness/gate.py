"""`python -m harness.gate RUN --baseline FILE`: did a run get worse than the committed baseline?

A metric has regressed when its estimate is past the baseline by more than the tolerance *and* its 95 %
interval lies past the baseline's: a wide tail is noise, not a regression. Exit 0 pass, 1 regression, 2
usage error, 3 run invalid or another schedule or configuration, 4 inconclusive (another machine, or nothing
to compare with). The last line is one JSON object for machines; docs/gates.md shows the files for CI."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from harness.cli import put, say
from harness.comparison import is_reliable
from harness.formats import Figure, Report
from harness.formats.files import OutputError, add_options, chosen, write_all
from harness.metrics.percentiles import share_interval
from harness.metrics.summary import build_summary, clean, to_json
from harness.table import console_for, grid, lookup, number, why_null

PASS, REGRESSION, USAGE, INVALID, INCONCLUSIVE = 0, 1, 2, 3, 4
OUTCOMES = {PASS: "pass", REGRESSION: "regression", INVALID: "invalid", INCONCLUSIVE: "inconclusive"}
SCHEMA_VERSION = 1
FINGERPRINT = ("schedule", "config", "host", "device")
OUTCOME_COUNTS = ("completed", "failed", "timed_out", "rejected")
KEYS = ("value", "ci95", "n", "better", "relative", "absolute")

DEFAULTS: tuple[tuple[str, str, float, float], ...] = (
    # path, better, relative, absolute: whichever of the two allows more
    ("counts.completed", "higher", 0.02, 0.0),
    ("counts.failed", "lower", 0.0, 0.0),
    ("latency_ms.ttft.from_intended.p50", "lower", 0.15, 5.0),
    ("latency_ms.ttft.from_intended.p90", "lower", 0.20, 10.0),
    ("latency_ms.ttft.from_intended.p99", "lower", 0.30, 20.0),
    ("latency_ms.tpot.p50", "lower", 0.15, 1.0),
    ("latency_ms.tpot.p90", "lower", 0.20, 2.0),
    ("latency_ms.itl.p99", "lower", 0.25, 5.0),
    ("latency_ms.normalized.p50", "lower", 0.15, 1.0),
    ("throughput.output_tokens_per_s", "higher", 0.10, 0.0),
    ("throughput.goodput_rps", "higher", 0.10, 0.0),
    ("throughput.slo_attainment", "higher", 0.0, 0.02),
    ("steps.useful_token_fraction", "higher", 0.0, 0.02),
)


class BaselineError(ValueError):
    """A baseline file that cannot be used: one line with the file, the key and what would work."""


@dataclass(frozen=True)
class Limit:
    """What a baseline says of one metric. The allowed change is max(relative x |value|, absolute)."""

    value: float
    better: str  # lower | higher
    relative: float = 0.0
    absolute: float = 0.0
    ci95: tuple[float, float] | None = None
    n: int | None = None

    @property
    def threshold(self) -> float:
        allowed = max(self.relative * abs(self.value), self.absolute)
        return self.value + allowed if self.better == "lower" else self.value - allowed


@dataclass(frozen=True)
class Baseline:
    run: str | None
    fingerprint: dict[str, str | None]
    metrics: dict[str, Limit]


@dataclass(frozen=True)
class Verdict:
    """One metric's outcome: pass, better, noise (past the limit, but the interval does not support it),
    regression, or inconclusive."""

    metric: str
    baseline: float
    now: float | None
    change: float | None  # relative to the baseline; null when that is 0
    limit: float
    verdict: str
    reason: str | None = None


@dataclass(frozen=True)
class Result:
    exit: int
    verdicts: tuple[Verdict, ...] = ()
    reasons: tuple[str, ...] = ()


def load_baseline(path: Path) -> Baseline:
    """Read and check a baseline. Raises BaselineError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaselineError(
            f"{path}: cannot be read ({error.strerror}); --write-baseline makes one"
        ) from None
    except (ValueError, RecursionError) as error:
        raise BaselineError(f"{path}: is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise BaselineError(f"{path}: is not a JSON object; --write-baseline makes one")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise BaselineError(f"{path}: schema_version={data.get('schema_version')!r}, needs {SCHEMA_VERSION}")
    prints, metrics = data.get("fingerprint"), data.get("metrics")
    if not isinstance(prints, dict) or any(name not in prints for name in FINGERPRINT):
        raise BaselineError(f"{path}: fingerprint needs {', '.join(FINGERPRINT)}")
    if not isinstance(metrics, dict) or not metrics:
        raise BaselineError(f"{path}: metrics needs at least one metric")
    return Baseline(
        data.get("run"),
        {name: prints[name] for name in FINGERPRINT},
        {name: _limit(path, name, entry) for name, entry in metrics.items()},
    )


def _limit(path: Path, name: str, entry: Any) -> Limit:
    where = f"{path}: metrics.{name}"
    if not isinstance(entry, dict):
        raise BaselineError(f"{where}: needs an object with value and better")
    for key in entry:
        if key not in KEYS:
            raise BaselineError(f"{where}.{key}: no such key; there are {', '.join(KEYS)}")
    if not _is_number(entry.get("value")):
        raise BaselineError(f"{where}.value={entry.get('value')!r}, needs a number")
    if entry.get("better") not in ("lower", "higher"):
        raise BaselineError(f"{where}.better={entry.get('better')!r}, needs lower or higher")
    for key in ("relative", "absolute"):
        if key in entry and not (_is_number(entry[key]) and entry[key] >= 0):
            raise BaselineError(f"{where}.{key}={entry[key]!r}, needs a number of 0 or more")
    if "relative" not in entry and "absolute" not in entry:
        raise BaselineError(f"{where}: needs a tolerance: relative (0.1 is 10 %), absolute, or both")
    ci = entry.get("ci95")
    if ci is not None and not (isinstance(ci, list) and len(ci) == 2 and all(map(_is_number, ci))):
        raise BaselineError(f"{where}.ci95={ci!r}, needs [low, high] or null")
    return Limit(
        float(entry["value"]),
        entry["better"],
        float(entry.get("relative", 0.0)),
        float(entry.get("absolute", 0.0)),
        (float(ci[0]), float(ci[1])) if ci is not None else None,
        entry.get("n"),
    )


def _is_number(value: Any) -> bool:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return known and abs(value) <= sys.float_info.max  # no NaN, no infinity, no int that is no float


def interval(summary: dict[str, Any], path: str) -> tuple[float, float] | None:
    """The 95 % interval of a percentile, or of attainment and goodput as shares of the requests that were
    served, failed, timed out or refused; None for figures that have none."""
    if path in ("throughput.slo_attainment", "throughput.goodput_rps"):
        share, value = lookup(summary, "throughput.slo_attainment"), lookup(summary, path)
        issued = sum(summary["counts"][name] for name in OUTCOME_COUNTS)
        if not share or not issued:
            return None
        low, high = share_interval(share, issued)
        return low * value / share, high * value / share
    block, _, name = path.rpartition(".")
    ci = lookup(summary, f"{block}.ci95.{name}")
    return (ci[0], ci[1]) if ci is not None and None not in ci else None


def assess(summary: dict[str, Any], path: str, limit: Limit) -> Verdict:
    """Hold one metric against its baseline."""

    def verdict(word: str, reason: str | None = None) -> Verdict:
        return Verdict(path, limit.value, now, change, limit.threshold, word, reason)

    now = lookup(summary, path)
    change = None
    if not _is_number(now):
        now = None
        return verdict("inconclusive", why_null(summary, path) or "the run has no such figure")
    if limit.value:
        change = now / limit.value - 1
    if not is_reliable(summary, path):
        return verdict("inconclusive", "too few samples for a 95 % interval")
    sign = 1.0 if limit.better == "lower" else -1.0
    allowed = abs(limit.threshold - limit.value)
    worse = sign * (now - limit.value)
    if worse <= allowed:
        return verdict("better" if worse < -allowed and allowed > 0 else "pass")
    ci = interval(summary, path)
    if ci is not None:
        nearest = ci[0] if limit.better == "lower" else ci[1]
        reference = limit.value
        if limit.ci95 is not None:
            reference = limit.ci95[1] if limit.better == "lower" else limit.ci95[0]
        if sign * (nearest - reference) <= 0:
            return verdict("noise", "past the limit, but the 95 % intervals overlap")
    return verdict("regression")


def gate(summary: dict[str, Any], baseline: Baseline) -> Result:
    """The verdict on a run: invalid before other machine before regression before inconclusive before
    pass."""
    if not summary["valid"]:
        return Result(INVALID, reasons=tuple(summary["invalid_reasons"]))
    prints = summary["run"]["fingerprint"]
    unlike = [name for name in FINGERPRINT if prints[name] != baseline.fingerprint[name]]
    fatal = [name for name in unlike if name in ("schedule", "config")]
    if fatal:
        return Result(
            INVALID,
            reasons=tuple(
                f"fingerprint.{name} differs from the baseline's: not the same test" for name in fatal
            ),
        )
    verdicts = tuple(assess(summary, path, limit) for path, limit in baseline.metrics.items())
    words = {v.verdict for v in verdicts}
    if unlike:
        reasons = tuple(f"fingerprint.{name} differs from the baseline's: another machine" for name in unlike)
        return Result(INCONCLUSIVE, verdicts, reasons)
    if "regression" in words:
        return Result(REGRESSION, verdicts)
    return Result(INCONCLUSIVE if "inconclusive" in words else PASS, verdicts)


def make_baseline(summary: dict[str, Any], old: Baseline | None = None) -> dict[str, Any]:
    """A baseline from a run: the metrics and tolerances of `old`, else DEFAULTS. Figures that are null or
    unreliable in this run are left out: a gate could never use them."""
    chosen = (
        [(path, limit.better, limit.relative, limit.absolute) for path, limit in old.metrics.items()]
        if old is not None
        else list(DEFAULTS)
    )
    metrics: dict[str, Any] = {}
    for path, better, relative, absolute in chosen:
        value = lookup(summary, path)
        if not _is_number(value) or not is_reliable(summary, path):
            continue
        ci = interval(summary, path)
        metrics[path] = {
            "value": value,
            "ci95": list(ci) if ci is not None else None,
            "n": lookup(summary, f"{path.rpartition('.')[0]}.n"),
            "better": better,
            "relative": relative,
            "absolute": absolute,
        }
    return {
        "schema_version": SCHEMA_VERSION,
        "run": summary["run"]["id"],
        "fingerprint": summary["run"]["fingerprint"],
        "metrics": clean(metrics),
    }


def report(result: Result, summary: dict[str, Any], baseline: Baseline, path: Path) -> Report:
    """The verdict as the writers of the formats take it; path is the baseline's. On another machine a figure
    is neither better nor worse."""
    figures = tuple(
        Figure(
            v.metric,
            baseline.metrics[v.metric].better,
            v.now,
            interval(summary, v.metric) if v.now is not None else None,
            *(v.baseline, v.change, v.limit),
            "not judged" if result.reasons and v.verdict != "inconclusive" else v.verdict,
            v.reason,
        )
        for v in result.verdicts
    )
    return Report(OUTCOMES[result.exit], result.reasons, str(path), figures, summary)


def print_result(result: Result, console: Console | None = None) -> None:
    """The table: a line a metric, then the reasons."""
    out = console_for(console)
    if result.verdicts:
        styles = {"regression": "bold red", "inconclusive": "yellow", "better": "green"}
        table = grid("metric", "baseline", "now", "change", "limit", "verdict")
        for v in result.verdicts:
            change = f"{100 * v.change:+.1f} %" if v.change is not None else "-"
            table.add_row(
                v.metric.replace("latency_ms.", "").replace("throughput.", ""),
                *(number(v.baseline), number(v.now), change, number(v.limit)),
                Text(v.verdict, style=styles.get(v.verdict, "")),
            )
        out.print(table)
        for v in result.verdicts:
            if v.reason:
                out.print(Text(f"{v.metric}: {v.reason}", style="dim"))
    for reason in result.reasons:
        out.print(Text(f"{OUTCOMES[result.exit].upper()} {reason}", style="bold red"))


def read_summary(run: Path) -> dict[str, Any]:
    """summary.json of a run, or the summary built from its records. Raises OSError and ValueError."""
    path = run / "summary.json"
    if not path.exists():
        return build_summary(run)
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        whole = summary["schema_version"] == 1 and isinstance(summary["valid"], bool)
        whole = whole and all(name in summary["run"]["fingerprint"] for name in FINGERPRINT)
        whole = whole and isinstance(summary["run"]["id"], str | None)
        whole = whole and isinstance(summary["invalid_reasons"], list)
        whole = whole and all(isinstance(summary["counts"][name], int) for name in OUTCOME_COUNTS)
    except (ValueError, RecursionError, KeyError, TypeError):  # cut off, edited, or of something else
        whole = False
    if not whole:
        raise ValueError(
            f"{path}: is no summary of schema_version 1; `python -m harness.report --from {run}` makes one"
        )
    return dict(summary)


def main(argv: Sequence[str] | None = None, console: Console | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.gate",
        description="Hold a run against a baseline. Exit: 0 pass, 1 worse, 2 usage, 3 invalid, 4 unclear.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("--baseline", metavar="FILE", type=Path, required=True)
    parser.add_argument(
        "--write-baseline", action="store_true", help="write FILE from RUN; tolerances that it holds are kept"
    )
    add_options(parser)
    args = parser.parse_args(argv)
    try:
        outputs = chosen(args)
        if args.write_baseline and outputs:
            raise OutputError(
                f"--{next(iter(outputs))}: nothing is judged with --write-baseline; leave one out"
            )
        summary = read_summary(args.run)
        if args.write_baseline:
            return write(args.baseline, summary)
        baseline = load_baseline(args.baseline)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    result = gate(summary, baseline)
    print_result(result, console)
    failures = write_all(outputs, report(result, summary, baseline, args.baseline))
    for failure in failures:
        say(f"error: {failure}")
    code = USAGE if failures else result.exit
    line = {
        "gate": OUTCOMES[result.exit],
        "exit": code,
        "run": summary["run"]["id"],
        "baseline": str(args.baseline),
        "reasons": list(result.reasons),
        "metrics": [asdict(v) for v in result.verdicts],
    }
    put(json.dumps(clean(line), allow_nan=False))
    return code


def write(path: Path, summary: dict[str, Any]) -> int:
    """Write a baseline; an invalid run makes none."""
    if not summary["valid"]:
        print(
            f"error: the run is invalid ({'; '.join(summary['invalid_reasons'])}): no baseline",
            file=sys.stderr,
        )
        return INVALID
    baseline = make_baseline(summary, load_baseline(path) if path.exists() else None)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(baseline), encoding="utf-8")
    put(json.dumps({"baseline": str(path), "run": baseline["run"], "metrics": list(baseline["metrics"])}))
    return PASS


if __name__ == "__main__":
    sys.exit(main())

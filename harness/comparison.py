"""Several runs side by side: `python -m harness.comparison RUN RUN...`, the first one is the reference.

Ratios are printed only between runs that were sent the same schedule: where there are several, as in a sweep
over rates, each run stands against the first that was sent what it was sent."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.metrics.run import Run, load_run
from harness.metrics.stalls import stalls
from harness.metrics.summary import summarize
from harness.names import label
from harness.names import name as name_of
from harness.table import LEGEND, MISSING, UNRELIABLE, console_for, grid, lookup, number, percent, why_null

SAME = 0.02
"""Closer to the reference than this is neither better nor worse."""
BETTER, WORSE = "▲", "▼"
MOST_TOLD = 2
"""Settings in the name of a run: more make no column."""
HEAD_WIDTH = 13
UNBOUND = 10_000
"""Columns of a terminal that no table fills."""
UNTOLD = ("output.dir", "output.text")


@dataclass(frozen=True)
class Row:
    """A line of the comparison. better: lower | higher | None (a fact, not a merit). optional: left out where
    no run has it, without a reason. said: its name where the heading says the rest. factor: whether a ratio
    to another run says anything (of a point in time or of an error around 0 it does not)."""

    path: str
    better: str | None
    share: bool = False
    optional: bool = False
    foreign: bool = False
    said: str = ""
    factor: bool = True

    @property
    def label(self) -> str:
        return self.said or label(self.path)


ROWS = (
    Row("steps.useful_token_fraction", "higher", share=True),
    Row("latency_ms.ttft.from_intended.p50", "lower"),
    Row("latency_ms.ttft.from_intended.p99", "lower"),
    Row("latency_ms.ttft.from_send.p50", "lower", foreign=True),
    Row("latency_ms.ttft.from_send.p99", "lower", foreign=True),
    Row("latency_ms.ttfc.from_send.p50", "lower", foreign=True),
    Row("latency_ms.tpot.p50", "lower"),
    Row("latency_ms.tpot.p99", "lower"),
    Row("stalls.longest_ms", "lower"),
    Row("stalls.count", "lower"),
    Row("stalls.seconds", "lower"),
    Row("fluidity", "higher"),
    Row("latency_ms.normalized.p50", "lower"),
    Row("latency_ms.normalized.p99", "lower"),
    Row("latency_ms.e2e.from_intended.p50", "lower"),
    Row("latency_ms.e2e.from_send.p50", "lower", foreign=True),
    Row("throughput.output_tokens_per_s", "higher"),
    Row("throughput.goodput_rps", "higher"),
    Row("throughput.slo_attainment", "higher", share=True),
    Row("deadline_misses", "lower", optional=True),
    Row("steps.batch_size_mean", None),
    Row("steps.kv_live_mean", None),
    Row("steps.preemptions", "lower"),
    Row("steps.recomputed_tokens", "lower"),
    Row("attribution.queue", "lower", share=True),
    Row("attribution.stalled", "lower", share=True),
    Row("attribution.held", "lower", share=True),
    Row("utilization.device_busy", None, share=True),
    Row("counts.completed", "higher"),
    Row("counts.failed", "lower"),
)


@dataclass(frozen=True)
class Comparison:
    """Summaries side by side. references: of each run, the place of the first that was sent the same
    requests. mismatches forbid comparing all with the first; notes do not."""

    names: tuple[str, ...]
    summaries: tuple[dict[str, Any], ...]
    references: tuple[int, ...]
    mismatches: tuple[str, ...]
    notes: tuple[str, ...]
    runs: tuple[Run, ...] = ()

    @property
    def comparable(self) -> bool:
        """Every run with the first."""
        return not self.mismatches

    @property
    def partly(self) -> bool:
        """Whether any run has another to stand against."""
        return any(reference != number for number, reference in enumerate(self.references))


def compare(run_dirs: Sequence[str | Path]) -> Comparison:
    """Load runs and say which may be compared with which. Raises FileNotFoundError."""
    runs = [load_run(folder) for folder in run_dirs]
    summaries = hold_to_one_threshold(runs, [summarize(run) for run in runs])
    names = column_names(summaries, [run.config for run in runs])
    prints = [summary["run"]["fingerprint"] for summary in summaries]
    references = tuple(first_alike([fingerprint["schedule"] for fingerprint in prints]))
    mismatches: list[str] = []
    notes: list[str] = []
    for place, reference in enumerate(references):
        if place == reference > 0:
            group = [name for name, other in zip(names, references, strict=True) if other == reference]
            mismatches.append(
                f"{listed(group)}: fingerprint.schedule differs: not sent what {names[0]} was sent"
                + (f"; compared with {names[place]} instead" if len(group) > 1 else "")
            )
    for name, summary, fingerprint in zip(names[1:], summaries[1:], prints[1:], strict=True):
        for part in ("host", "device"):
            if fingerprint[part] != prints[0][part]:
                notes.append(f"{name}: fingerprint.{part} differs: another machine is part of the difference")
        for what, path in (("model", "model"), ("length mode", "run.length_mode")):
            if lookup(summary, path) != lookup(summaries[0], path):
                notes.append(f"{name}: {what} is {lookup(summary, path)}, not {lookup(summaries[0], path)}")
    for name, run, reference in zip(names, runs, references, strict=True):
        unlike, both = unlike_outputs(runs[reference].requests, run.requests)
        if unlike:
            other = names[reference]
            notes.append(f"{name}: {unlike} of {both} answers have another token count than with {other}")
    for name, summary in zip(names, summaries, strict=True):
        notes.extend(f"{name}: {warning}" for warning in summary["warnings"])
        notes.extend(f"{name}: INVALID {reason}" for reason in summary["invalid_reasons"])
    return Comparison(
        tuple(names), tuple(summaries), references, tuple(mismatches), tuple(notes), tuple(runs)
    )


def first_alike(schedules: Sequence[str | None]) -> list[int]:
    """Of each, the place of the first that is the same; its own where it is not known."""
    return [place if sha is None else schedules.index(sha) for place, sha in enumerate(schedules)]


def listed(names: Sequence[str]) -> str:
    """Names of runs, which may hold a comma themselves, in one line."""
    return ("; " if any(", " in name for name in names) else ", ").join(names)


def column_names(summaries: Sequence[dict[str, Any]], configs: Sequence[dict[str, Any]]) -> list[str]:
    """What tells the runs apart: the engine, and where one occurs twice the settings in which those runs
    differ. Runs that differ in nothing are numbered. Of another tool's result, whose settings are not
    known, the tool."""
    engines = [str(summary["engine"] or summary["run"]["id"] or "run") for summary in summaries]
    tools = [summary["run"].get("source", {}).get("tool") for summary in summaries]
    engines = [
        f"{e}, {tool}" if tool and engines.count(e) > 1 else e for e, tool in zip(engines, tools, strict=True)
    ]
    flat = [{key: value for key, value in flatten(config).items() if key not in UNTOLD} for config in configs]
    names = []
    for engine, settings in zip(engines, flat, strict=True):
        group = [other for name, other in zip(engines, flat, strict=True) if name == engine]
        differing = [key for key in settings if len({other.get(key) for other in group}) > 1]
        told = ", ".join(f"{key.rpartition('.')[2]}={settings[key]}" for key in differing[:MOST_TOLD])
        names.append(told if told and len(set(engines)) == 1 else ", ".join(filter(None, (engine, told))))
    return [
        f"{name} #{names[: i + 1].count(name)}" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def flatten(value: dict[Any, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as {"engine.max_num_seqs": "16"}, values as one would write them in an override."""
    flat: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            flat.update(flatten(item, f"{prefix}{key}."))
        elif item is None:
            flat[f"{prefix}{key}"] = "null"
        else:
            flat[f"{prefix}{key}"] = str(item).lower() if isinstance(item, bool) else str(item)
    return flat


def hold_to_one_threshold(runs: Sequence[Run], summaries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count every run's stalls with the smallest threshold among them: a slower engine must not be allowed
    longer pauses because its own median gap is longer."""
    limits = [lookup(summary, "stalls.threshold_ms") for summary in summaries]
    known = [limit for limit in limits if limit is not None]
    if not known:
        return summaries
    return [
        {**summary, "stalls": stalls(run.requests, "", min(known))[0]} if limit is not None else summary
        for run, summary, limit in zip(runs, summaries, limits, strict=True)
    ]


def unlike_outputs(first: pd.DataFrame, second: pd.DataFrame) -> tuple[int, int]:
    """(answers with another token count, answers that both completed)."""
    columns = ["id", "output_tokens"]
    pair = first.loc[first["outcome"] == "completed", columns].merge(
        second.loc[second["outcome"] == "completed", columns], on="id"
    )
    known = pair.dropna()
    return int((known["output_tokens_x"] != known["output_tokens_y"]).sum()), len(pair)


def shown_rows(comparison: Comparison, metrics: Sequence[Row] = ROWS) -> list[Row]:
    """Those of the rows that this comparison has."""
    foreign = any("source" in s["run"] for s in comparison.summaries)
    return [
        row
        for row in metrics
        if (foreign or not row.foreign)
        and (not row.optional or any(lookup(s, row.path) is not None for s in comparison.summaries))
    ]


def comparison_rows(comparison: Comparison, metrics: Sequence[Row] = ROWS) -> list[dict[str, Any]]:
    """A dict for each metric and run: metric, path, run, value, reliable, ratio (to the first run of the same
    schedule that has the figure; null where there is none), verdict (better | worse | same | null)."""
    rows = []
    for row in shown_rows(comparison, metrics):
        base: dict[int, tuple[float, bool]] = {}
        for name, summary, group in zip(
            comparison.names, comparison.summaries, comparison.references, strict=True
        ):
            value = lookup(summary, row.path)
            ratio = verdict = None
            reliable = is_reliable(summary, row.path)
            if value is not None and group in base:
                reference, sure = base[group]
                ratio = value / reference if reference and row.factor else None
                verdict = judge(value, reference, row.better) if reliable and sure else None
            elif value is not None:
                base[group] = value, reliable
            rows.append(
                {
                    "metric": row.label,
                    "path": row.path,
                    "run": name,
                    "value": value,
                    "reliable": reliable,
                    "ratio": ratio,
                    "verdict": verdict,
                }
            )
    return rows


def judge(value: float, reference: float, better: str | None) -> str | None:
    """better, worse, or same when within SAME of the reference; None for a fact without merit."""
    if better is None:
        return None
    if abs(value - reference) <= SAME * abs(reference):
        return "same"
    return "better" if (value < reference) == (better == "lower") else "worse"


def is_reliable(summary: dict[str, Any], path: str) -> bool:
    """False where a percentile has no 95 % interval; figures that are no percentiles are taken as they
    are."""
    block, _, name = path.rpartition(".")
    flags = lookup(summary, f"{block}.reliable")
    return flags.get(name, True) if isinstance(flags, dict) else True


def print_comparison(run_dirs: Sequence[str | Path], console: Console | None = None) -> Comparison:
    """Print the table of runs (columns) and metrics (rows), and give what it was made of. Where the runs are
    too many for the width, they are the rows, and the metrics come in as many tables as they need."""
    out = console_for(console)
    comparison = compare(run_dirs)
    rows = comparison_rows(comparison)
    summary = comparison.summaries[0]
    scale = lookup(summary, "setup.planned.length_scale")
    title = f"{summary['workload'] or 'unknown workload'}, model {summary['model'] or 'unknown'}"
    out.print(Text(title + (f", workload.length_scale={scale:g}" if scale is not None else ""), style="bold"))
    lines = [(row, [cell for cell in rows if cell["path"] == row.path]) for row in shown_rows(comparison)]
    table = by_metric(comparison.names, lines)
    wide = out.measure(table, options=out.options.update_width(UNBOUND)).maximum > out.width
    if wide:
        for part in by_run(comparison.names, lines, out.width):
            out.print(part)
            out.print()
    else:
        out.print(table)
    if comparison.partly:
        ratios = "against" if wide else "ratios to"
        first = "the first run" if comparison.comparable else "the first run of the same requests"
        legend = f"{ratios} {first} that has the figure; {BETTER} better, {WORSE} worse, = within 2 %"
        out.print(Text(legend, style="dim"))
    if any(not cell["reliable"] and cell["value"] is not None for cell in rows):
        out.print(Text(LEGEND, style="dim"))
    for text in (*null_notes(comparison), *reading_notes(comparison)):
        out.print(Text(text, style="dim"))
    for mismatch in comparison.mismatches:
        out.print(Text(f"NOT COMPARABLE {mismatch}", style="bold red"))
    for note in comparison.notes:
        out.print(Text(note, style="bold red" if "INVALID" in note else ""))
    return comparison


def by_metric(names: Sequence[str], lines: Sequence[tuple[Row, list[dict[str, Any]]]]) -> Table:
    """A row for each metric, a column for each run, with ratios."""
    table = grid("", *(folded(name) for name in names))
    for row, cells in lines:
        table.add_row(row.label, *(show(cell, row) for cell in cells))
    return table


def by_run(
    names: Sequence[str], lines: Sequence[tuple[Row, list[dict[str, Any]]]], width: int
) -> Iterator[Table]:
    """A row for each run, a column for each metric without ratios; tables of at most that width."""
    left = max(map(len, names))
    columns: list[tuple[str, list[Text]]] = []
    used = left
    for row, cells in lines:
        head = "\n".join(row.label.replace(", ", " ").replace("/", "/ ").split())
        column = [show(cell, row, ratio=False) for cell in cells]
        needed = 1 + max(*map(len, head.split("\n")), *map(len, column))
        if used + needed > width and columns:
            yield _beside(names, columns)
            columns, used = [], left
        columns.append((head, column))
        used += needed
    yield _beside(names, columns)


def _beside(names: Sequence[str], columns: Sequence[tuple[str, list[Text]]]) -> Table:
    table = grid("", *(head for head, _ in columns))
    for name, *cells in zip(names, *(column for _, column in columns), strict=True):
        table.add_row(name, *cells)
    return table


def folded(name: str) -> str:
    """A run's name as the head of a narrow column: each setting on a line of its own, long ones cut at their
    underscores, so that nothing of it is lost."""
    lines: list[str] = []
    for part in name.split(", "):
        line = ""
        for piece in re.findall(r"=?[^_=]*_?", part):
            if line and len(line) + len(piece) > HEAD_WIDTH:
                lines.append(line)
                line = ""
            line += piece
        lines.append(line)
    return "\n".join(lines)


def null_notes(comparison: Comparison) -> list[str]:
    """Why figures are missing: a line for each reason and the runs and figures that share it."""
    runs: dict[tuple[str, str], list[str]] = {}
    for name, summary in zip(comparison.names, comparison.summaries, strict=True):
        missing: dict[str, list[str]] = {}
        for row in shown_rows(comparison):
            if lookup(summary, row.path) is None:
                reason = why_null(summary, row.path) or "not measured"
                missing.setdefault(reason, []).append(name_of(row.path))
        for reason, labels in missing.items():
            runs.setdefault((", ".join(labels), reason), []).append(name)
    return [f"{MISSING} {listed(names)}: {labels}: {reason}" for (labels, reason), names in runs.items()]


def reading_notes(comparison: Comparison) -> list[str]:
    """What a reader has to know to take the figures right."""
    notes: list[str] = []
    partly: dict[str, list[str]] = {}
    for name, summary in zip(comparison.names, comparison.summaries, strict=True):
        streamed = lookup(summary, "latency_ms.ttft.from_intended.n")
        completed = lookup(summary, "counts.completed")
        if streamed and completed and streamed < completed:
            partly.setdefault(f"{streamed} of {completed}", []).append(name)
    if partly:
        counts = [f"{listed(names)} {count}" for count, names in partly.items()]
        if len(partly) == 1 and len(*partly.values()) == len(comparison.names) > 1:
            counts = [f"{next(iter(partly))} in each run"]
        notes.append(f"TTFT and TPOT are of the answers that were streamed: {'; '.join(counts)}")
    threshold = next(filter(None, (lookup(s, "stalls.threshold_ms") for s in comparison.summaries)), None)
    if threshold is not None:
        notes.append(f"a stall is a gap over {number(threshold)} ms, for all runs alike")
    return notes


def show(cell: dict[str, Any], row: Row, ratio: bool = True) -> Text:
    """A value, its ratio to the reference and an arrow."""
    if cell["value"] is None:
        return Text(MISSING, style="dim")
    value = percent(cell["value"]) if row.share else number(cell["value"])
    text = Text(value if cell["reliable"] else UNRELIABLE + value, style="" if cell["reliable"] else "dim")
    if ratio and cell["ratio"] is not None:
        text.append(f" {number(cell['ratio'])}x")
    mark, style = {"better": (BETTER, "green"), "worse": (WORSE, "red"), "same": ("=", "dim")}.get(
        cell["verdict"], (" ", "")
    )
    return text.append(f" {mark}", style=style) if cell["verdict"] is not None else text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.comparison",
        description="Compare runs with the first one. Exit 3: not comparable, or one is invalid.",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        type=Path,
        help="run directories, or result files of other tools; the first is the reference",
    )
    args = parser.parse_args(argv)
    try:
        comparison = print_comparison(args.runs)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if comparison.comparable and all(s["valid"] for s in comparison.summaries) else 3


if __name__ == "__main__":
    sys.exit(main())

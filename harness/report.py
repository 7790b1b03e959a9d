"""A run's table for people: `python -m harness.report --from RUN` rebuilds summary.json and prints it.

The summary comes from the run's records alone, so the command gives the same bytes each time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from harness.cli import put
from harness.metrics import build_summary, save_summary
from harness.request_log import RecordsWriteError
from harness.slo import shown
from harness.table import LEGEND, console_for, figure, grid, lookup, number, percent, why_null

LATENCY_ROWS = (
    ("TTFT", "ttft.from_intended"),
    ("  from send", "ttft.from_send"),
    ("TTFO (no reasoning)", "ttfo.from_intended"),
    ("TPOT", "tpot"),
    ("ITL", "itl"),
    ("E2E", "e2e.from_intended"),
    ("normalized (E2E/token)", "normalized"),
    ("queue delay", "queue_delay"),
    ("prefill", "prefill"),
    ("decode", "decode"),
)
FOREIGN_ROWS = (
    ("first event from send", "ttfc.from_send"),
    ("E2E from send", "e2e.from_send"),
    ("ICL", "icl"),
)
"""Only of a result of another tool, which measures from the send and by event."""
FIGURES = ("mean", "p50", "p90", "p95", "p99", "max")
SETTINGS = (
    *("scheduler", "reservation", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("num_kv_blocks", "block_size", "prefill_chunk_size", "threads"),
)
LAGS = (("send lag", "send_lag_ms"), ("loop lag", "loop_lag_ms"), ("read lag", "read_lag_ms"))
LABEL_WIDTH = 12


def print_summary(summary: dict[str, Any], console: Console | None = None) -> None:
    """Print a run's summary in 80 columns, readable without colour. Unreliable figures carry a ~, null is
    -."""
    out = console_for(console)
    for label, text in heading(summary):
        line(out, label, text)
    out.print()
    out.print(latency_table(summary))
    for note in null_notes(summary):
        out.print(Text(note, style="dim"))
    out.print()
    for label, text in facts(summary):
        line(out, label, text)
    verdict(out, summary)


def line(out: Console, label: str, text: str) -> None:
    """label and text side by side; text wraps under itself."""
    row = grid("", "")
    row.show_header = False
    row.columns[0].width = LABEL_WIDTH
    row.columns[1].justify, row.columns[1].no_wrap = "left", False
    row.add_row(Text(label, style="bold"), Text(text))
    out.print(row)


def heading(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What ran: workload, engine, settings and how every request ended."""
    setup = summary.get("setup") or {}
    planned = setup.get("planned") or {}
    rate, scale = planned.get("rate"), planned.get("length_scale")
    workload = str(summary.get("workload") or "unknown workload")
    workload += f" at {number(rate)} requests/s" if rate is not None else ""
    workload += f", workload.length_scale={scale:g}" if isinstance(scale, (int, float)) else ""
    engine = f"{summary.get('engine') or 'unknown engine'}, model {summary.get('model') or 'unknown'}"
    engine += f" on {summary['device']}" if summary.get("device") else ""
    runner = setup.get("runner") or {}
    engine += f", {runner['dtype']}" if runner.get("dtype") else ""
    engine += f", attention {runner['attention']}" if runner.get("attention") else ""
    settings = setup.get("engine") or {}
    shown = [f"{name}={settings[name]}" for name in SETTINGS if settings.get(name) is not None]
    counts = summary["counts"]
    ended = ", ".join(
        f"{number(counts[name])} {name.replace('_', ' ')}"
        for name in ("completed", "failed", "timed_out", "rejected", "cancelled", "cut_off")
    )
    rows = [("workload", workload), ("engine", engine)]
    if source := summary["run"].get("source"):
        rows.append(("source", f"{source['tool']} {source['version'] or '(version unknown)'}"))
    if shown:
        rows.append(("settings", ", ".join(shown)))
    rows.append(("requests", f"{number(counts['scheduled'])} scheduled: {ended}"))
    if summary.get("refusals"):
        rows.append(("refusals", ", ".join(f"{n} {reason}" for reason, n in summary["refusals"].items())))
    for reason, failed in (summary.get("failures") or {}).items():
        example = f": {failed['example']}" if failed["example"] else ""
        rows.append(("failed", f"{failed['count']} {reason}{example}"))
    return rows


def latency_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """TTFO has a row only where answers hold reasoning: elsewhere it is TTFT."""
    reasons = bool(lookup(summary, "output_tokens.reasoning"))
    rows = (*LATENCY_ROWS, *(FOREIGN_ROWS if "source" in summary["run"] else ()))
    return [row for row in rows if reasons or not row[1].startswith("ttfo")]


def latency_table(summary: dict[str, Any]) -> Any:
    """Each row with its number of samples: requests, or gaps for ITL."""
    table = grid("latency, ms", "n", *FIGURES)
    for label, path in latency_rows(summary):
        block = lookup(summary, f"latency_ms.{path}")
        count = str(block["n"]) if block and block["n"] else "-"
        table.add_row(label, count, *(figure(block, name) for name in FIGURES))
    return table


def null_notes(summary: dict[str, Any]) -> list[str]:
    """Under the table: what ~ means, and why whole rows are missing."""
    notes: list[str] = []
    reliable = [lookup(summary, f"latency_ms.{path}") for _, path in latency_rows(summary)]
    if any(block and block["mean"] and not all(block["reliable"].values()) for block in reliable):
        notes.append(LEGEND)
    streamed = lookup(summary, "latency_ms.ttft.from_intended.n")
    whole = lookup(summary, "latency_ms.e2e.from_intended.n")
    if streamed and streamed < whole:
        notes.append(f"{streamed} of {whole} answers were streamed: only these have TTFT, TPOT and ITL")
    missing: dict[str, list[str]] = {}
    for label, path in latency_rows(summary):
        block = lookup(summary, f"latency_ms.{path}") or {}
        if not block.get("n") and block.get("mean") is None:
            reason = why_null(summary, f"latency_ms.{path}") or "not measured"
            missing.setdefault(reason, []).append(label.strip())
    notes.extend(f"- {', '.join(labels)}: {reason}" for reason, labels in missing.items())
    return notes


def facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Throughput, SLO, stalls, engine, machine and client, a line each."""
    rate, stalls, steps = summary["throughput"], summary["stalls"], summary["steps"]
    slo = (summary.get("setup") or {}).get("slo") or {}
    limits = shown(slo)
    rows = [
        (
            "throughput",
            f"{number(rate['requests_per_s'])} requests/s, "
            f"{number(rate['output_tokens_per_s'])} output tokens/s, "
            f"{number(rate['total_tokens_per_s'])} tokens/s with prompts",
        ),
        (
            "goodput",
            f"{number(rate['goodput_rps'])} requests/s, attainment {percent(rate['slo_attainment'])}"
            + (f" ({limits})" if limits else ""),
        ),
    ]
    if stalls["longest_ms"] is not None:
        rows.append(
            (
                "stalls",
                f"{stalls['count']} over {number(stalls['threshold_ms'])} ms "
                f"({number(stalls['seconds'])} s), longest gap {number(stalls['longest_ms'])} ms, "
                f"fluidity {number(summary['fluidity'], 4)}",
            )
        )
    spent = time_spent(summary)
    if spent:
        rows.append(("time", spent))
    rows.extend(windows(summary))
    rows.append(("arrivals", arrival_facts(summary)))
    if steps["count"] is not None:
        rows.extend(engine_facts(summary))
    use = summary["utilization"]
    busy = [
        f"{name} {text}"
        for name, text, value in (
            ("busy", percent(use["device_busy"]), use["device_busy"]),
            ("server CPU", f"{number(use['cpu_pct'])} % of a core", use["cpu_pct"]),
            ("GPU", f"{number(use['gpu_util_pct'])} %", use["gpu_util_pct"]),
            ("GPU memory", f"{number(use['gpu_memory_gb'])} GB", use["gpu_memory_gb"]),
            ("power", f"{number(use['power_w'])} W", use["power_w"]),
        )
        if value is not None
    ]
    if busy:
        rows.append(("device", ", ".join(busy)))
    if summary["cancellations"]["count"]:
        rows.append(("hang-ups", hang_ups(summary["cancellations"])))
    rows.append(("client", client_facts(summary["client"])))
    return rows


def time_spent(summary: dict[str, Any]) -> str:
    """Where the E2E went: parts of 0.1 % or more, the largest first, and of the queue what it was for."""
    parts = {name: share for name, share in summary["attribution"].items() if share and share >= 0.0005}
    told = []
    for name, share in sorted(parts.items(), key=lambda part: -part[1]):
        reasons = summary["queue_reasons"] if name == "queue" else {}
        why = {reason: part for reason, part in reasons.items() if part and part >= 0.0005}
        of = ", ".join(f"{reason} {percent(part)}" for reason, part in why.items())
        told.append(f"{name.replace('_', ' ')} {percent(share)}" + (f" ({of})" if of else ""))
    return f"of E2E: {', '.join(told)}" if told else ""


def windows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Where the figures above come from, and what they are in the steady part."""
    whole, steady = summary["window"], summary["steady"]
    part = steady["window"]
    if whole["start_s"] is None:
        return []
    text = f"{seconds(whole)}, {whole['requests']} requests: all figures but those of the steady part"
    if part["start_s"] is None:
        return [("window", text), ("steady", why_null(summary, "steady.window") or "not found")]
    text += f"; warm-up {length(summary['warmup'])}, drain {length(summary['drain'])}"
    rate, late = steady["throughput"], steady["latency_ms"]
    ttft, tpot = late["ttft"]["from_intended"], late["tpot"]
    figures = (
        f"{seconds(part)}, {part['requests']} requests: {number(rate['requests_per_s'])} requests/s, "
        f"{number(rate['output_tokens_per_s'])} output tokens/s, "
        f"TTFT p50 {figure(ttft, 'p50').plain} p99 {figure(ttft, 'p99').plain} ms, "
        f"TPOT p50 {figure(tpot, 'p50').plain} p99 {figure(tpot, 'p99').plain} ms"
    )
    return [("window", text), ("steady", figures)]


def seconds(part: dict[str, Any]) -> str:
    return f"{part['start_s']:.1f} to {part['end_s']:.1f} s"


def length(part: dict[str, Any]) -> str:
    return f"{part['end_s'] - part['start_s']:.1f} s ({part['requests']})"


def arrival_facts(summary: dict[str, Any]) -> str:
    part, load = summary["arrivals"], summary["in_flight"]
    text = f"{number(part['rate'])}/s"
    if part["rate_error"] is not None:
        text += f" ({part['rate_error']:+.1%} off the schedule)"
    text += f", CV {number(part['cv'])}, dispersion " + ", ".join(
        f"{number(value)} at {width}" for width, value in part["iod"].items() if value is not None
    )
    text = text.removesuffix(", dispersion ")
    held = [f"{part[name]} {name}" for name in ("deferred", "shed", "dropped") if part[name]]
    return ", ".join([text, *held, f"in flight {number(load['mean'])} mean, {number(load['peak'])} most"])


def client_facts(client: dict[str, Any]) -> str:
    """Whether the client itself kept up."""
    lags = [
        f"{label} p99 {lag(client[name])}"
        for label, name in (
            ("send lag", "send_lag_ms"),
            ("loop lag", "loop_lag_ms"),
            ("read lag", "read_lag_ms"),
        )
        if client[name]["n"] or name != "read_lag_ms"
    ]
    if client["cpu_s_per_1k_tokens"] is not None:
        lags.append(f"CPU {number(client['cpu_s_per_1k_tokens'])} s per 1,000 tokens")
    if client["retries"]:
        lags.append(f"{client['retries']} retries")
    how = [str(client["backend"])] if client["backend"] else []
    how += [f"{client['stamps']} stamps"] if client["stamps"] else []
    if client["processes"]:
        how.append(f"{client['processes']} process" + ("es" if client["processes"] > 1 else ""))
    return ", ".join([*lags, *how])


def engine_facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    steps = summary["steps"]
    blocks = ((summary.get("setup") or {}).get("engine") or {}).get("num_kv_blocks")
    of = f" of {blocks}" if isinstance(blocks, int) else ""
    gap = steps["host_gap_ms"]
    return [
        (
            "steps",
            f"{steps['count']}, batch {number(steps['batch_size_mean'])} mean, "
            f"useful tokens {percent(steps['useful_token_fraction'])}, "
            f"recomputed {number(steps['recomputed_tokens'])}, preemptions {number(steps['preemptions'])}, "
            f"host gap p50 {figure(gap, 'p50').plain} p99 {figure(gap, 'p99').plain} ms",
        ),
        (
            "KV blocks",
            f"{number(steps['kv_live_mean'])} mean, {number(steps['kv_live_max'])} max{of}",
        ),
    ]


def hang_ups(part: dict[str, Any]) -> str:
    states = (
        ", ".join(f"{n} {state}" for state, n in part["by_state"].items() if n) if part["by_state"] else ""
    )
    text = f"{part['count']} cancelled" + (f" ({states})" if states else "")
    if part["wasted_tokens"] is not None:
        text += f", {part['wasted_tokens']} tokens wasted"
    if part["release_ms"]["n"]:
        text += f", KV free after p50 {figure(part['release_ms'], 'p50').plain} ms"
        text += f", max {number(part['release_ms']['max'])} ms"
    if part["reuse_ms"]["n"]:
        text += f", in use again after p50 {figure(part['reuse_ms'], 'p50').plain} ms"
    return text


def lag(block: dict[str, Any]) -> str:
    text = figure(block, "p99").plain
    return text if block["p99"] is None else f"{text} ms"


def verdict(out: Console, summary: dict[str, Any]) -> None:
    """What to know before reading the figures, and why the run may not be compared, if so: the last thing a
    reader sees."""
    for warning in summary["warnings"]:
        out.print(f"[bold yellow]WARNING[/] {escape(warning)}")
    for reason in summary["invalid_reasons"]:
        out.print(f"[bold red]INVALID[/] [red]{escape(reason)}[/]")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.report", description="Rebuild summary.json from a run's records and print it."
    )
    parser.add_argument("--from", dest="run", metavar="RUN", type=Path, required=True, help="a run directory")
    args = parser.parse_args(argv)
    try:
        summary = build_summary(args.run)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_summary(summary)
    try:
        if args.run.is_dir():
            save_summary(summary, args.run)
    except RecordsWriteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    put(f"results: {args.run}")
    return 0 if summary["valid"] else 3


if __name__ == "__main__":
    sys.exit(main())

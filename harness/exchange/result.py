"""What a result file of another tool holds, in our terms, and the summary that it makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness import records
from harness.metrics.percentiles import describe, describe_pooled, empty_block
from harness.metrics.run import Run, engine_frame, request_frame, step_frame
from harness.metrics.summary import clean, summarize

ASSUMPTIONS = {
    "one_token": "every event of the stream carried exactly one token, the first one included",
    "no_trailer": "the stream ended with its last token: no usage or [DONE] event that took time",
    "all_completed": "no request failed, timed out or was refused",
}
LARGEST = 1e100
"""Of a time, rate or count: what is made of some (sums, squares, other units) still is a number."""
UNSAID = "{tool} does not record it"
SENT = "{tool} measures from the send, and its file does not hold the intended arrivals"
LANDS = (
    *(f"{name}.{ref}" for name in ("ttft", "ttfc", "ttfo", "e2e") for ref in ("from_intended", "from_send")),
    *("tpot", "itl", "icl", "normalized"),
)
RATES = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "goodput_rps", "slo_attainment")

Figure = dict[str, Any] | str
"""A latency block, or the reason why there is none."""


class ResultError(OSError):
    """A result file that cannot be used: one line. An OSError, as a run that cannot be read is."""


@dataclass(frozen=True)
class Result:
    """One result. latency: path below latency_ms -> block or reason; throughput: name -> value or reason."""

    tool: str
    version: str | None = None
    engine: str | None = None
    model: str | None = None
    started_at: str | None = None
    duration_s: float | None = None
    completed: int | None = None
    unserved: int | None = None  # failed, timed out or refused: most tools do not tell these apart
    cancelled: int | None = None
    cut_off: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    planned_rate: float | None = None
    length_mode: str | None = None
    complete: bool | None = None
    latency: Mapping[str, Figure] = field(default_factory=dict)
    throughput: Mapping[str, float | str | None] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()  # why the run cannot be called valid
    warnings: tuple[str, ...] = ()

    @property
    def all_completed(self) -> bool:
        return self.unserved == 0 and not self.cancelled and not self.cut_off


def real(value: Any) -> float | None:
    """A number from 0 to LARGEST, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if 0 <= number <= LARGEST else None


def count(value: Any) -> int | None:
    number = real(value)
    return int(number) if number is not None and number == int(number) else None


def text(value: Any) -> str | None:
    """A short printable line, or None."""
    line = " ".join(value.split()) if isinstance(value, str) else ""
    return "".join(c for c in line if c.isprintable())[:100] or None


def reals(value: Any) -> list[float]:
    """The numbers of a list: what is none (a failed request's null) is NaN."""
    found = [real(item) for item in value] if isinstance(value, list) else []
    return [float("nan") if item is None else item for item in found]


def aggregate(figures: Mapping[str, Any], n: int | None, scale: float = 1.0) -> Figure:
    """A block of a tool's own aggregates: without samples there is no interval, so nothing is reliable."""
    block = empty_block()
    block["n"] = n
    for name in ("mean", "p50", "p90", "p95", "p99", "max"):
        value = real(figures.get(name))
        block[name] = None if value is None else value * scale
    told = [block[name] for name in ("mean", "p50", "p90", "p95", "p99", "max") if block[name] is not None]
    if not told:
        return "the file does not hold it"
    return block if any(told) else "0 stands for a missing figure in such files"


def samples(values: Iterable[float], scale: float = 1.0) -> Figure:
    """A block of one value a request: percentiles and intervals are ours. A 0 stands for a missing one."""
    data = np.asarray(list(values), dtype=np.float64) * scale
    data = data[np.isfinite(data) & (data > 0)]
    return describe(data) if data.size else "no request has this figure"


def pooled(gaps: list[list[float]], scale: float = 1.0) -> Figure:
    """A block of all gaps; intervals come from whole requests."""
    owners = np.repeat(np.arange(len(gaps)), [len(g) for g in gaps])
    values = np.asarray([gap for g in gaps for gap in g], dtype=np.float64) * scale
    return (
        describe_pooled(values, owners) if np.isfinite(values).any() else "no answer of more than one chunk"
    )


def needs(figure: Figure, reason: str, assumed: frozenset[str], *names: str) -> Figure:
    """The figure where everything it takes is assumed, else the reason and what would let it in."""
    if isinstance(figure, str) or set(names) <= assumed:
        return figure
    return f"{reason} (--assume {' '.join(n for n in names if n not in assumed)})"


def summary_of(result: Result, name: str, assumed: frozenset[str]) -> dict[str, Any]:
    """The summary of one result. name: what the file is called. assumed: names of ASSUMPTIONS."""
    if result.unserved is None and "all_completed" in assumed:
        result = replace(result, unserved=0)
    unsaid = UNSAID.format(tool=result.tool)
    summary = summarize(empty_run())
    kept = ("schema_version", "setup", "by_class", "by_tenant", "refusals", "failures")
    summary = {key: value if key in kept else unmeasured(value) for key, value in summary.items()}
    reasons = {key: unsaid for key in summary if key not in (*kept, "valid", "invalid_reasons", "warnings")}
    reasons |= {f"latency_ms.{path}": unsaid for path in ("queue_delay", "prefill", "decode")}
    served = "which requests were never served, and when they were due, is not in the file"
    reasons |= {"latency_ms.adj_ttft": served, "latency_ms.adj_e2e": served}
    fill_run(summary, result, name, assumed, reasons)
    fill_counts(summary, result, reasons)
    for path in LANDS:
        figure = result.latency.get(path, SENT.format(tool=result.tool) if intended(path) else unsaid)
        place(summary["latency_ms"], path, figure, f"latency_ms.{path}", reasons)
    for rate in RATES:
        value = result.throughput.get(rate, unsaid)
        if isinstance(value, str) or value is None:
            reasons[f"throughput.{rate}"] = value or "the file does not hold it"
        else:
            summary["throughput"][rate] = value
    if not result.all_completed:
        why = "tokens of answers that did not complete are not in the tool's rate, and they are in ours"
        if result.unserved is None:
            why = "the file does not say whether requests failed, whose tokens count in ours"
            why += " (--assume all_completed)"
        for rate in ("output_tokens_per_s", "total_tokens_per_s"):
            summary["throughput"][rate] = None
            reasons[f"throughput.{rate}"] = why
    summary["valid"] = False
    summary["invalid_reasons"] = [
        f"{result.tool} does not record whether its client kept up with its schedule",
        *result.doubts,
    ]
    told = [f"assumed, not measured: {ASSUMPTIONS[a]}" for a in ASSUMPTIONS if a in assumed]
    summary["warnings"] = [*result.warnings, *told]
    summary["null_reasons"] = dict(sorted(reasons.items()))
    return dict(clean(summary))


def intended(path: str) -> bool:
    return path.endswith("from_intended") or path == "normalized"


def fill_run(
    summary: dict[str, Any], result: Result, name: str, assumed: frozenset[str], reasons: dict[str, str]
) -> None:
    summary["run"] |= {
        "id": name,
        "started_at": result.started_at,
        "duration_s": result.duration_s,
        "complete": bool(result.complete),
        "length_mode": result.length_mode,
        "source": {"tool": result.tool, "version": result.version, "assumed": sorted(assumed)},
    }
    if result.version is None:
        reasons["run.source.version"] = f"{result.tool} does not write its version into the file"
    if result.length_mode is None:
        reasons["run.length_mode"] = "the file does not say whether answers were held to a length"
    summary["engine"], summary["model"] = result.engine, result.model
    summary["arrivals"]["planned_rate"] = result.planned_rate
    for part, total in (("prompt_tokens", result.prompt_tokens), ("output_tokens", result.output_tokens)):
        summary[part]["counted"] = total
    summary["window"]["rule"] = f"the duration that {result.tool} gives"
    summary["window"]["completed"] = result.completed


def fill_counts(summary: dict[str, Any], result: Result, reasons: dict[str, str]) -> None:
    """Ours tell failed, timed out and refused apart: a sum of the three is only known to be each when 0."""
    counts = summary["counts"]
    counts |= {name: getattr(result, name) for name in ("completed", "cancelled", "cut_off")}
    three = ("failed", "timed_out", "rejected")
    if result.unserved == 0:
        counts |= dict.fromkeys(three, 0)
    else:
        known = result.unserved is not None
        why = f"{result.unserved} were not served; the file does not say which way" if known else None
        for name in three:
            reasons[f"counts.{name}"] = why or UNSAID.format(tool=result.tool)
    if result.completed is not None and result.unserved is not None:
        others = (result.cancelled or 0) + (result.cut_off or 0)
        counts["scheduled"] = result.completed + result.unserved + others


def place(parent: dict[str, Any], path: str, figure: Figure, full: str, reasons: dict[str, str]) -> None:
    """Put a block, or note why there is none."""
    *above, last = path.split(".")
    for key in above:
        parent = parent[key]
    if isinstance(figure, str):
        reasons[full] = figure
        return
    parent[last] = {**parent[last], **figure}
    reasons |= {f"{full}.{k}": "the file does not hold it" for k, v in figure.items() if v is None}
    if figure["n"] is not None and not any(figure["ci95"].values()):
        reasons[f"{full}.ci95"] = "too few samples, or aggregates without the samples"


def unmeasured(value: Any) -> Any:
    """The same shape with nothing in it."""
    if isinstance(value, dict):
        if "ci95" in value:
            return {**empty_block(), **({"zero_share": None} if "zero_share" in value else {})}
        return {key: unmeasured(item) for key, item in value.items()}
    return [] if isinstance(value, list) else None


def empty_run(imported: dict[str, Any] | None = None, path: Path = Path()) -> Run:
    """A run without any record."""
    none = pd.DataFrame()
    telemetry = pd.DataFrame({name: np.array([], dtype=float) for name in records.TELEMETRY_COLUMNS})
    return Run(
        path=path,
        meta={"t0_ns": 0},
        requests=request_frame([]),
        engine=engine_frame(none, 0, None),
        steps=step_frame(none, 0),
        telemetry=telemetry,
        schedule=none,
        imported=imported,
    )

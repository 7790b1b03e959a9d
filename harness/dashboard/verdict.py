"""The first thing on the page: who wins on what, how sure that is, and whether the runs are valid.

From compare.json where there is one: its intervals are of paired rounds, so that they hold what changes from
run to run. Else from the summaries, whose intervals are of the percentile within its one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.comparison import SAME, Comparison, is_reliable
from harness.dashboard.headline import headline, leads, validity
from harness.dashboard.shown import Shown
from harness.names import label as label_of
from harness.names import name as name_of
from harness.slo import shown as shown_slo
from harness.table import lookup, number, percent


@dataclass(frozen=True)
class Metric:
    path: str
    better: str  # lower | higher
    share: bool = False

    @property
    def label(self) -> str:
        return label_of(self.path)

    def text(self, value: Any) -> str:
        return percent(value) if self.share else number(value)


METRICS = (
    Metric("latency_ms.ttft.from_intended.p50", "lower"),
    Metric("latency_ms.ttft.from_intended.p99", "lower"),
    Metric("latency_ms.tpot.p50", "lower"),
    Metric("latency_ms.tpot.p99", "lower"),
    Metric("latency_ms.itl.p99", "lower"),
    Metric("latency_ms.e2e.from_intended.p50", "lower"),
    Metric("latency_ms.e2e.from_intended.p99", "lower"),
    Metric("throughput.output_tokens_per_s", "higher"),
    Metric("throughput.goodput_rps", "higher"),
    Metric("throughput.slo_attainment", "higher", share=True),
)
TILES = (
    *(Metric("throughput.slo_attainment", "higher", share=True), METRICS[8], METRICS[7]),
    *(*METRICS[:4], METRICS[5]),
)
MOST_COLUMNS = 4
ROOM = 1.25


def verdict(runs: Sequence[Shown], comparison: Comparison, compared: dict[str, Any] | None) -> dict[str, Any]:
    """For the template: kind (good | warn | bad), headline, lines, tiles or columns and rows, note."""
    if len(runs) == 1 and compared is None:
        return _alone(runs[0])
    return _of_rounds(runs, compared) if compared is not None else _of_summaries(runs, comparison)


def _alone(run: Shown) -> dict[str, Any]:
    summary = run.summary
    kept, limits = lookup(summary, "throughput.slo_attainment"), shown_slo(run.run.meta.get("slo") or {})
    headline = (
        f"{run.name}: {run.counts.get('completed', 0):,} of {run.counts.get('scheduled', 0):,} completed"
    )
    if kept is not None and limits:
        headline += f", {percent(kept)} within the SLO ({limits})"
    tiles = []
    for metric in TILES:
        value = lookup(summary, metric.path)
        if value is not None:
            span = _interval(summary, metric.path)
            sub = f"95 %: {metric.text(span[0])} to {metric.text(span[1])}" if span else ""
            if not span and not is_reliable(summary, metric.path):
                sub = "too few samples for an interval"
            tile = {"label": metric.label, "text": metric.text(value), "sub": sub}
            tiles.append({**tile, "path": metric.path, "value": value})
    return {"kind": _kind([run]), "headline": headline, "lines": [], "tiles": tiles, "note": _NOTE_ONE}


_NOTE_ONE = (
    "Intervals are of the percentile within this run (order statistics); another run of the same differs by "
    "more: python -m harness.compare measures by how much."
)


def _of_summaries(runs: Sequence[Shown], comparison: Comparison) -> dict[str, Any]:
    won: dict[str, list[str]] = {}
    behind: dict[str, list[str]] = {}
    rows, ahead, close = [], [], []
    for metric in METRICS:
        values = [(run, lookup(run.summary, metric.path)) for run in runs]
        if all(value is None for _, value in values):
            continue
        sound = [(run, value) for run, value in values if value is not None and run.summary.get("valid")]
        best, sure = _winner(sound, metric) if comparison.comparable else (None, False)
        label = name_of(metric.path)
        if best is not None and sure:
            won.setdefault(best.name, []).append(label)
        elif best is not None:
            ahead.append(f"{label} ({best.name})")
        elif len(sound) > 1:
            close.append(label)
        losers = _behind(sound, metric) if comparison.comparable else []
        for run in losers if best is None else ():
            behind.setdefault(run.name, []).append(label)
        rows.append(_row(metric, values, best, sure, comparison.comparable))
    names = sorted(won, key=lambda name: -len(won[name]))
    lines = [f"{name}: best {_listed(won[name])}." for name in names]
    if behind:
        told = [f"{name} ({', '.join(labels)})" for name, labels in behind.items()]
        lines.append(f"No single best there, but clearly behind it: {_listed(told)}.")
    if comparison.comparable:
        lines += [f"Ahead, in figures without an interval: {_listed(ahead)}."] if ahead else []
        lines += [f"Too close to call from one run each: {_listed(close)}."] if close else []
    columns = [{"name": run.name, "colour": run.style.colour} for run in runs]
    return {
        "kind": _kind(runs) if comparison.comparable else "warn",
        "headline": _headline(runs, comparison, won, names, behind),
        "lines": lines,
        "columns": columns if len(runs) <= MOST_COLUMNS else _SHORT,
        "rows": rows,
        "note": _NOTE_RUNS,
    }


_SHORT = [{"name": "best value", "colour": ""}, {"name": "reference", "colour": ""}]
_NOTE_RUNS = (
    "▲ best, and its 95 % interval touches no other; (▲) best by more than 2 %, without an interval. "
    "Intervals are of percentiles within one run each and hold nothing of what changes from run to run: "
    "python -m harness.compare measures that in interleaved rounds. Whiskers: each run's interval, on a "
    "logarithmic scale."
)


def _headline(
    runs: Sequence[Shown],
    comparison: Comparison,
    won: dict[str, list[str]],
    names: list[str],
    behind: dict[str, list[str]],
) -> str:
    if not comparison.comparable:
        return "No verdict: these runs were not sent the same requests"
    if invalid := [run.name for run in runs if not run.summary.get("valid")]:
        return f"Not valid, and out of the verdict: {_listed(invalid)}"
    if not names:
        others = len(runs) - len(behind)
        if behind and others > 1:
            return f"{_listed(list(behind))} clearly behind; none of the other {others} is clearly best"
        return "No single best" if behind else "No strategy is better by more than the intervals"
    of = sum(len(labels) for labels in won.values())
    told = [f"{name} on {len(won[name])}" for name in names]
    return f"Best: {_listed(told)} of {of} decided figures"


def _winner(known: Sequence[tuple[Shown, Any]], metric: Metric) -> tuple[Shown | None, bool]:
    """(the best run or None, whether its interval is clear of the next one's)."""
    if len(known) < 2:
        return None, False
    order = sorted(known, key=lambda pair: pair[1], reverse=metric.better == "higher")
    (first, best), (_, second) = order[0], order[1]
    if abs(best - second) <= SAME * abs(second):
        return None, False
    spans = [_interval(run.summary, metric.path) for run, _ in order]
    if spans[0] is None or any(span is None for span in spans[1:]):
        return (first, False) if is_reliable(first.summary, metric.path) else (None, False)
    if metric.better == "lower":
        clear = all(spans[0][1] < span[0] for span in spans[1:] if span)
    else:
        clear = all(spans[0][0] > span[1] for span in spans[1:] if span)
    return (first, True) if clear else (None, False)


def _behind(known: Sequence[tuple[Shown, Any]], metric: Metric) -> list[Shown]:
    """Runs whose interval is wholly worse than that of the run with the best value."""
    spans = [(run, value, _interval(run.summary, metric.path)) for run, value in known]
    sure = [(run, value, span) for run, value, span in spans if span is not None]
    if len(sure) < 2:
        return []
    low = metric.better == "lower"
    top = (min if low else max)(sure, key=lambda one: one[1])[2]
    return [run for run, _, span in sure if (span[0] > top[1] if low else span[1] < top[0])]


def _row(
    metric: Metric, values: Sequence[tuple[Shown, Any]], best: Shown | None, sure: bool, comparable: bool
) -> dict[str, Any]:
    base = next((pair for pair in values if pair[1]), None)
    cells = []
    for run, value in values:
        span = _interval(run.summary, metric.path)
        cell = {"name": run.name, "path": metric.path, "value": value, "mark": "", "ratio": "", "css": ""}
        cell["text"] = metric.text(value) if value is not None else "–"
        cell["sub"] = f"{metric.text(span[0])} to {metric.text(span[1])}" if span else ""
        if comparable and value is not None and base is not None and run is not base[0]:
            cell["ratio"] = f"{number(value / base[1])}x"
        if run is best:
            cell |= {"mark": "▲", "css": "better"} if sure else {"mark": "(▲)"}
        cells.append(cell if value is not None else {**cell, "css": "soft"})
    marks = [
        (run.style.colour, value, _interval(run.summary, metric.path))
        for run, value in values
        if value is not None
    ]
    if len(values) > MOST_COLUMNS:
        cells = _shortened(cells, best, metric.better == "lower")
    return {"label": metric.label, "cells": cells, "forest": forest(marks)}


def _shortened(cells: Sequence[dict[str, Any]], best: Shown | None, low: bool) -> list[dict[str, Any]]:
    """The best value and the reference, where all would be too many for a screen."""
    order = sorted((c for c in cells if c["value"] is not None), key=lambda c: c["value"], reverse=not low)
    top = next((cell for cell in cells if best is not None and cell["name"] == best.name), order[0])
    return [
        {**cell, "sub": f"{cell['name']} {cell['sub']}".strip()} for cell in (top, {**cells[0], "ratio": ""})
    ]


def forest(marks: Sequence[tuple[str, float, tuple[float, float] | None]], line: float | None = None) -> Any:
    """Whiskers on a common logarithmic scale from 0 to 100: marks of {colour, x, low, high, y}; None where
    there is nothing to span. Around a line the scale is at least ROOM wide, so that like figures look so."""
    ends = [v for _, value, span in marks for v in (value, *(span or ())) if v > 0 and math.isfinite(v)]
    ends += [line / ROOM, line * ROOM] if line else []
    if len(marks) < 1 or not ends or max(ends) <= min(ends):
        return None
    low, high = math.log(min(ends)), math.log(max(ends))

    def at(value: float) -> float:
        inside = min(high, max(low, math.log(value))) if value > 0 else low
        return round(3 + 94 * (inside - low) / (high - low), 2)

    rows = []
    for i, (colour, value, span) in enumerate(marks):
        left, right = (at(span[0]), at(span[1])) if span else (at(value), at(value))
        rows.append({"colour": colour, "x": at(value), "low": left, "high": right, "y": 5 + 9 * i})
    return {"marks": rows, "height": 9 * len(rows) + 1, "line": at(line) if line else None}


def _of_rounds(runs: Sequence[Shown], compared: dict[str, Any]) -> dict[str, Any]:
    """From compare.json: ratios against the reference with their intervals over rounds."""
    reference = str(compared.get("reference"))
    arms = [str(arm.get("name")) for arm in compared.get("arms") or []]
    others = [name for name in arms if name != reference]
    colours = {run.name: run.style.colour for run in runs}
    said = compared.get("verdict") or {}
    decided = "inconclusive" not in str(said.get("outcome", said) if isinstance(said, dict) else said)
    rows = []
    for path, metric in (compared.get("metrics") or {}).items():
        found = metric.get("arms") or {}
        cells, marks = [], []
        for name in others:
            effect = found.get(name) or {}
            cells.append(_effect_cell(name, path, effect))
            if effect.get("ratio"):
                span = (effect["low"], effect["high"]) if effect.get("low") and effect.get("high") else None
                marks.append((colours.get(name, "#777777"), effect["ratio"], span))
        rows.append({"label": label_of(path), "cells": cells, "forest": forest(marks, 1.0)})
    judged = bool(rows) and not compared.get("refused")
    text = str(said.get("text") or "") if isinstance(said, dict) else str(said)
    lines = leads(compared) if judged else [text]
    lines += [f"{validity(compared)}, arms interleaved; factors against {reference}."]
    lines += [f"Refused: {reason}" for reason in compared.get("refused") or []]
    alarms = _alarms(compared.get("drift") or {})
    if alarms:
        lines.append(f"{reference} differed from itself on {_listed(alarms)}: trust no small effect.")
    lines += _drift(compared.get("drift") or {})
    kind = "bad" if compared.get("refused") else "good" if decided and not alarms else "warn"
    columns = [{"name": name, "colour": colours.get(name, "")} for name in others]
    return {
        "kind": kind,
        "headline": headline(compared) if judged else "No verdict",
        "lines": lines,
        "columns": columns,
        "rows": rows,
        "note": "▲ better, ▼ worse than the reference: past the limit, with the whole interval. "
        "Intervals are over rounds; the dashed line is 1x. The charts below show one round, the middle one.",
    }


def _effect_cell(name: str, path: str, effect: dict[str, Any]) -> dict[str, Any]:
    if effect.get("ratio") is None:
        cell = {"text": "–", "sub": str(effect.get("reason") or ""), "mark": "", "css": "soft"}
    else:
        word = str(effect.get("verdict") or "")
        mark = {"better": "▲", "worse": "▼"}.get(word, "")
        span = [number(effect[end]) if effect.get(end) is not None else "?" for end in ("low", "high")]
        sub = f"{span[0]} to {span[1]}, {word}"
        if word == "inconclusive" and effect.get("needed"):
            sub += f": {effect['needed']} rounds would do"
        cell = {"text": f"{number(effect['ratio'])}x", "sub": sub, "mark": mark, "css": word}
    return {**cell, "ratio": "", "name": name, "path": path, "value": effect.get("ratio")}


def _alarms(drift: dict[str, Any]) -> list[str]:
    """Figures in which the reference was told apart from itself."""
    return [
        name_of(path)
        for path, part in drift.items()
        if isinstance(part, dict)
        and part.get("kind") == "again"
        and part.get("verdict") in ("better", "worse")
    ]


def _drift(drift: dict[str, Any]) -> list[str]:
    """What the reference did against itself, or all passes over time: the noise that a factor stands in."""
    told: dict[str, list[str]] = {}
    for path, part in drift.items():
        if isinstance(part, dict) and part.get("low") is not None and part.get("high") is not None:
            span = f"{name_of(path)} {number(part['low'])}x to {number(part['high'])}x"
            told.setdefault(str(part.get("kind")), []).append(span)
    words = {"trend": "Drift over the rounds", "again": "The reference against itself (A/A)"}
    return [f"{words.get(kind, 'Drift')}: {', '.join(spans[:4])}." for kind, spans in told.items()]


def _interval(summary: dict[str, Any], path: str) -> tuple[float, float] | None:
    block, _, name = path.rpartition(".")
    ends = lookup(summary, f"{block}.ci95.{name}")
    if not isinstance(ends, (list, tuple)) or len(ends) != 2 or None in ends:
        return None
    return float(ends[0]), float(ends[1])


def _kind(runs: Sequence[Shown]) -> str:
    if any(not run.summary.get("valid") for run in runs):
        return "bad"
    return "warn" if any(run.summary.get("warnings") for run in runs) else "good"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

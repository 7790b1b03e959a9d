"""A run's summary as a gate reads it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.comparison import is_reliable
from harness.gate.rules import Rules, RulesError, is_number
from harness.metrics.percentiles import share_interval
from harness.metrics.summary import build_summary
from harness.table import lookup, why_null

FINGERPRINT = ("schedule", "config", "host", "device")
OUTCOME_COUNTS = ("completed", "failed", "timed_out", "rejected")
TOO_FEW = "too few samples for a 95 % interval"


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


def measured(summary: dict[str, Any], path: str) -> tuple[float | None, str | None]:
    """(the figure, None), or (it or None, why it can be judged by nobody)."""
    value = lookup(summary, path)
    if not is_number(value):
        return None, why_null(summary, path) or "the run has no such figure"
    return value, None if is_reliable(summary, path) else TOO_FEW


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


def check_paths(rules: Rules, summary: dict[str, Any]) -> None:
    """A slip in a metric's name would be inconclusive for ever: it is a mistake in the rules, found at the
    first run, not after the last. Raises RulesError."""
    known = list(_figures(summary))
    for path in () if rules.optional else (rule.metric for rule in rules.metrics):
        if path not in known and why_null(summary, path) is None:
            near = difflib.get_close_matches(path, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RulesError(f"{rules.source}: metrics.{path}: summary.json has no such figure{hint}")


def _figures(value: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths of all that is a number, or null where one would be."""
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _figures(item, f"{prefix}{key}.")
        elif item is None or is_number(item):
            yield f"{prefix}{key}"

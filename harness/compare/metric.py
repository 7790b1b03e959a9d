"""The figures of a summary that arms are compared by, and which direction of each is good."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from harness import names
from harness.comparison import ROWS
from harness.conf import UsageError
from harness.stats import Better

DEFAULTS = (
    "latency_ms.ttft.from_intended.p50",
    "latency_ms.ttft.from_intended.p99",
    "latency_ms.tpot.p50",
    "latency_ms.tpot.p99",
    "latency_ms.normalized.p50",
    "throughput.output_tokens_per_s",
    "throughput.goodput_rps",
    "steps.useful_token_fraction",
)

HIGHER = r"throughput\.|fluidity$|counts\.completed$|.*useful_token_fraction$|.*hit_rate|utilization\.m[fb]u"
LOWER = r"latency_ms\.|stalls\.|attribution\.|deadline_misses$|counts\.|cancellations\.|steps\.|.*energy"
DIRECTIONS: tuple[tuple[str, Better], ...] = ((HIGHER, "higher"), (LOWER, "lower"))
"""By path, below steady. and by_class.NAME. too; the first that fits."""
COLUMNS = {"ttft.from_intended": "ttft_ms", "ttft.from_send": "ttft_send_ms", "tpot": "tpot_ms"}
COLUMNS |= {"e2e.from_intended": "e2e_ms", "e2e.from_send": "e2e_send_ms", "normalized": "normalized_ms"}
"""Blocks of latency_ms whose figures are of single requests: their column in per_request()."""


@dataclass(frozen=True, slots=True)
class Metric:
    """path: in summary.json."""

    path: str
    better: Better

    @property
    def label(self) -> str:
        return names.label(self.path)

    @property
    def column(self) -> str | None:
        """Of harness.metrics.latency.per_request, where requests can be paired one by one."""
        found = re.fullmatch(r"latency_ms\.(.+)\.(mean|max|p\d+)", self.path)
        return COLUMNS.get(found[1]) if found else None

    @property
    def name(self) -> str:
        """The label without its unit: ratios have none."""
        return names.name(self.path)


def metric(text: str) -> Metric:
    """A path, or path:lower or path:higher where the path alone does not say which is good. Raises
    UsageError."""
    path, _, direction = text.partition(":")
    if direction not in ("", "lower", "higher"):
        raise UsageError(f"metrics: {text}: needs {path}:lower or {path}:higher")
    for row in ROWS:
        if row.path == path and row.better in ("lower", "higher"):
            return Metric(path, direction or row.better)  # type: ignore[arg-type]
    tail = re.sub(r"^(steady|by_(class|tenant)\.[^.]+)\.", "", path)
    for pattern, better in DIRECTIONS:
        if re.match(pattern, tail):
            return Metric(path, direction or better)  # type: ignore[arg-type]
    if direction and re.match(r"[a-z_]+(\.|$)", path):
        return Metric(path, direction)  # type: ignore[arg-type]
    known = ", ".join(DEFAULTS)
    raise UsageError(
        f"metrics: {text}: is no figure of summary.json whose good direction is known; write {path}:lower or "
        f":higher, or choose from: {known}"
    )


def number_at(summary: dict[str, Any], path: str) -> float | None:
    """The figure, or None where it was not measured."""
    from harness.table import lookup

    value = lookup(summary, path)
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known else None

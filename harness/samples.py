"""How many requests a run needs until its percentiles can be believed, and which of them a plan will lack.

TTFT and TPOT have one sample for each request that streams and whose user stays: of those the schedule must
hold enough, in the whole and in every class of requests, where the rarest class decides. Two rules say how
many are enough (harness.metrics.percentiles): `interval`, the smallest sample with a distribution-free 95 %
interval, and `mlperf`, MLPerf's floors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.eta import duration

if TYPE_CHECKING:
    from workloads.schedule import Schedule

SHOWN = ("p50", "p90", "p95", "p99", "p99.9")
ASKED = ("p50", "p90", "p95", "p99")
"""What a summary holds of every figure."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Under one rule, for all requests or for one class."""

    rule: str
    request_class: str | None
    samples: int  # what the plan gives, of planned requests
    planned: int
    floors: dict[str, int]  # by percentile: samples
    requests: dict[str, int]  # by percentile: requests of a run that has so many samples

    @property
    def lacking(self) -> list[str]:
        return [name for name in ASKED if self.floors[name] > self.samples]

    @property
    def cure(self) -> int:
        """A number of requests that is enough for all percentiles of ASKED."""
        return max(self.requests[name] for name in ASKED)


def needs(schedule: Schedule) -> list[Needs]:
    """A row for each rule: for all requests, then for the class with the fewest samples if there are
    several."""
    from harness.metrics.percentiles import FLOOR_RULES, requests_needed

    streamed = any(request.stream for request in schedule)
    found = Counter({request.request_class: 0 for request in schedule})
    found.update(r.request_class for r in schedule if r.cancel_kind == "none" and r.stream >= streamed)
    rarest = min(found, key=lambda name: found[name])
    groups = [(None, sum(found.values())), *([(rarest, found[rarest])] if len(found) > 1 else [])]
    rows = []
    for name, samples in groups:
        share = max(samples, 1) / len(schedule)  # none among those planned: not more than one, then
        for rule in FLOOR_RULES:
            floors = {p: requests_needed((p,), rule) for p in SHOWN}
            requests = {p: math.ceil(n / share - 1e-9) for p, n in floors.items()}
            rows.append(Needs(rule, name, samples, len(schedule), floors, requests))
    return rows


def describe_needs(schedule: Schedule, load_s: float, rest_s: float) -> list[str]:
    """Lines for people. load_s: in which the planned requests are sent, more take longer in proportion;
    rest_s: what is before and after, whatever their number."""
    rows = needs(schedule)

    def took(requests: int) -> str:
        return duration(load_s * requests / len(schedule) + rest_s)

    what = "TTFT and TPOT" if any(r.stream for r in schedule) else "E2E (nobody streams)"
    lines = [f"samples    {rows[0].samples} of {rows[0].planned} requests should have {what}; reliable from"]
    lines.append(_line("", SHOWN))
    lines += [_line(f"{r.rule}: samples", r.floors.values()) for r in rows if r.request_class is None]
    for row in rows:
        who = f"in all: {row.rule}" if row.request_class is None else f"each class: {row.rule}"
        cells = (f"{n} ({took(n)})" for n in row.requests.values())
        lines.append(_line(f"requests {who}", cells))
    for row in rows:
        if row.lacking:
            who = "" if row.request_class is None else f" of class {row.request_class}, the rarest,"
            lines.append(
                f"lacks      {', '.join(row.lacking)}{who} by {row.rule}: {row.samples} samples planned; "
                f"load.requests={row.cure} ({took(row.cure)}) would do"
            )
    if not any(row.lacking for row in rows):
        lines.append(f"lacks      nothing up to {ASKED[-1]}")
    return lines


def _line(label: str, cells: Iterable[object]) -> str:
    return " " * 11 + f"{label:<30}" + "".join(f"{cell!s:>17}" for cell in cells).rstrip()

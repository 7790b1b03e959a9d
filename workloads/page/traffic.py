"""What a page and its table show of traffic: a drawn schedule or a recorded trace, in the same columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workloads.columns import Texts
from workloads.fitting.arrivals import index_of_dispersion
from workloads.fitting.prefixes import measure_reuse
from workloads.reuse import reused_tokens
from workloads.schedule import Schedule
from workloads.streams import stream
from workloads.trace import Trace

WINDOWS_S = (1.0, 10.0, 60.0)
"""Of the dispersions in the table."""
QUANTILES = (50, 90, 99)
UNKNOWN = "–"
ENDINGS = {
    "none": "wait for all of it",
    "before_first_token": "before the first token",
    "after_tokens": "in mid-answer",
    "after_s": "after a fixed time",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Rows in order of their times. None: not known, as a trace that has no times."""

    name: str
    times_s: np.ndarray | None  # of a session's later turns in a schedule: at the earliest
    prompts: np.ndarray  # tokens, int64
    answers: np.ndarray  # tokens, int64
    reused: np.ndarray | None  # tokens of each prompt that some earlier one began with, int64
    turns: np.ndarray | None  # requests of each session, int64
    think_s: np.ndarray | None  # of later turns
    tenants: tuple[int, ...] | None  # requests of each, the most first
    classes: dict[str, int] | None
    endings: dict[str, int] | None  # how users end requests
    transports: dict[str, int] | None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def span_s(self) -> float:
        return 0.0 if self.times_s is None or not len(self) else float(self.times_s[-1] - self.times_s[0])

    @property
    def rate(self) -> float | None:
        """Requests/s: gaps over the time they span."""
        return (len(self) - 1) / self.span_s if self.span_s > 0 else None

    def dispersion(self, window_s: float) -> float | None:
        """Variance over mean of the counts in windows; None where there are too few of them."""
        return None if self.times_s is None else index_of_dispersion(self.times_s, window_s)

    @property
    def reusable(self) -> float | None:
        """Share of all prompt tokens."""
        return None if self.reused is None else float(self.reused.sum() / self.prompts.sum())


def of_schedule(schedule: Schedule, name: str) -> Traffic:
    columns = schedule.columns
    codes = columns.session.codes
    sent = np.where(columns.stream, "streamed (SSE)", "not streamed").tolist()
    sent = [
        "WebSocket" if t == "websocket" else s for s, t in zip(sent, columns.transport.list(), strict=True)
    ]
    endings = Counter(columns.cancel_kind.list())
    timed = int(np.isfinite(columns.timeout_s).sum())
    return Traffic(
        name=name,
        times_s=columns.arrival_s,
        prompts=columns.prompt_tokens(),
        answers=columns.stop_after,
        reused=reused_tokens(columns.segments),
        turns=np.bincount(codes[codes >= 0]) if (codes >= 0).any() else None,
        think_s=_some(columns.think_s),
        tenants=_volumes(columns.tenant),
        classes=_counts(columns.request_class),
        endings={ENDINGS[kind or "none"]: n for kind, n in endings.most_common()},
        transports=dict(Counter(sent).most_common()),
        notes=(*schedule.notes, *([f"{timed} of {len(schedule)} clients have a time-out"] if timed else [])),
    )


def of_trace(trace: Trace, name: str) -> Traffic:
    reuse = measure_reuse(trace)
    tick = trace.tick_s()
    codes = None if trace.session is None else trace.session.codes[trace.session.codes >= 0]
    turns = None if codes is None or not len(codes) else np.unique(codes, return_counts=True)[1]
    return Traffic(
        name=name,
        times_s=None if trace.time_ns is None else trace.spread(stream(0, "ticks")).times_s(),
        prompts=trace.input_tokens,
        answers=trace.output_tokens,
        reused=None if reuse is None else reuse.tokens,
        turns=turns,
        think_s=None if trace.think_s is None else _some(trace.think_s),
        tenants=None if trace.user is None else _volumes(trace.user),
        classes=None if trace.request_class is None else _counts(trace.request_class),
        endings=None,
        transports=None,
        notes=(*trace.notes, *([] if tick is None else [f"stamps on a grid of {tick:g} s, spread over it"])),
    )


@dataclass(frozen=True, slots=True)
class Row:
    group: str
    label: str
    cells: tuple[str, ...]  # one a traffic


def table(shown: Sequence[Traffic]) -> list[Row]:
    """Every traffic in one column, for the terminal and for the page."""
    rows: list[Row] = []

    def add(group: str, label: str, values: list[str | None]) -> None:
        if any(value is not None for value in values):
            rows.append(Row(group, label, tuple(UNKNOWN if v is None else v for v in values)))

    add("arrivals", "requests", [f"{len(t)}" for t in shown])
    add("arrivals", "span", [duration(t.span_s) if t.span_s else None for t in shown])
    add("arrivals", "requests/s", [None if t.rate is None else f"{t.rate:.3g}" for t in shown])
    add("arrivals", "CV of gaps", [_cv(t.times_s) for t in shown])
    for window in WINDOWS_S:
        label = f"dispersion in {window:g} s"
        add("arrivals", label, [_number(t.dispersion(window)) for t in shown])
    for label in ("prompt", "answer"):
        group = f"{label} tokens"
        lengths = [getattr(t, f"{label}s") for t in shown]
        add(group, "mean", [f"{v.mean():.0f}" for v in lengths])
        for q in QUANTILES:
            add(group, f"p{q}", [f"{np.percentile(v, q):.0f}" for v in lengths])
        add(group, "max", [f"{v.max()}" for v in lengths])
    add("prompts", "rank correlation with answers", [_rank_correlation(t.prompts, t.answers) for t in shown])
    add("prompts", "tokens seen before", [_share(t.reusable) for t in shown])
    add("sessions", "sessions", [None if t.turns is None else f"{len(t.turns)}" for t in shown])
    add("sessions", "requests of one, mean", [_mean(t.turns) for t in shown])
    add("sessions", "p90", [None if t.turns is None else f"{np.percentile(t.turns, 90):.0f}" for t in shown])
    add("sessions", "think time, p50", [_median_s(t.think_s) for t in shown])
    for group, name in (
        ("users who give up", "endings"),
        ("transport", "transports"),
        ("classes", "classes"),
    ):
        parts = [getattr(t, name) for t in shown]
        labels = list(dict.fromkeys(label for part in parts if part for label in part))
        if name == "classes" and len(labels) == 1:
            continue
        for label in labels[:12]:
            values = [None if p is None else _share(p.get(label, 0) / sum(p.values())) for p in parts]
            add(group, label, values)
    if any(t.tenants is not None and len(t.tenants) > 1 for t in shown):
        add("tenants", "tenants", [None if t.tenants is None else f"{len(t.tenants)}" for t in shown])
        add("tenants", "requests of the largest", [_share(largest(t)) for t in shown])
    return rows


def largest(traffic: Traffic) -> float | None:
    """Share of the requests that the largest tenant sends."""
    return None if not traffic.tenants else traffic.tenants[0] / sum(traffic.tenants)


def duration(seconds: float) -> str:
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _some(values: np.ndarray) -> np.ndarray | None:
    finite = values[np.isfinite(values)]
    return finite if len(finite) else None


def _counts(column: Texts) -> dict[str, int]:
    return dict(Counter(name or UNKNOWN for name in column.list()).most_common())


def _volumes(column: Texts) -> tuple[int, ...] | None:
    codes = column.codes[column.codes >= 0]
    return tuple(sorted(np.unique(codes, return_counts=True)[1].tolist(), reverse=True)) or None


def _cv(times_s: np.ndarray | None) -> str | None:
    gaps = np.diff(times_s) if times_s is not None else np.zeros(0)
    return f"{gaps.std() / gaps.mean():.2f}" if len(gaps) > 1 and gaps.mean() > 0 else None


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _mean(values: np.ndarray | None) -> str | None:
    return None if values is None else f"{values.mean():.1f}"


def _median_s(values: np.ndarray | None) -> str | None:
    return None if values is None else duration(float(np.median(values)))


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> str | None:
    from scipy.stats import spearmanr

    if len(a) < 3 or a.min() == a.max() or b.min() == b.max():
        return None
    return f"{float(spearmanr(a, b).statistic):.2f}"

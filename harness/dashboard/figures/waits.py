"""What requests waited for: their time by part, stalls and whose prompts caused them, and hang-ups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.dashboard.figures import phases
from harness.dashboard.figures.plot import figure, finite, floats, line, markers, plain, shown_of, thin
from harness.dashboard.shown import Shown
from harness.dashboard.stalls import Stall
from harness.metrics.cancellations import STATES
from harness.table import lookup
from workloads.page.frame import COLOURS


def time_spent(runs: Sequence[Shown]) -> Any:
    """Where the E2E of the mean completed request went: a bar for each run and class."""
    bars = [
        (label, f"{label}, {run.name}" if len(runs) > 1 else label, spent)
        for run in runs
        for label, spent in run.spent()
    ]
    classes = list(dict.fromkeys(label for label, _, _ in bars))
    bars.sort(key=lambda bar: classes.index(bar[0]))  # runs side by side, then class by class
    traces: list[dict[str, Any]] = []
    for name, (colour, parts) in phases.PARTS.items():
        values = [max(0.0, sum(spent[part] for part in parts)) for _, _, spent in bars]
        totals = [sum(spent[part] for part in spent if not part.startswith("queue_")) for _, _, spent in bars]
        if not any(value > 0.002 * total for value, total in zip(values, totals, strict=True)):
            continue  # nothing that a screen could show
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [plain(label) for _, label, _ in bars],
                "x": floats(np.array(values)),
                "customdata": floats(100 * np.array(values) / np.maximum(totals, 1e-9)),
                "marker": {"color": colour, "line": {"width": 0}},
                "hovertemplate": f"{name}: %{{x:.4g}} ms, %{{customdata:.3g}} %<extra>%{{y}}</extra>",
            }
        )
    drawn = figure("Where the time went", traces, x=("ms of the mean request", "linear"), y=("", "category"))
    if drawn is not None:
        drawn["layout"].update(barmode="stack", height=70 + 34 * len(bars), bargap=0.25, showlegend=False)
        # A legend of its own, above the chart: Plotly's would have to scroll on a phone.
        drawn["key"] = [{"name": t["name"], "colour": phases.PARTS[t["name"]][0]} for t in traces]
        drawn["layout"]["yaxis"].update(autorange="reversed", automargin=True)
    return drawn


def stall_times(runs: Sequence[Shown], stalls: Sequence[tuple[list[Stall], int]]) -> Any:
    """A marker for each stall: when it began and how long it was."""
    traces = []
    for run, (found, _) in zip(runs, stalls, strict=True):
        if not found:
            continue
        rows = [stall.row for stall in found]
        hover = "%{customdata} waits %{y:.4g} ms from %{x:.1f} s on"
        traces.append(markers(run, [s.at_s for s in found], [s.gap_ms for s in found], hover, rows, size=6))
    notes = [_longest(runs, stalls)]
    limit = next(
        (lookup(run.summary, "stalls.threshold_ms") for run in runs if run.summary.get("stalls")), None
    )
    if limit is not None:
        notes.append(f"A stall is a gap between chunks of more than {limit:.4g} ms.")
    return figure("Stalls", traces, x=("time, s", "linear"), y=("gap, ms", "log"), notes=notes)


def _longest(runs: Sequence[Shown], stalls: Sequence[tuple[list[Stall], int]]) -> str:
    kept = [(run, len(found), whole) for run, (found, whole) in zip(runs, stalls, strict=True)]
    return shown_of(kept, "stalls", "the longest")


def stall_causes(runs: Sequence[Shown], stalls: Sequence[tuple[list[Stall], int]]) -> Any:
    """Seconds of stalls by the class of the longest prompt that was computed in them."""
    causes = sorted({s.cause for found, _ in stalls for s in found})
    traces = []
    for i, cause in enumerate(causes):
        seconds = [sum(s.gap_ms for s in found if s.cause == cause) * 1e-3 for found, _ in stalls]
        colour = "#999999" if cause == "no prompt in it" else COLOURS[i % len(COLOURS)]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(cause),
                "y": [plain(run.name) for run in runs],
                "x": floats(np.array(seconds)),
                "marker": {"color": colour, "pattern": {"shape": ("", "/", "x", ".")[i % 4]}},
                "hovertemplate": f"%{{y}}: %{{x:.4g}} s of stalls<extra>{plain(cause)}</extra>",
            }
        )
    drawn = figure(
        "Whose prefill: stalled seconds by the class of the longest prompt in them",
        traces,
        x=("seconds of stalls", "linear"),
        y=("", "category"),
        notes=[_longest(runs, stalls)],
    )
    if drawn is not None:
        drawn["layout"].update(barmode="stack", height=120 + 40 * len(runs), showlegend=True)
        drawn["layout"]["yaxis"].update(autorange="reversed", automargin=True)
    return drawn


def hang_ups(runs: Sequence[Shown]) -> Any:
    """Requests whose users hung up, by where the engine found them."""
    traces = []
    tints = ("#E69F00", phases.PREFILL, phases.DECODE, phases.RECOMPUTED, phases.ENDED)
    for state, colour in zip(STATES, tints, strict=True):
        counts = [lookup(run.summary, f"cancellations.by_state.{state}") or 0 for run in runs]
        if any(counts):
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": state,
                    "x": counts,
                    "y": [plain(run.name) for run in runs],
                    "text": [str(n) if n else "" for n in counts],
                    "marker": {"color": colour},
                    "hovertemplate": f"%{{y}}: %{{x}} in state {state}<extra></extra>",
                }
            )
    drawn = figure("Hang-ups by state", traces, x=("requests", "linear"), y=("", "category"))
    if drawn is not None:
        drawn["layout"].update(barmode="stack", height=120 + 40 * len(runs), showlegend=True)
        drawn["layout"]["yaxis"].update(autorange="reversed", automargin=True)
    return drawn


def reclaim(runs: Sequence[Shown], column: str, title: str) -> Any:
    """The distribution of the time from a hang-up to its blocks being free, or its slot in use again."""
    traces = []
    for run in runs:
        x = np.sort(finite(run.reclaim[column].to_numpy(np.float64)))
        x = np.maximum(x, 1e-3)  # the two clocks' last microseconds
        if len(x):
            at = thin(len(x))
            hover = "%{y:.1f} % within %{x:.4g} ms"
            traces.append(line(run, x[at], 100.0 * (at + 1) / len(x), hover, shape="hv"))
    return figure(
        title, traces, x=("ms after the hang-up", "log"), y=("% at or below", "linear"), y_range=[0, 101]
    )

"""The parts of the page in order, each with its charts. A chart without data is left out, and a part without
a chart says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.dashboard.figures import engine, latency, load, waits
from harness.dashboard.shown import Shown
from harness.dashboard.stalls import Stall
from harness.metrics.engine import NO_ENGINE, NO_STEPS

PLOT_HEIGHT = 300
MOST_EACH = 12
"""Charts of one run each, on one page."""
Stalls = Sequence[tuple[list[Stall], int]]


@dataclass(frozen=True)
class Part:
    """A tab. without: what is said where no chart has data."""

    id: str
    title: str
    note: str
    figures: list[Any]
    without: str
    wide: bool = False
    more: list[Part] = field(default_factory=list)


def parts(runs: Sequence[Shown], stalls: Stalls, capacity: dict[str, Any] | None) -> list[Part]:
    each = runs[:MOST_EACH]
    steps = any(not run.steps.empty for run in runs)
    return [
        Part(
            "latency",
            "Latency",
            "Share of completed requests (of gaps, in ITL) at or below a value. Latency counts from the "
            "intended arrival.",
            [
                latency.cdf(runs, "ttft_ms", "Time to first token"),
                latency.cdf(runs, "tpot_ms", "Time per output token"),
                latency.itl(runs),
                latency.cdf(runs, "e2e_ms", "End to end"),
                latency.cdf(runs, "normalized_ms", "Normalized latency: E2E over output tokens", "ms/token"),
                _gaps(runs),
                *_rates(runs, capacity),
            ],
            "No request was completed.",
        ),
        Part(
            "time",
            "Over time",
            "One marker per completed request at its intended arrival: a click shows its life."
            + (" The steady window is shaded." if len(runs) == 1 and runs[0].steady else ""),
            [
                latency.over_time(runs, "ttft_ms", "Time to first token"),
                latency.over_time(runs, "tpot_ms", "Time per output token"),
                load.throughput(runs),
                load.concurrency(runs),
                engine.occupancy(runs),
                engine.kv_use(runs),
            ],
            "Nothing was sent.",
        ),
        Part(
            "engine",
            "Engine",
            "What its iterations were spent on, and its KV cache.",
            [
                *(engine.composition(run) for run in each),
                *(engine.kv_blocks(run) for run in each),
                engine.step_times(runs),
                engine.device_busy(runs),
                *(engine.telemetry(runs, *names) for names in engine.TELEMETRY),
            ],
            f"{NO_STEPS}.",
        ),
        Part(
            "waits",
            "Waits",
            "The mean completed request, from its intended arrival to its last token at the client, in the "
            "order of its life. Definitions: docs/metrics.md, attribution.",
            [waits.time_spent(runs)],
            f"{NO_ENGINE}.",
            wide=True,
            more=[
                Part(
                    "stalls",
                    "Stalls and whose prefill caused them",
                    "Each stall by the iterations between its own last one before it and the one that ended "
                    "it, and the prompts of others in them.",
                    [waits.stall_times(runs, stalls), waits.stall_causes(runs, stalls)],
                    _no_stalls(runs),
                )
            ],
        ),
        Part(
            "users",
            "Users",
            "How every scheduled request ended.",
            [load.outcomes(runs)],
            "Nothing was scheduled.",
            wide=True,
            more=[
                Part(
                    "cancellations",
                    "Hang-ups and reclaim time",
                    "From the user's hang-up to its KV blocks being free, and to the next admission of "
                    "someone who was waiting.",
                    [
                        waits.hang_ups(runs),
                        waits.reclaim(runs, "release_ms", "KV blocks free after a hang-up"),
                        waits.reclaim(runs, "reuse_ms", "Slot in use again after a hang-up"),
                    ],
                    "No user hung up." if steps else f"{NO_ENGINE}.",
                ),
                Part(
                    "tenants",
                    "Fairness between tenants",
                    "Under a fair queue the curves of tenants that always ask for more rise alike.",
                    [
                        *(load.tenant_service(run) for run in each),
                        load.tenant_latency(runs, "latency_ms.ttft.from_intended", "TTFT by tenant"),
                        load.tenant_latency(runs, "latency_ms.tpot", "TPOT by tenant"),
                    ],
                    "All requests are of one tenant.",
                ),
            ],
        ),
    ]


def _gaps(runs: Sequence[Shown]) -> Any:
    """Between chunks, where that is another thing than between tokens."""
    if all((run.chunks["tokens"] <= 1).all() for run in runs):
        return None
    return latency.cdf(runs, "gap_ms", "Gap between chunks")


def _rates(runs: Sequence[Shown], capacity: dict[str, Any] | None) -> list[Any]:
    found = [
        latency.against_rate(runs, "latency_ms.ttft.from_intended", "TTFT against the rate"),
        latency.against_rate(runs, "latency_ms.tpot", "TPOT against the rate"),
    ]
    if capacity is not None:
        found += [
            latency.capacity(capacity, ("ttft_p99",), "Capacity: TTFT p99", "ms"),
            latency.capacity(capacity, ("tpot_p99",), "Capacity: TPOT p99", "ms"),
            latency.capacity(capacity, ("attainment",), "Capacity: SLO attainment", "%", 100.0),
            latency.capacity(capacity, ("goodput_rps",), "Capacity: goodput", "requests/s"),
        ]
    return found


def _no_stalls(runs: Sequence[Shown]) -> str:
    reasons = [run.summary.get("null_reasons", {}).get("stalls.count") for run in runs]
    limits = [(run.summary.get("stalls") or {}).get("threshold_ms") for run in runs]
    known = [limit for limit in limits if limit is not None]
    told = [f"No gap between chunks is over {min(known):.4g} ms."] if known else []
    return " ".join([*told, *(f"Not measured: {reason}." for reason in dict.fromkeys(filter(None, reasons)))])


def numbered(
    found: Sequence[Part], names: Sequence[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The parts for the template, and every chart in the order in which it is drawn. names: of the runs on
    the page; of several a chart says whose its lines are, also where only one has any."""
    drawn: list[dict[str, Any]] = []

    def one(part: Part) -> dict[str, Any]:
        shown = []
        for chart in filter(None, part.figures):
            chart["id"] = f"plot{len(drawn)}"
            if len(names) > 1 and any(trace.get("name") in names for trace in chart["data"]):
                chart["layout"].setdefault("showlegend", True)
            height = chart["layout"].setdefault("height", PLOT_HEIGHT)
            shown.append(
                {
                    "id": chart["id"],
                    "title": chart["title"],
                    "note": chart.get("note", ""),
                    "height": height,
                    "key": chart.get("key"),
                }
            )
            drawn.append(chart)
        return {
            "id": part.id,
            "title": part.title,
            "note": part.note if shown else part.without,
            "wide": part.wide,
            "figures": shown,
            "more": [one(inner) for inner in part.more],
        }

    return [one(part) for part in found], drawn

"""How near a preset comes to its trace: as many requests are drawn from it, and compared figure by figure.

Dispersions vary much from one draw to the next, so they are held against a band: the middle 90 % of
`replicas` draws of the arrivals alone. A coarse clock does not tell where in its tick a request came, so the
trace's own dispersion is then the median of as many ways to spread its stamps. Of few requests even the true
preset draws other lengths: a limit is never below what 99 of 100 samples of their number stay under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from workloads.arrivals import draw_arrivals, read_arrivals
from workloads.fitting.arrivals import CHECKED, index_of_dispersion
from workloads.fitting.lengths import ks_distance, rank_correlation
from workloads.fitting.preset import TraceFit
from workloads.presets import draw
from workloads.reuse import reusable_share
from workloads.sessions import lay_out, read_sessions, sessions_for
from workloads.settings import Settings
from workloads.streams import stream
from workloads.trace import Trace

KS_LIMIT, HIT_LIMIT, RANK_LIMIT, VOLUME_LIMIT = 0.02, 0.02, 0.05, 0.02
BAND = (5, 95)


@dataclass(frozen=True, slots=True)
class Figure:
    """One comparison. source, drawn: shown as they are; ok None: nothing to hold it against."""

    name: str
    source: str
    drawn: str
    limit: str
    ok: bool | None


def check(
    trace: Trace, fit: TraceFit, node: dict[str, Any], replicas: int = 200, seed: int = 0
) -> list[Figure]:
    """Every figure of the trace beside that of as many requests drawn from the preset."""
    schedule = draw(node, seed=seed, requests=len(trace))
    columns = schedule.columns
    prompts, answers = columns.prompt_tokens(), columns.stop_after
    cap = int(columns.max_tokens.max())
    chance = 1 / float(np.sqrt(len(trace)))
    ks_limit, rank_limit = max(KS_LIMIT, 1.63 * chance), max(RANK_LIMIT, 2.58 * chance)
    figures = []
    for name, source, drawn in (
        ("KS of prompts", trace.input_tokens, prompts),
        ("KS of answers", np.minimum(trace.output_tokens, cap), answers),
    ):
        distance = ks_distance(source, drawn)
        figures.append(
            Figure(
                name,
                f"mean {source.mean():.1f}",
                f"mean {drawn.mean():.1f}, KS {distance:.4f}",
                f"< {ks_limit:.2g}",
                distance < ks_limit,
            )
        )
    recorded, found = fit.lengths.spearman, rank_correlation(prompts, answers)
    if recorded is not None and found is not None:
        near = abs(recorded - found) < rank_limit
        figures.append(
            Figure("rank correlation", f"{recorded:.3f}", f"{found:.3f}", f"within {rank_limit:.2g}", near)
        )
    figures += _dispersions(trace, node, replicas)
    if fit.prefixes is not None:
        hit = reusable_share(columns.segments)
        near = abs(hit - fit.prefixes.hit_rate) < HIT_LIMIT
        figures.append(
            Figure(
                f"prefix hit rate ({fit.prefixes.source})",
                f"{fit.prefixes.hit_rate:.2%}",
                f"{hit:.2%}",
                "within 2 points",
                near,
            )
        )
    if fit.sessions is not None:
        counts = np.unique(columns.session.codes, return_counts=True)[1]
        turns = len(trace) / fit.sessions.sessions
        figures.append(
            Figure("requests a session", f"mean {turns:.2f}", f"mean {counts.mean():.2f}", "", None)
        )
    if len(fit.tenants) > 1:
        figures.append(_volumes(fit, columns))
    return figures


def _dispersions(trace: Trace, node: dict[str, Any], replicas: int) -> list[Figure]:
    if trace.time_ns is None or node["rate"] is None:
        return []
    # Where in its tick a stamp belongs is one draw of many as well: the median of as many.
    spreads = range(replicas) if trace.tick_s() is not None else range(1)
    fine = [trace.spread(stream(seed, "ticks")).times_s() for seed in spreads]
    source = {w: _median([index_of_dispersion(times, w) for times in fine]) for w in CHECKED}
    found: dict[float, list[float]] = {w: [] for w in CHECKED}
    for seed in range(replicas):
        drawn = _arrival_times(node, seed, len(trace))
        for window in CHECKED:
            value = index_of_dispersion(drawn - drawn[0], window)
            if value is not None:
                found[window].append(value)
    figures = []
    for window, recorded in source.items():
        if recorded is None or not found[window]:
            continue
        low, middle, high = np.percentile(found[window], [BAND[0], 50, BAND[1]])
        figures.append(
            Figure(
                f"dispersion in {window:g} s",
                f"{recorded:.3f}",
                f"{middle:.3f} [{low:.3f}, {high:.3f}]",
                f"in the 90 % band of {replicas} draws",
                bool(low <= recorded <= high),
            )
        )
    return figures


def _median(values: list[float | None]) -> float | None:
    some = [value for value in values if value is not None]
    return float(np.median(some)) if some else None


def _arrival_times(node: dict[str, Any], seed: int, n: int) -> np.ndarray:
    """When n requests come, as if answers took no time."""
    workload = Settings(node, "workload")
    arrivals = read_arrivals(workload.node("arrivals"))
    sessions = read_sessions(workload)
    if sessions is None:
        return draw_arrivals(seed, arrivals, rate=node["rate"], requests=n, duration_s=None)
    count = sessions_for(seed, sessions, n, n)
    starts = draw_arrivals(seed, arrivals, rate=node["rate"], requests=count, duration_s=None)
    return np.sort(lay_out(seed, sessions, starts).arrival_s)[:n]


def _volumes(fit: TraceFit, columns: Any) -> Figure:
    total = sum(fit.tenants.values())
    drawn = np.bincount(columns.tenant.codes, minlength=len(columns.tenant.names)) / len(columns)
    by_name = dict(zip(columns.tenant.names, drawn, strict=True))
    off = {name: by_name.get(name, 0.0) - n / total for name, n in fit.tenants.items()}
    worst = max(off, key=lambda name: abs(off[name]))
    limit = max(VOLUME_LIMIT, 1.29 / float(np.sqrt(len(columns))))
    return Figure(
        f"volume shares of {len(off)} tenants",
        f"{fit.tenants[worst] / total:.2%} ({worst})",
        f"{by_name.get(worst, 0.0):.2%}, the worst of them",
        f"within {100 * limit:.2g} points",
        abs(off[worst]) < limit,
    )

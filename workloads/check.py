"""`python -m workloads check`: whether a preset draws what its file says, and what its source showed.

At full size (length_scale=1, no caps):

lengths       Kolmogorov-Smirnov distance of answers, own parts and documents to the distribution of the
              file: below 0.02, or below what 999 in 1,000 samples of their number stay under
shares        of classes, and of the tenant in each that is farthest off, in all requests: within 2 points
correlation   Spearman's, of prompts and answers where the file asks for one: within 0.05, or what
              chance allows
dispersion    variance / mean of the arrivals in 1, 10 and 60 s: what the source, or else the theory of the
              process, says lies in the middle 90 % of as many replicas of an hour
reuse         share of prompt tokens that a prefix cache without limits finds: within 2 points of the source
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import integrate, stats

from workloads.arrivals import Arrivals, draw_arrivals, read_arrivals
from workloads.fitting.arrivals import index_of_dispersion
from workloads.lengths import distribution_at, read_answer, scaled
from workloads.presets import draw
from workloads.reuse import reusable_share
from workloads.schedule import Schedule
from workloads.settings import Settings
from workloads.tenants import read_terms

WINDOWS_S = (1.0, 10.0, 60.0)
_HOUR_S = 3500.0
_GRID = (np.arange(200_000) + 0.5) / 200_000


@dataclass(frozen=True, slots=True)
class Source:
    """What the traffic behind a preset showed. dispersion: at `rate`, in each of WINDOWS_S."""

    name: str
    reuse: float | None = None
    rate: float | None = None
    dispersion: tuple[float, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()  # of the preset, as measured where it is cut by default


SOURCES = {
    "chat": Source("Azure 2023 conversations", rate=5.53, dispersion=(1.39, 3.86, 16.13)),
    "rag": Source("RAGPulse", reuse=0.315),
    "code": Source("keep x (1 - 1 / edits)", reuse=0.76),
    "agent": Source(
        "kv-cache-tester",
        reuse=0.963,
        settings=(
            ("input.cap", 200_000),
            ("sessions.turns.max", 200),
            ("sessions.steps.max", 200),
            ("classes.agent.input.first.length.max", 244_000),
            ("classes.agent.input.append.length.max", 700_000),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Check:
    figure: str
    found: float
    wanted: float
    ok: bool
    limit: str


def check(
    workload: Mapping[str, Any], *, seed: int = 0, requests: int = 20_000, replicas: int = 100
) -> list[Check]:
    """Every check that a preset allows. Raises WorkloadError for a preset that cannot be drawn."""
    node = full_size(workload)
    schedule = draw(node, seed=seed, requests=requests)
    settings = Settings(node, "workload")
    checks = [*_lengths(schedule, settings), *_shares(schedule, settings), *_correlations(schedule, settings)]
    checks += _dispersion(settings, seed, replicas)
    source = SOURCES.get(schedule.name)
    if source is not None and source.reuse is not None:
        found = reusable_share(schedule.columns.segments)
        near = abs(found - source.reuse) <= 0.02
        checks.append(Check(f"reuse, {source.name}", found, source.reuse, near, "within 0.02"))
    return checks


def full_size(workload: Mapping[str, Any]) -> dict[str, Any]:
    """The preset as its sources measured it."""
    node = copy.deepcopy(dict(workload))
    node |= {"length_scale": 1, "input": {"cap": None}, "output": {"cap": None}}
    node |= {"max_tokens": "factor", "max_tokens_factor": 1.0}  # no answer is cut by what clients declare
    source = SOURCES.get(node["name"])
    for path, value in source.settings if source is not None else ():
        *way, last = path.split(".")
        at = node
        for key in way:
            at = at[key]
        at[last] = value
    return node


def _lengths(schedule: Schedule, node: Settings) -> Iterator[Check]:
    columns = schedule.columns
    for number, name in enumerate(columns.request_class.names):
        rows = np.flatnonzero(columns.request_class.codes == number)
        of_class = node.node("classes").node(name)
        answer = read_answer(of_class.node("output"))
        if len(rows) and not answer.edges:
            wanted = scaled(answer.citations.cited(answer.tables[0](_GRID)), 1)
            yield _distance(f"{name}: answers", columns.stop_after[rows], wanted)
        if "sessions" in node and node.get("sessions") is not None:
            continue  # what is a session's own is one piece that grows
        prompts = columns.segments.take(rows)
        parts = of_class.node("input")
        for part in parts:
            kind = parts.node(part).text("kind")
            if kind not in ("unique", "passages"):
                continue
            mine = prompts.code == prompts.names.index(f"{schedule.name}/{part}")
            tokens = prompts.tokens[mine]
            if kind == "passages":
                tokens = tokens[np.unique(prompts.number[mine], return_index=True)[1]]
            if len(tokens):
                wanted = scaled(distribution_at(parts.node(part), "length")(_GRID), 1)
                yield _distance(f"{name}: {part}", tokens, wanted)


def _distance(figure: str, found: np.ndarray, wanted: np.ndarray) -> Check:
    points = np.unique(np.concatenate([found, wanted]))
    below = [np.searchsorted(np.sort(a), points, side="right") / len(a) for a in (found, wanted)]
    distance = float(np.abs(below[0] - below[1]).max())
    most = max(0.02, 1.95 / float(np.sqrt(len(found))))
    return Check(f"KS of {figure}", distance, 0.0, distance <= most, f"at most {most:.3f}")


def _shares(schedule: Schedule, node: Settings) -> Iterator[Check]:
    columns = schedule.columns
    classes = node.node("classes")
    weights = np.array([classes.node(name).number("weight", least=0) for name in classes])
    users = columns.turn == 0  # who draws a class and a tenant
    codes, tenants = columns.request_class.codes[users], columns.tenant.take(users)
    for number, (name, terms) in enumerate(zip(classes, read_terms(classes), strict=True)):
        of_all = float(weights[number] / weights.sum())
        mine = codes == number
        if len(weights) > 1:
            yield _share(f"share of {name}", float(mine.mean()), of_all, len(codes))
        shares = [
            _share(
                f"share of {tenant}",
                float(np.mean(mine & (tenants.codes == tenants.names.index(tenant)))),
                of_all * float(share),
                len(codes),
            )
            for tenant, share in zip(terms.tenants, terms.shares, strict=True)
            if tenant in tenants.names
        ]
        yield from sorted(shares, key=lambda one: -abs(one.found - one.wanted))[:1]


def _share(figure: str, found: float, wanted: float, n: int) -> Check:
    most = max(0.02, 3.3 * float(np.sqrt(wanted * (1 - wanted) / n)))
    return Check(figure, found, wanted, abs(found - wanted) <= most, f"within {most:.3f}")


def _correlations(schedule: Schedule, node: Settings) -> Iterator[Check]:
    columns = schedule.columns
    prompts = columns.prompt_tokens()
    for number, name in enumerate(columns.request_class.names):
        answer = read_answer(node.node("classes").node(name).node("output"))
        rows = columns.request_class.codes == number
        if answer.spearman and rows.sum() > 100 and (columns.turn == 0).all():
            found = float(stats.spearmanr(prompts[rows], columns.stop_after[rows]).statistic)
            most = max(0.05, 3.3 * (1 - answer.spearman**2) / float(np.sqrt(rows.sum())))
            near = abs(found - answer.spearman) <= most
            figure = f"rank correlation of {name}"
            yield Check(figure, found, answer.spearman, near, f"within {most:.3f}")


def _dispersion(node: Settings, seed: int, replicas: int) -> Iterator[Check]:
    arrivals = read_arrivals(node.node("arrivals"))
    rate = node.get("rate")
    shaped = (
        arrivals.swings.day or arrivals.swings.on_s or arrivals.burst.factor != 1 or arrivals.cluster.size > 1
    )
    superposed = "tenants" in node.node("arrivals") and node.node("arrivals").get("tenants") is not None
    if arrivals.kind == "at_once" or not isinstance(rate, int | float) or shaped or superposed:
        return  # no theory of one line
    source = SOURCES.get(node.text("name"), Source("theory"))
    rate = float(source.rate or rate)
    found = np.array(
        [
            [index_of_dispersion(times, w) or np.nan for w in WINDOWS_S]
            for k in range(replicas)
            for times in [draw_arrivals(seed + k, arrivals, rate=rate, requests=None, duration_s=_HOUR_S)]
        ]
    )
    for k, window in enumerate(WINDOWS_S):
        wanted = source.dispersion[k] if source.dispersion else theory(arrivals, rate, window)
        low, middle, high = np.nanpercentile(found[:, k], (5, 50, 95))
        name = source.name if source.dispersion else "theory"
        figure = f"dispersion in {window:g} s at {rate:g}/s, {name}"
        yield Check(figure, float(middle), wanted, low <= wanted <= high, f"{low:.2f} to {high:.2f}")


def theory(arrivals: Arrivals, rate: float, window_s: float) -> float:
    """The index of dispersion of a renewal process under exp(AR(1)): CV^2 of its gaps, which holds from some
    gaps on, and the variance of the mean factor over the window times the requests in it."""
    swings = arrivals.swings
    own = 0.0 if arrivals.kind == "constant" else 1.0 if arrivals.kind == "poisson" else arrivals.cv**2

    def covariance(t: float) -> float:
        return (window_s - t) * float(np.expm1(swings.sigma**2 * np.exp(-t / swings.tau_s)))

    common = 2 / window_s**2 * integrate.quad(covariance, 0, window_s)[0] if swings.sigma else 0.0
    return own + rate * window_s * common

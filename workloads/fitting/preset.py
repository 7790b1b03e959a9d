"""A trace's fits put together: the node of a preset, and its YAML file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workloads.columns import Texts
from workloads.errors import WorkloadError
from workloads.fitting.arrivals import ArrivalFit, fit_arrivals
from workloads.fitting.lengths import LengthFit, fit_lengths
from workloads.fitting.prefixes import PrefixFit, Reuse, fit_prefixes, measure_reuse
from workloads.fitting.sessions import SessionFit, fit_sessions
from workloads.streams import stream
from workloads.trace import Trace

DAY_S = 86_400.0
_FEWEST_ROWS = 20
_MOST_TENANTS = 40


@dataclass(frozen=True, slots=True)
class TraceFit:
    """What a trace's traffic is like, part by part."""

    rows: int
    span_s: float
    lengths: LengthFit
    arrivals: ArrivalFit
    reuse: Reuse | None
    prefixes: PrefixFit | None
    sessions: SessionFit | None
    tenants: dict[str, int]  # requests of each; empty: the trace does not tell
    notes: tuple[str, ...]


def fit_trace(trace: Trace) -> TraceFit:
    """Raises WorkloadError for a trace that is too short to be like anything."""
    if len(trace) < _FEWEST_ROWS:
        raise WorkloadError(
            f"{trace.path}: has {len(trace)} rows, a fit needs {_FEWEST_ROWS} or more; replay it instead "
            "(+workload=trace workload.path=...)"
        )
    tick = trace.tick_s()
    trace = trace.spread(stream(0, "ticks"))
    times = trace.times_s()
    sessions = fit_sessions(trace)
    starts = times if sessions is None or sessions.starts_s is None else sessions.starts_s
    if trace.time_ns is None:
        arrivals = ArrivalFit(
            "lengths_only", None, {}, notes=("the trace has no times: arrivals are a choice",)
        )
    else:
        arrivals = _with_day(starts)
    reuse = measure_reuse(trace)
    return TraceFit(
        rows=len(trace),
        span_s=float(times[-1]),
        lengths=fit_lengths(trace),
        arrivals=arrivals,
        reuse=reuse,
        prefixes=None if reuse is None else fit_prefixes(trace, reuse),
        sessions=sessions,
        tenants=_tenants(trace.user, sessions),
        notes=trace.notes if not tick else (*trace.notes, f"stamps on a grid of {tick:g} s, spread over it"),
    )


def preset(fit: TraceFit, name: str) -> dict[str, Any]:
    """The `workload` node that draws such traffic, unscaled and without caps."""
    arrivals = dict(fit.arrivals.settings)
    rate = fit.arrivals.rate
    if not arrivals:
        arrivals = {"kind": "poisson", "cv": 1, "burst": {"factor": 1, "on_s": 5, "off_s": 15}}
        rate = 1.0
    prompt: dict[str, Any] = {"kind": "unique", "length": _table(fit.lengths.input)}
    if fit.prefixes is not None:
        prompt = {
            "kind": "continued",
            "length": _table(fit.lengths.input),
            "reused": {"edges": fit.prefixes.edges, "points": fit.prefixes.shares},
            "lag": _table(fit.prefixes.lag),
        }
        if fit.sessions is not None:
            prompt |= {"session_like": fit.sessions.alike, "growing": fit.sessions.growing}
    output = _table(fit.lengths.output)
    if fit.lengths.edges:
        output = {"dist": "joint", "edges": fit.lengths.edges, "points": fit.lengths.joint}
    sessions = None
    if fit.sessions is not None:
        sessions = {
            "turns": fit.sessions.turns,
            "think_s": _table(fit.sessions.think_s),
            "history": False,
        }
    traffic: dict[str, Any] = {"weight": 1, "input": {"prompt": prompt}, "output": output}
    if fit.tenants:
        traffic["tenants"] = fit.tenants
    return {
        "name": name,
        "kind": "preset",
        "rate": None if arrivals["kind"] == "at_once" or rate is None else float(f"{rate:.6g}"),
        "requests": fit.rows,
        "length_scale": 1,
        "max_tokens": "class_cap",
        "max_tokens_factor": 2.0,
        "stream_fraction": 1,
        "arrivals": arrivals,
        "sessions": sessions,
        "input": {"cap": None},
        "output": {"cap": None},
        "cancel": {
            "before_first_token": {"share": 0, "p50_s": 20, "sigma": 0.8},
            "after_tokens": {"share": 0, "fraction": [0.05, 0.95]},
            "after_s": {"share": 0, "p50_s": 60, "sigma": 0},
        },
        "classes": {"traffic": traffic},
    }


def to_yaml(node: dict[str, Any], comments: list[str]) -> str:
    """The file of a preset, tables on one line each."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def short(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
        return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)

    def literal(dumper: yaml.SafeDumper, value: str) -> yaml.Node:  # ${..} would refer to a setting
        return dumper.represent_scalar("tag:yaml.org,2002:str", value.replace("${", "$ {"))

    Dumper.add_representer(list, short)
    Dumper.add_representer(str, literal)
    text = yaml.dump(node, Dumper=Dumper, sort_keys=False, width=10**9, allow_unicode=True)
    return "".join(f"# {line}\n" for line in comments) + text


def _with_day(starts_s: np.ndarray) -> ArrivalFit:
    """With a curve of the day, where the trace has two days or more: what is left is fitted on a clock that
    runs as fast as the day is busy."""
    span = float(starts_s[-1])
    if span < 2 * DAY_S:
        return fit_arrivals(starts_s)
    whole = int(span // DAY_S) * DAY_S
    hours = np.histogram(starts_s[starts_s < whole] % DAY_S, bins=24, range=(0, DAY_S))[0].astype(float)
    curve = np.maximum(hours / hours.mean(), 0.01)
    edges = np.concatenate([[0.0], np.cumsum(curve)]) / curve.sum() * DAY_S
    flat = (starts_s // DAY_S) * DAY_S + np.interp(starts_s % DAY_S, np.arange(25) * 3600.0, edges)
    found = fit_arrivals(flat - flat[0])
    settings = {**found.settings, "day": {"curve": [round(float(c), 3) for c in curve], "from_hour": 0}}
    if "on_off" in settings:
        settings = {k: v for k, v in settings.items() if k != "day"}
    return replace(found, settings=settings, rate=(len(starts_s) - 1) / span)


def _tenants(user: Texts | None, sessions: SessionFit | None) -> dict[str, int]:
    """Requests of each user. Empty where nearly every session has one of its own: they are no tenants."""
    if user is None or (sessions is not None and len(np.unique(user.codes)) > sessions.sessions / 2):
        return {}
    codes, counts = np.unique(user.codes[user.codes >= 0], return_counts=True)
    order = np.argsort(-counts, kind="stable")
    named = {user.names[int(codes[k])]: int(counts[k]) for k in order[:_MOST_TENANTS]}
    rest = int(counts[order[_MOST_TENANTS:]].sum())
    return {**named, "others": named.get("others", 0) + rest} if rest else named


def _table(rows: list[list[float]]) -> dict[str, Any]:
    return {"dist": "quantiles", "points": rows}

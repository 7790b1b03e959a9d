"""`kind: trace`: replay a recorded trace, with its own timestamps, stretched to a rate, or in closed loops
inside its sessions.

    replay: times      every request at its recorded time
    replay: sessions   the first of a session at its time, each later one think_s after the end of the
                       one before

Traces record how long answers were, not what clients had declared: `workload.max_tokens` says what they
declare here. What prompts have in common comes from `workloads.recorded`.
"""

from __future__ import annotations

import math

import numpy as np

from workloads.assembly import COMMON_KEYS, Common, Drafts, Prompts, assemble, class_cap, read_common
from workloads.columns import Texts
from workloads.errors import TraceError
from workloads.gaps import Renewal, unit_gaps
from workloads.lengths import scaled
from workloads.rates import RateProfile
from workloads.readers import FORMATS, read_trace
from workloads.recorded import segments
from workloads.schedule import Schedule, planned_rate
from workloads.settings import Settings
from workloads.streams import stream
from workloads.tenants import NOBODY
from workloads.trace import Trace

TRACE_KEYS = ("path", "format", "speed", "limit", "on_bad_row", "spread_ticks", "replay")
REPLAYS = ("auto", "times", "sessions")


def draw_trace(
    node: Settings, *, seed: int, requests: int | None = None, duration_s: float | None = None
) -> Schedule:
    """The schedule of a trace; see `workloads.presets.draw`. Times count from the first row."""
    node.only(*COMMON_KEYS, *TRACE_KEYS)
    common = read_common(node)
    if node.get("path") is None:
        raise node.error("path", "workload=trace needs a file, such as an Azure CSV or a Mooncake JSONL")
    replay = node.choice("replay", REPLAYS) if "replay" in node else "auto"
    spread = node.flag("spread_ticks") if "spread_ticks" in node else True
    try:
        trace = read_trace(
            node.text("path"),
            format=node.choice("format", FORMATS),
            limit=node.optional_whole("limit"),
            on_bad_row=node.choice("on_bad_row", ("error", "skip")),
            seed=seed,
        )
    except TraceError as exc:
        raise exc.advised("workload.on_bad_row=skip") from exc
    if replay == "auto":
        only_sessions = trace.closed or (trace.time_ns is None and trace.session is not None)
        replay = "sessions" if only_sessions else "times"
    if replay == "sessions" and trace.session is None:
        raise node.error("replay", f"the {trace.format} trace has no sessions; needs times")
    if replay == "times" and trace.time_ns is None and trace.session is not None:
        raise node.error("replay", f"the {trace.format} trace has no times across sessions; needs sessions")
    notes = list(trace.notes)
    times, think_s, turn = _times(node, common, trace, replay, spread, seed, notes)
    order = np.argsort(times, kind="stable")
    if duration_s is not None:
        order = order[times[order] <= duration_s]
    count = requests if requests is not None else common.requests
    order = order[: len(order) if count is None else count]
    times, trace = times[order], trace.take(order)

    n = len(times)
    pieces = segments(trace, common.name, common.length_scale)
    outputs = scaled(trace.output_tokens, common.length_scale)
    member, class_names = _classes(trace, common.name)
    drafts = Drafts(
        arrival_s=times,
        member=member,
        prompts=Prompts(pieces, np.zeros(len(pieces.code), dtype=bool)),
        answer_tokens=outputs,
        tenant=_named(trace.user, NOBODY, n),
        priority=np.zeros(n, dtype=np.int64),
        deadline_ms=np.full(n, np.nan),
        session=Texts(np.full(n, -1), ()) if trace.session is None else trace.session,
        turn=turn[order],
        think_s=think_s[order],
    )
    return assemble(
        drafts,
        common,
        seed=seed,
        planned_rate=planned_rate(times) if replay == "times" else None,
        class_names=class_names,
        class_caps=[class_cap(_p99(outputs[member == k])) for k in range(len(class_names))],
        habits=[common.habits] * len(class_names),
        cut_from_end=True,
        skipped_rows=trace.skipped,
        notes=notes,
    )


def _times(
    node: Settings, common: Common, trace: Trace, replay: str, spread: bool, seed: int, notes: list[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(arrival, think time or NaN, number in its session) of each row; arrivals in s, of a later turn of a
    session at the earliest."""
    speed = node.number("speed", above=0)
    if isinstance(common.rate, RateProfile):
        raise node.error("rate", "a trace brings its own times; give a number, or null and workload.speed")
    n = len(trace)
    codes = np.full(n, -1) if trace.session is None else trace.session.codes
    by_session = np.argsort(codes, kind="stable")
    begins = np.ones(n, dtype=bool)  # in order of sessions
    begins[1:] = (np.diff(codes[by_session]) != 0) | (codes[by_session][1:] < 0)
    first = np.flatnonzero(begins)[np.cumsum(begins) - 1]
    turn = np.empty(n, dtype=np.int64)
    turn[by_session] = np.arange(n) - first

    # The moments to stretch: of every row, or of every session's first.
    heads = np.sort(by_session[begins]) if replay == "sessions" else np.arange(n)
    if trace.time_ns is None:
        moments = np.zeros(len(heads))
        if common.rate is not None:
            gaps = unit_gaps(stream(seed, "arrivals"), Renewal("poisson"), len(heads)) / common.rate
            moments = np.cumsum(gaps)
        elif replay == "sessions":
            raise node.error("rate", f"the {trace.format} trace has no times; needs sessions a second")
        else:
            notes.append("the trace has no times: all arrive at once (workload.rate: Poisson arrivals)")
    else:
        if spread and (tick := trace.tick_s()) is not None:
            trace = trace.spread(stream(seed, "ticks"))
            notes.append(f"stamps are {tick:g} s apart: spread evenly within (workload.spread_ticks)")
        moments = trace.times_s()[heads]
        if common.rate is not None:
            if speed != 1:
                raise node.error("rate", f"workload.speed={speed:g} is set as well; set one of them")
            recorded = planned_rate(moments)
            if recorded is None:
                raise node.error("rate", "the rows of this trace have one time, which cannot be stretched")
            speed = common.rate / recorded
        moments = moments / speed
    if replay == "times":
        return moments, np.full(n, np.nan), turn

    assert trace.think_s is not None
    starts = np.zeros(n)
    starts[heads] = moments
    think_s = np.where(turn > 0, np.nan_to_num(trace.think_s), 0.0)[by_session]
    waited = np.cumsum(think_s)
    times = np.empty(n)
    times[by_session] = starts[by_session][first] + (waited - waited[first])
    return times, np.where(turn > 0, np.nan_to_num(trace.think_s), np.nan), turn


def _classes(trace: Trace, name: str) -> tuple[np.ndarray, list[str]]:
    """(class of each row, names of the classes): those of the trace, or one."""
    kinds = _named(trace.request_class, name, len(trace))
    used, member = np.unique(kinds.codes, return_inverse=True)
    return member.astype(np.int64), [kinds.names[code] for code in used.tolist()]


def _named(texts: Texts | None, name: str, n: int) -> Texts:
    """The texts, `name` where there is none."""
    if texts is None:
        return Texts.all(name, n)
    codes = np.where(texts.codes < 0, len(texts.names), texts.codes)
    return Texts(codes, (*texts.names, name))


def _p99(outputs: np.ndarray) -> int:
    return math.ceil(np.percentile(outputs, 99)) if len(outputs) else 1

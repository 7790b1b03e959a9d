"""Drawing a schedule from a configuration: the presets of `harness/conf/workload/`, and the way to traces.

A preset is a mix of classes. A class has a weight, a prompt made of parts (`workloads.inputs`) and a
distribution of answers, optionally rank-correlated with the prompt's length, and terms (`workloads.terms`):
whose it is, how urgent, until when.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from workloads.arrivals import draw_arrivals, read_arrivals
from workloads.assembly import COMMON_KEYS, Common, Draft, Piece, assemble, class_cap, read_common
from workloads.errors import WorkloadError
from workloads.inputs import draw_prompts, scale_pieces
from workloads.lengths import correlate, read_distribution, scaled
from workloads.rates import RateProfile, shown_rate
from workloads.schedule import Schedule, planned_rate
from workloads.sessions import (
    Sessions,
    grow,
    in_order,
    keeps_part,
    lay_out,
    read_sessions,
    sessions_for,
)
from workloads.settings import Settings
from workloads.streams import stream
from workloads.terms import KEYS as TERM_KEYS
from workloads.terms import draw_terms


def draw(
    workload: Mapping[str, Any],
    *,
    seed: int,
    requests: int | None = None,
    duration_s: float | None = None,
) -> Schedule:
    """Draw the schedule of a `workload` configuration node.

    `requests` (load.requests) replaces the workload's own count; each turn of a session is one. With
    `duration_s` (load.duration_s) no request arrives later than that; then the workload's own count does not
    bind. With neither, a profile of rates ends by itself, anything else at the workload's count. Same
    arguments, same schedule, in every process. Raises WorkloadError.
    """
    if requests is not None and (not isinstance(requests, int) or isinstance(requests, bool) or requests < 1):
        raise WorkloadError(f"load.requests={requests!r}: needs a whole number of 1 or more")
    if duration_s is not None and not (math.isfinite(duration_s) and duration_s > 0):
        raise WorkloadError(f"load.duration_s={duration_s!r}: needs a number above 0")
    node = Settings(workload, "workload")
    if node.choice("kind", ("preset", "trace")) == "trace":
        from workloads.traces import draw_trace

        return draw_trace(node, seed=seed, requests=requests, duration_s=duration_s)
    return _draw_preset(node, seed=seed, requests=requests, duration_s=duration_s)


def _draw_preset(node: Settings, *, seed: int, requests: int | None, duration_s: float | None) -> Schedule:
    node.only(*COMMON_KEYS, "arrivals", "classes", "sessions")
    common = read_common(node)
    arrivals = read_arrivals(node.node("arrivals"))
    at_once = arrivals.kind == "at_once"
    if at_once and common.rate is not None:
        raise node.error(
            "rate", "workload.arrivals.kind=at_once has no rate; set it to null or choose another kind"
        )
    profile = common.rate if isinstance(common.rate, RateProfile) else None
    if requests is None and duration_s is None and profile is not None:
        duration_s = profile.span_s
    if requests is None and (duration_s is None or at_once):
        requests = common.requests
    times = draw_arrivals(
        stream(seed, "arrivals"), arrivals, rate=common.rate, requests=requests, duration_s=duration_s
    )
    if len(times) == 0:
        raise WorkloadError(
            f"load.duration_s={duration_s:g}: no request arrives that early at "
            f"workload.rate={shown_rate(common.rate)}"
        )

    classes = node.node("classes")
    if not list(classes):
        raise node.error("classes", "needs at least one class")
    notes = [] if profile is None else _profile_notes(profile, times)
    sessions = read_sessions(node)
    if sessions is None:
        member = _choose_classes(seed, classes, len(times))
        names, pieces, answers, caps = _draw_contents(seed, common, classes, member)
        terms = draw_terms(seed, classes, member, np.arange(len(times)))
        drafts = [
            Draft(float(times[i]), names[i], pieces[i], int(answers[i]), terms=terms[i])
            for i in range(len(times))
        ]
    else:
        drafts, caps, more = _draw_sessions(seed, common, classes, sessions, times, requests, duration_s)
        notes += more
    return assemble(
        drafts,
        common,
        seed=seed,
        planned_rate=planned_rate(times) if sessions is None else None,
        class_caps=caps,
        cut_from_end=False,
        notes=notes,
    )


def _draw_sessions(
    seed: int,
    common: Common,
    classes: Settings,
    sessions: Sessions,
    starts_s: np.ndarray,
    requests: int | None,
    duration_s: float | None,
) -> tuple[list[Draft], dict[str, int], list[str]]:
    """(drafts in order of their earliest arrival, class caps, notes). With `requests` exactly so many, where
    the last session may be cut."""
    count = len(starts_s) if requests is None else sessions_for(seed, sessions, starts_s, requests)
    while True:
        rows = lay_out(seed, sessions, starts_s[:count])
        member = _choose_classes(seed, classes, count)[rows.session]
        turn = rows.turn if sessions.history else None
        names, pieces, answers, caps = _draw_contents(seed, common, classes, member, turn)
        terms = draw_terms(seed, classes, member, rows.session)
        drafts = [
            Draft(
                float(rows.arrival_s[i]),
                names[i],
                pieces[i],
                int(answers[i]),
                session=f"s{rows.session[i]:06d}",
                turn=int(rows.turn[i]),
                think_s=float(rows.think_s[i]) if rows.turn[i] else None,
                terms=terms[i],
            )
            for i in range(len(rows))
        ]
        full: set[str | None] = set()
        grown = grow(drafts, common, caps, full) if sessions.history else iter(drafts)
        kept = list(islice((d for d in grown if duration_s is None or d.arrival_s <= duration_s), requests))
        if requests is None or len(kept) >= requests or count == len(starts_s):
            break
        count = min(len(starts_s), count + count // 2 + 1)  # some sessions were full before their last turn
    notes = []
    if full:
        notes.append(
            f"{len(full)} of {len({draft.session for draft in kept})} sessions end early: their next prompt "
            f"would pass workload.input.cap={common.input_cap} tokens"
        )
    return in_order(kept), caps, notes


def _draw_contents(
    seed: int, common: Common, classes: Settings, member: np.ndarray, turn: np.ndarray | None = None
) -> tuple[list[str], list[tuple[Piece, ...]], np.ndarray, dict[str, int]]:
    """(class, own pieces of the prompt, answer tokens) of each request, and what clients of a class declare.
    member: the number of its class, int. turn: of a session whose turns carry their history, else None."""
    n, all_names = len(member), list(classes)
    pieces: list[tuple[Piece, ...]] = [()] * n
    answers = np.zeros(n, dtype=np.int64)
    caps: dict[str, int] = {}
    for number, name in enumerate(all_names):
        indices = np.flatnonzero(member == number)
        class_node = classes.node(name)
        class_node.only("weight", "input", "output", *TERM_KEYS)
        has_part = None if turn is None else partial(keeps_part, turn=turn[indices])
        prompts = draw_prompts(seed, common.name, name, class_node.node("input"), n, indices, has_part)
        for index, prompt in zip(indices, prompts, strict=True):
            if not prompt:
                raise class_node.error("input", _why_empty(turn is not None and turn[index] > 0))
            pieces[index] = tuple(Piece(*piece) for piece in scale_pieces(prompt, common.length_scale))
        output = class_node.node("output")
        answer = read_distribution(output, "correlation")
        spearman = output.number("correlation") if "correlation" in output else 0.0
        if not -1 <= spearman <= 1:
            raise output.error("correlation", "needs a rank correlation, -1 to 1")
        u = stream(seed, "output", name).random(n)[indices]
        prompt_tokens = np.array([sum(p.tokens for p in prompt) for prompt in prompts])
        answers[indices] = scaled(answer(correlate(u, prompt_tokens, spearman)), common.length_scale)
        caps[name] = class_cap(float(scaled(answer(np.array([0.99])), common.length_scale)[0]))
    return [all_names[number] for number in member], pieces, answers, caps


def _why_empty(later_turn: bool) -> str:
    if later_turn:
        return (
            "later turns of a session add nothing; needs a part of kind unique or passages that always has "
            "tokens, or workload.sessions.history=false"
        )
    return "makes empty prompts; needs a part that always has tokens"


def _profile_notes(profile: RateProfile, times: np.ndarray) -> list[str]:
    """Where load.requests or load.duration_s and the profile do not end together."""
    after = int((times > profile.span_s).sum())
    if after:
        last = profile.stretches[-1].end
        return [
            f"{after} of {len(times)} requests come after the {profile.span_s:g} s of workload.rate, "
            f"at its last rate of {last:g}/s"
        ]
    if profile.expected(profile.span_s) - profile.expected(float(times[-1])) > 5:
        return [f"the requests end at {times[-1]:.1f} s, before the {profile.span_s:g} s of workload.rate"]
    return []


def _choose_classes(seed: int, classes: Settings, n: int) -> np.ndarray:
    names = list(classes)
    weights = np.array([classes.node(name).number("weight", least=0) for name in names])
    if weights.sum() <= 0:
        raise WorkloadError(f"{classes.name}: needs a class with a weight above 0")
    edges = np.cumsum(weights) / weights.sum()
    chosen = np.searchsorted(edges, stream(seed, "classes").random(n), side="right")
    return np.minimum(chosen, len(names) - 1)

"""Drawing a schedule from a configuration: the presets of `harness/conf/workload/`, and the way to traces.

A preset is a mix of classes. A class has a weight, a prompt made of parts (`workloads.inputs`) and a
distribution of answers, optionally rank-correlated with the prompt's length, and terms (`workloads.terms`):
whose it is, how urgent, until when.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from workloads.arrivals import draw_arrivals, read_arrivals
from workloads.assembly import (
    CLASS_KEYS,
    COMMON_KEYS,
    Common,
    Drafts,
    Habits,
    Prompts,
    assemble,
    class_cap,
    declared_tokens,
    fit,
    read_common,
    read_habits,
)
from workloads.columns import Segments, Texts
from workloads.errors import WorkloadError
from workloads.inputs import Pieces, cache_friendly, draw_parts
from workloads.lengths import read_answer, scaled
from workloads.rates import RateProfile, shown_rate
from workloads.schedule import Schedule, planned_rate
from workloads.sessions import OWN, Sessions, grow, keeps_part, lay_out, read_sessions, sessions_for
from workloads.settings import Settings
from workloads.streams import stream
from workloads.tenants import KEYS as TERM_KEYS
from workloads.tenants import ClassTerms, SuperposedProcess, choose_tenants, read_superposition, read_terms


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


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of a workload, in their order."""

    node: Settings
    names: tuple[str, ...]
    weights: np.ndarray  # shares of the requests, in all 1
    terms: list[ClassTerms]
    habits: list[Habits]


@dataclass(frozen=True, slots=True)
class Contents:
    """What requests ask: their own prompts, and the tokens of their answers, both after length_scale."""

    prompts: Prompts
    own: np.ndarray  # bool, one per segment: of a kind that is one session's alone
    answers: np.ndarray  # int64
    caps: list[int]  # what clients of each class declare


def _draw_preset(node: Settings, *, seed: int, requests: int | None, duration_s: float | None) -> Schedule:
    node.only(*COMMON_KEYS, "arrivals", "classes", "sessions", "cache_friendly")
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
    classes = _read_classes(node, common)
    sessions = read_sessions(node)
    friendly = "cache_friendly" in node and node.flag("cache_friendly")
    starts = requests
    if requests is not None and sessions is not None:
        starts = sessions_for(seed, sessions, requests, requests)
    superposition = read_superposition(seed, node.node("arrivals"), classes.terms, classes.weights)
    while True:
        process = None if superposition is None else SuperposedProcess(seed, superposition)
        times = draw_arrivals(
            seed, arrivals, rate=common.rate, requests=starts, duration_s=duration_s, process=process
        )
        if len(times) == 0:
            raise WorkloadError(
                f"load.duration_s={duration_s:g}: no request arrives that early at "
                f"workload.rate={shown_rate(common.rate)}"
            )
        if process is None:
            user_class = _choose_classes(seed, classes, len(times))
            tenant = choose_tenants(seed, classes.terms, user_class, np.arange(len(times)))
        else:
            user_class, tenant = process.senders(len(times))
        user = Users(times, user_class, tenant)
        if sessions is None:
            drafts, caps, notes = _draw_single(seed, common, classes, user, friendly)
        else:
            drafts, caps, notes = _draw_sessions(
                seed, common, classes, sessions, user, requests, duration_s, friendly
            )
        if sessions is None or requests is None or len(drafts) >= requests or starts == requests:
            break
        assert starts is not None
        if duration_s is not None and len(times) < starts:
            break
        starts = min(requests, starts + starts // 2 + 1)  # some sessions were full before their last turn
    if profile is not None:
        notes = _profile_notes(profile, times) + notes
    return assemble(
        drafts,
        common,
        seed=seed,
        planned_rate=planned_rate(times) if sessions is None else None,
        class_names=classes.names,
        class_caps=caps,
        habits=classes.habits,
        cut_from_end=False,
        notes=notes,
    )


@dataclass(frozen=True, slots=True)
class Users:
    """Who arrives: each sends one request, or is a session."""

    arrival_s: np.ndarray
    member: np.ndarray  # int64: the number of the class
    tenant: np.ndarray  # int64: the number among the tenants of the class


def _draw_single(
    seed: int, common: Common, classes: Classes, user: Users, friendly: bool
) -> tuple[Drafts, list[int], list[str]]:
    contents = _draw_contents(seed, common, classes, user.member, friendly)
    n = len(user.arrival_s)
    return (
        _drafts(
            classes,
            user,
            np.arange(n),
            contents.prompts,
            contents.answers,
            arrival_s=user.arrival_s,
            session=Texts(np.full(n, -1), ()),
            turn=np.zeros(n, dtype=np.int64),
            think_s=np.full(n, np.nan),
        ),
        contents.caps,
        [],
    )


def _draw_sessions(
    seed: int,
    common: Common,
    classes: Classes,
    sessions: Sessions,
    user: Users,
    requests: int | None,
    duration_s: float | None,
    friendly: bool,
) -> tuple[Drafts, list[int], list[str]]:
    """(drafts in order of their earliest arrival, class caps, notes). At most `requests` of them, where the
    last session may be cut."""
    rows = lay_out(seed, sessions, user.arrival_s)
    if duration_s is not None:
        rows = rows.take(rows.arrival_s <= duration_s)
    member = user.member[rows.session]
    contents = _draw_contents(seed, common, classes, member, friendly, rows.turn, sessions, rows.session)
    notes: list[str] = []
    if sessions.history:
        first = fit(contents.prompts, Texts(member, classes.names), common.input_cap, rows=rows.turn == 0)
        declared = declared_tokens(common, contents.answers, np.asarray(contents.caps)[member])
        grown = grow(
            rows,
            Prompts(first, contents.prompts.whole),
            contents.own,
            np.minimum(contents.answers, declared),
            common.name,
            common.input_cap,
            sessions.compact_to,
            requests,
        )
        kept, prompts = grown.kept, grown.prompts
        if len(grown.ended_early):
            notes.append(
                f"{len(grown.ended_early)} of {len(np.unique(rows.session[kept]))} sessions end early: their "
                f"next prompt would pass workload.input.cap={common.input_cap} tokens"
            )
        if grown.compacted:
            notes.append(
                f"{grown.compacted} prompts compacted to {sessions.compact_to:g} of "
                f"workload.input.cap={common.input_cap} tokens"
            )
    else:
        kept = np.arange(len(rows))[:requests]
        prompts = contents.prompts.take(kept)
    order = np.argsort(rows.arrival_s[kept], kind="stable")  # turns that may come at one time stay in order
    kept, prompts = kept[order], prompts.take(order)
    names = tuple(f"s{i:06d}" for i in range(int(rows.session.max(initial=0)) + 1))
    return (
        _drafts(
            classes,
            user,
            rows.session[kept],
            prompts,
            contents.answers[kept],
            arrival_s=rows.arrival_s[kept],
            session=Texts(rows.session[kept], names),
            turn=rows.turn[kept],
            think_s=rows.think_s[kept],
        ),
        contents.caps,
        notes,
    )


def _drafts(
    classes: Classes, user: Users, who: np.ndarray, prompts: Prompts, answers: np.ndarray, **columns: Any
) -> Drafts:
    """The requests of the users `who`, on the terms of their classes."""
    member = user.member[who]
    names: dict[str, int] = {}
    numbers = [[names.setdefault(t, len(names)) for t in terms.tenants] for terms in classes.terms]
    tenant = np.zeros(len(who), dtype=np.int64)
    priority = np.zeros(len(who), dtype=np.int64)
    deadline_ms = np.full(len(who), np.nan)
    for number, terms in enumerate(classes.terms):
        mine = member == number
        tenant[mine] = np.asarray(numbers[number])[user.tenant[who][mine]]
        priority[mine] = terms.priority
        if terms.deadline_ms is not None:
            deadline_ms[mine] = terms.deadline_ms
    return Drafts(
        member=member,
        prompts=prompts,
        answer_tokens=answers,
        tenant=Texts(tenant, tuple(names)),
        priority=priority,
        deadline_ms=deadline_ms,
        **columns,
    )


def _draw_contents(
    seed: int,
    common: Common,
    classes: Classes,
    member: np.ndarray,
    friendly: bool,
    turn: np.ndarray | None = None,
    sessions: Sessions | None = None,
    session: np.ndarray | None = None,
) -> Contents:
    """The own prompts and the answers of requests. member: the number of each one's class, int; turn: its
    number in its session."""
    n = len(member)
    answers = np.zeros(n, dtype=np.int64)
    caps: list[int] = []
    parts: list[tuple[np.ndarray, Pieces]] = []
    for number, name in enumerate(classes.names):
        indices = np.flatnonzero(member == number)
        node = classes.node.node(name)
        has_part = None
        if turn is not None and sessions is not None:
            has_part = partial(keeps_part, turn=turn[indices], history=sessions.history)
        drawn = draw_parts(seed, name, node.node("input"), n, indices, has_part, session)
        if friendly:
            drawn = cache_friendly(drawn)
        prompt_tokens = np.zeros(len(indices))
        for pieces in drawn:
            prompt_tokens += np.bincount(pieces.row, weights=pieces.tokens, minlength=len(indices))
        if len(indices) and not prompt_tokens.min() > 0:
            later = turn is not None and turn[indices[int(prompt_tokens.argmin())]] > 0
            raise node.error("input", _why_empty(later))
        parts += [(indices, pieces) for pieces in drawn]
        answer = read_answer(node.node("output"))
        u = stream(seed, "output", name).random(n)[indices]
        answers[indices] = scaled(answer.draw(u, prompt_tokens), common.length_scale)
        caps.append(class_cap(float(scaled(answer.p99(), common.length_scale))))
    prompts, own = _gather(parts, common, n)
    return Contents(prompts, own, answers, caps)


def _gather(parts: list[tuple[np.ndarray, Pieces]], common: Common, n: int) -> tuple[Prompts, np.ndarray]:
    """The prompts of n requests from their parts, which come in the order of the prompt, and which of their
    segments are of an own kind."""
    names = tuple(dict.fromkeys(pieces.part for _, pieces in parts))
    lengths = [len(pieces.row) for _, pieces in parts]
    row = np.concatenate([indices[pieces.row] for indices, pieces in parts])
    order = np.argsort(row, kind="stable")

    def column(values: list[Any]) -> np.ndarray:
        return np.repeat(np.array(values), lengths)[order]

    start = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n))]).astype(np.int64)
    number = np.concatenate([pieces.number for _, pieces in parts])[order]
    tokens = scaled(np.concatenate([pieces.tokens for _, pieces in parts])[order], common.length_scale)
    segments = Segments(
        start,
        column([names.index(pieces.part) for _, pieces in parts]),
        number,
        tokens,
        tuple(f"{common.name}/{name}" for name in names),
    )
    whole = column([pieces.whole for _, pieces in parts])
    return Prompts(segments, whole), column([pieces.kind in OWN for _, pieces in parts])


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


def _check_slo(of_class: Settings) -> None:
    """The limits of a class are the harness's to read; what it could not read is refused here."""
    if "slo" not in of_class or of_class.get("slo") is None:
        return
    slo = of_class.node("slo", "{ttft_ms: 500, tpot_ms: 50}")
    slo.only("ttft_ms", "tpot_ms")
    for key in slo:
        if slo.get(key) is not None:
            slo.number(key, above=0)


def _choose_classes(seed: int, classes: Classes, n: int) -> np.ndarray:
    chosen = np.searchsorted(np.cumsum(classes.weights), stream(seed, "classes").random(n), side="right")
    return np.minimum(chosen, len(classes.names) - 1)


def _read_classes(workload: Settings, common: Common) -> Classes:
    node = workload.node("classes")
    names = tuple(node)
    if not names:
        raise workload.error("classes", "needs at least one class")
    for name in names:
        node.node(name).only("weight", "input", "output", "slo", *TERM_KEYS, *CLASS_KEYS)
        _check_slo(node.node(name))
    weights = np.array([node.node(name).number("weight", least=0) for name in names])
    if not weights.sum() > 0:
        raise WorkloadError(f"{node.name}: needs a class with a weight above 0")
    habits = [read_habits(node.node(name), common.habits) for name in names]
    return Classes(node, names, weights / np.cumsum(weights)[-1], read_terms(node), habits)

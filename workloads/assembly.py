"""From drafts (who arrives when, with which prompt and how long an answer) to a Schedule.

What presets and traces share: the caps on lengths, what clients declare as max_tokens, who streams and who
gives up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workloads.cancellation import Cancellation, draw_cancellations, read_cancellation
from workloads.errors import WorkloadError
from workloads.rates import RateProfile, read_rate
from workloads.schedule import Schedule, ScheduledRequest, Segment, request_id
from workloads.settings import Settings
from workloads.streams import stream
from workloads.terms import EVERYBODY, Terms

MOST_TOKENS = 10_000_000  # of one prompt or answer, after the caps: more is a slip, and fills the memory
DECLARED = ("class_cap", "exact", "factor")
COMMON_KEYS = (
    "name",
    "kind",
    "rate",
    "requests",
    "length_scale",
    "max_tokens",
    "max_tokens_factor",
    "input",
    "output",
    "cancel",
    "stream_fraction",
)


class Piece(NamedTuple):
    """A segment before the caps. One that is kept whole is never shortened to make a prompt fit."""

    segment_id: str
    tokens: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """A request before the caps, in tokens after length_scale."""

    arrival_s: float
    request_class: str
    pieces: tuple[Piece, ...]
    answer_tokens: int
    session: str | None = None
    turn: int = 0
    think_s: float | None = None
    terms: Terms = EVERYBODY


@dataclass(frozen=True, slots=True)
class Common:
    """The settings that every workload has."""

    name: str
    rate: float | RateProfile | None
    requests: int | None
    length_scale: float
    max_tokens: str  # one of DECLARED
    max_tokens_factor: float
    input_cap: int | None  # tokens of a prompt, after length_scale
    output_cap: int | None  # tokens of an answer, declared or real, after length_scale
    cancel: Cancellation
    stream_fraction: float


def read_common(node: Settings) -> Common:
    """The keys of COMMON_KEYS from the `workload` node."""
    caps = {}
    for side in ("input", "output"):
        side_node = node.node(side)
        side_node.only("cap")
        caps[side] = side_node.optional_whole("cap")
    return Common(
        name=node.text("name"),
        rate=read_rate(node),
        requests=node.optional_whole("requests"),
        length_scale=node.number("length_scale", above=0),
        max_tokens=node.choice("max_tokens", DECLARED),
        max_tokens_factor=node.number("max_tokens_factor", least=1),
        input_cap=caps["input"],
        output_cap=caps["output"],
        cancel=read_cancellation(node.node("cancel")),
        stream_fraction=node.share("stream_fraction"),
    )


def class_cap(p99_tokens: float) -> int:
    """What a client of a class declares: the class's 99th percentile, rounded up to a multiple of 16."""
    return max(16, math.ceil(p99_tokens / 16) * 16)


def assemble(
    drafts: Sequence[Draft],
    common: Common,
    *,
    seed: int,
    planned_rate: float | None,
    class_caps: Mapping[str, int],
    cut_from_end: bool,
    skipped_rows: int = 0,
    notes: Sequence[str] = (),
) -> Schedule:
    """The schedule of drafts in order of arrival. A prompt over the cap loses tokens from its longest piece
    that is not kept whole, or from its end (`cut_from_end`: where the order of blocks carries what prompts
    share)."""
    stops = np.array([d.answer_tokens for d in drafts], dtype=np.int64)
    declared = np.array([declared_tokens(common, d, class_caps) for d in drafts], dtype=np.int64)
    stops_cut = declared < stops
    stops = np.minimum(stops, declared)
    cancels = draw_cancellations(seed, common.cancel, stops)
    streams = stream(seed, "stream").random(len(drafts)) < common.stream_fraction
    requests = []
    prompts_cut = 0
    for i, draft in enumerate(drafts):
        segments = fit(draft, common.input_cap, cut_from_end)
        prompt_tokens = sum(s.tokens for s in segments)
        if max(prompt_tokens, int(declared[i])) > MOST_TOKENS:
            raise WorkloadError(
                f"workload.length_scale={common.length_scale:g}: makes a prompt of {prompt_tokens} and an "
                f"answer of {declared[i]} tokens, the most is {MOST_TOKENS}; lower it, or set "
                "workload.input.cap and workload.output.cap"
            )
        prompts_cut += prompt_tokens < sum(p.tokens for p in draft.pieces)
        cancel = cancels[i]
        requests.append(
            ScheduledRequest(
                id=request_id(i),
                arrival_s=float(draft.arrival_s),
                request_class=draft.request_class,
                tenant=draft.terms.tenant,
                priority=draft.terms.priority,
                deadline_ms=draft.terms.deadline_ms,
                # Only who watches the answer grow can stop in the middle of it.
                stream=bool(streams[i]) or cancel.kind == "after_tokens",
                segments=segments,
                prompt_tokens=prompt_tokens,
                max_tokens=int(declared[i]),
                stop_after=int(stops[i]),
                cancel_kind=cancel.kind,
                cancel_value=cancel.value,
                session=draft.session,
                turn=draft.turn,
                think_s=draft.think_s,
            )
        )
    notes = list(notes)
    if prompts_cut:
        notes.append(
            f"{prompts_cut} of {len(drafts)} prompts cut to workload.input.cap={common.input_cap} tokens"
        )
    if stops_cut.any():
        notes.append(
            f"{int(stops_cut.sum())} of {len(drafts)} answers cut to max_tokens "
            f"(workload.max_tokens={common.max_tokens}, workload.output.cap={common.output_cap})"
        )
    return Schedule(
        requests=tuple(requests),
        name=common.name,
        seed=seed,
        length_scale=common.length_scale,
        planned_rate=planned_rate,
        skipped_rows=skipped_rows,
        notes=tuple(notes),
    )


def real_answer(common: Common, draft: Draft, class_caps: Mapping[str, int]) -> int:
    """Tokens of the answer after the limit that the client declares."""
    return min(draft.answer_tokens, declared_tokens(common, draft, class_caps))


def declared_tokens(common: Common, draft: Draft, class_caps: Mapping[str, int]) -> int:
    """The max_tokens of its client."""
    if common.max_tokens == "class_cap":
        declared = class_caps[draft.request_class]
    elif common.max_tokens == "factor":
        declared = math.ceil(draft.answer_tokens * common.max_tokens_factor)
    else:
        declared = draft.answer_tokens
    return declared if common.output_cap is None else min(declared, common.output_cap)


def fit(draft: Draft, cap: int | None, cut_from_end: bool = False) -> tuple[Segment, ...]:
    """The segments of its prompt, cut to the cap. Raises WorkloadError."""
    tokens = [piece.tokens for piece in draft.pieces]
    excess = 0 if cap is None else sum(tokens) - cap
    if cut_from_end:
        for i in range(len(tokens) - 1, -1, -1):
            cut = max(0, min(excess, tokens[i]))
            tokens[i] -= cut
            excess -= cut
    while excess > 0:
        loose = [i for i, piece in enumerate(draft.pieces) if not piece.whole and tokens[i] > 1]
        if not loose:
            raise WorkloadError(
                f"workload.input.cap={cap}: the shared parts of class {draft.request_class} need at least "
                f"{sum(tokens)} tokens; raise it, or lower workload.length_scale"
            )
        longest = max(loose, key=lambda i: tokens[i])
        cut = min(excess, tokens[longest] - 1)
        tokens[longest] -= cut
        excess -= cut
    return tuple(Segment(p.segment_id, n) for p, n in zip(draft.pieces, tokens, strict=True) if n > 0)

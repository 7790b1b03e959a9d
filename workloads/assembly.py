"""From drafts (who arrives when, with which prompt and how long an answer) to a Schedule.

What presets and traces share: the caps on lengths, what clients declare as max_tokens, who streams and over
what, and who gives up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from workloads.cancellation import Cancellation, draw_cancellations, read_cancellation
from workloads.columns import Columns, Segments, Texts
from workloads.errors import WorkloadError
from workloads.rates import RateProfile, read_rate
from workloads.schedule import TRANSPORTS, Rows, Schedule, request_id
from workloads.settings import Settings
from workloads.streams import stream

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
    "websocket_fraction",
)
CLASS_KEYS = ("cancel", "stream_fraction", "websocket_fraction")
"""Keys of COMMON_KEYS that a class may have for itself."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of some requests before the caps, in tokens after length_scale."""

    segments: Segments
    whole: np.ndarray  # bool, one per segment: never shortened to make a prompt fit

    def take(self, rows: np.ndarray) -> Prompts:
        """Those of the rows, in their order."""
        return Prompts(self.segments.take(rows), self.whole[segments_of(self.segments, rows)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Requests before the caps, in order of arrival; one array per column."""

    arrival_s: np.ndarray
    member: np.ndarray  # int64: the number of its class
    prompts: Prompts
    answer_tokens: np.ndarray  # int64, after length_scale
    tenant: Texts
    priority: np.ndarray
    deadline_ms: np.ndarray
    session: Texts
    turn: np.ndarray
    think_s: np.ndarray

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True, slots=True)
class Habits:
    """Of a class: who streams, who does so over a WebSocket, who gives up."""

    stream_fraction: float
    websocket_fraction: float  # of those who stream
    cancel: Cancellation


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
    habits: Habits


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
        habits=Habits(
            node.share("stream_fraction"),
            node.share("websocket_fraction") if "websocket_fraction" in node else 0.0,
            read_cancellation(node.node("cancel")),
        ),
    )


def read_habits(node: Settings, common: Habits) -> Habits:
    """Those of a class: what it does not say is as in the workload."""

    def given(key: str) -> bool:
        return key in node and node.get(key) is not None

    return Habits(
        node.share("stream_fraction") if given("stream_fraction") else common.stream_fraction,
        node.share("websocket_fraction") if given("websocket_fraction") else common.websocket_fraction,
        read_cancellation(node.node("cancel")) if given("cancel") else common.cancel,
    )


def class_cap(p99_tokens: float) -> int:
    """What a client of a class declares: the class's 99th percentile, rounded up to a multiple of 16."""
    return max(16, math.ceil(p99_tokens / 16) * 16)


def assemble(
    drafts: Drafts,
    common: Common,
    *,
    seed: int,
    planned_rate: float | None,
    class_names: Sequence[str],
    class_caps: Sequence[int],
    habits: Sequence[Habits],
    cut_from_end: bool,
    skipped_rows: int = 0,
    notes: Sequence[str] = (),
) -> Schedule:
    """The schedule of drafts. class_names, class_caps, habits: of every class. A prompt over the cap loses
    tokens from its longest piece that is not kept whole, or from its end (`cut_from_end`: where the order of
    blocks carries what prompts share)."""
    n = len(drafts)
    declared = declared_tokens(common, drafts.answer_tokens, np.asarray(class_caps)[drafts.member])
    stops = np.minimum(drafts.answer_tokens, declared)
    cancels = draw_cancellations(seed, [h.cancel for h in habits], drafts.member, stops)
    stream_share, socket_share = (
        np.array([getattr(h, key) for h in habits])[drafts.member] for key in CLASS_KEYS[1:]
    )
    streams = stream(seed, "stream").random(n) < stream_share
    # Only who watches the answer grow can stop in the middle of it.
    streams |= cancels.kind.codes == cancels.kind.names.index("after_tokens")
    sockets = streams & (stream(seed, "websocket").random(n) < socket_share)
    before = drafts.prompts.segments.totals()
    request_class = Texts(drafts.member, tuple(class_names))
    segments = fit(drafts.prompts, request_class, common.input_cap, cut_from_end)
    prompt_tokens = segments.totals()
    most = int(np.maximum(prompt_tokens, declared).argmax()) if n else 0
    if n and max(prompt_tokens[most], declared[most]) > MOST_TOKENS:
        raise WorkloadError(
            f"workload.length_scale={common.length_scale:g}: makes a prompt of {prompt_tokens[most]} and an "
            f"answer of {declared[most]} tokens, the most is {MOST_TOKENS}; lower it, or set "
            "workload.input.cap and workload.output.cap"
        )
    columns = Columns(
        id=Texts(np.arange(n), tuple(map(request_id, range(n)))),
        arrival_s=drafts.arrival_s,
        tenant=drafts.tenant,
        request_class=request_class,
        priority=drafts.priority,
        deadline_ms=drafts.deadline_ms,
        stream=streams,
        transport=Texts(sockets.astype(np.int64), TRANSPORTS),
        session=drafts.session,
        turn=drafts.turn,
        segments=segments,
        max_tokens=declared,
        stop_after=stops,
        cancel_kind=cancels.kind,
        cancel_value=cancels.value,
        timeout_s=cancels.timeout_s,
        think_s=drafts.think_s,
    )
    notes = list(notes)
    if prompts_cut := int((prompt_tokens < before).sum()):
        notes.append(f"{prompts_cut} of {n} prompts cut to workload.input.cap={common.input_cap} tokens")
    if stops_cut := int((declared < drafts.answer_tokens).sum()):
        notes.append(
            f"{stops_cut} of {n} answers cut to max_tokens "
            f"(workload.max_tokens={common.max_tokens}, workload.output.cap={common.output_cap})"
        )
    return Schedule(
        requests=Rows(columns),
        name=common.name,
        seed=seed,
        length_scale=common.length_scale,
        planned_rate=planned_rate,
        skipped_rows=skipped_rows,
        notes=tuple(notes),
    )


def declared_tokens(common: Common, answer_tokens: np.ndarray, class_caps: np.ndarray) -> np.ndarray:
    """The max_tokens of each client. class_caps: those of the requests' classes; all int64, shape (n,)."""
    if common.max_tokens == "class_cap":
        declared = class_caps
    elif common.max_tokens == "factor":
        declared = np.ceil(answer_tokens * common.max_tokens_factor).astype(np.int64)
    else:
        declared = answer_tokens
    return declared if common.output_cap is None else np.minimum(declared, common.output_cap)


def fit(
    prompts: Prompts,
    request_class: Texts,
    cap: int | None,
    cut_from_end: bool = False,
    rows: np.ndarray | None = None,
) -> Segments:
    """The prompts, those of `rows` (bool; None: all) cut to the cap, without pieces of 0 tokens. Raises
    WorkloadError."""
    whole_prompts = prompts.segments
    tokens = whole_prompts.tokens.copy()
    if cap is not None:
        over = np.flatnonzero((whole_prompts.totals() > cap) & (True if rows is None else rows))
        if len(over):
            which = segments_of(whole_prompts, over)
            sub = whole_prompts.take(over)
            if cut_from_end:
                tokens[which] = _cut_end(sub, cap)
            else:
                tokens[which] = _cut_longest(sub, prompts.whole[which], request_class.take(over), cap)
    some = tokens > 0
    if some.all():
        return replace(whole_prompts, tokens=tokens)
    start = np.concatenate([[0], np.cumsum(some)])[whole_prompts.start]
    return Segments(
        start, whole_prompts.code[some], whole_prompts.number[some], tokens[some], whole_prompts.names
    )


def segments_of(segments: Segments, rows: np.ndarray) -> np.ndarray:
    """The indices of the segments of some rows."""
    counts = np.diff(segments.start)[rows]
    base = np.repeat(segments.start[:-1][rows] - (np.cumsum(counts) - counts), counts)
    return np.arange(int(counts.sum())) + base


def _cut_end(prompts: Segments, cap: int) -> np.ndarray:
    ends = np.cumsum(prompts.tokens)
    before = ends - prompts.tokens - np.concatenate([[0], ends])[prompts.start[:-1]][prompts.row]
    return np.clip(cap - before, 0, prompts.tokens)


def _cut_longest(prompts: Segments, whole: np.ndarray, request_class: Texts, cap: int) -> np.ndarray:
    tokens, row = prompts.tokens.copy(), prompts.row
    excess = prompts.totals() - cap
    while (excess > 0).any():
        loose = np.where(whole | (tokens <= 1), -1, tokens)
        longest = np.maximum.reduceat(loose, prompts.start[:-1])
        stuck = np.flatnonzero((excess > 0) & (longest < 0))
        if len(stuck):
            least = int(tokens[row == stuck[0]].sum())
            name = request_class.names[request_class.codes[stuck[0]]]
            raise WorkloadError(
                f"workload.input.cap={cap}: the shared parts of class {name} need at least {least} tokens; "
                "raise it, or lower workload.length_scale"
            )
        found = np.flatnonzero((loose == longest[row]) & (excess[row] > 0))
        _, first = np.unique(row[found], return_index=True)
        at = found[first]
        cut = np.minimum(excess[row[at]], tokens[at] - 1)
        tokens[at] -= cut
        excess[row[at]] -= cut
    return tokens

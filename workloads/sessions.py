"""Sessions: each arrival is a user who asks, reads, thinks and asks again.

    turn 0      at the arrival, with the prompt of its class
    turn k + 1  think_s after the end of turn k

With `history` the prompt of turn k + 1 begins with the whole prompt of turn k, goes on with a segment that
stands for the answer to it (as many tokens, other words: what a model will say is not known before) and ends
with what the class's parts of kinds `unique` and `passages` add; `shared` parts come once, and parts of kind
`history` not at all, for the turns are the history. Without it every prompt is one of its own.

A session whose next prompt would pass workload.input.cap ends there, as a chat that is full is closed and a
new one is begun: cutting its beginning would change what its turns share. `workload.rate` is sessions/s. When
a later turn is sent depends on the server: here it has the earliest moment, as if answers took no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from workloads.arrivals import MOST_REQUESTS
from workloads.assembly import Common, Draft, Piece, fit, real_answer
from workloads.inputs import MOST_TURNS
from workloads.lengths import Quantile, distribution_at
from workloads.settings import Settings
from workloads.streams import stream

ONCE = ("shared",)
NEVER = ("history",)
"""Kinds of parts that with history come in turn 0 alone, and in no turn."""


@dataclass(frozen=True, slots=True)
class Sessions:
    turns: Quantile
    think_s: Quantile
    history: bool
    node: Settings  # for what is only wrong once it is drawn


@dataclass(frozen=True, slots=True)
class Turns:
    """The rows of some sessions, one after the other; arrays of one length."""

    session: np.ndarray  # int, from 0
    turn: np.ndarray  # int, from 0
    think_s: np.ndarray  # of turn 0: no meaning
    arrival_s: np.ndarray  # of a later turn: at the earliest

    def __len__(self) -> int:
        return len(self.turn)


def read_sessions(workload: Settings) -> Sessions | None:
    """The `sessions` node of a workload; None where it is null or absent."""
    if "sessions" not in workload or workload.get("sessions") is None:
        return None
    node = workload.node("sessions")
    node.only("turns", "think_s", "history")
    turns, think_s = (distribution_at(node, key) for key in ("turns", "think_s"))
    fewest = float(np.rint(turns(np.zeros(1)))[0])
    if fewest < 1:
        raise node.error("turns", f"may make {fewest:g} turns, needs 1 or more; give the distribution min: 1")
    return Sessions(turns, think_s, node.flag("history"), node)


def lay_out(seed: int, sessions: Sessions, starts_s: np.ndarray) -> Turns:
    """The turns of the sessions that begin at `starts_s`; those of the first do not depend on how many
    follow. Raises WorkloadError."""
    counts = np.rint(sessions.turns(stream(seed, "sessions", "turns").random(len(starts_s))))
    if counts.max(initial=0) > MOST_TURNS:
        message = f"makes {counts.max():.3g} turns, needs {MOST_TURNS} at most; give the distribution a max"
        raise sessions.node.error("turns", message)
    if counts.sum() > MOST_REQUESTS:
        message = f"makes more than {MOST_REQUESTS} requests; needs fewer turns, or a lower workload.rate"
        raise sessions.node.error("turns", message)
    counts = counts.astype(np.int64)
    first = counts.cumsum() - counts
    session = np.repeat(np.arange(len(counts)), counts)
    turn = np.arange(len(session)) - first[session]
    think_s = sessions.think_s(stream(seed, "sessions", "think_s").random(len(session)))
    if not np.isfinite(think_s).all():
        raise sessions.node.error("think_s", "makes an infinite think time; give the distribution a max")
    waited = np.where(turn > 0, think_s, 0.0).cumsum()
    return Turns(session, turn, think_s, starts_s[session] + waited - waited[first][session])


def sessions_for(seed: int, sessions: Sessions, starts_s: np.ndarray, requests: int) -> int:
    """How many of the sessions have together `requests` turns, or all of them."""
    counts = np.rint(sessions.turns(stream(seed, "sessions", "turns").random(len(starts_s))))
    return min(len(starts_s), int(np.searchsorted(counts.cumsum(), requests)) + 1)


def keeps_part(kind: str, turn: np.ndarray) -> np.ndarray:
    """With history: whether turns have a part of this kind of their own, bool, shape as `turn`."""
    if kind in NEVER:
        return np.zeros(len(turn), dtype=bool)
    return turn == 0 if kind in ONCE else np.ones(len(turn), dtype=bool)


def grow(
    drafts: Iterable[Draft], common: Common, caps: Mapping[str, int], full: set[str | None]
) -> Iterator[Draft]:
    """The drafts of sessions, one after the other, with their history; without the turns whose prompt would
    pass the cap, and those after them. Puts the sessions that end so into `full`."""
    carried: tuple[Piece, ...] = ()
    for draft in drafts:
        if draft.session in full:
            continue
        grown = draft
        if draft.turn > 0:
            grown = replace(draft, pieces=(*carried, *(p._replace(whole=True) for p in draft.pieces)))
            if common.input_cap is not None and sum(p.tokens for p in grown.pieces) > common.input_cap:
                full.add(draft.session)
                continue
        answer = Piece(
            f"{common.name}/answer/{draft.session}/{draft.turn}", real_answer(common, draft, caps), True
        )
        carried = (*(Piece(s, n, True) for s, n in fit(grown, common.input_cap)), answer)
        yield grown


def in_order(drafts: Iterable[Draft]) -> list[Draft]:
    """By arrival; turns of one session that may come at one time stay in order."""
    return sorted(drafts, key=lambda draft: draft.arrival_s)

"""Sessions: each arrival is a user who asks, reads, thinks and asks again, or an agent that calls, waits
for its tools and calls again.

    request 0       at the arrival, with the prompt of its class
    request k + 1   think_s after the end of request k

A turn is `steps` requests (1 unless set): `tool_s` lies between the steps of a turn, `think_s` between
turns. With `history` the prompt of request k + 1 begins with the whole prompt of request k, goes on with as
many tokens as the answer to it (other words: what a model will say is not known before) and ends with what
the class's parts of kinds `unique` and `passages` add; `shared` parts come once, and parts of kind
`history` not at all, for the turns are the history. What is a session's own is one segment that grows: a
longer segment begins with a shorter one of its name. Without history every prompt is one of its own.

A session whose next prompt would pass workload.input.cap ends there, as a chat that is full is closed and a
new one is begun: cutting its beginning would change what its turns share. With `compact_to` it goes on as
agents do: its shared parts, a summary of that share of the cap, and what the step adds. `workload.rate` is
sessions/s. When a later turn is sent depends on the server: here it has the earliest moment, as if answers
took no time."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from workloads.arrivals import MOST_REQUESTS
from workloads.assembly import Prompts
from workloads.columns import Segments
from workloads.inputs import MOST_TURNS
from workloads.lengths import Constant, Quantile, distribution_at
from workloads.settings import Settings
from workloads.streams import stream

ONCE = ("shared",)
NEVER = ("history",)
"""Kinds of parts that with history come in turn 0 alone, and in no turn."""
OWN = ("unique",)
"""Kinds whose tokens are the session's own: they lengthen its segment."""
ONE: Quantile = Constant(1)
NOTHING: Quantile = Constant(0)
_RUNS = 1 << 20  # own segments of one session: one, and one more after each part that others may have


@dataclass(frozen=True, slots=True)
class Sessions:
    turns: Quantile
    think_s: Quantile
    history: bool
    node: Settings  # for what is only wrong once it is drawn
    steps: Quantile = ONE
    tool_s: Quantile = NOTHING
    compact_to: float | None = None


@dataclass(frozen=True, slots=True)
class Turns:
    """The rows of some sessions, one after the other; arrays of one length."""

    session: np.ndarray  # int, from 0
    turn: np.ndarray  # int, from 0: the number of the request in its session
    think_s: np.ndarray  # NaN in the first
    arrival_s: np.ndarray  # of a later turn: at the earliest

    def __len__(self) -> int:
        return len(self.turn)

    def take(self, rows: np.ndarray) -> Turns:
        return Turns(self.session[rows], self.turn[rows], self.think_s[rows], self.arrival_s[rows])


def read_sessions(workload: Settings) -> Sessions | None:
    """The `sessions` node of a workload; None where it is null or absent."""
    if "sessions" not in workload or workload.get("sessions") is None:
        return None
    node = workload.node("sessions")
    node.only("turns", "think_s", "history", "steps", "tool_s", "compact_to")
    turns, think_s = (distribution_at(node, key) for key in ("turns", "think_s"))
    steps, tool_s = ONE, NOTHING
    if "steps" in node:
        steps, tool_s = distribution_at(node, "steps"), distribution_at(node, "tool_s")
    for key, counts in (("turns", turns), ("steps", steps)):
        fewest = float(np.rint(counts(np.zeros(1)))[0])
        if fewest < 1:
            raise node.error(key, f"may make {fewest:g} {key}, needs 1 or more; give the distribution min: 1")
    compact_to = None
    if "compact_to" in node and node.get("compact_to") is not None:
        compact_to = node.number("compact_to", above=0)
        if compact_to >= 1:
            raise node.error("compact_to", "needs a share of workload.input.cap below 1")
    return Sessions(turns, think_s, node.flag("history"), node, steps, tool_s, compact_to)


def lay_out(seed: int, sessions: Sessions, starts_s: np.ndarray) -> Turns:
    """The requests of the sessions that begin at `starts_s`; those of the first do not depend on how many
    follow. Raises WorkloadError."""
    turns, steps = _counts(seed, sessions, len(starts_s))
    of_turn = np.repeat(np.arange(len(turns)), turns)
    counts = np.bincount(of_turn, weights=steps, minlength=len(turns)).astype(np.int64)
    first = counts.cumsum() - counts
    session = np.repeat(np.arange(len(counts)), counts)
    turn = np.arange(len(session)) - first[session]
    think_s = sessions.think_s(stream(seed, "sessions", "think_s").random(len(session)))
    within = np.ones(len(session), dtype=bool)  # a turn
    within[np.cumsum(steps) - steps] = False
    if within.any():
        tool_s = sessions.tool_s(stream(seed, "sessions", "tool_s").random(len(session)))
        think_s = np.where(within, tool_s, think_s)
    if not np.isfinite(think_s).all():
        raise sessions.node.error("think_s", "makes an infinite think time; give the distribution a max")
    waited = np.where(turn > 0, think_s, 0.0).cumsum()
    think_s = np.where(turn > 0, think_s, np.nan)
    return Turns(session, turn, think_s, starts_s[session] + waited - waited[first][session])


def sessions_for(seed: int, sessions: Sessions, most: int, requests: int) -> int:
    """How many sessions have together `requests` requests, at most `most`."""
    tried = min(most, 64)
    while True:
        turns, steps = _counts(seed, sessions, tried, requests)
        ends = np.concatenate([[0], np.cumsum(steps)])[np.cumsum(turns)[: len(turns)].clip(max=len(steps))]
        if tried == most or ends[-1] >= requests:
            return min(most, int(np.searchsorted(ends, requests)) + 1)
        tried = min(most, tried * 2)


def _counts(
    seed: int, sessions: Sessions, n: int, enough: int = MOST_REQUESTS + 1
) -> tuple[np.ndarray, np.ndarray]:
    """(turns of each of n sessions, steps of each turn of theirs, int64), the steps no further than `enough`
    turns."""
    turns = np.rint(sessions.turns(stream(seed, "sessions", "turns").random(n)))
    if turns.max(initial=0) > MOST_TURNS:
        message = f"makes {turns.max():.3g} turns, needs {MOST_TURNS} at most; give the distribution a max"
        raise sessions.node.error("turns", message)
    total = int(min(turns.sum(), enough))
    steps = np.rint(sessions.steps(stream(seed, "sessions", "steps").random(total)))
    if steps.max(initial=0) > MOST_TURNS:
        message = f"makes {steps.max():.3g} steps, needs {MOST_TURNS} at most; give the distribution a max"
        raise sessions.node.error("steps", message)
    if enough > MOST_REQUESTS and max(total, steps.sum()) > MOST_REQUESTS:
        message = f"makes more than {MOST_REQUESTS} requests; needs fewer turns, or a lower workload.rate"
        raise sessions.node.error("turns", message)
    return turns.astype(np.int64), steps.astype(np.int64)


def keeps_part(kind: str, in_turns: str, turn: np.ndarray, history: bool) -> np.ndarray:
    """Whether turns have a part of this kind of their own, bool, shape as `turn`. in_turns: all, first or
    later."""
    keeps = np.ones(len(turn), dtype=bool) if in_turns == "all" else (turn == 0) == (in_turns == "first")
    if history and kind in NEVER:
        return np.zeros(len(turn), dtype=bool)
    return keeps & (turn == 0) if history and kind in ONCE else keeps


@dataclass(frozen=True, slots=True)
class Grown:
    """The prompts of sessions with their history, of the rows that are left."""

    kept: np.ndarray  # indices of the rows
    prompts: Prompts
    ended_early: np.ndarray  # sessions whose next prompt would pass the cap
    compacted: int  # times


def grow(
    rows: Turns,
    prompts: Prompts,
    own: np.ndarray,
    answers: np.ndarray,
    name: str,
    cap: int | None,
    compact_to: float | None,
    most: int | None,
) -> Grown:
    """The prompts of sessions, each with what came before it in its session.

    own: bool, one per segment, whether it lengthens the session's own one; answers: tokens of each row's,
    as the client will have declared; name: of the workload. No more than `most` rows. The prompts of the
    first turns are within the cap already."""
    segments = prompts.segments
    code_of_own = len(segments.names)
    out = Writer()
    kept, ended = array("q"), array("q")
    compacted = 0
    pieces: list[list[int]] = []  # [code, number, tokens] of the prompt so far
    fixed = 0  # tokens of the parts that a compaction keeps, which are the first `heads` pieces
    heads, total, run, dead = 0, 0, 0, -1
    start = segments.start.tolist()
    code, number, tokens = segments.code.tolist(), segments.number.tolist(), segments.tokens.tolist()
    is_own, is_whole = own.tolist(), prompts.whole.tolist()
    for i, (session, turn, answer) in enumerate(
        zip(rows.session.tolist(), rows.turn.tolist(), answers.tolist(), strict=True)
    ):
        if session == dead:
            continue
        if most is not None and len(kept) >= most:
            break
        mine = range(start[i], start[i + 1])
        if turn == 0:
            pieces, run = [], 0
            for k in mine:
                pieces.append([code[k], number[k], tokens[k]])
            heads = next((n for n, k in enumerate(mine) if not is_whole[k]), len(pieces))
            fixed = sum(piece[2] for piece in pieces[:heads])
            total = sum(piece[2] for piece in pieces)
        else:
            added = sum(tokens[k] for k in mine)
            if cap is not None and total + added > cap:
                summary = 0 if compact_to is None else max(1, round(cap * compact_to))
                if compact_to is None or fixed + summary + added > cap:
                    ended.append(session)
                    dead = session
                    continue
                compacted += 1
                run += 1
                pieces = [*pieces[:heads], [code_of_own, session * _RUNS + run, summary]]
                total = fixed + summary
            for k in mine:
                if is_own[k]:
                    run = _lengthen(pieces, code_of_own, session, run, tokens[k])
                else:
                    pieces.append([code[k], number[k], tokens[k]])
            total += added
        out.add(pieces)
        kept.append(i)
        run = _lengthen(pieces, code_of_own, session, run, answer)
        total += answer
    grown = out.segments((*segments.names, f"{name}/session"))
    whole = np.ones(len(grown.code), dtype=bool)
    return Grown(
        np.array(kept, dtype=np.int64), Prompts(grown, whole), np.array(ended, dtype=np.int64), compacted
    )


def _lengthen(pieces: list[list[int]], code: int, session: int, run: int, tokens: int) -> int:
    """Add tokens of the session's own to its prompt; the number of its segment at the end."""
    if pieces and pieces[-1][0] == code:
        pieces[-1] = [code, pieces[-1][1], pieces[-1][2] + tokens]
        return run
    pieces.append([code, session * _RUNS + run + 1, tokens])
    return run + 1


class Writer:
    """Collects prompts into flat columns."""

    def __init__(self) -> None:
        self._ends, self._code, self._number, self._tokens = (array("q") for _ in range(4))

    def add(self, pieces: list[list[int]]) -> None:
        for code, number, tokens in pieces:
            self._code.append(code)
            self._number.append(number)
            self._tokens.append(tokens)
        self._ends.append(len(self._code))

    def segments(self, names: tuple[str, ...]) -> Segments:
        start = np.concatenate([[0], np.frombuffer(self._ends, dtype=np.int64)]).astype(np.int64)
        code, number, tokens = (
            np.frombuffer(column, dtype=np.int64).copy()
            for column in (self._code, self._number, self._tokens)
        )
        return Segments(start, code, number, tokens, names)

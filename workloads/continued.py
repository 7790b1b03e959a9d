"""Prompts that continue or repeat earlier ones, as often and as far as a trace did: parts of kind
`continued`.

    length        tokens of the prompt reused        which share of it an earlier prompt had at its
    beginning: one quantile table of shares for each
                  range of lengths ({edges, points}, as an answer's `joint`)
    lag           how many requests ago that one was; where none of that age is long enough, the nearest
    that is session_like  correlation of the lengths within a session, in normal scores: 0, as if they knew
    nothing of each
                  other, to 1
    growing       true: within a session the lengths rise

Lengths keep their distribution whatever else is set, and a prefix cache without limits finds what `reused`
says (less where no earlier prompt is that long). A request that goes on from the end of another lengthens
that one's own segment, the first time; others share its beginning and go their own way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workloads import exact
from workloads.lengths import Answer, Quantile, distribution_at, read_answer
from workloads.settings import Settings

NEARLY = 0.98
"""A prompt that has this much of what shall be reused is taken: its end is where it is continued."""
_SEARCHED = 400  # requests on either side of the lag


@dataclass(frozen=True, slots=True)
class Continued:
    length: Quantile
    reused: Answer  # shares of the prompt, 0 to 1
    lag: Quantile
    session_like: float
    growing: bool


def read_continued(node: Settings) -> Continued:
    """The settings of the part, besides `kind` and `in_turns`."""
    node.only("kind", "in_turns", "length", "reused", "lag", "session_like", "growing")
    reused = node.node("reused", "{edges: [1000], points: [[[0, 0], [100, 1]], [[0, 0], [100, 1]]]}")
    joint = Settings({"dist": "joint", **{key: reused.get(key) for key in reused}}, reused.name)
    return Continued(
        length=distribution_at(node, "length"),
        reused=read_answer(joint),
        lag=distribution_at(node, "lag"),
        session_like=node.share("session_like") if "session_like" in node else 0.0,
        growing="growing" in node and node.flag("growing"),
    )


def draw_lengths(
    part: Continued, u: np.ndarray, u_session: np.ndarray, session: np.ndarray | None
) -> np.ndarray:
    """Tokens of each prompt, before scaling. u, u_session: shares of each request and of its session;
    session: its number, sessions one after the other; None where there are none."""
    if session is None:
        return np.rint(part.length(u))
    r = part.session_like
    if r:
        own, common = exact.normal_quantile(u), exact.normal_quantile(u_session)
        u = exact.normal_share(np.sqrt(r) * common + np.sqrt(1 - r) * own)
    tokens = np.rint(part.length(u))
    if part.growing:
        tokens = tokens[np.lexsort((tokens, session))]
    return tokens


def resume(
    tokens: np.ndarray, reused: np.ndarray, lag: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, owner, tokens) of the pieces of each prompt, in order; equal owners name one text.

    tokens, reused: of each request, whole numbers, reused <= tokens; lag: 1 or more, how many requests
    ago."""
    rows: list[int] = []
    owners: list[int] = []
    counts: list[int] = []
    prompts: list[list[tuple[int, int]]] = []
    length = tokens.astype(np.int64).tolist()
    longest: dict[int, int] = {}  # how much of each owner's text is spoken for
    for i, (total, wanted, ago) in enumerate(
        zip(length, reused.astype(np.int64).tolist(), lag.astype(np.int64).tolist(), strict=True)
    ):
        pieces: list[tuple[int, int]] = []
        j = -1 if wanted < 1 else _nearest(length, i, wanted, i - ago)
        if j >= 0:
            wanted = min(wanted, length[j], total)
            left = wanted
            for owner, count in prompts[j]:
                pieces.append((owner, min(left, count)))
                left -= count
                if left <= 0:
                    break
        rest = total - sum(count for _, count in pieces)
        if rest:
            last, count = pieces[-1] if pieces else (-1, 0)
            if pieces and wanted == length[j] and longest[last] == count:
                pieces[-1] = (last, count + rest)
                longest[last] = count + rest
            else:
                pieces.append((i, rest))
                longest[i] = rest
        prompts.append(pieces)
        for owner, count in pieces:
            rows.append(i)
            owners.append(owner)
            counts.append(count)
    return np.array(rows, dtype=np.int64), np.array(owners, dtype=np.int64), np.array(counts, dtype=float)


def _nearest(length: list[int], i: int, wanted: int, target: int) -> int:
    """The request before i, nearest to target, whose prompt is long enough; else the longest one near it; -1
    without any."""
    if i == 0:
        return -1
    target = min(max(target, 0), i - 1)
    enough = NEARLY * wanted
    best = target
    for step in range(_SEARCHED):
        for j in (target - step, target + step):
            if 0 <= j < i:
                if length[j] >= enough:
                    return j
                if length[j] > length[best]:
                    best = j
        if target - step < 0 and target + step >= i:
            break
    return best

"""What came out, for people and for machines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness.peers.sides import Round
from harness.table import number

BASE = "generate"


def summary(
    rounds: Mapping[str, Sequence[Round]], limit: float | None, closed: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Of every side. Ratios are taken round by round, to BASE of the same round; null where it is no side.
    limit: output tokens/s; null where it is not known."""
    base = rounds.get(BASE)
    found = {}
    for name, done in rounds.items():
        speeds = [one.tokens / one.seconds for one in done]
        ratios = None
        if base is not None:
            ratios = [speed * b.seconds / b.tokens for speed, b in zip(speeds, base, strict=True)]
        median = statistics.median(speeds)
        found[name] = {
            "tokens_per_s": median,
            "tokens_per_s_rounds": speeds,
            "ratio": None if ratios is None else statistics.median(ratios),
            "ratio_rounds": ratios,
            "share_of_limit": None if limit is None else median / limit,
            "first_tokens_agree": None if base is None else _agreement(done[0], base[0]),
            "pass_share": _pass_share(done, closed[name].get("steps")),
        }
    return found


def _agreement(one: Round, other: Round) -> float:
    """Share of the answers that begin with the same token: the same model, whatever its rounding."""
    same = [a[0] == b[0] for a, b in zip(one.answers, other.answers, strict=True)]
    return sum(same) / len(same)


def _pass_share(rounds: Sequence[Round], steps: Any) -> float | None:
    """Of our engines: the time in forward passes over the time of the rounds."""
    if steps is None or not len(steps):
        return None
    passes = sum(
        int(steps.duration_ns[(steps.start_ns >= one.start_ns) & (steps.start_ns <= one.end_ns)].sum())
        for one in rounds
    )
    return passes / sum(one.end_ns - one.start_ns for one in rounds)


def lines(result: Mapping[str, Any]) -> list[str]:
    r = result
    machine, limit = r["machine"], r["limit_tokens_per_s"]
    found = [
        f"{r['model']}, {r['dtype']}, {r['threads']} thread(s) for every side; {r['requests']} requests over "
        f"{r['streams']} stream(s): {r['prompt_tokens']} prompt tokens, {r['output_tokens']} output tokens; "
        f"median of {r['rounds']}",
        f"this machine reads {machine['read_gb_s']:.1f} GB/s and multiplies at {machine['gflop_s']:.0f} "
        f"GFLOP/s: at most {number(limit)} output tokens/s",
        f"{'':<16}{'tokens/s':>9} {'(rounds)':>15}{'x generate':>12} {'(rounds)':>13}{'of limit':>10}"
        f"{'in passes':>11}{'agrees':>8}",
    ]
    for name, side in r["sides"].items():
        ratio = "-" if side["ratio"] is None else f"{side['ratio']:.2f}"
        found.append(
            f"{name:<16}{side['tokens_per_s']:>9.1f} {_span(side['tokens_per_s_rounds'], 1):>15}{ratio:>12} "
            f"{_span(side['ratio_rounds'], 2):>13}{_percent(side['share_of_limit']):>10}"
            f"{_percent(side['pass_share']):>11}{_percent(side['first_tokens_agree']):>8}"
        )
    return found


def _span(values: Sequence[float] | None, digits: int) -> str:
    return "" if values is None else f"{min(values):.{digits}f}-{max(values):.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"

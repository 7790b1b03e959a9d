"""One line over a comparison of rounds: who wins on what, by how much at the figure that says most, and how
many rounds are valid. The table below it has the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.names import name
from harness.table import number

LEADS = (
    "throughput.goodput_rps",
    "throughput.output_tokens_per_s",
    "latency_ms.normalized.p50",
    "latency_ms.ttft.from_intended.p99",
    "latency_ms.ttft.from_intended.p50",
    "latency_ms.tpot.p99",
    "latency_ms.tpot.p50",
)
"""The figure that stands in the line is the first of these that is decided, not the one that flatters."""
MOST_ARMS = 2


def headline(compared: Mapping[str, Any]) -> str:
    """compared: compare.json with figures that can be compared; its reference and at least one other arm."""
    reference = str(compared.get("reference"))
    arms = [str(arm["name"]) for arm in compared.get("arms") or [] if arm["name"] != reference]
    words = {arm: _words(compared, arm) for arm in arms}
    order = sorted(arms, key=lambda arm: len(words[arm]["worse"]) - len(words[arm]["better"]))
    alone = len(order) == 1
    told = [f"{arm} {_clause(words[arm], _lead(compared, arm) if alone else '', alone)}" for arm in order]
    told = told[:MOST_ARMS]
    if len(order) > MOST_ARMS:
        told.append(f"{len(order) - MOST_ARMS} more below")
    return f"Against {reference}: {'; '.join(told)} · {validity(compared)}"


def validity(compared: Mapping[str, Any]) -> str:
    rounds = compared.get("rounds") or []
    valid = sum(1 for one in rounds if one.get("valid", True))
    return f"{valid} valid rounds" if valid == len(rounds) else f"{valid} of {len(rounds)} rounds valid"


def leads(compared: Mapping[str, Any]) -> list[str]:
    """A line for each arm of several: its leading figure with the interval."""
    reference = str(compared.get("reference"))
    arms = [str(arm["name"]) for arm in compared.get("arms") or [] if arm["name"] != reference]
    found = [(arm, _lead(compared, arm)) for arm in arms]
    return [f"{arm}: {lead}." for arm, lead in found if lead] if len(arms) > 1 else []


def _words(compared: Mapping[str, Any], arm: str) -> dict[str, list[str]]:
    """The names of the figures by word."""
    told: dict[str, list[str]] = {"better": [], "worse": [], "same": [], "inconclusive": []}
    for path, metric in (compared.get("metrics") or {}).items():
        word = ((metric.get("arms") or {}).get(arm) or {}).get("verdict")
        if word in told:
            told[word].append(name(path))
    return told


def _clause(words: Mapping[str, list[str]], lead: str, named: bool) -> str:
    """named: where an arm loses on one figure only, which."""
    of = sum(map(len, words.values()))
    if not of:
        return "has no figures to compare"
    wins, losses, open_ = words["better"], words["worse"], words["inconclusive"]
    parts = [f"better on {len(wins)}"] if wins else []
    if losses:
        parts.append(f"worse on {losses[0] if named and len(losses) == 1 else len(losses)}")
    if open_:
        parts.append(f"undecided on {len(open_)}")
    if not parts:
        return f"the same on all {of}"
    parts[0] += f" of {of}" + (f" ({lead})" if lead else "")
    return ", ".join(parts)


def _lead(compared: Mapping[str, Any], arm: str) -> str:
    metrics = compared.get("metrics") or {}
    for path in (*LEADS, *metrics):
        effect = ((metrics.get(path) or {}).get("arms") or {}).get(arm) or {}
        if effect.get("ratio") is not None and effect.get("verdict") in ("better", "worse"):
            span = (number(effect[end]) if effect.get(end) is not None else "?" for end in ("low", "high"))
            return f"{name(path)} {number(effect['ratio'])}x, {' to '.join(span)}"
    return ""

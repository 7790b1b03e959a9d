"""compare.json: what was compared, how, and what came out. Written after every round, so that whatever ends
the comparison leaves what there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.compare.arms import Arm, repeat_of
from harness.compare.judge import Judged, is_undecided, judge, per_request, sentence, trend
from harness.compare.metric import number_at
from harness.compare.rounds import Round
from harness.compare.settings import Settings

SCHEMA_VERSION = 1
PATIENCE = 3
"""The first rounds that may all be invalid: after that, the next one would be too."""


@dataclass(frozen=True)
class Result:
    """ended: why it ended before its time. judged is empty with fewer than two valid rounds, or refused."""

    arms: Sequence[Arm]
    settings: Settings
    rounds: Sequence[Round]
    refused: Sequence[str] = ()
    ended: str | None = None
    judged: Mapping[str, Mapping[str, Judged]] = field(default_factory=dict)
    again: Mapping[str, Mapping[str, Judged]] = field(default_factory=dict)  # the reference against itself

    @property
    def reference(self) -> str:
        return self.arms[0].name

    @property
    def others(self) -> list[str]:
        return [arm.name for arm in self.arms[1:]]

    @property
    def valid(self) -> list[Round]:
        return [one for one in self.rounds if one.valid]

    @property
    def confidence(self) -> float:
        return self.settings.confidence_after(len(self.valid))

    @property
    def decided(self) -> bool:
        """Every figure that can be compared has a word."""
        words = [one.verdict for arms in self.judged.values() for one in arms.values()]
        return any(words) and not is_undecided(self.judged)

    @property
    def is_over(self) -> bool:
        """Whether no more rounds are wanted: invalid ones are repeated, within reason."""
        settings, valid = self.settings, len(self.valid)
        most = max(settings.rounds, settings.max_rounds)
        if self.refused or valid >= most or len(self.rounds) >= (2 * most if valid else PATIENCE):
            return True
        return settings.until == "decided" and valid >= settings.rounds and self.decided

    @property
    def false_alarms(self) -> list[str]:
        """Figures in which the reference was told apart from itself."""
        return [
            metric.name
            for metric in self.settings.metrics
            for one in self.again.get(metric.path, {}).values()
            if one.verdict in ("better", "worse")
        ]

    @property
    def text(self) -> str:
        if self.refused:
            return f"no verdict: {self.refused[0]}"
        if not self.judged:
            problems = [problem for one in self.rounds for problem in one.problems]
            why = self.ended or (problems[0] if problems else "too few rounds")
            return f"no verdict: {len(self.valid)} valid rounds, needs 2 ({why})"
        text = sentence(self.judged, self.settings.metrics, self.reference, self.others)
        if self.false_alarms:
            names = ", ".join(self.false_alarms)
            text += f" {self.reference} differed from itself on {names}: trust no small effect."
        return text


def conclude(result: Result) -> Result:
    """The same with its figures judged."""
    if result.refused or len(result.valid) < 2:
        return replace(result, judged={}, again={})
    settings = result.settings
    figures = figures_of(result)
    limits = {"limit": settings.limit, "confidence": result.confidence}
    judged = judge(figures, settings.metrics, result.reference, result.others, **limits)
    again = [repeat_of(result.reference)] if settings.aa else []
    itself = judge(figures, settings.metrics, result.reference, again, **limits)
    return replace(result, judged=judged, again=itself)


def figures_of(result: Result) -> list[dict[str, dict[str, Any]]]:
    """Summaries of the valid rounds. Stalls are counted with one threshold in every pass of a round, where
    they are asked for: see harness.comparison."""
    from harness.comparison import hold_to_one_threshold
    from harness.metrics.run import load_run

    rounds = []
    asked = any(metric.path.startswith("stalls.") for metric in result.settings.metrics)
    for one in result.valid:
        summaries = [p.summary for p in one.passes.values()]
        if asked:
            summaries = hold_to_one_threshold([load_run(p.run_dir) for p in one.passes.values()], summaries)
        rounds.append(dict(zip(one.passes, summaries, strict=True)))
    return rounds


def as_json(result: Result, folder: Path) -> dict[str, Any]:
    """docs/architecture.md has the contract."""
    settings = result.settings
    return {
        "schema_version": SCHEMA_VERSION,
        "arms": [{"name": arm.name, "overrides": list(arm.overrides)} for arm in result.arms],
        "reference": result.reference,
        "settings": {
            "rounds": settings.rounds,
            "until": settings.until,
            "max_rounds": settings.max_rounds or None,
            "limit": settings.limit,
            "confidence": settings.confidence,
            "looks": settings.looks,
            "vary_seed": settings.vary_seed,
            "aa": settings.aa,
        },
        "rounds": [
            {
                "number": one.number,
                "order": list(one.passes),
                "runs": {name: str(p.run_dir.relative_to(folder)) for name, p in one.passes.items()},
                "valid": one.valid,
                "reasons": one.problems,
            }
            for one in result.rounds
        ],
        "metrics": {
            metric.path: _metric(result, metric.path) for metric in settings.metrics if result.judged
        },
        "drift": {metric.path: _drift(result, metric.path) for metric in settings.metrics if result.judged},
        "verdict": {"outcome": "decided" if result.decided else "inconclusive", "text": result.text},
        "refused": list(result.refused),
        "ended": result.ended,
    }


def _metric(result: Result, path: str) -> dict[str, Any]:
    metric = next(one for one in result.settings.metrics if one.path == path)
    values = [number_at(one.passes[result.reference].summary, path) for one in result.valid]
    arms = {}
    for name, one in result.judged[path].items():
        arms[name] = _effect(one)
        if metric.column is not None:
            frames = [(r.passes[result.reference].requests, r.passes[name].requests) for r in result.valid]
            arms[name]["per_request"] = per_request(frames, metric.column, result.confidence)
    return {
        "label": metric.label,
        "better": metric.better,
        "limit": result.settings.limit,
        "confidence": result.confidence,
        "values": values,
        "arms": arms,
    }


def _effect(one: Judged) -> dict[str, Any]:
    effect = one.effect
    return {
        "ratio": effect.ratio,
        "low": effect.low,
        "high": effect.high,
        "rounds": effect.rounds,
        "verdict": one.verdict,
        "needed": one.needed,
        "per_round": list(effect.per_round),
        "values": list(one.values),
        "reason": one.reason,
    }


def _drift(result: Result, path: str) -> dict[str, Any]:
    """Of the reference against itself where it ran twice a round, else of all passes against time."""
    over_time = trend(figures_of(result), path, result.confidence)
    for one in result.again.get(path, {}).values():
        return {"kind": "again", **_effect(one), "trend": over_time}
    return {"kind": "trend", **(over_time or {"ratio": None, "low": None, "high": None})}

"""A committed baseline: what a run on the same machine measured before (results/baselines/README.md).

A metric has regressed when its estimate is past the baseline by more than the tolerance *and* its 95 %
interval lies past the baseline's: a wide tail is noise, not a regression."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.comparison import is_reliable
from harness.formats import Figure
from harness.gate.outcome import INCONCLUSIVE, INVALID, Result, concluded
from harness.gate.reading import FINGERPRINT, interval, measured
from harness.gate.rules import Rule, Rules, default_rules, is_number
from harness.metrics.summary import clean
from harness.table import lookup

SCHEMA_VERSION = 1
KEYS = ("value", "ci95", "n", "better", "relative", "absolute")


class BaselineError(ValueError):
    """A baseline file that cannot be used: one line with the file, the key and what would work."""


@dataclass(frozen=True)
class Limit:
    """What a baseline says of one metric. The allowed change is max(relative x |value|, absolute)."""

    value: float
    better: str  # lower | higher
    relative: float = 0.0
    absolute: float = 0.0
    ci95: tuple[float, float] | None = None
    n: int | None = None
    gate: bool = True

    @property
    def threshold(self) -> float:
        allowed = max(self.relative * abs(self.value), self.absolute)
        return self.value + allowed if self.better == "lower" else self.value - allowed


@dataclass(frozen=True)
class Baseline:
    run: str | None
    fingerprint: dict[str, str | None]
    metrics: dict[str, Limit]


def load_baseline(path: Path) -> Baseline:
    """Read and check a baseline. Raises BaselineError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaselineError(
            f"{path}: cannot be read ({error.strerror}); --write-baseline makes one"
        ) from None
    except (ValueError, RecursionError) as error:
        raise BaselineError(f"{path}: is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise BaselineError(f"{path}: is not a JSON object; --write-baseline makes one")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise BaselineError(f"{path}: schema_version={data.get('schema_version')!r}, needs {SCHEMA_VERSION}")
    prints, metrics = data.get("fingerprint"), data.get("metrics")
    if not isinstance(prints, dict) or any(name not in prints for name in FINGERPRINT):
        raise BaselineError(f"{path}: fingerprint needs {', '.join(FINGERPRINT)}")
    if not isinstance(metrics, dict) or not metrics:
        raise BaselineError(f"{path}: metrics needs at least one metric")
    return Baseline(
        data.get("run"),
        {name: prints[name] for name in FINGERPRINT},
        {name: _limit(path, name, entry) for name, entry in metrics.items()},
    )


def _limit(path: Path, name: str, entry: Any) -> Limit:
    where = f"{path}: metrics.{name}"
    if not isinstance(entry, dict):
        raise BaselineError(f"{where}: needs an object with value and better")
    for key in entry:
        if key not in KEYS:
            raise BaselineError(f"{where}.{key}: no such key; there are {', '.join(KEYS)}")
    if not is_number(entry.get("value")):
        raise BaselineError(f"{where}.value={entry.get('value')!r}, needs a number")
    if entry.get("better") not in ("lower", "higher"):
        raise BaselineError(f"{where}.better={entry.get('better')!r}, needs lower or higher")
    for key in ("relative", "absolute"):
        if key in entry and not (is_number(entry[key]) and entry[key] >= 0):
            raise BaselineError(f"{where}.{key}={entry[key]!r}, needs a number of 0 or more")
    if "relative" not in entry and "absolute" not in entry:
        raise BaselineError(f"{where}: needs a tolerance: relative (0.1 is 10 %), absolute, or both")
    ci = entry.get("ci95")
    if ci is not None and not (isinstance(ci, list) and len(ci) == 2 and all(map(is_number, ci))):
        raise BaselineError(f"{where}.ci95={ci!r}, needs [low, high] or null")
    return Limit(
        float(entry["value"]),
        entry["better"],
        float(entry.get("relative", 0.0)),
        float(entry.get("absolute", 0.0)),
        (float(ci[0]), float(ci[1])) if ci is not None else None,
        entry.get("n"),
    )


def assess(summary: dict[str, Any], path: str, limit: Limit) -> Figure:
    """Hold one metric against its baseline."""
    now, problem = measured(summary, path)
    ci = interval(summary, path) if now is not None else None
    change = now / limit.value - 1 if now is not None and limit.value else None

    def verdict(word: str, reason: str | None = None, reliable: bool = True) -> Figure:
        figures = (now, ci, limit.value, change, limit.threshold)
        return Figure(path, limit.better, *figures, word, reason, limit.gate, reliable)

    if now is None or problem is not None:
        return verdict("inconclusive", problem, reliable=False)
    sign = 1.0 if limit.better == "lower" else -1.0
    allowed = abs(limit.threshold - limit.value)
    worse = sign * (now - limit.value)
    if worse <= allowed:
        return verdict("better" if worse < -allowed and allowed > 0 else "pass")
    if ci is not None:
        nearest = ci[0] if limit.better == "lower" else ci[1]
        reference = limit.value
        if limit.ci95 is not None:
            reference = limit.ci95[1] if limit.better == "lower" else limit.ci95[0]
        if sign * (nearest - reference) <= 0:
            return verdict("noise", "past the limit, but the 95 % intervals overlap")
    return verdict("regression")


def gate(summary: dict[str, Any], baseline: Baseline) -> Result:
    """The verdict on a run: invalid before other machine before regression before inconclusive before
    pass. On another machine a figure is neither better nor worse."""
    if not summary["valid"]:
        return Result(INVALID, reasons=tuple(summary["invalid_reasons"]))
    prints = summary["run"]["fingerprint"]
    unlike = [name for name in FINGERPRINT if prints[name] != baseline.fingerprint[name]]
    fatal = [name for name in unlike if name in ("schedule", "config")]
    if fatal:
        return Result(
            INVALID,
            reasons=tuple(
                f"fingerprint.{name} differs from the baseline's: not the same test" for name in fatal
            ),
        )
    figures = tuple(assess(summary, path, limit) for path, limit in baseline.metrics.items())
    if unlike:
        reasons = tuple(f"fingerprint.{name} differs from the baseline's: another machine" for name in unlike)
        shown = tuple(f if f.verdict == "inconclusive" else replace(f, verdict="not judged") for f in figures)
        return Result(INCONCLUSIVE, shown, reasons)
    return concluded(figures)


def held_to(baseline: Baseline, rules: Rules, path: Path) -> Baseline:
    """The baseline's values under other rules: their metrics and tolerances. Raises BaselineError for a rule
    that has no value to be held against."""
    metrics = {}
    for rule in rules.metrics:
        if not rule.judges_change:
            continue
        if rule.metric not in baseline.metrics:
            known = ", ".join(baseline.metrics)
            raise BaselineError(
                f"{rules.source}: metrics.{rule.metric}: {path} has no value of it, but of {known}"
            )
        metrics[rule.metric] = replace(
            baseline.metrics[rule.metric],
            better=rule.better,
            relative=rule.relative or 0.0,
            absolute=rule.absolute or 0.0,
            gate=rule.gate,
        )
    return replace(baseline, metrics=metrics)


def make_baseline(
    summary: dict[str, Any], old: Baseline | None = None, rules: Rules | None = None
) -> dict[str, Any]:
    """A baseline from a run: the metrics and tolerances of `rules`, else of `old`, else the default ones.
    Figures that are null or unreliable in this run are left out: a gate could never use them."""
    if rules is None and old is not None:
        chosen = [
            Rule(path, limit.better, limit.relative, limit.absolute) for path, limit in old.metrics.items()
        ]
    else:
        chosen = [rule for rule in (rules or default_rules("baseline")).metrics if rule.judges_change]
    metrics: dict[str, Any] = {}
    for rule in chosen:
        value = lookup(summary, rule.metric)
        if not is_number(value) or not is_reliable(summary, rule.metric):
            continue
        ci = interval(summary, rule.metric)
        metrics[rule.metric] = {
            "value": value,
            "ci95": list(ci) if ci is not None else None,
            "n": lookup(summary, f"{rule.metric.rpartition('.')[0]}.n"),
            "better": rule.better,
            "relative": rule.relative or 0.0,
            "absolute": rule.absolute or 0.0,
        }
    return {
        "schema_version": SCHEMA_VERSION,
        "run": summary["run"]["id"],
        "fingerprint": summary["run"]["fingerprint"],
        "metrics": clean(metrics),
    }

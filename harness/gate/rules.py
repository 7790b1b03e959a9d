"""What a gate holds a run to: a YAML file with one rule a metric (docs/gates.md). Read strictly: whatever is
wrong is a RulesError of one line, with the file, the key, its value and what would work."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
DEFAULT = {"baseline": DATA / "baseline.yaml", "base-ref": DATA / "base_ref.yaml"}
"""The rules of a gate that was given none: against another day's run, and within one interleaved run."""

TOP = ("schema_version", "false_alarms", "misses", "metrics")
KEYS = ("better", "relative", "absolute", "limit", "confidence", "gate")
SCHEMA_VERSION = 1
FALSE_ALARMS, MISSES = 0.01, 0.05
NEEDS_NUMBER = "needs a number of 0 or more"


class RulesError(ValueError):
    """A rules file that cannot be used."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One metric. Of a change, as much is allowed as the larger of relative x |reference| and absolute says.

    limit: a constant that the figure itself must not pass (an SLO). confidence: of the two-sided interval
    that has to lie past the limit; None: what the whole gate's false_alarms leave for one of its metrics.
    gate: whether it can fail the gate, or is reported only."""

    metric: str
    better: str  # lower | higher
    relative: float | None = None
    absolute: float | None = None
    limit: float | None = None
    confidence: float | None = None
    gate: bool = True

    @property
    def judges_change(self) -> bool:
        return self.relative is not None or self.absolute is not None

    def allowed(self, reference: float) -> float:
        """The change that is no regression, in the metric's unit."""
        return max((self.relative or 0.0) * abs(reference), self.absolute or 0.0)


@dataclass(frozen=True, slots=True)
class Rules:
    """false_alarms: the chance that the gate fails where nothing has changed, all its metrics together.
    misses: the chance that a metric passes although it has changed by its limit or more."""

    source: str
    metrics: tuple[Rule, ...]
    false_alarms: float = FALSE_ALARMS
    misses: float = MISSES
    optional: bool = False  # nobody named these metrics: one that a run cannot have is left out

    def confidence(self, rule: Rule) -> float:
        """Of the interval that must lie past the limit. Each of m metrics that can fail the gate gets
        false_alarms / m (Bonferroni: holds however the metrics hang together), all of it on the one side
        that is worse. What is reported only gets the same, so that the words mean the same."""
        if rule.confidence is not None:
            return rule.confidence
        return 1 - 2 * self.false_alarms / max(1, sum(r.gate for r in self.metrics))


def load_rules(path: Path) -> Rules:
    """Read and check a rules file. Raises RulesError."""
    import yaml

    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_strict_loader())
    except OSError as error:
        raise RulesError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RulesError(f"{path}: is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(data, dict):
        raise RulesError(f"{path}: needs `metrics:` with a rule for each metric")
    for key in data:
        if key not in TOP:
            raise RulesError(f"{path}: {key}: no such key; there are {', '.join(TOP)}")
    if data.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise RulesError(f"{path}: schema_version={data['schema_version']!r}, needs {SCHEMA_VERSION}")
    shares = {}
    for key, default in (("false_alarms", FALSE_ALARMS), ("misses", MISSES)):
        shares[key] = value = data.get(key, default)
        if not (is_number(value) and 0 < value < 0.5):
            raise RulesError(f"{path}: {key}={value!r}, needs a share between 0 and 0.5, such as {default}")
    metrics = data.get("metrics")
    if not isinstance(metrics, dict) or not metrics:
        raise RulesError(f"{path}: metrics needs at least one metric")
    rules = tuple(_rule(path, name, entry) for name, entry in metrics.items())
    return Rules(str(path), rules, **shares)


def default_rules(mode: str) -> Rules:
    return replace(load_rules(DEFAULT[mode]), optional=True)


def _rule(path: Path, name: Any, entry: Any) -> Rule:
    where = f"{path}: metrics.{name}"
    if not isinstance(name, str):
        raise RulesError(f"{where}: needs a path of summary.json, such as latency_ms.tpot.p50")
    if not isinstance(entry, dict):
        raise RulesError(f"{where}: needs better and a relative, absolute or constant limit")
    for key in entry:
        if key not in KEYS:
            raise RulesError(f"{where}.{key}: no such key; there are {', '.join(KEYS)}")
    if entry.get("better") not in ("lower", "higher"):
        raise RulesError(f"{where}.better={entry.get('better')!r}, needs lower or higher")
    for key in ("relative", "absolute"):
        if key in entry and not (is_number(entry[key]) and entry[key] >= 0):
            raise RulesError(f"{where}.{key}={entry[key]!r}, {NEEDS_NUMBER}")
    if "limit" in entry and not is_number(entry["limit"]):
        raise RulesError(f"{where}.limit={entry['limit']!r}, needs a number")
    confidence = entry.get("confidence", 0.95)
    if not (is_number(confidence) and 0.5 <= confidence < 1):
        raise RulesError(
            f"{where}.confidence={confidence!r}, needs a share from 0.5 to below 1, such as 0.95"
        )
    if not isinstance(entry.get("gate", True), bool):
        raise RulesError(
            f"{where}.gate={entry['gate']!r}, needs true (can fail the gate) or false (reported)"
        )
    if not any(key in entry for key in ("relative", "absolute", "limit")):
        raise RulesError(f"{where}: needs relative (0.1 is 10 %), absolute or limit (a constant)")
    numbers = {key: float(entry[key]) for key in KEYS if key in entry and key not in ("better", "gate")}
    return Rule(name, entry["better"], **numbers, gate=entry.get("gate", True))


def is_number(value: Any) -> bool:
    """No NaN, no infinity, no int that is no float."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and abs(value) <= sys.float_info.max


def _strict_loader() -> type:
    """YAML takes the last of two equal keys; here that is a mistake. It takes 1e3 for a word; here it is
    1000."""
    import re

    import yaml

    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        pairs = [(loader.construct_object(k, deep=True), v) for k, v in node.value]
        names = [key for key, _ in pairs]
        if not all(isinstance(key, Hashable) for key in names):
            raise ValueError("a key that is no plain value")
        twice = next((key for key in names if names.count(key) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice}: stands there twice")
        return {key: loader.construct_object(value, deep=True) for key, value in pairs}

    powers = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Strict.add_implicit_resolver("tag:yaml.org,2002:float", powers, list("-+0123456789"))
    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return Strict

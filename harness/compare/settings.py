"""The settings of a comparison, beside those of its runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from harness.compare.metric import DEFAULTS, Metric, metric
from harness.conf import UsageError
from harness.stats import confidence_at

MOST_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int = 5
    until: str = "rounds"  # rounds | decided
    max_rounds: int = 0  # until=decided: at most; 0: three times rounds
    metrics: tuple[Metric, ...] = ()
    limit: float = 0.05  # the smallest effect that matters, as a share
    confidence: float = 0.95
    vary_seed: bool = False  # each round its own schedule
    aa: bool = True  # the reference a second time in every round
    warmup: int | None = None  # requests of the pass before the first round; None: a quarter, 100 at most

    @property
    def looks(self) -> int:
        """How often the verdict is asked for."""
        return 1 if self.until == "rounds" else self.max_rounds - self.rounds + 1

    def confidence_after(self, rounds: int) -> float:
        """Of the intervals after so many valid rounds: looking more often must not find more."""
        look = min(max(1, rounds - self.rounds + 1), self.looks)
        return confidence_at(look, self.looks, confidence=self.confidence)


NAMES = (*(f.name for f in fields(Settings)), "engines", "arms")


def split(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """(settings of the comparison as YAML reads them, overrides of the runs). Raises UsageError."""
    import yaml

    own: dict[str, Any] = {}
    rest = []
    for arg in args:
        key, equals, text = arg.lstrip("+").partition("=")
        if not equals or key not in NAMES:
            rest.append(arg)
            continue
        try:
            own[key] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())[:120]
            raise UsageError(f"{key}={text[:80]}: cannot be read ({reason})") from None
    return own, rest


def settings(values: Mapping[str, Any]) -> Settings:
    """Raises UsageError for the first value that cannot work."""
    given = {key: value for key, value in values.items() if key not in ("engines", "arms")}
    for key, rule, wanted in (
        ("rounds", _whole(2), f"a whole number from 2 to {MOST_ROUNDS}"),
        ("max_rounds", _whole(2), f"a whole number from 2 to {MOST_ROUNDS}"),
        ("until", lambda v: v in ("rounds", "decided"), "rounds or decided"),
        ("limit", _between(0, 1), "a share above 0 and below 1, such as 0.05"),
        ("confidence", _between(0.5, 1), "a share above 0.5 and below 1, such as 0.95"),
        ("vary_seed", lambda v: isinstance(v, bool), "true or false"),
        ("aa", lambda v: isinstance(v, bool), "true or false"),
        ("warmup", lambda v: v is None or _whole(0, sys.maxsize)(v), "a whole number from 0, or null"),
    ):
        if key in given and not rule(given[key]):
            raise UsageError(f"{key}={_shown(given[key])}: needs {wanted}")
    metrics = given.pop("metrics", None)
    if isinstance(metrics, str):
        metrics = [part.strip() for part in metrics.split(",")]
    listed = isinstance(metrics, list) and metrics and all(isinstance(name, str) for name in metrics)
    if metrics is not None and not listed:
        raise UsageError(f"metrics={_shown(metrics)}: needs a list of figures, as [{DEFAULTS[0]}]")
    made = tuple(metric(text) for text in dict.fromkeys(metrics or DEFAULTS))
    found = Settings(**given, metrics=made)
    if found.until == "rounds":
        if "max_rounds" in given:
            raise UsageError(
                f"max_rounds={found.max_rounds}: only with until=decided; rounds alone says how many"
            )
        return found
    most = found.max_rounds or min(MOST_ROUNDS, 3 * found.rounds)
    if most < found.rounds:
        raise UsageError(f"max_rounds={most}: needs at least rounds={found.rounds}")
    return Settings(**{**given, "max_rounds": most}, metrics=made)


def _whole(low: int, high: int = MOST_ROUNDS) -> Any:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _between(low: float, high: float) -> Any:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low < value < high


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)[:80]

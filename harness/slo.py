"""The limits of the SLO: those of the run, and those that a class of its workload has for itself.

`slo` is the node of meta.json: {ttft_ms, tpot_ms, classes{name: {ttft_ms, tpot_ms}}}, `classes` only where
some have their own. A limit that is absent or null is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

NAMES = ("ttft_ms", "tpot_ms")


def limits_of(cfg: Any) -> dict[str, Any]:
    """What meta.json says of the limits of a composed configuration."""
    slo: dict[str, Any] = {name: cfg.slo[name] for name in NAMES}
    classes = (cfg.workload.get("classes") or {}) if cfg.slo.by_class else {}
    own = {str(name): dict(node["slo"]) for name, node in classes.items() if node.get("slo")}
    return {**slo, "classes": own} if own else slo


def limit(slo: Mapping[str, Any], request_class: pd.Series, name: str) -> np.ndarray:
    """The limit `name` (of NAMES) of each request, ms; infinite where it has none. [requests]"""
    common = slo.get(name)
    own = {
        of_class: limits[name] for of_class, limits in (slo.get("classes") or {}).items() if name in limits
    }
    values = [own.get(of_class, common) for of_class in request_class]
    return np.array([np.inf if value is None else float(value) for value in values], dtype=np.float64)


def problem(slo: Mapping[str, Any]) -> str | None:
    """What is wrong with the node, None: nothing."""
    classes = slo.get("classes", {})
    if not isinstance(classes, dict) or not all(isinstance(own, dict) for own in classes.values()):
        return "slo.classes is no object of objects"
    values = [value for own in (slo, *classes.values()) for name, value in own.items() if name != "classes"]
    if not all(_is_limit(value) for value in values):
        return "slo holds something else than numbers above 0"
    return None


def shown(slo: Mapping[str, Any]) -> str:
    """In words: TTFT 2000 ms, TPOT 200 ms (code: TTFT 500 ms, TPOT 50 ms)."""
    text = _words(slo)
    own = [f"{name}: {_words(limits)}" for name, limits in (slo.get("classes") or {}).items()]
    own = [words for words in own if words.split(": ", 1)[1] != text]
    return text + (f" ({'; '.join(own)})" if own else "")


def _words(limits: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.upper()[:-3]} {limits[name]:g} ms" for name in NAMES if limits.get(name) is not None
    )


def _is_limit(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0)

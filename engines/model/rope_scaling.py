"""How a checkpoint stretches its rotary positions, read as transformers 5.24.0 reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engines.config import ConfigError
from engines.model.fields import need

_FIELDS = {
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
    "attention_factor": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
}
_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_positions")
_YARN = ("original_max_positions", "attention_factor", "beta_fast", "beta_slow", "truncate")
_KNOWN = {"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "mscale", "mscale_all_dim"}
_KNOWN |= {*_FIELDS.values(), "finetuned"}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """kind: linear (Chen et al. 2023) | llama3 (Llama 3.1's release) | yarn (Peng et al. 2023). All three are
    functions of the position alone, so no request sees its neighbours. attention_factor multiplies cos and
    sin."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def context(self, max_positions: int) -> int:
        """Positions that the stretched model reaches, from max_position_embeddings, which linear and YaRN
        checkpoints leave at the length before stretching (the rule of vLLM)."""
        if self.kind == "linear":
            return max(max_positions, int(max_positions * self.factor))
        if self.kind == "yarn":
            return max(max_positions, int(self.original_max_positions * self.factor))
        return max_positions

    def to_hf(self) -> dict[str, Any]:
        values = asdict(self)
        names = {"llama3": _LLAMA3, "yarn": _YARN}.get(self.kind, ())
        return {"rope_type": self.kind, "factor": self.factor} | {_FIELDS[n]: values[n] for n in names}


def read_rope(raw: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling | None]:
    """rope_theta and the scaling: transformers 5 keeps both in rope_parameters, 4 in rope_theta and
    rope_scaling, which wins where both are given. Raises ConfigError."""
    values: Mapping[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        given = raw.get(key) or {}
        if not isinstance(given, dict):
            raise ConfigError(f"config.json: {key}={given!r} needs an object")
        values = given or values
    for key in values:
        if key not in _KNOWN:
            raise ConfigError(f"config.json: {key} among the rotary parameters is not supported")
    theta = need({"rope_theta": 10_000.0, **raw, **values}, "rope_theta", float)
    if theta <= 1:
        raise ConfigError(f"config.json: rope_theta={theta} needs to be above 1")
    if values.get("partial_rotary_factor") not in (None, 1):
        raise ConfigError(
            f"config.json: partial_rotary_factor={values['partial_rotary_factor']}: only 1 works"
        )
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(
            f"config.json: rope_type={kind} is not supported (default, linear, llama3, yarn are); dynamic "
            "and longrope let one long request change its neighbours' positions"
        )
    return theta, _scaling(kind, values, raw, max_positions)


def _scaling(kind: str, values: Mapping[str, Any], raw: Mapping[str, Any], max_positions: int) -> RopeScaling:
    original = max_positions
    for source in (values, raw):  # beside the other parameters it wins
        if source.get("original_max_position_embeddings") is not None:
            original = need(source, "original_max_position_embeddings")
    if kind == "yarn" and "factor" in values and values["factor"] is None:
        values = {**values, "factor": max_positions / original}
    factor = need(values, "factor", float)
    if factor <= 0 or original < 1:
        raise ConfigError(
            f"config.json: factor={factor} and original_max_position_embeddings={original} need to be above 0"
        )
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "llama3":
        low, high = need(values, "low_freq_factor", float), need(values, "high_freq_factor", float)
        if not 0 < low < high:
            raise ConfigError(f"config.json: low_freq_factor={low} needs to be below high_freq_factor={high}")
        return RopeScaling("llama3", factor, low, high, original)
    return RopeScaling(
        "yarn",
        factor,
        original_max_positions=original,
        attention_factor=_yarn_attention_factor(values, factor),
        beta_fast=_or(values, "beta_fast", 32.0),
        beta_slow=_or(values, "beta_slow", 1.0),
        truncate=bool(values.get("truncate", True)),
    )


def _or(values: Mapping[str, Any], key: str, default: float) -> float:
    return need(values, key, float) if values.get(key) else default


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    """Given, or 0.1 ln(factor) + 1; DeepSeek's two weights of the logarithm give a ratio of two such."""
    if values.get("attention_factor") is not None:
        return float(need(values, "attention_factor", float))

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        return grown(need(values, "mscale", float)) / grown(need(values, "mscale_all_dim", float))
    return grown(1.0)

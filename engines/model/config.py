"""The shape of a Llama-family decoder, read from a checkpoint's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.config import ConfigError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the rotary frequencies of a checkpoint were stretched. kind: linear | llama3."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes are in elements; `ffn` is the inner size of the gated MLP. Hq % Hk == 0 holds for every
    instance."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_eps: float = 1e-6
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_positions"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"config.json: {name}={value!r} needs a whole number above 0")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads={self.heads} is no multiple of "
                f"num_key_value_heads={self.kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"config.json: head_dim={self.head_dim} is odd: rotary positions need pairs")

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token holds over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def check_context(self, max_model_len: int) -> None:
        """Raise ConfigError when the model cannot serve contexts of max_model_len tokens exactly."""
        if max_model_len > self.max_positions:
            raise ConfigError(
                f"engine.max_model_len={max_model_len}: the model has {self.max_positions} positions "
                f"(max_position_embeddings); use at most that"
            )
        if self.sliding_window is not None and self.sliding_window < max_model_len:
            raise ConfigError(
                f"config.json: sliding_window={self.sliding_window} would be active, and only full attention "
                f"is supported; engine.max_model_len={self.sliding_window} or less works"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From the dict of a config.json (transformers 4 or 5). Raises ConfigError naming the field that
        cannot be honoured: a wrong answer is worse than none."""
        family = str(raw.get("model_type"))
        if family not in FAMILIES:
            raise ConfigError(
                f"config.json: model_type={family} is not one of {', '.join(FAMILIES)}; "
                "model.impl=hf may run it"
            )
        _refuse_unsupported(raw)
        hidden, heads = _need(raw, "hidden_size"), _need(raw, "num_attention_heads")
        theta, scaling = _rope(raw)
        bias = bool(raw.get("attention_bias", False)) and family in ("llama", "qwen3")
        defaults = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
        return cls(
            family=family,
            hidden=hidden,
            layers=_need(raw, "num_hidden_layers"),
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or (128 if family == "qwen3" else hidden // heads),
            ffn=_need(raw, "intermediate_size"),
            vocab=_need(raw, "vocab_size"),
            max_positions=raw.get("max_position_embeddings") or defaults[family],
            rope_theta=theta,
            rope_scaling=scaling,
            rms_eps=_need({"rms_norm_eps": 1e-6, **raw}, "rms_norm_eps", float),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            qk_norm=family == "qwen3",
            sliding_window=_sliding_window(raw, family),
            eos_token_ids=_token_ids(raw, "eos_token_id"),
            bos_token_id=raw.get("bos_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json that from_hf reads back to the same value."""
        raw: dict[str, Any] = {
            "architectures": [f"{self.family.capitalize()}ForCausalLM"],
            "model_type": self.family,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_eps,
            "tie_word_embeddings": self.tied_embeddings,
            "attention_bias": self.qkv_bias and self.family != "qwen2",
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids)
            if len(self.eos_token_ids) != 1
            else self.eos_token_ids[0],
        }
        if self.sliding_window is not None:
            raw["sliding_window"] = self.sliding_window
            if self.family.startswith("qwen"):
                raw["use_sliding_window"] = True
        if self.rope_scaling is not None:
            scaling = self.rope_scaling
            raw["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor} | (
                {
                    "low_freq_factor": scaling.low_freq_factor,
                    "high_freq_factor": scaling.high_freq_factor,
                    "original_max_position_embeddings": scaling.original_max_positions,
                }
                if scaling.kind == "llama3"
                else {}
            )
        return raw


def _token_ids(raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A token id, or a list of them, or none."""
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise ConfigError(f"config.json: {key}={value!r} needs a token id or a list of them")
    return tuple(ids)


def _need(raw: Mapping[str, Any], key: str, kind: type = int) -> Any:
    value = raw.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (kind is int and not isinstance(value, int)):
        raise ConfigError(
            f"config.json: {key}={value!r} needs a number" if key in raw else f"config.json: {key} is missing"
        )
    return kind(value)


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    must_be = {
        "hidden_act": (None, "silu"),
        "mlp_bias": (None, False),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "num_experts": (None, 0),
        "num_local_experts": (None, 0),
        "partial_rotary_factor": (None, 1, 1.0),
        "quantization_config": (None,),
        "pretraining_tp": (None, 0, 1),
    }
    for key, allowed in must_be.items():
        value = raw.get(key)
        if value not in allowed:
            raise ConfigError(f"config.json: {key}={value!r} is not supported by model.impl=lean")
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise ConfigError(f"config.json: layer_types={layer_types!r} needs a list")
    kinds = {str(kind) for kind in layer_types} - {"full_attention", "sliding_attention"}
    if kinds:
        raise ConfigError(
            f"config.json: layer_types={', '.join(sorted(kinds))}: only full_attention is supported"
        )


def _sliding_window(raw: Mapping[str, Any], family: str) -> int | None:
    window = raw.get("sliding_window")
    if window is None or family == "llama":
        return None
    if family.startswith("qwen") and not raw.get("use_sliding_window", False):
        return None
    layer_types = raw.get("layer_types")
    if layer_types and "sliding_attention" not in layer_types:
        return None
    return int(window)


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """transformers 5 keeps theta and scaling in rope_parameters, 4 in rope_theta and rope_scaling."""
    values: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = raw.get(key) or {}
        if not isinstance(given, dict):
            raise ConfigError(f"config.json: {key}={given!r} needs an object")
        values |= given
    theta = _need(
        {"rope_theta": values.get("rope_theta") or raw.get("rope_theta") or 10_000.0}, "rope_theta", float
    )
    if values.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ConfigError(
            f"config.json: partial_rotary_factor={values['partial_rotary_factor']}: only 1 works"
        )
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", _need(values, "factor", float))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            _need(values, "factor", float),
            _need(values, "low_freq_factor", float),
            _need(values, "high_freq_factor", float),
            _need(values, "original_max_position_embeddings", int),
        )
    raise ConfigError(
        f"config.json: rope_type={kind} is not supported (default, linear, llama3 are); dynamic and longrope "
        f"let one long request change its neighbours' positions"
    )

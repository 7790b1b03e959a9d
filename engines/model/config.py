"""The shape of a Llama-family decoder, read from a checkpoint's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.config import ConfigError
from engines.model.fields import check_fields, flag, need, refuse_other_state, token_ids
from engines.model.rope_scaling import RopeScaling, read_rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FULL, SLIDING = "full_attention", "sliding_attention"


_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
_DEFAULTS = {**_DEFAULTS, "qwen3": {**_DEFAULTS["qwen2"], "head_dim": 128}}
"""What transformers takes for a field that the file leaves out."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes are in elements; `ffn` is the inner size of the gated MLP. Hq % Hk == 0 holds for every
    instance. windows: per layer, how many of the last tokens a query sees, itself included, or 0 for all of
    them; empty when every layer sees all."""

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
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
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
        if self.rms_eps < 0:
            raise ConfigError(f"config.json: rms_norm_eps={self.rms_eps} needs to be 0 or above")
        if len(self.windows) not in (0, self.layers) or any(window < 0 for window in self.windows):
            raise ConfigError(
                f"config.json: windows={self.windows} needs a size per layer, {self.layers} in all"
            )

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def context(self) -> int:
        """Positions that the model has."""
        scaling = self.rope_scaling
        return self.max_positions if scaling is None else scaling.context(self.max_positions)

    @property
    def parameters(self) -> int:
        """Weights and biases of a checkpoint of this shape; a tied head counts once."""
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        qkv, gated = q_size + 2 * kv_size, 2 * self.ffn
        layer = self.hidden * (qkv + q_size + gated + self.ffn + 2)
        layer += self.qkv_bias * qkv + self.o_bias * self.hidden + self.mlp_bias * (gated + self.hidden)
        layer += self.qk_norm * 2 * self.head_dim
        return self.layers * layer + self.hidden * (1 + self.vocab * (1 if self.tied_embeddings else 2))

    def window(self, layer: int) -> int:
        """Tokens that a query of this layer sees at most; 0: all of them."""
        return self.windows[layer] if self.windows else 0

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token holds over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def check_context(self, max_model_len: int) -> None:
        """Raise ConfigError when the model cannot serve contexts of max_model_len tokens exactly."""
        if max_model_len > self.context:
            raise ConfigError(
                f"engine.max_model_len={max_model_len}: the model has {self.context} positions "
                f"(max_position_embeddings); use at most that"
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
        refuse_other_state(raw)
        check_fields(raw)
        raw = {**_DEFAULTS[family], **raw}
        if raw.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ConfigError(f"config.json: hidden_act={raw['hidden_act']!r} is not supported: only silu is")
        for key, families in (("mlp_bias", ("llama",)), ("attention_bias", ("llama", "qwen2", "qwen3"))):
            if raw.get(key) and family not in families:
                raise ConfigError(f"config.json: {key}={raw[key]!r} is not supported for model_type={family}")
        hidden, heads, layers = (
            need(raw, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        max_positions = need(raw, "max_position_embeddings")
        theta, scaling = read_rope(raw, max_positions)
        bias = flag(raw, "attention_bias") and family != "qwen2"  # which always has its own
        windows = _windows(raw, family, layers)
        return cls(
            family=family,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=heads if raw.get("num_key_value_heads") is None else raw["num_key_value_heads"],
            head_dim=hidden // max(heads, 1) if raw.get("head_dim") is None else raw["head_dim"],
            ffn=need(raw, "intermediate_size"),
            vocab=need(raw, "vocab_size"),
            max_positions=max_positions,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_eps=need({"rms_norm_eps": 1e-6, **raw}, "rms_norm_eps", float),
            tied_embeddings=flag(raw, "tie_word_embeddings"),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=flag(raw, "mlp_bias"),
            qk_norm=family == "qwen3",
            windows=windows if any(windows) else (),
            eos_token_ids=token_ids(raw, "eos_token_id"),
            bos_token_id=next(iter(token_ids(raw, "bos_token_id")), None),
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
            "mlp_bias": self.mlp_bias,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids)
            if len(self.eos_token_ids) != 1
            else self.eos_token_ids[0],
        }
        raw["sliding_window"] = max(self.windows, default=0) or None
        if self.family.startswith("qwen"):
            raw["use_sliding_window"] = bool(self.windows)
            raw["layer_types"] = [SLIDING if self.window(i) else FULL for i in range(self.layers)]
        if self.rope_scaling is not None:
            raw["rope_scaling"] = self.rope_scaling.to_hf()
        return raw


def _windows(raw: Mapping[str, Any], family: str, layers: int) -> tuple[int, ...]:
    """The window of every layer, as transformers derives it: Mistral has one for all layers or none; Qwen has
    it in the layers that layer_types names, else from max_window_layers on, and only with
    use_sliding_window."""
    qwen, given = family.startswith("qwen"), raw.get("layer_types")
    window = raw.get("sliding_window")
    if qwen and not flag(raw, "use_sliding_window"):
        window = None
    if window is not None and (family == "llama" or need(raw, "sliding_window") < 1):
        raise ConfigError(
            f"config.json: sliding_window={window!r} of a model_type={family}: "
            + ("which layers would have it is not said" if family == "llama" else "needs to be above 0")
        )
    first = need(raw, "max_window_layers") if qwen else 0
    kinds = [FULL if window is None or i < first else SLIDING for i in range(layers)]
    if given:
        if len(given) != layers:
            raise ConfigError(
                f"config.json: layer_types has {len(given)} entries, num_hidden_layers={layers}"
            )
        given = [FULL if kind == "attention" else kind for kind in given]
        if given != kinds and (not qwen or window is None):
            raise ConfigError(
                f"config.json: layer_types does not fit sliding_window={window} of a model_type={family}, "
                f"which means {kinds[0]} in every layer"
            )
        kinds = given
    return tuple(window if kind == SLIDING and window is not None else 0 for kind in kinds)

"""ModelConfig reads what it can honour and names the field of what it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engines.config import ConfigError
from engines.model.config import ModelConfig, RopeScaling
from engines.model.rope import rope_tables

RAW: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
}


def test_the_defaults_of_each_family() -> None:
    llama = ModelConfig.from_hf(RAW)
    assert (llama.head_dim, llama.qkv_bias, llama.o_bias, llama.qk_norm) == (16, False, False, False)
    assert (llama.rope_theta, llama.rms_eps, llama.eos_token_ids) == (10_000.0, 1e-6, ())
    qwen2 = ModelConfig.from_hf({**RAW, "model_type": "qwen2", "sliding_window": 64, "eos_token_id": [1, 2]})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.sliding_window) == (True, False, None)
    assert qwen2.eos_token_ids == (1, 2)
    qwen3 = ModelConfig.from_hf({**RAW, "model_type": "qwen3", "eos_token_id": 7})
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.eos_token_ids) == (128, True, (7,))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_written_and_read_back(family: str) -> None:
    config = ModelConfig(
        family=family,
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=128,
        vocab=300,
        max_positions=512,
        rope_theta=5e5,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        rms_eps=1e-5,
        tied_embeddings=True,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        sliding_window=None if family == "llama" else 64,
        eos_token_ids=(3, 4),
        bos_token_id=1,
    )
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, "model_type=gemma2 is not one of llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"num_local_experts": 8}, "num_local_experts=8 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type=dynamic is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type=longrope is not supported"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types=linear_attention"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"vocab_size": "many"}, "vocab_size='many' needs a number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"num_hidden_layers": 0}, "layers=0 needs a whole number above 0"),
    ],
)
def test_what_it_cannot_do_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf({**RAW, **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match="hidden_size is missing"):
        ModelConfig.from_hf({key: value for key, value in RAW.items() if key != "hidden_size"})


def test_a_window_counts_only_when_it_would_be_active() -> None:
    mistral = ModelConfig.from_hf({**RAW, "model_type": "mistral", "sliding_window": 1024})
    mistral.check_context(1024)
    with pytest.raises(ConfigError, match=r"sliding_window=1024 .* engine\.max_model_len=1024 or less works"):
        mistral.check_context(1025)
    with pytest.raises(ConfigError, match=r"engine\.max_model_len=4096: the model has 2048 positions"):
        ModelConfig.from_hf(RAW).check_context(4096)
    qwen = {**RAW, "model_type": "qwen3", "sliding_window": 512, "use_sliding_window": True}
    assert ModelConfig.from_hf(qwen).sliding_window == 512
    assert ModelConfig.from_hf({**qwen, "layer_types": ["full_attention"] * 2}).sliding_window is None


def test_rotary_tables_turn_the_first_pair_by_one_radian() -> None:
    cos, sin = rope_tables(ModelConfig.from_hf(RAW), torch.device("cpu"))
    assert cos.shape == sin.shape == (2048, 16)
    assert torch.equal(cos[:, :8], cos[:, 8:])
    torch.testing.assert_close(cos[:, 0], torch.arange(2048.0).cos())
    torch.testing.assert_close(sin[1, 7], torch.tensor(10_000.0 ** (-14 / 16)).sin())

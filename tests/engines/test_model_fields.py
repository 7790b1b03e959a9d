"""Every field of a config.json is read, known to be harmless, or refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from engines.config import ConfigError
from engines.model.config import FAMILIES, ModelConfig
from engines.model.fields import HARMLESS, READ, REFUSED
from engines.model.transformers_import import import_transformers

COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "use_cache": True,
    "num_hidden_layers": 4,
}
"""The shapes below are shortened; the names and kinds of the fields are those of published checkpoints."""
LLAMA_31 = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
FINE_TUNE = {
    **LLAMA_31,
    "_name_or_path": "/home/someone/checkpoint-1200",
    "_attn_implementation_autoset": True,
    "unsloth_version": "2025.1",
    "id2label": {"0": "LABEL_0"},
    "temperature": 0.6,
    "max_length": 4096,
    "head_dim": 128,
    "pad_token_id": 128004,
    "quantization_config": None,
    "some_new_thing": None,
}
MISTRAL = {
    **COMMON,
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN25 = {
    **COMMON,
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 2,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": True,
    "use_mrope": None,
    "vocab_size": 152064,
}
QWEN3 = {
    **COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "layer_types": ["full_attention"] * 4,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = [LLAMA_31, FINE_TUNE, MISTRAL, QWEN25, QWEN3]


def test_files_as_they_are_published_are_read_whole() -> None:
    llama, tuned, mistral, qwen25, qwen3 = (ModelConfig.from_hf(raw) for raw in PUBLISHED)
    assert llama.eos_token_ids == (128001, 128008, 128009)
    assert llama.rope_scaling is not None
    assert llama.rope_scaling.kind == "llama3"
    assert dataclasses.replace(tuned, head_dim=llama.head_dim) == llama
    assert mistral.windows == (4096,) * 4
    assert qwen25.windows == (0, 0, 131072, 131072)
    assert (qwen25.context, qwen25.qkv_bias, qwen25.kv_heads) == (131072, True, 4)
    assert (qwen3.rope_theta, qwen3.windows, qwen3.qk_norm) == (1e6, (), True)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_transformers_own_class_is_known(family: str) -> None:
    """Fails when a new release of transformers has a field that nobody here has looked at."""
    transformers = import_transformers()
    kind = transformers.CONFIG_MAPPING[family]
    fields = {field.name for field in dataclasses.fields(kind)} | set(kind().to_dict())
    assert len(fields) > 25
    assert {name for name in fields if name[0] != "_"} - READ - HARMLESS - set(REFUSED) == set()
    sampling = transformers.GenerationConfig._get_default_generation_params()
    assert set(sampling) - HARMLESS == set()


def test_the_lists_do_not_overlap() -> None:
    assert not READ & HARMLESS
    assert not (READ | HARMLESS) & set(REFUSED)


DIFFERENT = [
    ("hidden_act", "gelu"),
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0),
    ("query_pre_attn_scalar", 256),
    ("num_local_experts", 8),
    ("num_experts", 128),
    ("n_routed_experts", 64),
    ("kv_lora_rank", 512),
    ("mamba_d_state", 16),
    ("attention_chunk_size", 8192),
    ("partial_rotary_factor", 0.5),
    ("logit_scale", 0.0625),
    ("logits_scaling", 8.0),
    ("embedding_multiplier", 12.0),
    ("residual_multiplier", 0.22),
    ("attention_multiplier", 0.0078125),
    ("clip_qkv", 8.0),
    ("no_rope_layers", [1, 1, 1, 0]),
    ("use_qk_norm", True),
    ("is_causal", False),
    ("alibi", True),
    ("rope_interleave", True),
    ("per_layer_config", {"1": {"num_key_value_heads": 2}}),
    ("quantization_config", {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}),
    ("auto_map", {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}),
    ("architectures", ["LlamaForSequenceClassification"]),
    ("some_new_thing", 0.5),
    ("some_new_switch", False),
]


@pytest.mark.parametrize(("key", "value"), DIFFERENT)
def test_a_field_that_asks_for_other_arithmetic_is_refused(key: str, value: Any) -> None:
    for raw in (LLAMA_31, QWEN3):
        with pytest.raises(ConfigError) as caught:
            ModelConfig.from_hf({**raw, key: value})
        text = str(caught.value)
        assert text.startswith(f"config.json: {key}=")
        assert len(text) < 200
        assert "\n" not in text


def test_values_that_change_nothing_are_taken() -> None:
    expected = ModelConfig.from_hf(LLAMA_31)
    for key, (_, neutral) in REFUSED.items():
        for value in neutral:
            assert ModelConfig.from_hf({**LLAMA_31, key: value}) == expected

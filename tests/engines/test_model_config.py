"""ModelConfig reads what it can honour and names the field of what it cannot."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from engines.config import ConfigError
from engines.model.config import FAMILIES, ModelConfig
from engines.model.rope import inverse_frequencies, rope_tables
from engines.model.rope_scaling import RopeScaling
from engines.model.transformers_import import import_transformers

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
    assert (llama.rope_theta, llama.rms_eps, llama.eos_token_ids) == (10_000.0, 1e-6, (2,))
    qwen2 = ModelConfig.from_hf({**RAW, "model_type": "qwen2", "sliding_window": 64, "eos_token_id": [1, 2]})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.windows) == (True, False, ())
    assert qwen2.eos_token_ids == (1, 2)
    qwen3 = ModelConfig.from_hf({**RAW, "model_type": "qwen3", "eos_token_id": 7})
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.eos_token_ids) == (128, True, (7,))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_is_left_out_has_the_default_of_transformers(family: str) -> None:
    theirs = import_transformers().CONFIG_MAPPING[family]()
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    ours = ModelConfig.from_hf({"model_type": family} | {key: getattr(theirs, key) for key in needed})
    assert ours == ModelConfig.from_hf(theirs.to_dict())
    assert (ours.kv_heads, ours.head_dim) == (theirs.num_key_value_heads, head_dim(theirs))
    assert (ours.max_positions, ours.rms_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert (ours.rope_theta, ours.rope_scaling) == (theirs.rope_parameters["rope_theta"], None)
    assert ours.tied_embeddings is theirs.tie_word_embeddings
    assert ours.windows == ((4096,) * theirs.num_hidden_layers if family == "mistral" else ())
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.bos_token_id == theirs.bos_token_id


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


SCALINGS = {
    "llama": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
    "mistral": RopeScaling("linear", 2.5),
    "qwen2": RopeScaling("yarn", 4.0, original_max_positions=32768, attention_factor=1.25, beta_fast=16.0),
    "qwen3": RopeScaling("yarn", 2.0, original_max_positions=100, truncate=False),
}


@pytest.mark.parametrize("family", FAMILIES)
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
        rope_scaling=SCALINGS[family],
        rms_eps=1e-5,
        tied_embeddings=True,
        qkv_bias=family == "qwen2",
        mlp_bias=family == "llama",
        qk_norm=family == "qwen3",
        windows={"llama": (), "mistral": (64, 64)}.get(family, (0, 64)),
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
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias=True is not supported for model_type=qwen2"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias=True is not supported for"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type=dynamic is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type=longrope is not supported"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type=proportional is not supported"),
        ({"rope_scaling": {"mrope_section": [4, 2, 2]}}, "mrope_section among the rotary parameters"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor=0.0"),
        ({"rope_theta": 0}, "rope_theta=0.0 needs to be above 1"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types=linear_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers=2"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types does not fit sliding_window=None of a"),
        ({"sliding_window": 8}, "sliding_window=8 of a model_type=llama"),
        (
            {"model_type": "mistral", "sliding_window": 0},
            "sliding_window=0 of a model_type=mistral: needs to be",
        ),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"] * 2},
            "which means sliding_attention in every layer",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types does not fit sliding_window=None of a model_type=qwen3",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"vocab_size": "many"}, "vocab_size='many' needs a number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"num_hidden_layers": 0}, "layers=0 needs a whole number above 0"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05 needs to be 0 or above"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' needs true or false"),
        ({"attention_bias": [1]}, "attention_bias=[1] needs true or false"),
        ({"bos_token_id": "x"}, "bos_token_id='x' needs a token id"),
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


def test_which_layers_have_a_window() -> None:
    """Exactly those that transformers' classes give one, for every way to say it."""
    mistral = {**RAW, "model_type": "mistral"}
    qwen = {**RAW, "num_hidden_layers": 4, "sliding_window": 512}
    used = {**qwen, "use_sliding_window": True}
    mixed = ["sliding_attention", "full_attention"] * 2
    for raw in (
        {**mistral, "sliding_window": None},
        {**mistral, "sliding_window": 7},
        *({**raw, "model_type": family} for family in ("qwen2", "qwen3") for raw in (qwen, used)),
        {**used, "model_type": "qwen2", "max_window_layers": 3},
        {**used, "model_type": "qwen3", "max_window_layers": 0, "layer_types": None},
        {**used, "model_type": "qwen3", "max_window_layers": 3, "layer_types": mixed},
        {**qwen, "model_type": "qwen2", "layer_types": ["full_attention"] * 4},
    ):
        theirs = import_transformers().CONFIG_MAPPING[raw["model_type"]](**copy.deepcopy(raw))
        kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
        windows = [theirs.sliding_window or 0 if kind == "sliding_attention" else 0 for kind in kinds]
        ours = ModelConfig.from_hf(raw)
        assert [ours.window(i) for i in range(ours.layers)] == windows, raw


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 2048),
        ({"type": "linear", "factor": 3.0}, 6144),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}, 2048),
    ],
)
def test_the_context_is_that_of_the_stretched_positions(scaling: Any, context: int) -> None:
    config = ModelConfig.from_hf({**RAW, "rope_scaling": scaling})
    assert config.context == context
    config.check_context(context)
    with pytest.raises(
        ConfigError, match=rf"engine\.max_model_len={context + 1}: the model has {context} pos"
    ):
        config.check_context(context + 1)


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 500000},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 7.0},
    {"rope_scaling": {"type": "linear", "factor": 3}, "rope_theta": 5e4},
    {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
        | {"original_max_position_embeddings": 64},
        "rope_theta": 500.0,
    },
    {"rope_parameters": YARN},
    {
        "rope_scaling": {"type": "yarn", "factor": 4.0},
        "rope_theta": 1e4,
        "rope_parameters": {**YARN, "factor": 2.0},
    },
    {"rope_parameters": YARN, "original_max_position_embeddings": 256},
    {"rope_parameters": {**YARN, "factor": None, "original_max_position_embeddings": 300, "truncate": False}},
    {"rope_parameters": {**YARN, "attention_factor": 0.75, "beta_fast": 8, "beta_slow": 2}},
    {
        "rope_parameters": {
            **YARN,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "original_max_position_embeddings": 32,
        }
    },
]


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_frequencies_are_those_of_transformers_to_the_bit(rope: dict[str, Any]) -> None:
    transformers = import_transformers()
    for head_dim in (16, 128):
        raw = {**RAW, "head_dim": head_dim, **rope}
        theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
            transformers.LlamaConfig.from_dict(copy.deepcopy(raw))
        )
        ours = ModelConfig.from_hf(raw)
        assert torch.equal(inverse_frequencies(ours), theirs.inv_freq)
        cos, sin = rope_tables(ours, torch.device("cpu"))
        for ours_table, table in zip(
            (cos, sin), theirs(torch.zeros(1), torch.arange(300)[None]), strict=True
        ):
            torch.testing.assert_close(ours_table[:300], table[0], rtol=0, atol=2e-7)


def test_rotary_tables_turn_the_first_pair_by_one_radian() -> None:
    cos, sin = rope_tables(ModelConfig.from_hf(RAW), torch.device("cpu"))
    assert cos.shape == sin.shape == (2048, 16)
    assert torch.equal(cos[:, :8], cos[:, 8:])
    torch.testing.assert_close(cos[:, 0], torch.arange(2048.0).cos())
    torch.testing.assert_close(sin[1, 7], torch.tensor(10_000.0 ** (-14 / 16)).sin())

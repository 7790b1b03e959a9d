"""The fields of a config.json: which of them change a decoder's answers, and which do not.

The lean model's arithmetic is written by hand: a field that it does not know may ask for what it does not do,
and would get wrong answers without a word. Therefore an allow-list: every field is read, known to be
harmless, or refused by name. model.impl=hf needs no such list, since there transformers' own code reads the
fields; only what its attention asks of our cache is checked (`refuse_other_state`).

Read from the configuration classes of Llama, Mistral, Qwen2 and Qwen3 and of their relatives in transformers
5.24.0; a test holds the lists against the installed classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engines.config import ConfigError

_READ = """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act rms_norm_eps max_position_embeddings tie_word_embeddings
    attention_bias mlp_bias rope_theta rope_scaling rope_parameters original_max_position_embeddings
    sliding_window use_sliding_window max_window_layers layer_types bos_token_id eos_token_id
"""
# Weights are converted from the dtype in which they were stored to that of the run.
_STORAGE = "transformers_version torch_dtype dtype tokenizer_class name_or_path unsloth_version unsloth_fixed"
_TRAINING = """
    initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop gradient_checkpointing
    id2label label2id num_labels problem_type finetuning_task task_specific_params
"""
# How a library runs the model; pretraining_tp splits a product into the same sum.
_LIBRARY = """
    use_cache pretraining_tp chunk_size_feed_forward return_dict return_dict_in_generate output_attentions
    output_hidden_states output_scores torchscript use_bfloat16 attn_implementation use_flash_attn is_decoder
    tf_legacy_loss tie_encoder_decoder cross_attention_hidden_size
"""
_UNREAD_IDS = "pad_token_id sep_token_id decoder_start_token_id prefix model_max_length max_sequence_length"
# How transformers would sample; here the request says it.
_GENERATION = """
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens do_sample
    diversity_penalty early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff
    eta_cutoff exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty
    max_length min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule
    num_beam_groups num_beams num_return_sequences remove_invalid_values repetition_penalty suppress_tokens
    target_lookbehind temperature top_k top_p typical_p
"""
READ = frozenset(_READ.split())
HARMLESS = frozenset(
    word for text in (_STORAGE, _TRAINING, _LIBRARY, _UNREAD_IDS, _GENERATION) for word in text.split()
)

_OFF: tuple[Any, ...] = (None, False, 0, [], {}, "")
_ONE: tuple[Any, ...] = (None, 1)

OTHER_STATE: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "attn_logit_softcapping": ("soft-capped attention scores", (None,)),
    "attention_chunk_size": ("attention within chunks of the context", (None,)),
    "is_causal": ("attention that is not causal", (None, True)),
    "use_bidirectional_attention": ("attention that is not causal", _OFF),
    "is_encoder_decoder": ("an encoder", _OFF),
    "add_cross_attention": ("an encoder", _OFF),
    "num_kv_shared_layers": ("layers that share another layer's keys and values", _OFF),
    "per_layer_config": ("layers of different shapes", _OFF),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        ("mixture of experts", _OFF),
    ),
    "kv_lora_rank": ("multi-head latent attention", _OFF),
    **dict.fromkeys(
        (
            *("mamba_d_state", "mamba_n_heads", "state_size", "ssm_cfg", "linear_num_value_heads"),
            *("linear_num_heads", "conv_L_cache", "attn_layer_period", "attn_layer_indices"),
        ),
        ("layers whose state is not keys and values (Mamba, linear attention, convolution)", _OFF),
    ),
}
"""Needs more than causal attention over keys and values of one shape, whatever code runs it. Field: (what it
means, values at which it means nothing)."""

REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    **OTHER_STATE,
    "quantization_config": ("only unquantised checkpoints run", _OFF),
    "compression_config": ("only unquantised checkpoints run", _OFF),
    "auto_map": ("modelling code of the checkpoint's own", _OFF),
    "final_logit_softcapping": ("soft-capped logits", (None,)),
    "query_pre_attn_scalar": ("another scale of the attention scores", (None,)),
    "attention_multiplier": ("another scale of the attention scores", (None,)),
    "embedding_multiplier": ("scaled embeddings", _ONE),
    "residual_multiplier": ("scaled residuals", _ONE),
    "scale_emb": ("scaled embeddings", _ONE),
    "scale_depth": ("scaled residuals", (None,)),
    "dim_model_base": ("scaled logits", (None,)),
    "logits_scaling": ("scaled logits", _ONE),
    "logit_scale": ("scaled logits", _ONE),
    "clip_qkv": ("clipped queries, keys and values", (None,)),
    "no_rope_layers": ("layers without rotary positions", _OFF),
    "no_rope_layer_interval": ("layers without rotary positions", (None,)),
    "partial_rotary_factor": ("rotary positions in a part of the head", _ONE),
    "rotary_pct": ("rotary positions in a part of the head", _ONE),
    "rope_interleave": ("interleaved rotary pairs", _OFF),
    "rope_interleaved": ("interleaved rotary pairs", _OFF),
    "rope_local_base_freq": ("rotary positions that differ between layers", (None,)),
    "layer_rope_theta": ("rotary positions that differ between layers", (None,)),
    "sliding_window_pattern": ("windows by a pattern; layer_types works", (None,)),
    "qk_layernorm": ("norms of queries and keys", _OFF),
    "use_qk_norm": ("norms of queries and keys", _OFF),
    "qkv_bias": ("biases that the family does not have", _OFF),
    "use_bias": ("biases that the family does not have", _OFF),
    "use_parallel_residual": ("attention and MLP side by side", _OFF),
    "alibi": ("positions as a bias of the scores", _OFF),
    "pruned_heads": ("pruned heads", _OFF),
    "text_config": ("a model of several parts", _OFF),
    "vision_config": ("a model of several parts", _OFF),
}
"""What the lean model does not do."""


def check_fields(raw: Mapping[str, Any]) -> None:
    """Raises ConfigError naming the first field that the lean model cannot honour, or does not know. null is
    "not set", and what begins with an underscore is the library's own."""
    for key, value in raw.items():
        if key in REFUSED:
            _refuse(key, value, *REFUSED[key], " by model.impl=lean")
        elif key not in READ and key not in HARMLESS and value is not None and not key.startswith("_"):
            raise ConfigError(
                f"config.json: {key}={_short(value)} is unknown to model.impl=lean and may change the answers"
                "; model.impl=hf runs transformers' own code"
            )
    family = str(raw.get("model_type"))
    for name in raw.get("architectures") or ():
        if str(name).lower() != f"{family}forcausallm":
            raise ConfigError(
                f"config.json: architectures={name} is not supported: only {family}ForCausalLM is"
            )


def refuse_other_state(fields: Mapping[str, Any]) -> None:
    """Raises ConfigError for a decoder that needs more than its keys and values."""
    for key, (what, neutral) in OTHER_STATE.items():
        _refuse(key, fields.get(key), what, neutral)
    kinds = fields.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ConfigError(f"config.json: layer_types={_short(kinds)} needs a list")
    others = sorted({str(kind) for kind in kinds} - {"full_attention", "attention", "sliding_attention"})
    if others:
        raise ConfigError(
            f"config.json: layer_types={', '.join(others)} is not supported: only full_attention and "
            "sliding_attention are"
        )


def need(raw: Mapping[str, Any], key: str, kind: type = int) -> Any:
    """The number raw[key]. Raises ConfigError naming the field."""
    value = raw.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (kind is int and not isinstance(value, int)):
        raise ConfigError(
            f"config.json: {key}={_short(value)} needs a number"
            if key in raw
            else f"config.json: {key} is missing"
        )
    return kind(value)


def flag(raw: Mapping[str, Any], key: str) -> bool:
    """The switch raw[key], off where it is missing: "false" in quotes would be true. Raises ConfigError."""
    value = raw.get(key)
    if value not in (None, True, False):
        raise ConfigError(f"config.json: {key}={_short(value)} needs true or false")
    return bool(value)


def token_ids(raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A token id, or a list of them, or none."""
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise ConfigError(f"config.json: {key}={_short(value)} needs a token id or a list of them")
    return tuple(ids)


def _refuse(key: str, value: Any, what: str, neutral: tuple[Any, ...], by: str = "") -> None:
    if value not in neutral:
        raise ConfigError(f"config.json: {key}={_short(value)} is not supported{by} ({what})")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

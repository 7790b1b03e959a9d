"""Seeded random weights: the tiny model, and any shape with model.weights=dummy."""

from __future__ import annotations

import math

import torch

from engines.model.config import ModelConfig

TINY = ModelConfig(
    family="llama",
    hidden=384,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn=1024,
    vocab=384,
    max_positions=16384,
    rope_theta=10_000.0,
    rms_eps=1e-5,
    eos_token_ids=(257,),
    bos_token_id=256,
)
"""6.2 M parameters; ids 0-255 are bytes, 256 BOS, 257 EOS, 258 pad, the rest unused."""

_BAN = 100.0


def random_weights(
    config: ModelConfig,
    seed: int,
    embedding_std: float = 1.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Tensors under Hugging Face's names, drawn on `device` (another kind of device draws other numbers).
    Each product keeps the scale of its input, so that the logits of a deep stack of random layers stay
    spread: std 1 / sqrt(fan_in), norms of 1."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator, device=device)
        return drawn.mul_(gain / math.sqrt(columns)).to(dtype)

    hidden, q_size, kv_size = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    weights = {"model.embed_tokens.weight": normal(config.vocab, hidden, embedding_std * math.sqrt(hidden))}
    for i in range(config.layers):
        prefix = f"model.layers.{i}."
        attention = prefix + "self_attn."
        # Sharp scores (std 2): each query listens to a few keys instead of the mean of all, so the context
        # counts.
        for name, rows, gain in (("q", q_size, 2.0), ("k", kv_size, 1.0), ("v", kv_size, 1.0)):
            weights[f"{attention}{name}_proj.weight"] = normal(rows, hidden, gain)
            if config.qkv_bias:
                weights[f"{attention}{name}_proj.bias"] = torch.zeros(rows)
        weights[attention + "o_proj.weight"] = normal(hidden, q_size, 2.0)
        if config.o_bias:
            weights[attention + "o_proj.bias"] = torch.zeros(hidden)
        if config.qk_norm:
            weights[attention + "q_norm.weight"] = torch.ones(config.head_dim)
            weights[attention + "k_norm.weight"] = torch.ones(config.head_dim)
        weights[prefix + "mlp.gate_proj.weight"] = normal(config.ffn, hidden)
        weights[prefix + "mlp.up_proj.weight"] = normal(config.ffn, hidden)
        weights[prefix + "mlp.down_proj.weight"] = normal(hidden, config.ffn, 2.0)
        if config.mlp_bias:
            for name, rows in (("gate", config.ffn), ("up", config.ffn), ("down", hidden)):
                weights[f"{prefix}mlp.{name}_proj.bias"] = torch.zeros(rows)
        weights[prefix + "input_layernorm.weight"] = torch.ones(hidden)
        weights[prefix + "post_attention_layernorm.weight"] = torch.ones(hidden)
    weights["model.norm.weight"] = torch.ones(hidden)
    if not config.tied_embeddings:
        weights["lm_head.weight"] = normal(config.vocab, hidden, 3.0)
    return weights


def tiny_weights(seed: int) -> dict[str, torch.Tensor]:
    """The weights of model=tiny. It answers in printable ASCII and never ends by itself (an answer's length
    is the workload's business): component 0 of the residual stream is the same positive number at every
    token, no layer writes to it, and the head's row of every other id weighs it with a large negative number.
    So the ban is in the weights, and every implementation of the architecture obeys it."""
    weights = random_weights(TINY, seed, embedding_std=0.5)
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    for i in range(TINY.layers):
        weights[f"model.layers.{i}.self_attn.o_proj.weight"][0] = 0.0
        weights[f"model.layers.{i}.mlp.down_proj.weight"][0] = 0.0
    head = weights["lm_head.weight"]
    allowed = torch.zeros(TINY.vocab, dtype=torch.bool)
    allowed[ord(" ") : ord("~") + 1] = True
    head[:, 0] = torch.where(allowed, 0.0, -_BAN)
    return weights

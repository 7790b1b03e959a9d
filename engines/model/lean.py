"""A hand-written decoder for the Llama family (Llama, Mistral, Qwen2, Qwen3; Touvron et al. 2023 and
successors): RMSNorm before each block, rotary positions, grouped-query attention over the paged cache, gated
SiLU MLP.

Q, K and V are one matrix product, gate and up another. After the last layer's attention only the rows that
will be sampled go on: no later layer needs the others. Up to there everything is one call where all
operations are in C++ (kernels.cpu.layers); elsewhere, and to be read, it is `_operations`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engines.config import ConfigError
from engines.model.base import ForwardContext, RowProbe
from engines.model.checkpoint import to_dtype
from engines.model.config import ModelConfig
from engines.model.linear import Linear, fuses_gate
from engines.model.rope import rope_tables
from kernels import fused
from kernels.cpu.layers import CppLayers, LayerWeights


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LeanModel:
    """Weights of one checkpoint, laid out for speed."""

    def __init__(
        self,
        config: ModelConfig,
        weights: MutableMapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """weights: tensors under Hugging Face's names; they are taken out one by one, so that two copies of
        the model never exist at once. Raises ConfigError for a missing or misshapen tensor."""
        self.config = config
        self.parameters = 0
        self.ops: fused.FusedOps = fused.ops(device, dtype)
        take = _Taker(self, weights, device, dtype)
        hidden, q_size, kv_size = (
            config.hidden,
            config.heads * config.head_dim,
            config.kv_heads * config.head_dim,
        )
        self._sizes = (q_size, kv_size, kv_size)
        self.embedding = take("model.embed_tokens.weight", config.vocab, hidden)
        self.layers = [self._layer(take, f"model.layers.{i}.") for i in range(config.layers)]
        self.norm = take("model.norm.weight", hidden)
        if config.tied_embeddings:
            self.head = Linear(self.embedding)
        else:
            self.head = Linear(take("lm_head.weight", config.vocab, hidden))
        _refuse_leftovers(weights, config)
        self._cos, self._sin = rope_tables(config, device)
        self._one_call = self._compose()

    def _layer(self, take: _Taker, prefix: str) -> Layer:
        c = self.config
        q_size, kv_size, _ = self._sizes
        attention = prefix + "self_attn."
        rows = {"q": q_size, "k": kv_size, "v": kv_size}
        qkv = torch.cat([take(f"{attention}{n}_proj.weight", size, c.hidden) for n, size in rows.items()])
        bias = None
        if c.qkv_bias:
            bias = torch.cat([take(f"{attention}{n}_proj.bias", size) for n, size in rows.items()])
        gate_up = torch.cat([take(f"{prefix}mlp.{n}_proj.weight", c.ffn, c.hidden) for n in ("gate", "up")])
        gate_up_bias = down_bias = None
        if c.mlp_bias:
            gate_up_bias = torch.cat([take(f"{prefix}mlp.{n}_proj.bias", c.ffn) for n in ("gate", "up")])
            down_bias = take(prefix + "mlp.down_proj.bias", c.hidden)
        return Layer(
            input_norm=take(prefix + "input_layernorm.weight", c.hidden),
            qkv=Linear(qkv, bias),
            q_norm=take(attention + "q_norm.weight", c.head_dim) if c.qk_norm else None,
            k_norm=take(attention + "k_norm.weight", c.head_dim) if c.qk_norm else None,
            o=Linear(
                take(attention + "o_proj.weight", c.hidden, q_size),
                take(attention + "o_proj.bias", c.hidden) if c.o_bias else None,
            ),
            mlp_norm=take(prefix + "post_attention_layernorm.weight", c.hidden),
            gate_up=Linear(gate_up, gate_up_bias, gated=fuses_gate(gate_up, gate_up_bias)),
            down=Linear(take(prefix + "mlp.down_proj.weight", c.hidden, c.ffn), down_bias),
        )

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """token_ids, positions [T] -> logits [R, vocab] of the rows ctx.sample_rows."""
        tokens, c = token_ids.shape[0], self.config
        residual = F.embedding(token_ids, self.embedding)
        attended = residual.new_empty(tokens, c.heads, c.head_dim)
        attended[ctx.real_tokens :] = 0  # attention leaves the padding rows alone: keep them finite
        if self._one_call is not None and self._one_call.suits(self.ops, ctx.backend):
            self._one_call(
                residual,
                attended,
                positions,
                ctx.k_caches,
                ctx.v_caches,
                ctx.slot,
                ctx.cu_q,
                ctx.kv_len,
                ctx.block_table,
                ctx.real_tokens,
            )
        else:
            self._operations(residual, attended, positions, ctx)
        rows = attended.view(tokens, c.heads * c.head_dim)
        if ctx.sample_rows.shape[0] == 0:
            return residual.new_empty(0, c.vocab)
        rows, residual = rows[ctx.sample_rows], residual[ctx.sample_rows]
        return self.head(self._mlp(rows, residual, self.layers[-1], self.norm))

    def _operations(
        self, residual: torch.Tensor, attended: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> None:
        """Every layer up to the last one's attention, which is left in attended [T, Hq, D]."""
        ops, eps, (tokens, heads, head_dim) = self.ops, self.config.rms_eps, attended.shape
        kv_heads, last = self.config.kv_heads, len(self.layers) - 1
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers):
            k_cache, v_cache = ctx.k_caches[i], ctx.v_caches[i]
            q, k, v = layer.qkv(x).split(self._sizes, dim=-1)
            q, k = q.view(tokens, heads, head_dim), k.view(tokens, kv_heads, head_dim)
            v = v.view(tokens, kv_heads, head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                ops.rms_norm(q, layer.q_norm, eps, out=q)
                ops.rms_norm(k, layer.k_norm, eps, out=k)
            ops.rope_write_kv(q, k, v, self._cos, self._sin, positions, k_cache, v_cache, ctx.slot)
            ctx.backend.paged_attention(
                q[: ctx.real_tokens],
                k_cache,
                v_cache,
                ctx.cu_q,
                ctx.kv_len,
                ctx.block_table,
                self.config.scale,
                ctx.max_q_len,
                attended[: ctx.real_tokens],
                window=self.config.window(i),
            )
            if i < last:
                rows = attended.view(tokens, heads * head_dim)
                x = self._mlp(rows, residual, layer, self.layers[i + 1].input_norm)

    def _mlp(
        self, attended: torch.Tensor, residual: torch.Tensor, layer: Layer, next_norm: torch.Tensor
    ) -> torch.Tensor:
        """What a layer does after its attention, and the norm that follows: rows [n, Hq D] -> [n, H]."""
        ops, eps = self.ops, self.config.rms_eps
        x = layer.o(attended)
        x = ops.add_rms_norm(x, residual, layer.mlp_norm, eps, out=x)
        x = layer.gate_up(x)
        x = layer.down(x if layer.gate_up.gated else ops.silu_mul(x))
        return ops.add_rms_norm(x, residual, next_norm, eps, out=x)

    @property
    def at_once(self) -> bool:
        """Whether there is one call for the layers, which is used where the attention is in C++ too."""
        return self._one_call is not None

    @contextlib.contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Forward operation by operation, also where one call would do: to see what each of them takes."""
        kept, self._one_call = self._one_call, None
        try:
            yield
        finally:
            self._one_call = kept

    def _compose(self) -> CppLayers | None:
        """The same as _operations in one call, where all of them are in C++."""
        weights = []
        for i, layer in enumerate(self.layers):
            products = {name: getattr(layer, name).own for name in ("qkv", "o", "gate_up", "down")}
            if not layer.gate_up.gated or None in products.values() or self.ops.name != "cpp":
                return None
            norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
            weights.append(LayerWeights(*norms, **products, window=self.config.window(i)))
        c = self.config
        tables = self._cos, self._sin
        return CppLayers(weights, c.heads, c.kv_heads, c.head_dim, *tables, c.rms_eps, c.scale)

    @property
    def linear_kind(self) -> str:
        """Who multiplies, for the records."""
        return self.layers[0].qkv.kind

    def row_probes(self) -> list[RowProbe]:
        first, ops, eps = self.layers[0], self.ops, self.config.rms_eps
        products = (first.qkv, first.o, first.gate_up, first.down)
        return [
            RowProbe(self.config.hidden, lambda x: ops.rms_norm(x, first.input_norm, eps)),
            *([] if first.gate_up.gated else [RowProbe(2 * self.config.ffn, ops.silu_mul)]),
            *(RowProbe(linear.in_features, linear) for linear in products),
            RowProbe(self.head.in_features, self.head, sampled_only=True),
        ]

    def close(self) -> None:
        """Nothing global was touched."""


def _refuse_leftovers(weights: MutableMapping[str, torch.Tensor], config: ModelConfig) -> None:
    """A tensor that nobody took (a bias, a norm) would make the answers wrong in silence."""
    for name in weights:
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings):
            continue
        raise ConfigError(
            f"the checkpoint's tensor {name} has no place in a {config.family} of this config.json"
        )


class _Taker:
    """Takes checked tensors out of the checkpoint and counts the parameters."""

    def __init__(
        self,
        model: LeanModel,
        weights: MutableMapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._model, self._weights, self._device, self._dtype = model, weights, device, dtype

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._weights.pop(name, None)
        if tensor is None:
            raise ConfigError(f"the checkpoint has no tensor {name}")
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"the checkpoint's {name} is {list(tensor.shape)}, config.json: {list(shape)}")
        self._model.parameters += tensor.numel()
        return to_dtype(name, tensor, self._device, self._dtype).contiguous()

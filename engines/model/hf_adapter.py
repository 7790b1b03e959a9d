"""Any Hugging Face decoder through our paged attention: transformers' modelling code, our cache and our
kernel.

transformers calls the attention function that is registered under a model's `_attn_implementation`, and hands
every extra keyword of `model.forward` to it unchanged; our ForwardContext travels that way. The name must not
contain "flash" (transformers then checks for that package), and without an entry among the mask functions no
mask is built, which suits a ragged batch. It fits models whose only state is attention over all earlier
tokens; a probe pass at the start refuses the others."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from engines.config import ConfigError
from engines.model.base import ForwardContext, RowProbe
from engines.model.config import ModelConfig
from engines.model.fields import refuse_other_state, token_ids
from engines.model.rope_scaling import RopeScaling
from engines.model.transformers_import import import_transformers

transformers = import_transformers()

NAME = "batchmark_paged"
_REFUSED_KEYWORDS = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "positions as a bias of the scores",
    "head_mask": "masked heads",
}
_open_adapters = 0  # the registration belongs to the process, not to one model


class HfAdapter:
    """A transformers model behind DecoderModel."""

    def __init__(
        self,
        raw: dict[str, Any],
        weights: dict[str, torch.Tensor] | None,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        """raw: a config.json. weights: tensors under the checkpoint's names; None: random ones. Raises
        ConfigError naming what the model needs and this attention does not do."""
        hf_config = _hf_config(raw)
        self.config = _shape(hf_config)
        _register()
        try:
            self._model = _build(hf_config, weights, seed, device, dtype)
            self.parameters = sum(p.numel() for p in self._model.parameters())
            self._probe(device)
        except BaseException:
            _unregister()
            raise
        self._closed = False

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """token_ids, positions [T] -> logits [R, vocab] of the rows ctx.sample_rows."""
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=ctx.sample_rows,
            batchmark_ctx=ctx,
        )
        return output.logits[0]

    def row_probes(self) -> list[RowProbe]:
        head = self._model.get_output_embeddings()
        probes: dict[tuple[str, tuple[int, ...]], RowProbe] = {}
        for module in self._model.modules():
            kind = type(module).__name__
            if isinstance(module, nn.Linear):
                shape = tuple(module.weight.shape)
                probes[f"{kind}{module is head}", shape] = RowProbe(
                    module.in_features, module, module is head
                )
            elif kind.endswith("Norm") and isinstance(module.weight, nn.Parameter):
                probes[kind, tuple(module.weight.shape)] = RowProbe(module.weight.shape[0], module)
        return list(probes.values())

    def close(self) -> None:
        """Take our attention out of transformers' global table again, when no other adapter uses it."""
        if not self._closed:
            self._closed = True
            _unregister()

    def _probe(self, device: torch.device) -> None:
        """One token through the model: what it asks of its attention shows here, before any request runs."""
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        probe = _AttentionProbe()
        ctx = ForwardContext(
            backend=probe,
            k_caches=cast(Any, probe),
            v_caches=cast(Any, probe),
            slot=zero - 1,
            cu_q=torch.tensor([0, 1], dtype=torch.int32, device=device),
            kv_len=torch.ones(1, dtype=torch.int32, device=device),
            block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
            max_q_len=1,
            real_tokens=1,
            sample_rows=zero,
        )
        family = self.config.family
        try:
            with torch.inference_mode():
                self.forward(zero, zero, ctx)
        except ConfigError:
            raise
        except Exception as error:  # modelling code that was not written for it fails in any way it likes
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"config.json: model_type={family} does not run through the paged attention ({reason})"
            ) from error
        shape = (self.config.heads, self.config.kv_heads, self.config.head_dim)
        if probe.layers != set(range(self.config.layers)):
            raise ConfigError(
                f"config.json: model_type={family} runs {len(probe.layers)} of {self.config.layers} layers "
                "through attention; the others keep state that the paged cache does not hold"
            )
        if probe.calls != self.config.layers:
            raise ConfigError(
                f"config.json: model_type={family} calls attention {probe.calls} times in "
                f"{self.config.layers} layers; the paged cache holds one set of keys and values a layer"
            )
        if probe.shapes != {shape}:
            raise ConfigError(
                f"config.json: model_type={family} calls attention with (heads, kv heads, head size) "
                f"{sorted(probe.shapes)}; the paged cache holds one shape, {shape}"
            )


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, Hq, T, D], rotated
    key: torch.Tensor,  # [1, Hk, T, D], rotated
    value: torch.Tensor,  # [1, Hk, T, D]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    batchmark_ctx: ForwardContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in every layer. Returns [1, T, Hq, D]."""
    if batchmark_ctx is None:
        raise RuntimeError(
            f"attn_implementation={NAME} runs only under engines.model.hf_adapter, which hands it a context"
        )
    for name, what in _REFUSED_KEYWORDS.items():  # never dropped: the answers would be wrong
        if kwargs.get(name) is not None:
            raise ConfigError(f"this model's attention uses {name} ({what}), which is not supported")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ConfigError("this model's attention is not causal")
    ctx, layer = batchmark_ctx, cast(int, module.layer_idx)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    k_cache, v_cache = ctx.k_caches[layer], ctx.v_caches[layer]
    ctx.backend.write_kv(k, v, k_cache, v_cache, ctx.slot)
    out = torch.empty_like(q)
    real = ctx.real_tokens
    out[real:] = 0  # attention leaves the padding rows alone: keep them finite
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    window = kwargs.get("sliding_window") or 0  # of this layer, None where it sees all
    ctx.backend.paged_attention(
        q[:real],
        k_cache,
        v_cache,
        ctx.cu_q,
        ctx.kv_len,
        ctx.block_table,
        scale,
        ctx.max_q_len,
        out[:real],
        window=window,
    )
    return out[None], None


class _AttentionProbe:
    """Stands for the backend and for the caches of a probe pass: notes what is asked, answers zeros."""

    name = "probe"

    def __init__(self) -> None:
        self.calls = 0
        self.layers: set[int] = set()
        self.shapes: set[tuple[int, int, int]] = set()

    def pairs(self, dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
        return False

    def __getitem__(self, layer: int) -> Any:
        self.layers.add(layer)

    def __len__(self) -> int:
        return len(self.layers)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, *_: Any) -> None:
        if k.shape != v.shape:
            raise ConfigError("this model's keys and values differ in size: the paged cache needs one size")
        self._kv_heads = k.shape[1]
        self.calls += 1

    def paged_attention(self, q: torch.Tensor, *rest: Any, window: int = 0) -> None:
        self.shapes.add((q.shape[1], self._kv_heads, q.shape[2]))
        rest[-1].zero_()


def _hf_config(raw: dict[str, Any]) -> Any:
    family = str(raw.get("model_type"))
    if family not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"config.json: model_type={family} is unknown to this version of transformers")
    if raw.get("quantization_config"):
        raise ConfigError("config.json: quantization_config is set; only unquantised checkpoints run")
    return transformers.CONFIG_MAPPING[family].from_dict(raw)


def _shape(config: Any) -> ModelConfig:
    """What the runner needs to know of any decoder. Raises ConfigError."""
    text: Any = config.get_text_config(decoder=True)
    family, fields = config.model_type, text.to_dict()
    refuse_other_state(fields)
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            raise ConfigError(
                f"config.json: rope_type={rope['rope_type']} is not supported: one long request would change "
                "its neighbours' positions"
            )
    heads, hidden, layers, positions = (
        _attribute(text, name, family)
        for name in ("num_attention_heads", "hidden_size", "num_hidden_layers", "max_position_embeddings")
    )
    scaling, factor = None, ropes.get("factor")
    if ropes.get("rope_type") in ("linear", "yarn") and isinstance(factor, int | float):
        original = ropes.get("original_max_position_embeddings") or positions
        scaling = RopeScaling(ropes["rope_type"], factor, original_max_positions=original)
    return ModelConfig(
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or hidden // heads,
        ffn=getattr(text, "intermediate_size", None) or 4 * hidden,
        vocab=_attribute(text, "vocab_size", family),
        max_positions=positions,
        rope_scaling=scaling,
        eos_token_ids=token_ids(fields, "eos_token_id"),
        bos_token_id=text.bos_token_id,
    )


def _attribute(config: Any, name: str, family: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ConfigError(
            f"config.json: a model_type={family} has no {name}: only decoders with attention run"
        )
    return value


def _build(
    config: Any,
    weights: dict[str, torch.Tensor] | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """The transformers model. Its parameters take dtype; its buffers (rotary frequencies) stay in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=NAME, dtype=torch.float32
        )
    if weights is not None:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        tied = set(model.all_tied_weights_keys)
        lost = [name for name in missing if name not in tied]
        if lost or unexpected:
            names = ", ".join((lost + unexpected)[:3])
            raise ConfigError(f"the checkpoint does not fit model_type={config.model_type}: {names}")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device=device, dtype=dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device=device)
    return model.eval()


def _register() -> None:
    global _open_adapters
    if _open_adapters == 0:
        transformers.AttentionInterface.register(NAME, paged_attention)
    _open_adapters += 1


def _unregister() -> None:
    global _open_adapters
    _open_adapters -= 1
    if _open_adapters == 0:
        transformers.AttentionInterface._global_mapping.pop(NAME, None)

"""One way to any model: `load_model` turns the `model` node of the configuration into weights and a
tokenizer.

transformers is imported by model.impl=hf alone: it takes seconds, and the other models don't need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engines.config import ConfigError
from engines.model.base import DecoderModel
from engines.model.checkpoint import find_checkpoint, read_config, read_tokenizer, read_weights
from engines.model.config import ModelConfig
from engines.model.lean import LeanModel
from engines.model.random_weights import TINY, random_weights, tiny_weights
from engines.model.smollm2 import ensure_smollm2
from engines.model.tokenizer import ByteTokenizer, Tokenizer
from kernels.memory import available_memory

WEIGHTS = {"tiny": ("random",), "smollm2": ("real", "dummy"), "hf": ("real", "dummy")}
"""What model.weights may be, per model.name; the first is the default."""
IMPLEMENTATIONS = ("lean", "hf")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run."""

    name: str  # what clients call it
    model: DecoderModel
    config: ModelConfig
    tokenizer: Tokenizer
    tokenizer_ref: str  # "bytes" or the path of a tokenizer.json
    parameters: int


def model_shape(model_cfg: Mapping[str, Any]) -> ModelConfig:
    """The shape of the model that `load_model` would load, without its weights. Raises ConfigError."""
    name = str(model_cfg.get("name"))
    if name == "tiny":
        return TINY
    if name == "smollm2":
        return ModelConfig.from_hf(read_config(ensure_smollm2()))
    model_id = model_cfg.get("id")
    folder = find_checkpoint(None if model_id is None else str(model_id), with_weights=False)
    return ModelConfig.from_hf(read_config(folder))


def load_model(
    model_cfg: Mapping[str, Any], device: torch.device, dtype: torch.dtype, seed: int
) -> LoadedModel:
    """model_cfg: the keys of harness/conf/model/*.yaml (name, id, weights, impl). seed: of random weights.
    Raises ConfigError, one line."""
    name, impl = str(model_cfg.get("name")), str(model_cfg.get("impl", "lean"))
    if name not in WEIGHTS:
        raise ConfigError(f"model={name}: choose from {', '.join(WEIGHTS)}")
    if impl not in IMPLEMENTATIONS:
        raise ConfigError(f"model.impl={impl}: choose from {', '.join(IMPLEMENTATIONS)}")
    weights = str(model_cfg.get("weights") or WEIGHTS[name][0])
    if weights not in WEIGHTS[name]:
        raise ConfigError(f"model.weights={weights}: choose from {', '.join(WEIGHTS[name])}")
    if name == "tiny":
        tokenizer: Tokenizer = ByteTokenizer(TINY.vocab, TINY.eos_token_ids)
        model = _build(impl, TINY.to_hf(), tiny_weights(seed), device, dtype)
        return _loaded(name, model, tokenizer)
    if name == "smollm2":
        return load_folder(ensure_smollm2(), name, impl, weights, device, dtype, seed)
    model_id = model_cfg.get("id")
    folder = find_checkpoint(None if model_id is None else str(model_id), with_weights=weights == "real")
    return load_folder(folder, str(model_id), impl, weights, device, dtype, seed)


def load_folder(
    folder: Path, name: str, impl: str, weights: str, device: torch.device, dtype: torch.dtype, seed: int
) -> LoadedModel:
    """A checkpoint in Hugging Face's layout. Raises ConfigError, one line, that begins with the folder."""
    try:
        raw = read_config(folder)
        if impl == "lean":
            _check_room(ModelConfig.from_hf(raw), device, dtype, drawn=weights != "real")
        tensors = read_weights(folder) if weights == "real" else None
        if tensors is None and impl == "lean":
            shape = ModelConfig.from_hf(raw)
            if device.type == "cuda":  # drawing 8 billion numbers on the host would take minutes
                tensors = random_weights(shape, seed, device=device, dtype=dtype)
            else:
                tensors = random_weights(shape, seed)
        model = _build(impl, raw, tensors, device, dtype, seed)
        try:
            tokenizer = read_tokenizer(folder, model.config, required=weights == "real")
        except BaseException:
            model.close()  # the adapter has registered itself with transformers
            raise
        return _loaded(name, model, tokenizer)
    except Exception as error:  # a checkpoint is foreign data: its libraries fail on it in any way they like
        text = " ".join(str(error).split())[:400]
        if not isinstance(error, ConfigError):
            text = f"this checkpoint cannot be loaded ({type(error).__name__}: {text[:300]})"
        raise ConfigError(text if text.startswith(str(folder)) else f"{folder}: {text}") from error


def _check_room(shape: ModelConfig, device: torch.device, dtype: torch.dtype, drawn: bool) -> None:
    """Weights that the memory does not hold are refused before the first is read, for the system would end
    the process in the middle. Random ones are drawn in float32 on a CPU."""
    size = 4 if drawn and device.type == "cpu" else dtype.itemsize
    needed, free = shape.parameters * size, available_memory(device)
    if needed > free:
        raise ConfigError(
            f"{shape.parameters:,} weights take {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free"
        )


def _build(
    impl: str,
    raw: dict[str, Any],
    tensors: dict[str, torch.Tensor] | None,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> DecoderModel:
    """raw: a config.json. tensors None: random weights of the implementation's own."""
    if impl == "hf":
        from engines.model.hf_adapter import HfAdapter

        return HfAdapter(raw, tensors, device, dtype, seed)
    assert tensors is not None
    return LeanModel(ModelConfig.from_hf(raw), tensors, device, dtype)


def _loaded(name: str, model: DecoderModel, tokenizer: Tokenizer) -> LoadedModel:
    return LoadedModel(name, model, model.config, tokenizer, tokenizer.ref, model.parameters)

"""One way to any model: `load_model` turns the `model` node of the configuration into weights and a
tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engines.config import ConfigError
from engines.model.base import DecoderModel
from engines.model.config import ModelConfig
from engines.model.lean import LeanModel
from engines.model.random_weights import TINY, tiny_weights
from engines.model.tokenizer import ByteTokenizer, Tokenizer

NAMES = ("tiny", "smollm2", "hf")
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


def load_model(
    model_cfg: Mapping[str, Any], device: torch.device, dtype: torch.dtype, seed: int
) -> LoadedModel:
    """model_cfg: the keys of harness/conf/model/*.yaml (name, id, weights, impl). Raises ConfigError, one
    line."""
    name, impl = str(model_cfg.get("name")), str(model_cfg.get("impl", "lean"))
    if name not in NAMES:
        raise ConfigError(f"model={name}: choose from {', '.join(NAMES)}")
    if impl not in IMPLEMENTATIONS:
        raise ConfigError(f"model.impl={impl}: choose from {', '.join(IMPLEMENTATIONS)}")
    if name == "tiny":
        _check_weights(model_cfg, ("random",))
        tokenizer = ByteTokenizer(TINY.vocab)
        model = LeanModel(TINY, tiny_weights(seed), device, dtype)
        return LoadedModel(name, model, TINY, tokenizer, tokenizer.ref, model.parameters)
    raise ConfigError(f"model={name}: not here yet")


def _check_weights(model_cfg: Mapping[str, Any], choices: tuple[str, ...]) -> str:
    weights = str(model_cfg.get("weights", choices[0]))
    if weights not in choices:
        raise ConfigError(f"model.weights={weights}: choose from {', '.join(choices)}")
    return weights

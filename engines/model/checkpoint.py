"""A checkpoint in Hugging Face's layout, on disk or on the hub: config.json, *.safetensors,
tokenizer.json."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from engines.config import ConfigError
from engines.model.config import ModelConfig
from engines.model.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SMALL_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
_SMALL_FILES += ["chat_template.jinja"]
_CONNECT_S = 5.0


def find_checkpoint(model_id: str | None, with_weights: bool) -> Path:
    """The folder of model.id: a local one, or a hub repository (fetched, or from the hub's own cache). Raises
    ConfigError, one line, within seconds when it cannot be had."""
    if not model_id:
        raise ConfigError("model.id is not set: model=hf needs a hub id or a local folder")
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.id={model_id}: the folder has no config.json")
        return folder
    if not _HUB_ID.fullmatch(model_id):
        raise ConfigError(f"model.id={model_id}: no such folder")
    return _from_hub(model_id, [*_SMALL_FILES, *(["*.safetensors*"] if with_weights else [])])


def _from_hub(model_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model_id, allow_patterns=patterns, local_files_only=True))
        if _complete(folder, "*.safetensors*" in patterns):
            return folder
    except Exception:  # not in the cache
        folder = Path()
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if offline:
        raise ConfigError(
            f"model.id={model_id}: no such folder, not in the hub's cache, and HF_HUB_OFFLINE is set"
        )
    _check_reachable(model_id)
    try:
        return Path(snapshot_download(model_id, allow_patterns=patterns))
    except Exception as error:  # the hub's errors share no base class across releases
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.id={model_id}: no such folder, and the hub did not give it ({reason})"
        ) from None


def _complete(folder: Path, with_weights: bool) -> bool:
    if not (folder / "config.json").is_file():
        return False
    files = weight_files(folder) if with_weights else []
    return not with_weights or (bool(files) and all(path.is_file() for path in files))


def _check_reachable(model_id: str) -> None:
    """One quick request, since the hub's client retries for minutes when there is no network."""
    import urllib.error
    import urllib.request

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_CONNECT_S).close()
    except urllib.error.HTTPError:
        return  # it answers: the hub's client will say what is wrong
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.id={model_id}: no such folder, not in the hub's cache, and {endpoint} does not answer "
            f"({error})"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected an object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with the end tokens of generation_config.json, which is where chat models keep them
    all."""
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        if eos is not None:
            raw["eos_token_id"] = eos
    return raw


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the model: the shards that the index names, or all there are."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in read_json(index).get("weight_map", {}).values()})
    return sorted(folder.glob("*.safetensors"))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder's safetensors files (one, or the shards that the index names),
    memory-mapped."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = weight_files(folder)
    if not files:
        raise ConfigError(
            f"{folder}: no *.safetensors file; model.weights=dummy runs the shape with random weights"
        )
    weights: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            weights.update(load_file(path))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: not readable as safetensors ({error})") from None
    return weights


def to_dtype(name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in the run's dtype, whatever it was stored in. Raises ConfigError where float16 ends before
    the values do: infinite weights would give answers of nothing."""
    result = tensor.to(device=device, dtype=dtype)
    if dtype == torch.float16 and not torch.isfinite(result).all():
        raise ConfigError(f"dtype=float16: the checkpoint's {name} has values above 65504; use bfloat16")
    return result


def read_tokenizer(folder: Path, config: ModelConfig, required: bool) -> Tokenizer:
    """The checkpoint's tokenizer; bytes when it has none and none is required."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        if required:
            raise ConfigError(
                f"{folder}: no tokenizer.json; transformers' AutoTokenizer writes one with save_pretrained()"
            )
        if config.vocab < 256:
            raise ConfigError(
                f"{folder}: no tokenizer.json, and vocab_size={config.vocab} is too small for bytes"
            )
        return ByteTokenizer(config.vocab, config.eos_token_ids)
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.is_file() else {}
    template_path = folder / "chat_template.jinja"
    template = _default_template(settings.get("chat_template"))
    if template_path.is_file():
        template = template_path.read_text(encoding="utf-8")
    values = {
        name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
    }
    return BpeTokenizer(path, config.eos_token_ids, template, values)


def _default_template(value: Any) -> str | None:
    """A chat template is text, or a list of named ones."""
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        return named.get("default")
    return value


def _content(token: Any) -> str:
    """A special token is text, or an object with its content."""
    return token.get("content", "") if isinstance(token, dict) else token or ""

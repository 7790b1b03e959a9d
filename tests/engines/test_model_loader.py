"""load_model: local folders, dummy weights, and one line for everything that cannot be loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engines.config import ConfigError
from engines.model.config import ModelConfig
from engines.model.lean import LeanModel
from engines.model.loader import LoadedModel, load_model
from engines.model.random_weights import random_weights, tiny_weights

SHAPE = ModelConfig(
    family="llama", hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=300, max_positions=64,
    eos_token_ids=(1,),
)  # fmt: skip
CPU, FLOAT32 = torch.device("cpu"), torch.float32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE.to_hf()))
    save_file(random_weights(SHAPE, 0), tmp_path / "model.safetensors")
    return tmp_path


def load(folder: str | Path, **more: Any) -> LoadedModel:
    return load_model({"name": "hf", "id": str(folder), "weights": "real", **more}, CPU, FLOAT32, 0)


def message(folder: str | Path, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i + 2 for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|user|>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_folder_with_its_tokenizer_and_chat_template(folder: Path) -> None:
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    (folder / "chat_template.jinja").write_text("<|user|>{{ messages[0]['content'] }}{{ eos_token }}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    loaded = load(folder)
    assert loaded.tokenizer_ref == str((folder / "tokenizer.json").resolve())
    assert loaded.config.eos_token_ids == loaded.tokenizer.eos_token_ids == (1, 5)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Grüße")) == "Grüße"
    ids = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    assert len(ids) == 3, "the markers of the template are single tokens"
    assert loaded.tokenizer.decode(ids) == "a"
    assert loaded.parameters == sum(t.numel() for t in random_weights(SHAPE, 0).values())


def test_dummy_weights_need_only_the_shape(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    loaded = load(folder, weights="dummy")
    assert loaded.tokenizer_ref == "bytes"
    assert loaded.config == SHAPE
    assert loaded.tokenizer.vocab_size == 300
    assert "no *.safetensors file; model.weights=dummy" in message(folder)


def test_random_weights_are_seeded() -> None:
    first, again, other = tiny_weights(0), tiny_weights(0), tiny_weights(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_weights_are_converted_from_the_dtype_that_they_are_stored_in(folder: Path, key: str) -> None:
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({**SHAPE.to_hf(), key: "bfloat16"}))
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in random_weights(SHAPE, 0).items()}
    save_file(weights, folder / "model.safetensors")
    for dtype in (torch.float32, torch.float16):
        model = load_model({"name": "hf", "id": str(folder)}, CPU, dtype, 0).model
        assert isinstance(model, LeanModel)
        assert model.embedding.dtype == dtype
        assert torch.equal(model.embedding.float(), weights["model.embed_tokens.weight"].float())
    weights["model.norm.weight"][3] = 1e5
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"dtype=float16: .* model\.norm\.weight has values above 65504"):
        load_model({"name": "hf", "id": str(folder)}, CPU, torch.float16, 0)


def test_rows_of_a_padded_vocabulary_have_no_bytes(folder: Path) -> None:
    """Embeddings are often padded to a round number: the model may say an id that no token has."""
    write_tokenizer(folder)
    loaded = load(folder)
    assert loaded.tokenizer.vocab_size < loaded.config.vocab == 300
    assert loaded.tokenizer.token_bytes(299) == b""


def test_tied_embeddings_are_one_tensor_whatever_the_file_holds(folder: Path) -> None:
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({**SHAPE.to_hf(), "tie_word_embeddings": True}))
    with_head = load(folder).parameters
    weights = random_weights(SHAPE, 0)
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    adapted = load(folder, impl="hf")
    adapted.model.close()
    assert load(folder).parameters == adapted.parameters == with_head
    (folder / "config.json").write_text(json.dumps(SHAPE.to_hf()))
    assert "no tensor lm_head.weight" in message(folder)
    assert "does not fit model_type=llama: lm_head.weight" in message(folder, impl="hf")


def test_what_is_wrong_with_a_folder_is_one_line(folder: Path) -> None:
    assert "no tokenizer.json" in message(folder)
    write_tokenizer(folder)
    weights = random_weights(SHAPE, 0)
    save_file({**weights, "lm_head.weight": torch.zeros(7, 32)}, folder / "model.safetensors")
    assert "lm_head.weight is [7, 32], config.json: [300, 32]" in message(folder)
    bias = "model.layers.0.self_attn.q_proj.bias"
    save_file({**weights, bias: torch.zeros(32)}, folder / "model.safetensors")
    assert f"tensor {bias} has no place in a llama" in message(folder)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    assert "has no tensor model.layers.1.mlp.up_proj.weight" in message(folder)
    (folder / "model.safetensors").write_bytes(b"junk")
    assert "not readable as safetensors" in message(folder)
    (folder / "config.json").write_text("{")
    assert "config.json: not readable as JSON" in message(folder)
    (folder / "config.json").unlink()
    assert f"model.id={folder}: the folder has no config.json" == message(folder)


@pytest.mark.parametrize("impl", ["lean", "hf"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", "x"),
        ("rms_norm_eps", None),
        ("eos_token_id", {}),
        ("rope_scaling", 1.5),
        ("layer_types", 7),
        ("hidden_act", "x"),
        ("hidden_size", "1"),
    ],
)
def test_a_field_of_the_wrong_kind_is_one_line(folder: Path, impl: str, field: str, value: Any) -> None:
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({**SHAPE.to_hf(), field: value}))
    text = message(folder, impl=impl)
    assert text.startswith(str(folder))
    if impl == "lean":
        assert field in text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", '{"chat_template": [{"x": 1}]}'),
        ("model.safetensors.index.json", '{"weight_map": []}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}'),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_a_broken_file_beside_the_weights_is_one_line(folder: Path, name: str, content: str | bytes) -> None:
    write_tokenizer(folder)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message(folder).startswith(str(folder))


@pytest.mark.parametrize("weights", ["real", "dummy"])
def test_weights_that_the_memory_does_not_hold_are_refused(
    folder: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4 * SHAPE.parameters
    monkeypatch.setattr("engines.model.loader.available_memory", lambda device: size - 1)
    assert "weights take" in message(folder, weights=weights)
    monkeypatch.setattr("engines.model.loader.available_memory", lambda device: size)
    assert load(folder, weights="dummy").parameters == SHAPE.parameters


def test_settings_that_do_not_exist() -> None:
    for cfg, expected in [
        ({"name": "big"}, "model=big: choose from tiny, smollm2, hf"),
        ({"name": "tiny", "impl": "fast"}, "model.impl=fast: choose from lean, hf"),
        ({"name": "tiny", "weights": "real"}, "model.weights=real: choose from random"),
        ({"name": "hf", "id": None}, "model.id is not set: model=hf needs a hub id or a local folder"),
        ({"name": "hf", "id": "/no/such/folder"}, "model.id=/no/such/folder: no such folder"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_model(cfg, CPU, FLOAT32, 0)
        assert str(caught.value) == expected


def test_a_hub_id_offline_is_one_line_and_quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "not in the hub's cache, and HF_HUB_OFFLINE is set" in message("some-org/no-such-model")


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    text = message("some-org/no-such-model")
    assert "http://127.0.0.1:9 does not answer" in text
    assert text.startswith("model.id=some-org/no-such-model: ")


def test_the_default_models_do_not_import_transformers() -> None:
    code = (
        "import sys, torch\n"
        "from engines.model.loader import load_model\n"
        "import engines.runner\n"
        "load_model({'name': 'tiny'}, torch.device('cpu'), torch.float32, 0)\n"
        "print('transformers' in sys.modules, 'huggingface_hub' in sys.modules)\n"
    )
    started = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert started.stdout.split() == ["False", "False"]

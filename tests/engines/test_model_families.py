"""The lean model and the Hugging Face adapter against transformers itself, on random tiny checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.config import ConfigError
from engines.model.lean import LeanModel
from engines.model.transformers_import import import_transformers
from engines.runner import ModelRunner, build_runner
from kernels.cpu.library import available
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
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-llama3-biases": {
        "model_type": "llama",
        "rope_parameters": LLAMA3,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 10,
    },
    "llama-yarn-no-groups": {"model_type": "llama", "rope_parameters": YARN, "num_key_value_heads": 6},
    "llama-group-of-7": {
        "model_type": "llama",
        "rope_parameters": LINEAR,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "hidden_size": 56,
    },
    "mistral": {
        "model_type": "mistral",
        "head_dim": 16,
        "sliding_window": None,
        "rope_parameters": LINEAR,
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 5, "tie_word_embeddings": True},
    "mistral-window-of-1": {"model_type": "mistral", "sliding_window": 1, "rope_parameters": YARN},
    "qwen2": {"model_type": "qwen2", "rms_norm_eps": 1e-5},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
        "rope_parameters": {**YARN, "attention_factor": 1.5, "truncate": False},
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3-window-biases": {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": MIXED,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "rope_parameters": LLAMA3,
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
        torch.manual_seed(list(FAMILIES).index(request.param))
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


def load(folder: Path, impl: str, attention: str = "auto", dtype: str = "auto") -> ModelRunner:
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return build_runner(
        {"name": "hf", "id": str(folder), "impl": impl}, engine_config(), "cpu", dtype, attention=attention
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
        # Its cache for a window of 1 keeps every token (5.24.0); without a cache the mask is right.
        cached = getattr(model.config, "sliding_window", None) != 1
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, use_cache=cached
        )
        assert seq.answer == expected[0, len(prompt) :].tolist()
    assert len({token for seq in seqs for token in seq.answer}) > 6


def test_a_config_says_how_many_weights_there_are(checkpoint: Path) -> None:
    with contextlib.closing(load(checkpoint, "lean")) as runner:
        assert runner.loaded.config.parameters == runner.loaded.parameters


def test_lean_model_over_the_torch_attention(checkpoint: Path) -> None:
    answers = []
    for attention in ("torch", "auto"):
        seqs = [Seq(list(prompt)) for prompt in PROMPTS]
        Passes(load(checkpoint, "lean", attention)).generate(seqs, answer=6, chunk=7)
        answers.append([seq.answer for seq in seqs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_call_has_the_bits_of_its_operations(checkpoint: Path, dtype: str) -> None:
    runner = load(checkpoint, "lean", dtype=dtype)
    model = runner.loaded.model
    assert isinstance(model, LeanModel)
    if not available():
        pytest.skip("no C++ kernels here")
    assert model.at_once == model.layers[0].gate_up.gated  # biases of the MLP are not part of the call
    logits = []
    for way in (contextlib.nullcontext, model.one_by_one):
        seqs = [Seq(list(prompt)) for prompt in PROMPTS]
        with way():
            Passes(runner).generate(seqs, answer=6, chunk=7)
        logits.append(torch.cat([torch.stack(seq.logits) for seq in seqs]))
    runner.close()
    assert len(logits[0]) == 6 * len(PROMPTS)
    assert logits[0].isfinite().all()
    assert torch.equal(logits[0], logits[1])


def own_logits(folder: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    """transformers' logits after each prompt."""
    model = import_transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([prompt])).logits[0, -1].float() for prompt in PROMPTS]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("checkpoint", ["llama", "mistral-window", "qwen2-window", "qwen3"], indirect=True)
def test_half_precision_is_no_further_from_float32_than_transformers_own(
    checkpoint: Path, dtype: str
) -> None:
    """The errors of rounding are of one size: the root mean square over all logits, with room for chance."""
    exact, theirs = own_logits(checkpoint, torch.float32), own_logits(checkpoint, getattr(torch, dtype))
    allowed = 1.5 * error(theirs, exact)
    for impl in ("lean", "hf"):
        seqs = [Seq(list(prompt)) for prompt in PROMPTS]
        runner = load(checkpoint, impl, dtype=dtype)
        Passes(runner).generate(seqs, answer=1, chunk=5)
        runner.close()
        assert 0 < error([seq.logits[0].float() for seq in seqs], exact) < allowed, impl


def error(logits: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return float((torch.stack(logits) - torch.stack(exact)).square().mean().sqrt())


OTHERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "layer_types": MIXED},
    "cohere2": {"sliding_window": 5, "layer_types": MIXED},
    "olmo3": {"sliding_window": 5, "layer_types": MIXED},
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 0.5},
    "phi3": {"sliding_window": 5},
    "smollm3": {"no_rope_layer_interval": 2},
}


@pytest.mark.parametrize("family", OTHERS)
def test_families_beyond_the_lean_model_run_through_the_adapter(family: str, tmp_path: Path) -> None:
    transformers = import_transformers()
    config = transformers.CONFIG_MAPPING[family](**{**SHAPE, "pad_token_id": 0, **OTHERS[family]})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.25)
    model.save_pretrained(tmp_path)
    runner = load(tmp_path, "hf")
    seqs = [Seq(list(prompt)) for prompt in PROMPTS]
    Passes(runner).generate(seqs, answer=3, chunk=7)
    runner.close()
    for seq, prompt, logits in zip(seqs, PROMPTS, own_logits(tmp_path, torch.float32), strict=True):
        torch.testing.assert_close(seq.logits[0], logits, rtol=1e-4, atol=1e-4)
        expected = model.eval().generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False)
        assert seq.answer == expected[0, len(prompt) :].tolist()
    with pytest.raises(ConfigError, match=f"model_type={family} is not one of llama, mistral, qwen2, qwen3"):
        load(tmp_path, "lean")

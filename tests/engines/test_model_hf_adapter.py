"""The adapter: what it leaves behind, what it refuses, and transformers beside a package named kernels."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.config import ConfigError
from engines.model.hf_adapter import NAME, HfAdapter
from engines.model.loader import load_model
from engines.model.transformers_import import import_transformers
from engines.runner import build_runner
from tests.support.passes import Passes, Seq, engine_config

transformers = import_transformers()
CPU = torch.device("cpu")
RAW: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}


def adapter(**changes: Any) -> HfAdapter:
    return HfAdapter({**RAW, **changes}, None, CPU, torch.float32)


def registered() -> bool:
    return NAME in transformers.AttentionInterface._global_mapping


def test_the_process_is_left_as_it_was() -> None:
    before = dict(transformers.AttentionInterface._global_mapping)
    seed, dtype = torch.initial_seed(), torch.get_default_dtype()
    state = torch.random.get_rng_state()
    first, second = adapter(), adapter()
    assert registered()
    first.close()
    first.close()
    assert registered(), "the second still uses it"
    second.close()
    assert dict(transformers.AttentionInterface._global_mapping) == before
    assert (torch.initial_seed(), torch.get_default_dtype()) == (seed, dtype)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "gemma2"}, r"attn_logit_softcapping=50\.0 is not supported \(soft-capped"),
        ({"model_type": "no-such-model"}, "model_type=no-such-model is unknown"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type=dynamic",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is set"),
        ({"model_type": "gpt_oss", "num_local_experts": 2}, r"num_local_experts=2 .*mixture of experts"),
        ({"model_type": "qwen3_moe"}, r"experts=128 is not supported \(mixture of experts\)"),
        ({"model_type": "mixtral"}, r"num_local_experts=8 is not supported \(mixture of experts\)"),
        ({"model_type": "deepseek_v3"}, "is not supported"),
        ({"model_type": "qwen3_next"}, "is not supported"),
        ({"model_type": "falcon_h1"}, r"mamba_d_state=256 is not supported"),
        ({"model_type": "llama4_text"}, "is not supported"),
        ({"model_type": "mamba"}, r"state_size=16 is not supported \(layers whose state"),
        ({"model_type": "diffllama"}, "calls attention 4 times in 2 layers"),
        ({"model_type": "nemotron"}, "model_type=nemotron does not run through the paged attention"),
        ({"model_type": "bert", "hidden_act": "gelu", "is_decoder": True}, "config.json"),
    ],
)
def test_attention_that_it_cannot_do_is_refused_at_the_start(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        adapter(**changes)
    assert not registered()


def test_a_start_that_fails_later_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    """The model is whole; its tokenizer, and then its context, are what cannot be served."""
    (tmp_path / "config.json").write_text(json.dumps(RAW | {"vocab_size": 100}))
    model = {"name": "hf", "id": str(tmp_path), "impl": "hf", "weights": "dummy"}
    with pytest.raises(ConfigError, match="too small for bytes"):
        load_model(model, CPU, torch.float32, 0)
    assert not registered()
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    with pytest.raises(ConfigError, match="max_model_len"):
        build_runner(model, engine_config(max_model_len=10**6))
    assert not registered()


@pytest.mark.parametrize(("keyword", "what"), [("softcap", "soft-capped"), ("s_aux", "attention sinks")])
def test_what_a_model_asks_of_its_attention_is_never_dropped(keyword: str, what: str) -> None:
    """Also where no field of config.json says it."""
    model = adapter()
    model._model.forward = functools.partial(model._model.forward, **{keyword: torch.ones(4)})
    with pytest.raises(ConfigError, match=rf"uses {keyword} \({what}.*not supported"):
        model._probe(CPU)
    model.close()


def test_a_checkpoint_that_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match=r"does not fit model_type=llama: model\.embed_tokens\.weight"):
        HfAdapter(RAW, {"model.norm.weight": torch.ones(32)}, CPU, torch.float32)


def test_a_model_beyond_the_lean_families(tmp_path: Path) -> None:
    """Any decoder whose state is attention: here GPT-2, with learned positions and LayerNorm."""
    config = transformers.CONFIG_MAPPING["gpt2"](
        vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None, bos_token_id=None
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.3)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(
        '{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":[]},"added_tokens":[]}'
    )
    runner = build_runner(
        {"name": "hf", "id": str(tmp_path), "impl": "hf"}, engine_config(max_model_len=64), "cpu"
    )
    prompts = [[5, 9, 250, 4, 17], [100] * 11]
    seqs = [Seq(list(prompt)) for prompt in prompts]
    Passes(runner).generate(seqs, answer=6, chunk=4)
    for seq, prompt in zip(seqs, prompts, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert seq.answer == expected[0, len(prompt) :].tolist()
    runner.close()


def test_outside_the_adapter_the_attention_says_so() -> None:
    model = adapter()
    with pytest.raises(RuntimeError, match=r"runs only under engines\.model\.hf_adapter"):
        model._model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
    model.close()


def test_transformers_beside_a_distribution_named_kernels(tmp_path: Path) -> None:
    """That distribution's module has the name of our package: transformers must not reach for it."""
    version = transformers.utils.import_utils.KERNELS_MIN_VERSION
    info = tmp_path / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    (info / "RECORD").write_text("")
    code = (
        "import importlib.metadata as m; print(m.version('kernels'))\n"
        "import torch, kernels\n"
        "from engines.model.loader import load_model\n"
        "loaded = load_model({'name': 'tiny', 'impl': 'hf'}, torch.device('cpu'), torch.float32, 0)\n"
        "print(loaded.parameters, hasattr(kernels, 'get_backend'))\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [version, "6196608", "True"]

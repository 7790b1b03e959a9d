"""The runner: every row's bits are its own, and what cannot work is refused in one line."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.batch import RaggedBatch
from engines.config import ConfigError
from engines.model.base import RowProbe
from engines.model.invariance import BITWISE, find_row_guarantee
from engines.runner import ModelRunner, build_runner, kv_blocks, prepare_torch, resolve_device, resolve_dtype
from tests.support.passes import Passes, Seq, engine_config

TINY = {"name": "tiny", "id": None, "weights": "random", "impl": "lean"}
PROMPT = list(b"Paged attention keeps the keys and values of a sequence in blocks.")
OTHERS = [list(b"Hi"), list(b"a longer neighbour, with more tokens than the first"), list(b"xyz")]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    runner = build_runner(TINY, engine_config(), "cpu", request.param)
    if runner.info()["determinism"] != BITWISE:
        pytest.skip(f"{request.param}: {runner.info()['determinism']}")
    return runner


def fresh(runner: ModelRunner) -> ModelRunner:
    """The same weights behind a runner without the recorder of an earlier test."""
    model = runner.loaded.model
    while hasattr(model, "_model"):
        model = model._model
    runner.loaded = dataclasses.replace(runner.loaded, model=model)
    return runner


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> Seq:
    """The prompt whole, by itself: what every other way must give, bit for bit."""
    seq = Seq(list(PROMPT))
    Passes(fresh(runner)).generate([seq], answer=10)
    return seq


def assert_same_bits(seq: Seq, alone: Seq) -> None:
    assert seq.answer == alone.answer
    for got, expected in zip(seq.logits, alone.logits, strict=True):
        assert torch.equal(got, expected)


@settings(max_examples=8, deadline=None)
@given(chunk=st.integers(1, 70))
def test_chunked_prefill_gives_the_bits_of_whole_prefill(runner: ModelRunner, alone: Seq, chunk: int) -> None:
    seq = Seq(list(PROMPT))
    Passes(fresh(runner), seed=chunk).generate([seq], answer=4, chunk=chunk)
    for got, expected in zip(seq.logits, alone.logits[:4], strict=True):
        assert torch.equal(got, expected)


@settings(max_examples=8, deadline=None)
@given(chunk=st.integers(1, 70), order=st.permutations([0, 1, 2, 3]), start=st.integers(0, 6))
def test_a_batch_gives_the_bits_of_a_request_alone(
    runner: ModelRunner, alone: Seq, chunk: int, order: list[int], start: int
) -> None:
    seqs = [Seq(list(PROMPT)), *(Seq(list(other)) for other in OTHERS)]
    passes = Passes(fresh(runner), seed=chunk)
    passes.generate(seqs[1:], answer=start)  # the neighbours are already decoding when it arrives
    passes.generate([seqs[i] for i in order], answer=10, chunk=chunk)
    assert_same_bits(seqs[0], alone)


@settings(max_examples=8, deadline=None)
@given(at=st.integers(1, 9), chunk=st.integers(5, 80))
def test_recomputing_after_preemption_gives_the_same_bits(
    runner: ModelRunner, alone: Seq, at: int, chunk: int
) -> None:
    seqs = [Seq(list(PROMPT)), Seq(list(OTHERS[1]))]
    passes = Passes(fresh(runner))
    passes.generate(seqs, answer=at)
    passes.preempt(seqs[0])
    passes.generate(seqs, answer=10, chunk=chunk)
    assert_same_bits(seqs[0], alone)


def test_two_threads_give_the_bits_of_any_batch_too() -> None:
    runner = build_runner(TINY, engine_config(threads=2, max_num_batched_tokens=128), "cpu")
    try:
        if runner.info()["determinism"] != BITWISE:
            pytest.skip(runner.info()["determinism"])
        alone = Seq(list(PROMPT))
        Passes(runner).generate([alone], answer=3)
        seqs = [Seq(list(OTHERS[1])), Seq(list(PROMPT))]
        Passes(fresh(runner)).generate(seqs, answer=3, chunk=31)
        assert_same_bits(seqs[1], alone)
    finally:
        torch.set_num_threads(1)


def test_a_sampled_answer_depends_on_its_seed_alone(runner: ModelRunner) -> None:
    def answer(neighbours: int, seed: int) -> list[int]:
        mine = Seq(list(PROMPT), temperature=1.5, seed=seed)
        seqs = [Seq(list(o), temperature=1.0, seed=9) for o in OTHERS[:neighbours]]
        Passes(fresh(runner)).generate([*seqs, mine], answer=8)
        return mine.answer

    assert answer(0, seed=1) == answer(3, seed=1)
    assert answer(0, seed=1) != answer(0, seed=2)


def test_pad_rows_of_a_static_batch_change_nothing(runner: ModelRunner, alone: Seq) -> None:
    """Left pads: tokens with slot -1 in front of the real ones would be another sequence's business; here a
    row of its own over the null block, as the static engine sends it."""
    passes = Passes(fresh(runner))
    seq = Seq(list(PROMPT))
    passes.step([(seq, len(PROMPT) - 1)])
    table = np.zeros((2, len(seq.blocks)), np.int32)
    table[0] = seq.blocks
    last = len(PROMPT) - 1
    slot = seq.blocks[last // 4] * 4 + last % 4
    runner.run(
        RaggedBatch(
            token_ids=np.array([PROMPT[-1], 0, 0], np.int64),
            positions=np.array([last, 0, 1], np.int64),
            slot_mapping=np.array([slot, -1, -1], np.int64),
            cu_q=np.array([0, 1, 3], np.int32),
            kv_len=np.array([last + 1, 2], np.int32),
            block_table=table,
            sample_rows=np.array([0], np.int64),
        )
    )
    assert torch.equal(passes.recorder.logits[-1][0], alone.logits[0])


def test_tiny_answers_in_varied_printable_text(runner: ModelRunner) -> None:
    seq = Seq(list(b"Hello"))
    Passes(fresh(runner)).generate([seq], answer=60)
    assert len(set(seq.answer)) >= 10
    assert all(32 <= token < 127 for token in seq.answer)
    assert runner.loaded.tokenizer_ref == "bytes"
    assert 5e6 < runner.loaded.parameters < 10e6
    assert float(torch.stack(seq.logits)[:, 32:127].std()) > 1.0


def test_a_pass_without_samples_returns_none_and_counts_its_padding() -> None:
    runner = build_runner({**TINY, "impl": "hf"}, engine_config(), "cpu")
    passes = Passes(runner)
    multiple = runner.info()["row_multiple"]
    seq = Seq(list(PROMPT))
    passes.step([(seq, 3)])
    assert seq.answer == []
    assert passes.pad_rows == -3 % multiple
    runner.close()


def test_rows_that_depend_on_their_number_are_padded_or_reported() -> None:
    def odd(x: torch.Tensor) -> torch.Tensor:
        return x + (0.5 if len(x) % 4 else 0.0)

    def worse(x: torch.Tensor) -> torch.Tensor:
        return x + float(len(x))

    cpu, dtype = torch.device("cpu"), torch.float32
    assert find_row_guarantee([RowProbe(3, lambda x: x)], 64, 8, cpu, dtype).multiple == 1
    found = find_row_guarantee([RowProbe(3, odd)], 64, 8, cpu, dtype)
    assert (found.multiple, found.guarantee) == (4, BITWISE)
    assert find_row_guarantee([RowProbe(3, worse)], 64, 8, cpu, dtype).guarantee.startswith("not bitwise")


def test_the_pool_is_sized_once_and_refused_when_too_small() -> None:
    assert kv_blocks(engine_config(num_kv_blocks=5), 64) == 5  # what never fits is refused when it comes
    assert kv_blocks(engine_config(num_kv_blocks=None, kv_memory_gb=100.0), 64) == 8 * 32 + 1
    assert kv_blocks(engine_config(num_kv_blocks=None, kv_memory_gb=100 * 4 * 64 / 1e9), 64) == 100
    with pytest.raises(
        ConfigError, match=r"engine\.kv_memory_gb=1e-06 is 3 blocks .* needs 33, the null block included"
    ):
        kv_blocks(engine_config(num_kv_blocks=None, kv_memory_gb=1e-6), 64)


def test_a_pool_larger_than_the_memory_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(ConfigError, match=r"engine\.num_kv_blocks=1000000000: .* GB are free"):
        build_runner(TINY, engine_config(num_kv_blocks=1_000_000_000), "cpu")
    many = engine_config(
        num_kv_blocks=None, kv_memory_gb=1e9, max_num_seqs=10**9, max_num_batched_tokens=10**9
    )
    with pytest.raises(ConfigError, match=r"engine\.kv_memory_gb=1000000000\.0: .* GB are free"):
        build_runner(TINY, many, "cpu")


def test_caches_and_the_spinning_of_threads_are_bounded_before_torch_is_loaded() -> None:
    code = (
        "import importlib.abc, os, sys\n"
        "class Watch(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'torch':\n"
        "            print(*(os.environ[name] for name in sys.argv[1:]))\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "import engines.runner\n"
    )
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY", "GOMP_SPINCOUNT")
    bare = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-uc", code, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=bare)
    assert done.stdout.split() == ["256", "128", "50000"], done.stderr


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    prepare_torch()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["LRU_CACHE_CAPACITY"]) == ("ACTIVE", "7")


def test_devices_dtypes_and_contexts_that_cannot_work() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device=cuda: torch sees no CUDA"):
            resolve_device("cuda")
        assert resolve_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="device=tpu: choose from"):
        resolve_device("tpu")
    with pytest.raises(ConfigError, match="dtype=int8: choose from"):
        resolve_dtype("int8", torch.device("cpu"))
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
    too_long = engine_config(max_model_len=16385, max_num_batched_tokens=20000, num_kv_blocks=5000)
    with pytest.raises(ConfigError, match=r"engine\.max_model_len=16385: the model has 16384 positions"):
        build_runner(TINY, too_long, "cpu")


def test_info_says_what_ran(runner: ModelRunner) -> None:
    info = runner.info()
    assert info["num_kv_blocks"] == runner.num_kv_blocks == 200
    assert info["kv_bytes"] == 2 * 4 * 200 * 4 * 2 * 64 * (2 if info["dtype"] == "bfloat16" else 4)
    assert info["determinism"] == BITWISE
    assert info["threads"] == 1


def test_an_instruction_set_that_does_not_exist_is_a_setting_that_cannot_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATCHMARK_CPU_ISA", "bogus")
    with pytest.raises(ConfigError, match="BATCHMARK_CPU_ISA=bogus: choose from"):
        build_runner(TINY, engine_config(), "cpu")

"""Padded decode passes and the packing of a pass's arrays, on the CPU: all of CUDA graphs but the capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.batch import NULL_BLOCK, RaggedBatch
from engines.compiled import CompiledOps, compile_model
from engines.config import ConfigError
from engines.engine import Engine
from engines.graph_sizes import Shape, decode_shape, ladder, only_decodes, size_for
from engines.graphs import DecodeGraphs, why_no_graphs
from engines.request import Request, SamplingParams
from engines.runner import ModelRunner, build_runner
from engines.staging import Carried, Staging, words_of
from kernels.fused import TorchOps
from tests.support.engine_driver import MemoryLog, config
from tests.support.passes import engine_config

TINY = {"name": "tiny", "id": None, "weights": "random", "impl": "lean"}
LIMITS: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 128, "block_size": 16, "threads": 1}


def padded(runner: ModelRunner, sizes: tuple[int, ...], width: int = 8) -> DecodeGraphs:
    """What the runner builds on CUDA, with work that is run again in the place of work that is replayed."""
    with torch.inference_mode():
        return DecodeGraphs(
            lambda inputs: runner._forward(inputs, inputs.token_ids.shape[0], 1),
            sizes,
            width,
            runner.loaded.config.vocab,
            torch.float32,
            torch.device("cpu"),
            lambda work: work,
        )


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    cfg = config("continuous", **LIMITS, num_kv_blocks=60, max_num_batched_tokens=256)
    made = build_runner(TINY, cfg, "cpu", "float32")
    yield made
    made.close()


@pytest.fixture
def graphed(runner: ModelRunner) -> Iterator[ModelRunner]:
    runner._graphs = padded(runner, (4, 8))
    yield runner
    runner._graphs = None


def test_the_ladder_reaches_the_largest_batch() -> None:
    assert ladder(32) == (1, 2, 4, 8, 16, 24, 32)
    assert ladder(20) == (1, 2, 4, 8, 16, 20)
    assert ladder(3) == (1, 2, 3)
    assert ladder(1) == (1,)


@given(st.sets(st.integers(1, 300), min_size=1), st.integers(1, 300))
def test_a_batch_takes_the_smallest_size_that_holds_it(sizes: set[int], rows: int) -> None:
    assert size_for(sorted(sizes), rows) == min((s for s in sizes if s >= rows), default=None)


def play(runner: ModelRunner, sampling: SamplingParams) -> tuple[dict[int, list[int]], MemoryLog]:
    cfg = config("continuous", **LIMITS, max_num_batched_tokens=256)
    log = MemoryLog()
    engine = Engine(cfg, runner, num_kv_blocks=50, step_log=log, seed=5)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    answers: dict[int, list[int]] = {}
    for length, limit in [(1, 20), (15, 9), (16, 17), (17, 24), (33, 3), (90, 12), (7, 25), (64, 16)]:
        prompt = rng.integers(0, 256, length).tolist()
        answers[engine.add(Request(prompt, limit, sampling))] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            answers[output.seq_id] += output.token_ids
        engine.check_integrity()
    return answers, log


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_padded_decodes_give_the_same_tokens(
    runner: ModelRunner, temperature: float, request: pytest.FixtureRequest
) -> None:
    plain, _ = play(runner, SamplingParams(temperature))
    graphed = request.getfixturevalue("graphed")
    answers, log = play(graphed, SamplingParams(temperature))
    assert answers == plain
    info = graphed.info()["graphs"]
    decodes = [step for step in log.steps if set(step.kind) == {1}]
    assert info == {"on": True, "sizes": [4, 8], "passes": len(log.steps), "replayed": len(decodes)}
    assert 0 < len(decodes) < len(log.steps)
    sizes = {len(step.ids) + step.backend_pad_rows for step in decodes}
    assert sizes == {4, 8}, "a batch of decodes is as large as one of the sizes"


@torch.inference_mode()
def test_pad_rows_write_nothing_and_read_the_null_block_alone(graphed: ModelRunner) -> None:
    """A canary in every block: after a padded pass only the slots of the real rows have changed; with NaN in
    all that the rows do not own, the results are as they were."""
    torch.manual_seed(0)
    for cache in graphed._caches:
        cache.copy_(torch.randn(cache.shape))
        cache[NULL_BLOCK] = 0
    batch = decodes([(5, 3), (9, 20), (12, 16)], block_size=16)
    before = [cache.clone() for cache in graphed._caches]
    graphed._graphs, graphs = None, graphed._graphs
    plain = graphed.run(batch)
    alone = [cache.clone() for cache in graphed._caches]
    graphed._graphs = graphs
    for cache, old in zip(graphed._caches, before, strict=True):
        cache.copy_(old)
        cache[[block for block in range(1, 60) if block not in batch.block_table]] = float("nan")
    result = graphed.run(batch)
    assert (result.backend_pad_rows, result.token_ids.tolist()) == (1, plain.token_ids.tolist())
    owned = sorted(set(batch.block_table.ravel().tolist()) | {NULL_BLOCK})
    for cache, expected in zip(graphed._caches, alone, strict=True):
        assert torch.equal(cache[owned], expected[owned])
        assert not cache[NULL_BLOCK].any()
        others = [block for block in range(60) if block not in owned]
        assert cache[others].isnan().all()
        cache.zero_()


def decodes(rows: list[tuple[int, int]], block_size: int) -> RaggedBatch:
    """Rows of (first block, context): the blocks of a row follow each other."""
    kv_len = np.array([length for _, length in rows], np.int32)
    width = -(-int(kv_len.max()) // block_size)
    table = np.zeros((len(rows), width), np.int32)
    for row, (first, length) in enumerate(rows):
        used = -(-length // block_size)
        table[row, :used] = np.arange(first, first + used)
    last = kv_len.astype(np.int64) - 1
    slots = table[np.arange(len(rows)), last // block_size].astype(np.int64) * block_size + last % block_size
    return RaggedBatch(
        token_ids=np.arange(65, 65 + len(rows)),
        positions=last,
        slot_mapping=slots,
        cu_q=np.arange(len(rows) + 1, dtype=np.int32),
        kv_len=kv_len,
        block_table=table,
        sample_rows=np.arange(len(rows)),
    )


def test_other_batches_run_without_a_graph() -> None:
    batch = decodes([(1, 3), (2, 4)], 16)
    assert only_decodes(batch)
    assert not only_decodes(dataclasses.replace(batch, sample_rows=np.array([1])))  # a piece of a prompt
    longer = dataclasses.replace(batch, token_ids=np.arange(5), cu_q=np.array([0, 1, 5], np.int32))
    assert not only_decodes(longer)


def test_a_batch_that_is_too_large_or_too_long_runs_without_a_graph(graphed: ModelRunner) -> None:
    graphs = graphed._graphs
    assert graphs is not None
    assert graphs.shape_for(decodes([(1, 3)] * 8, 16)) == decode_shape(8, 8)
    assert graphs.shape_for(decodes([(1, 3)] * 9, 16)) is None
    assert graphs.shape_for(decodes([(1, 16 * 8)], 16)) == decode_shape(4, 8)
    assert graphs.shape_for(decodes([(1, 16 * 8 + 1)], 16)) is None


@given(st.data())
def test_staging_gives_back_what_it_was_given(data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    rows, tokens, width = len(lens), sum(lens), data.draw(st.integers(1, 4))
    samples = data.draw(st.integers(0, rows))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    batch = RaggedBatch(
        token_ids=rng.integers(0, 99, tokens),
        positions=rng.integers(0, 99, tokens),
        slot_mapping=rng.integers(-1, 99, tokens),
        cu_q=np.cumsum([0, *lens], dtype=np.int32),
        kv_len=rng.integers(1, 99, rows).astype(np.int32),
        block_table=rng.integers(1, 99, (rows, width)).astype(np.int32),
        sample_rows=rng.integers(0, tokens, samples),
    )
    more = data.draw(st.integers(0, 3))
    shape = Shape(tokens + more, rows + more, samples + more, width + data.draw(st.integers(0, 2)))
    source = np.where(rng.random(tokens) < 0.5, -1, rng.integers(0, 4, tokens))
    ids = torch.tensor([900, 901, 902, 903])
    staging = Staging(torch.device("cpu"))
    staging.views(shape).block_table.fill_(77)  # of an earlier pass
    found = staging.stage(batch, shape, Carried(source, ids))
    known = np.where(source < 0, batch.token_ids, 900 + source)
    assert found.token_ids.tolist() == [*known, *[0] * more]
    assert found.positions.tolist() == [*batch.positions, *[0] * more]
    assert found.slot.tolist() == [*batch.slot_mapping, *[-1] * more]
    assert found.sample_rows.tolist() == [*batch.sample_rows, *[0] * more]
    assert found.cu_q.tolist() == [*batch.cu_q, *range(tokens + 1, tokens + more + 1)]
    assert found.kv_len.tolist() == [*batch.kv_len, *[1] * more]
    assert torch.equal(found.block_table[:rows, :width], torch.from_numpy(batch.block_table))
    assert not found.block_table[rows:].any()
    assert not found.block_table[:, width:].any()
    for tensor in (getattr(found, field.name) for field in dataclasses.fields(found)):
        assert tensor.data_ptr() % 16 == 0
        assert tensor.is_contiguous()
    assert words_of(shape) * 8 >= sum(t.nbytes for t in (found.token_ids, found.block_table, found.cu_q))


@torch.inference_mode()
def test_carried_tokens_come_from_the_pass_before(runner: ModelRunner) -> None:
    """Two passes are launched, the second one on tokens that nobody has read yet."""
    first = decodes([(5, 1), (9, 1), (12, 1)], 16)
    second = decodes([(12, 2), (5, 2)], 16)
    one = runner.begin(first)
    two = runner.begin(second, Carried(np.array([2, 0]), one.ids))
    ids = one.result().token_ids
    for cache in runner._caches:
        cache.zero_()
    assert runner.run(first).token_ids.tolist() == ids.tolist()
    again = runner.run(dataclasses.replace(second, token_ids=ids[[2, 0]]))
    assert again.token_ids.tolist() == two.result().token_ids.tolist()


def test_where_graphs_cannot_be_they_are_off_or_refused() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert why_no_graphs(engine_config(), cuda, "triton") is None
    assert "device=cpu" in str(why_no_graphs(engine_config(), cpu, "cpp"))
    assert "attention=torch" in str(why_no_graphs(engine_config(), cuda, "torch"))
    assert "false" in str(why_no_graphs(engine_config(cuda_graphs=False), cuda, "triton"))
    with pytest.raises(ConfigError, match=r"^engine.cuda_graphs=true: device=cpu has none"):
        build_runner(TINY, engine_config(cuda_graphs=True), "cpu")
    with pytest.raises(ConfigError, match=r"^engine.cuda_graph_sizes=\[4, 9\]: needs batch sizes from 1 to"):
        engine_config(cuda_graph_sizes=(4, 9))
    with pytest.raises(ConfigError, match=r"^engine.compile=true: needs device=cuda, this is cpu"):
        build_runner(TINY, engine_config(compile=True), "cpu")


def test_what_is_compiled_can_be_traced_whole(runner: ModelRunner) -> None:
    """By Dynamo, with its graph run as it is: what inductor makes of it on CUDA is checked there."""
    with pytest.raises(ConfigError, match="needs device=cuda"):
        compile_model(runner.loaded.model, torch.device("cpu"))
    plain, compiled = TorchOps(), CompiledOps(TorchOps(), backend="eager")
    for rows in (3, 5, 9):
        x, weight = torch.randn(rows, 16), torch.randn(16)
        assert torch.equal(plain.rms_norm(x, weight, 1e-5), compiled.rms_norm(x, weight, 1e-5))
        assert torch.equal(plain.silu_mul(x), compiled.silu_mul(x))
        mine, theirs = torch.ones(rows, 16), torch.ones(rows, 16)
        out = torch.empty(rows, 16)
        expected = plain.add_rms_norm(x, mine, weight, 1e-5)
        assert torch.equal(compiled.add_rms_norm(x, theirs, weight, 1e-5, out=out), expected)
        assert torch.equal(mine, theirs)

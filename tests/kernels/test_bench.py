"""The attention bench measures what it says it measures."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from kernels.bench import __main__ as command
from kernels.bench import attention, cases, machine
from kernels.bench.attention import Line
from kernels.bench.cases import DECODE, PREFILL, Case, Pool, Shape
from kernels.reference import TorchBackend

SMALL = Shape("small", 4, 2, 16)
RAGGED = Case("ragged", ((1, 40), (5, 21), (7, 7), (1, 1)))
CPU = torch.device("cpu")


@pytest.fixture
def pool() -> Pool:
    return Pool(SMALL, 16, 2**20, torch.float32, CPU)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PRODUCTS", ((32, 64, 64),))
    monkeypatch.setattr(attention, "SAMPLE_S", 1e-4)
    for module in (attention, cases):
        monkeypatch.setattr(module, "CASES", (RAGGED, Case(DECODE, ((1, 64),) * 16)))


def test_work_of_a_ragged_batch() -> None:
    visible = 40 + (17 + 18 + 19 + 20 + 21) + sum(range(1, 8)) + 1
    assert RAGGED.flops(SMALL) == 4 * 4 * 16 * visible
    assert RAGGED.kv_bytes(SMALL, 4) == 2 * 2 * 16 * 4 * (40 + 21 + 7 + 1)


def test_batches_lie_side_by_side_over_the_whole_pool(pool: Pool) -> None:
    assert sum(c.numel() * c.element_size() for c in pool.caches) >= 2**20
    tables = pool.tables(RAGGED)
    used = torch.cat([table[table > 0] for table in tables])
    assert len(used) == len(used.unique()) == 7 * len(tables)
    assert pool.blocks - len(used) < 7
    assert not torch.equal(used, used.sort().values)
    rows = [part for batch in pool.contiguous(RAGGED) for k, v in batch for part in (k, v)]
    spans = sorted((part.data_ptr(), part.data_ptr() + part.numel() * 4) for part in rows)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("case", [RAGGED, Case("equal decodes", ((1, 33),) * 3)])
def test_the_lines_beside_compute_the_same_attention(pool: Pool, case: Case) -> None:
    q = pool.queries(case).split([n for n, _ in case.rows])
    for batch, call in ((0, 0), (-1, -1)):
        rows = pool.contiguous(case)[batch]
        found = cases.contiguous(pool, case)[call]()
        for i, (n, length) in enumerate(case.rows):
            k, v = (part.repeat_interleave(2, 0) for part in rows[i])
            seen = torch.ones(n, length, dtype=torch.bool).tril(length - n)
            expected = F.scaled_dot_product_attention(q[i].transpose(0, 1), k, v, attn_mask=seen)
            mine = found[i]
            got = mine.reshape(4, n, 16) if n == 1 else mine[0]
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_what_is_gathered_is_what_the_table_names(pool: Pool) -> None:
    found = cases.gathered(pool, RAGGED)[1]()
    table = pool.tables(RAGGED)[1]
    q = pool.queries(RAGGED)[:1].transpose(0, 1)
    keys, values = (
        cache.view(-1, 2, 16, 16)[table[0, :3].long()].transpose(0, 1).reshape(2, 48, 16)[:, :40]
        for cache in pool.caches
    )
    expected = F.scaled_dot_product_attention(q, keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0))
    torch.testing.assert_close(found[0].reshape(4, 1, 16), expected, atol=1e-5, rtol=1e-5)


def test_a_wrong_backend_is_told(pool: Pool) -> None:
    class Wrong(TorchBackend):
        def paged_attention(self, *args: object) -> None:
            super().paged_attention(*args)  # type: ignore[arg-type]
            args[-1][0] += 0.5  # type: ignore[index]

    assert attention.error_of(TorchBackend(), pool, RAGGED) == 0
    assert attention.error_of(Wrong(), pool, RAGGED) == pytest.approx(0.5)
    line = _line("smollm2", DECODE, "cpp", 1.0, 0.7, error=0.5)
    assert attention.wrong([line], torch.float32) == [
        f"smollm2, {DECODE}: cpp is 0.5 off the torch reference"
    ]
    assert attention.wrong([replace(line, error=float("nan"))], torch.bfloat16)
    assert not attention.wrong([replace(line, error=1e-6), replace(line, error=None)], torch.float32)


def test_goals() -> None:
    good = [
        _line("smollm2", DECODE, "cpp", 1.0, 0.61),
        _line("smollm2", DECODE, "sdpa", 1.1, 0.55),
        _line("smollm2", DECODE, "gather", 3.0, 0.2),
        _line("smollm2", PREFILL, "cpp", 5.0, 0.01),
        _line("smollm2", PREFILL, "sdpa", 5.0, 0.01),
    ]
    assert attention.missed(good, "cpp") == []
    slow = [replace(good[0], ms=1.2, share_of_bandwidth=0.5), *good[1:3], replace(good[3], ms=10.0), good[4]]
    assert attention.missed(slow, "cpp") == [
        f"smollm2, {DECODE}: 50% of the read bandwidth, needs 60%",
        f"smollm2, {DECODE}: 0.92x of sdpa, needs at least 1.00x",
        f"smollm2, {PREFILL}: 0.50x of sdpa, needs at least 1.00x",
    ]


def _line(shape: str, case: str, backend: str, ms: float, share: float, error: float | None = None) -> Line:
    return Line(shape, case, backend, ms, ms, ms, (ms, ms), 1.0, 1.0, share, 0.1, 3, error)


@pytest.mark.usefixtures("quick")
def test_a_table_for_people_and_a_line_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rotate-mb", "1", "--rounds", "2", "--backends", "torch", "--block-size", "32"]
    assert command.main(["--shapes", "2,1,16", *options]) == 0
    out = capsys.readouterr().out.splitlines()
    result = json.loads(out[-1])
    lines = result["results"]
    assert [line["backend"] for line in lines] == ["torch", "sdpa", "gather"] * len(cases.CASES)
    assert len([text for text in out if " torch " in text]) == len(cases.CASES)
    for line in lines:
        case = next(case for case in cases.CASES if case.name == line["case"])
        kv = case.kv_bytes(Shape("", 2, 1, 16), 4)
        assert line["gb_s"] == pytest.approx(kv / line["ms"] / 1e6, rel=1e-3)
        share = line["gb_s"] / result["machine"]["read_gb_s"]
        assert line["share_of_bandwidth"] == pytest.approx(share, rel=1e-2, abs=1e-5)
        assert line["ms_min"] <= line["ms"] <= line["ms_max"]
        assert (line["error"] is None) == (line["backend"] != "torch")


@pytest.mark.usefixtures("quick")
def test_the_machine_alone_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--machine", "--rotate-mb", "8", "--dtype", "bfloat16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["read_gb_s"] > 0
    assert found["gflop_s"] > 0
    assert (found["dtype"], found["buffer_bytes"]) == ("bfloat16", 8 * 2**20)


def test_no_cache_holds_the_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    for cache, least in ((0, 2**28), (2**20, 2**28), (2**29, 2**30)):
        monkeypatch.setattr(machine, "cache_bytes", lambda device, cache=cache: cache)
        assert machine.rotation_bytes(CPU) == least


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shapes", "7,2,64"], "--shapes 7,2,64: 7 heads are no multiple of 2 kv_heads"),
        (["--shapes", "gpt5"], "--shapes gpt5: choose from smollm2, qwen3-0.6b, llama-8b"),
        (["--rounds", "0"], "--rounds 0: needs at least 1"),
        (["--check", "--dtype", "bfloat16"], "--check: the goals are of float32 on the CPU"),
        (["--backends", "cpp", "--dtype", "float16"], "attention=cpp: runs float32 and bfloat16"),
        (["--device", "meta"], "--device meta: choose from cpu, cuda"),
        (["--rotate-mb", str(2**40)], f"--rotate-mb {2**40}: more than the memory that is free here"),
        (["--rotate-mb", "1", "--block-size", str(2**40)], f"--block-size {2**40}, --shapes smollm2 (9, 3"),
        (["--step", "--batches", "8", "0"], "--batches 8 0, --context 256: need at least 1"),
        (["--step", "--context", "0"], "--context 0: need at least 1"),
        (["--step", "--model", "hf", "--id", "/no/such"], "model.id=/no/such: no such folder"),
    ],
)
def test_what_cannot_work_is_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(options) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--step"], ["--machine"]])
def test_an_instruction_set_that_does_not_exist_is_one_line(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATCHMARK_CPU_ISA", "bogus")
    assert command.main(options) == 2
    assert capsys.readouterr().err == "BATCHMARK_CPU_ISA=bogus: choose from amx, avx512, avx2, native\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == ("--device cuda: torch sees no CUDA device here; use --device cpu\n")

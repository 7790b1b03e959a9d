"""Triton's paged attention in Triton's interpreter, in float32, against unpaged float64 attention.

Not collected by itself: test_triton_interpreter.py runs it in a process with TRITON_INTERPRET=1, which Triton
reads when it is imported. The interpreter runs one program after the other, so a later one could repair what
an earlier one broke; on a GPU the order is open. Hence the launches that stop early: after each program,
what is written must be right and the rest untouched.
"""

from __future__ import annotations

import math

import pytest
import torch

from kernels.reference import TorchBackend
from kernels.triton import attention
from kernels.triton.backend import TritonBackend
from tests.kernels.paged_cases import Cache, Shape, attend, exact

REFERENCE = TorchBackend()
WHOLE, SPLIT = TritonBackend("cpu", split_programs=0), TritonBackend("cpu", split_programs=10**6)
MIX = [(0, 40), (30, 1), (90, 21), (65, 1)]  # (context, new): a prompt, decodes, a chunk
DECODES = [(0, 1), (299, 1), (1099, 1), (255, 1), (256, 1)]


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """torch.empty gives NaN: a partial result that nobody wrote cannot pass for one."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Stopping:
    """Stands for a kernel and launches only the first programs of its grid along one axis."""

    def __init__(self, kernel, axis: int = 0, programs: int | None = None) -> None:
        self.kernel, self.axis, self.programs, self.grid = kernel, axis, programs, None

    def __getitem__(self, grid):
        self.grid = grid
        if self.programs is not None:
            grid = (*grid[: self.axis], self.programs, *grid[self.axis + 1 :])
        return self.kernel[grid]


def batch(shape: Shape, rows, seed: int = 0):
    cache = Cache(shape, [context + new for context, new in rows], seed)
    work = []
    for sequence, (context, new) in zip(cache.sequences, rows, strict=True):
        cache.write(REFERENCE, sequence, 0, context + new)
        work.append((sequence, context, context + new))
    return cache, work


def check(backend, shape: Shape, rows, window: int = 0) -> None:
    cache, work = batch(shape, rows)
    for row, got in zip(work, attend(backend, cache, work, window=window), strict=True):
        close(got, exact(*row, window=window))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_groups(group):
    check(WHOLE, Shape(group, 1, 32, 16), MIX)


@pytest.mark.parametrize(("dim", "window"), [(64, 0), (80, 33), (96, 0), (128, 33), (256, 0)])
def test_head_sizes(dim, window):
    check(WHOLE, Shape(3, 1, dim, 16), MIX, window)


@pytest.mark.parametrize("block_size", [1, 3, 24, 64, 256])
def test_block_sizes(block_size):
    check(WHOLE, Shape(3, 1, 64, block_size), MIX[1:], window=50)
    check(SPLIT, Shape(3, 1, 64, block_size), [(600, 1)], window=300)


@pytest.mark.parametrize("window", [1, 32, 1000])
def test_windows(window):
    check(WHOLE, Shape(6, 1, 32, 16), [(0, 50), (200, 21)], window)
    check(SPLIT, Shape(6, 1, 32, 16), DECODES[1:3], window)


@pytest.mark.parametrize("backend", [WHOLE, SPLIT])
def test_decodes(backend):
    check(backend, Shape(4, 1, 64, 16), DECODES)


def test_a_group_larger_than_a_tile():
    check(SPLIT, Shape(20, 1, 32, 16), [(300, 1), (5, 1)])
    check(WHOLE, Shape(40, 1, 32, 16), [(20, 2)])


@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(14, 2, 0), (6, 2, 20)])
def test_every_tile_alone_writes_its_rows_and_no_other(monkeypatch, heads, kv_heads, window):
    """Groups of 7 and 3: a tile has spare rows, which belong to the next one's queries."""
    rows = [(5, 13), (27, 1), (37, 22)]
    cache, work = batch(Shape(heads, kv_heads, 32, 16), rows)
    want = [exact(*row, window=window) for row in work]
    whole = Stopping(attention.attention_kernel)
    monkeypatch.setattr(attention, "attention_kernel", whole)
    attend(WHOLE, cache, work, window=window)
    for axis in (0, 1):
        before = 0
        for programs in range(1, whole.grid[axis] + 1):
            stopping = Stopping(whole.kernel, axis, programs)
            monkeypatch.setattr(attention, "attention_kernel", stopping)
            got = attend(WHOLE, cache, work, window=window)
            written = [~out.isnan() for out in got]
            for out, there, right in zip(got, written, want, strict=True):
                close(out[there], right[there])
                assert torch.equal(there.all(-1), there.any(-1))
            after = sum(int(there.sum()) for there in written)
            assert after >= before
            before = after
        assert before == sum(right.numel() for right in want)


def test_every_lane_alone_writes_its_part_and_no_other(monkeypatch):
    """The partial results are NaN until their own program writes them, and the reduction reads no other."""
    cache, work = batch(Shape(6, 2, 32, 16), [(0, 1), (513, 1)])
    partial = []
    kernel = attention.reduce_kernel

    class Seen(Stopping):
        def __getitem__(self, grid):
            launch = super().__getitem__(grid)
            return lambda out, acc, stats, *rest, **names: (
                partial.append((acc.clone(), stats.clone())),
                launch(out, acc, stats, *rest, **names),
            )

    monkeypatch.setattr(attention, "reduce_kernel", Seen(kernel))
    attend(SPLIT, cache, work)
    ((whole_acc, _),) = partial
    lanes = whole_acc.shape[2]
    assert lanes == 3
    whole_kernel = attention.attention_kernel
    for axis, programs in [(2, 1), (2, 2), (0, 1), (1, 1)]:
        partial.clear()
        monkeypatch.setattr(attention, "attention_kernel", Stopping(whole_kernel, axis, programs))
        attend(SPLIT, cache, work)
        ((acc, stats),) = partial
        there = ~acc.isnan()
        assert 0 < there.sum() < there.numel()
        assert torch.equal(acc[there], whole_acc[there])
        assert torch.equal(stats.isnan().any(-1), acc.isnan().any(-1))
    # And the reduction, program by program.
    monkeypatch.setattr(attention, "attention_kernel", whole_kernel)
    monkeypatch.setattr(attention, "reduce_kernel", Stopping(kernel, 1, 4))
    for row, out in zip(work, attend(SPLIT, cache, work), strict=True):
        close(out[:, :4], exact(*row)[:, :4])
        assert out[:, 4:].isnan().all()


def test_a_split_decode_depends_on_its_own_row_alone(monkeypatch):
    """Bits: beside other rows, beside longer ones (more lanes), and where lanes take several segments."""
    cache, work = batch(Shape(3, 1, 32, 16), [(1099, 1), (299, 1), (3, 1)])
    together = attend(SPLIT, cache, work)
    for row, beside in zip(work, together, strict=True):
        (alone,) = attend(SPLIT, cache, [row])
        assert torch.equal(alone, beside)
    monkeypatch.setattr(attention, "MAX_LANES", 2)
    for row, got in zip(work, attend(SPLIT, cache, work), strict=True):
        close(got, exact(*row))
    for row, got in zip(work, attend(SPLIT, cache, work, window=400), strict=True):
        close(got, exact(*row, window=400))


def test_a_row_depends_on_its_own_sequence_alone():
    """Bits, within one variant: neighbours and the cut of the prompt change nothing."""
    cache, work = batch(Shape(6, 1, 32, 16), [(0, 90), (0, 20)])
    whole, _ = attend(WHOLE, cache, work)
    (sequence, _, _), other = work
    for cut in (31, 64):
        first, _ = attend(WHOLE, cache, [(sequence, 0, cut), other])
        assert torch.equal(first, whole[:cut])
        _, second = attend(WHOLE, cache, [other, (sequence, cut, 90)])
        assert torch.equal(second, whole[cut:])


@pytest.mark.parametrize("backend", [WHOLE, SPLIT])
@pytest.mark.parametrize("queries", [3, 1])
def test_rows_behind_the_last_query_are_left_alone(backend, queries):
    """What pads a batch, for graphs or for determinism, in T and in S."""
    cache, work = batch(Shape(4, 2, 32, 16), [(20, queries), (40, 1)])
    table = torch.zeros(4, 4, dtype=torch.int32)
    for i, (sequence, _, _) in enumerate(work):
        table[i, : len(sequence.blocks)] = torch.tensor(sequence.blocks, dtype=torch.int32)
    q = torch.cat([s.q[start:end] for s, start, end in work] + [torch.full((9, 4, 32), float("nan"))])
    out = torch.full_like(q, math.inf)
    real = queries + 1
    cu_q = torch.tensor([0, queries, real, real, real], dtype=torch.int32)
    lengths = torch.tensor([20 + queries, 41, 5, 0], dtype=torch.int32)
    backend.paged_attention(q, cache.k, cache.v, cu_q, lengths, table, 32**-0.5, queries, out)
    close(out[:real], torch.cat([exact(*row) for row in work]))
    assert (out[real:] == math.inf).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, where the interpreter looks for a maximum
@pytest.mark.parametrize("backend", [WHOLE, SPLIT])
@pytest.mark.parametrize("longest", [1, 2])
def test_queries_without_keys_give_zeros_and_nan_stays_visible(backend, longest):
    cache, work = batch(Shape(4, 2, 32, 16), [(299, 1), (40, 1)])
    sequence = work[0][0]
    table = torch.tensor([sequence.blocks] * 3, dtype=torch.int32)
    q, lengths = torch.randn(3, 4, 32), torch.tensor([0, 290, 1], dtype=torch.int32)
    q[1] = float("nan")
    out = torch.full_like(q, math.inf)
    cu_q = torch.arange(4, dtype=torch.int32)
    backend.paged_attention(q, cache.k, cache.v, cu_q, lengths, table, 1.0, longest, out)
    assert torch.equal(out[0], torch.zeros(4, 32))
    assert out[1].isnan().all()
    close(out[2], sequence.v[0].repeat_interleave(2, dim=0).double())


def test_bad_tensors_are_refused_in_one_line():
    cache, work = batch(Shape(4, 2, 32, 16), [(0, 20)])
    sequence = work[0][0]
    q, out = sequence.q, torch.empty_like(sequence.q)

    def call(**changed):
        arguments = {
            "q": q,
            "k_cache": cache.k,
            "v_cache": cache.v,
            "cu_q": torch.tensor([0, 20]).int(),
            "kv_len": torch.tensor([20]).int(),
            "block_table": torch.tensor([sequence.blocks]).int(),
            "scale": 1.0,
            "max_q_len": 20,
            "out": out,
        }
        WHOLE.paged_attention(**(arguments | changed))

    wide = Cache(Shape(1, 1, 512, 16), [1], 0)
    bad = [
        ("q: needs torch.float32", {"q": q.half()}),
        ("not a multiple", {"q": q[:, :3], "out": out[:, :3]}),
        ("contiguous heads", {"q": q.transpose(0, 1).contiguous().transpose(0, 1)}),
        ("out: needs", {"out": out[:19]}),
        ("cu_q: needs", {"cu_q": torch.tensor([0, 20])}),
        ("kv_len: needs", {"kv_len": torch.tensor([20, 20]).int()}),
        ("block_table: needs", {"block_table": torch.tensor(sequence.blocks).int()}),
        ("block_table: needs", {"block_table": torch.tensor([sequence.blocks])}),
        ("caches: need", {"v_cache": cache.v[:, :, :8]}),
        ("window=-1", {"window": -1}),
        ("head size 512", {"q": wide.sequences[0].q, "k_cache": wide.k, "v_cache": wide.v}),
    ]
    for text, changed in bad:
        with pytest.raises(ValueError, match=text) as error:
            call(**changed)
        assert "\n" not in str(error.value)

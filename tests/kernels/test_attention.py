"""Both CPU backends against unpaged float64 attention, over ragged batches whose foreign slots are NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels.cpu.backend import CppBackend
from kernels.reference import TorchBackend
from tests.kernels.paged_cases import CPP, Cache, Sequence, Shape, attend, exact

BACKENDS = [TorchBackend(), *CPP]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.5e-2}

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(params=BACKENDS, ids=lambda b: getattr(b, "isa", b.name))
def backend(request):
    return request.param


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


shapes = st.builds(
    lambda group, kv_heads, dim, block_size, dtype: Shape(group * kv_heads, kv_heads, dim, block_size, dtype),
    st.sampled_from([1, 2, 3, 4, 7]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([20, 32, 64, 80, 96, 128]),
    st.sampled_from([1, 3, 16, 32, 48, 64, 100, 256]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
row_lengths = st.lists(
    st.tuples(st.integers(0, 150), st.integers(1, 80)), min_size=1, max_size=5
)  # context, new


@settings(max_examples=24, deadline=None)
@given(
    shapes,
    row_lengths,
    st.sampled_from([0, 0, 1, 5, 16, 64, 100, 1000]),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_ragged_batches_match_exact_attention(shape, rows, window, seed, plain):
    for backend in BACKENDS:
        cache = Cache(shape, [context + new for context, new in rows], seed, None if plain else backend)
        work = []
        for sequence, (context, new) in zip(cache.sequences, rows, strict=True):
            cache.write(backend, sequence, 0, context + new)
            work.append((sequence, context, context + new))
        for row, got in zip(work, attend(backend, cache, work, window=window), strict=True):
            close(got, exact(*row, window=window), shape.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_blocks_below_the_window_are_never_read(backend, block_size, dtype):
    """Their memory may be anybody's by now, and their entries in the table anything."""
    shape = Shape(heads=6, kv_heads=2, block_size=block_size, dtype=dtype)
    cache = Cache(shape, [400], block_size, backend)
    (sequence,) = cache.sequences
    cache.write(backend, sequence, 0, 400)
    for start, window in ((399, 1), (399, 65), (390, 130), (300, 64), (10, 500)):
        row = (sequence, start, 400)
        (want,) = attend(backend, cache, [row], window=window)
        close(want, exact(*row, window=window), dtype)
        freed = max(0, start - window + 1) // block_size
        gone = Sequence(sequence.q, sequence.k, sequence.v, [10**6] * freed + sequence.blocks[freed:])
        k, v = cache.k.clone(), cache.v.clone()
        cache.k[sequence.blocks[:freed]] = float("nan")
        cache.v[sequence.blocks[:freed]] = float("nan")
        (got,) = attend(backend, cache, [(gone, start, 400)], window=window)
        cache.k, cache.v = k, v
        assert torch.equal(got, want)


def test_a_negative_window_is_refused(backend):
    cache = Cache(Shape(), [20], seed=9)
    with pytest.raises(ValueError, match="window=-1"):
        attend(backend, cache, [(cache.sequences[0], 0, 20)], window=-1)


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [1, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_block_borders(backend, dim, block_size, dtype):
    shape = Shape(heads=3, kv_heads=1, dim=dim, block_size=block_size, dtype=dtype)
    for length in {1, max(1, block_size - 1), block_size, block_size + 1, 2 * block_size}:
        cache = Cache(shape, [length, length], length, backend)
        whole, decode = cache.sequences
        cache.write(backend, whole, 0, length)
        cache.write(backend, decode, 0, length)
        got = attend(backend, cache, [(whole, 0, length), (decode, length - 1, length)])
        close(got[0], exact(whole, 0, length), shape.dtype)
        close(got[1], exact(decode, length - 1, length), shape.dtype)


def test_long_context_with_large_scores(backend):
    """The online softmax rescales: scores reach +-100, most weights vanish, none overflows."""
    shape = Shape(heads=2, kv_heads=1, dim=64, block_size=16)
    cache = Cache(shape, [2000], seed=1)
    (sequence,) = cache.sequences
    cache.write(backend, sequence, 0, 2000)
    (got,) = attend(backend, cache, [(sequence, 1900, 2000)], scale=3.0)
    want = exact(sequence, 1900, 2000, scale=3.0)
    torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=2e-4)


def test_write_stores_rows_and_nothing_else(backend):
    """Negative slots are skipped; every slot that no token names keeps its canary."""
    shape = Shape(heads=2, kv_heads=2, dim=32, block_size=16)
    cache = Cache(shape, [40], seed=2)
    (sequence,) = cache.sequences
    cache.k.fill_(7.0)
    cache.v.fill_(7.0)
    slot = cache.slots(sequence, 0, 40)
    slot[[0, 13, 39]] = -1
    slot[1] = -99
    backend.write_kv(sequence.k, sequence.v, cache.k, cache.v, slot)
    keys = cache.k.permute(0, 3, 1, 2).reshape(-1, 2, 32)  # by slot
    values = cache.v.permute(0, 2, 1, 3).reshape(-1, 2, 32)
    written = slot[slot >= 0]
    assert torch.equal(keys[written], sequence.k[slot >= 0])
    assert torch.equal(values[written], sequence.v[slot >= 0])
    others = torch.ones(len(keys), dtype=torch.bool)
    others[written] = False
    assert others.sum() > 3 * 16
    assert (keys[others] == 7.0).all()
    assert (values[others] == 7.0).all()


@pytest.mark.parametrize(("block_size", "dim"), [(16, 32), (48, 80)])
def test_a_paired_cache_holds_neighbours_side_by_side(block_size, dim):
    """What was written stands where kernels.interface says; slots that no token names keep their canary."""
    backend = CppBackend()
    shape = Shape(heads=2, kv_heads=2, dim=dim, block_size=block_size, dtype=torch.bfloat16)
    cache = Cache(shape, [40], 2, backend)
    (sequence,) = cache.sequences
    assert cache.k.shape[2:] == (dim // 2, block_size, 2)
    assert cache.v.shape[2:] == (block_size // 2, dim, 2)
    cache.k.fill_(7.0)
    cache.v.fill_(7.0)
    slot = cache.slots(sequence, 0, 40)
    slot[[0, 13, 39]] = -1
    backend.write_kv(sequence.k, sequence.v, cache.k, cache.v, slot)
    plain = kernels.allocate_kv(len(cache.k), block_size, 2, dim, torch.bfloat16, "cpu")
    for plain_cache in plain:
        plain_cache.fill_(7.0)
    TorchBackend().write_kv(sequence.k, sequence.v, *plain, slot)
    assert torch.equal(cache.k.permute(0, 1, 2, 4, 3).flatten(2, 3), plain[0])
    assert torch.equal(cache.v.permute(0, 1, 2, 4, 3).flatten(2, 3), plain[1])


def test_attention_reads_only(backend):
    cache = Cache(Shape(), [50], seed=3)
    (sequence,) = cache.sequences
    cache.write(backend, sequence, 0, 50)
    before = cache.k.clone(), cache.v.clone(), sequence.q.clone()
    attend(backend, cache, [(sequence, 0, 50)])
    for was, now in zip(before, (cache.k, cache.v, sequence.q), strict=True):
        assert torch.equal(was.nan_to_num(-1.0), now.nan_to_num(-1.0))


def test_pad_rows_on_the_null_block_are_finite(backend):
    """A pad row attends to zeros in block 0, over any length, beside rows that stay right."""
    shape = Shape(block_size=16)
    cache = Cache(shape, [30, 90], seed=4)
    real, pad = cache.sequences
    cache.write(backend, real, 0, 30)
    pad.blocks = [0] * len(pad.blocks)
    outputs = attend(backend, cache, [(pad, 89, 90), (real, 0, 30), (pad, 60, 90)])
    close(outputs[1], exact(real, 0, 30), shape.dtype)
    assert torch.equal(outputs[0], torch.zeros_like(outputs[0]))
    assert torch.equal(outputs[2], torch.zeros_like(outputs[2]))


def test_queries_without_keys_give_zeros(backend):
    """Rows with no queries are skipped; a query that sees no key is 0, never NaN."""
    cache = Cache(Shape(), [20], seed=5)
    (sequence,) = cache.sequences
    cache.write(backend, sequence, 0, 20)
    q = torch.randn(3, 4, 32)
    out = torch.full_like(q, float("nan"))
    table = torch.tensor([sequence.blocks] * 3, dtype=torch.int32)
    cu_q, kv_len = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 20, 1])
    backend.paged_attention(q, cache.k, cache.v, cu_q.int(), kv_len.int(), table, 1.0, 2, out)
    assert torch.equal(out[:2], torch.zeros(2, 4, 32))
    only = sequence.v[0].repeat_interleave(2, dim=0)
    close(out[2], only.double(), torch.float32)
    # Two queries, one key: the first sits before the sequence.
    cu_q, kv_len = torch.tensor([0, 2]), torch.tensor([1])
    backend.paged_attention(q[:2], cache.k, cache.v, cu_q.int(), kv_len.int(), table[:1], 1.0, 2, out[:2])
    assert torch.equal(out[0], torch.zeros(4, 32))
    close(out[1], only.double(), torch.float32)


def test_a_nan_query_stays_visible_and_alone(backend):
    cache = Cache(Shape(), [90], seed=8)
    (sequence,) = cache.sequences
    cache.write(backend, sequence, 0, 90)
    (before,) = attend(backend, cache, [(sequence, 0, 90)])
    sequence.q[70] = float("nan")
    (after,) = attend(backend, cache, [(sequence, 0, 90)])
    assert after[70].isnan().all()
    others = torch.arange(90) != 70
    torch.testing.assert_close(after[others], before[others], atol=1e-6, rtol=1e-6)


def test_strided_queries_and_outputs(backend):
    """Slices of one fused projection, as the models pass them."""
    shape = Shape(heads=4, kv_heads=2, dim=32)
    cache = Cache(shape, [37], seed=6)
    (sequence,) = cache.sequences
    fused = torch.cat([sequence.q.flatten(1), sequence.k.flatten(1), sequence.v.flatten(1)], dim=1)
    sequence.q, sequence.k, sequence.v = (
        part.unflatten(1, (-1, 32)) for part in fused.split([128, 64, 64], dim=1)
    )
    assert not sequence.k.is_contiguous()
    cache.write(backend, sequence, 0, 37)
    wide = torch.full((37, 8, 32), float("nan"))
    table, kv_len = torch.tensor([sequence.blocks]), torch.tensor([37])
    backend.paged_attention(
        sequence.q,
        cache.k,
        cache.v,
        torch.tensor([0, 37]).int(),
        kv_len.int(),
        table.int(),
        32**-0.5,
        37,
        wide[:, 4:],
    )
    close(wide[:, 4:], exact(sequence, 0, 37), shape.dtype)
    assert wide[:, :4].isnan().all()


def test_bad_tensors_are_refused_before_they_are_read():
    backend, shape = CppBackend(), Shape()
    cache = Cache(shape, [20], seed=7)
    (sequence,) = cache.sequences
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
        backend.paged_attention(**(arguments | changed))

    call()
    bad = [
        ("q", {"q": q.double()}),
        ("q", {"q": q[:, :3], "out": out[:, :3]}),
        ("q", {"q": q.transpose(0, 1).contiguous().transpose(0, 1)}),
        ("out", {"out": out[:19]}),
        ("cu_q", {"cu_q": torch.tensor([0, 20])}),
        ("cu_q", {"cu_q": torch.tensor([0, 21]).int()}),
        ("cu_q", {"cu_q": torch.tensor([20, 0]).int()}),
        ("kv_len", {"kv_len": torch.tensor([20, 20]).int()}),
        ("kv_len", {"kv_len": torch.tensor([-1]).int()}),
        ("kv_len", {"kv_len": torch.tensor([-(2**31)]).int()}),
        ("block_table", {"kv_len": torch.tensor([33]).int()}),
        ("block_table", {"kv_len": torch.tensor([2**31 - 1]).int()}),
        (
            "block_table",
            {
                "cu_q": torch.tensor([0, 20, 20]).int(),
                "kv_len": torch.tensor([33, 5]).int(),
                "block_table": torch.tensor([sequence.blocks] * 2).int(),
            },
        ),
        ("block_table", {"block_table": torch.tensor([[1, len(cache.k)]]).int()}),
        ("block_table", {"block_table": torch.tensor([[-1, 1]]).int()}),
        ("caches", {"v_cache": cache.v[:, :, :8]}),
        ("caches", {"k_cache": cache.k.view(-1, 2, 16, 16, 2), "v_cache": cache.v.view(-1, 2, 8, 32, 2)}),
    ]
    for name, changed in bad:
        with pytest.raises(ValueError, match=name):
            call(**changed)
    with pytest.raises(ValueError, match="slot"):
        backend.write_kv(sequence.k, sequence.v, cache.k, cache.v, torch.full((20,), cache.k.shape[0] * 16))


def test_choice_of_backend():
    assert kernels.get_backend("auto", "cpu").name == "cpp"
    assert kernels.get_backend("auto", torch.device("cpu"), torch.bfloat16).name == "cpp"
    assert kernels.get_backend("auto", "cpu", torch.float16).name == "torch"
    assert kernels.get_backend("auto", "cuda").name == "torch"
    assert kernels.get_backend("torch", "cpu").name == "torch"
    with pytest.raises(ValueError, match="attention=flash: choose from auto, cpp, triton, varlen, torch"):
        kernels.get_backend("flash", "cpu")
    with pytest.raises(ValueError, match="attention=triton: runs on cuda, not cpu"):
        kernels.get_backend("triton", "cpu")
    with pytest.raises(ValueError, match="attention=cpp"):
        kernels.get_backend("cpp", "cuda")

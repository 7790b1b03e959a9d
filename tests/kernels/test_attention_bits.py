"""A query row's bits depend on its own sequence alone: not on neighbours, chunks, order or threads."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.backend import CppBackend
from tests.kernels.paged_cases import CPP, Cache, Shape, attend, exact


@pytest.fixture(params=CPP, ids=lambda b: b.isa, scope="module")
def backend(request) -> CppBackend:
    return request.param


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def filled(backend: CppBackend, shape: Shape, lengths: list[int], seed: int) -> Cache:
    cache = Cache(shape, lengths, seed, backend)
    for sequence, length in zip(cache.sequences, lengths, strict=True):
        cache.write(backend, sequence, 0, length)
    return cache


shapes = st.builds(
    lambda group, kv_heads, dim, block_size, dtype: Shape(group * kv_heads, kv_heads, dim, block_size, dtype),
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([1, 2]),
    st.sampled_from([20, 32, 64, 96]),
    st.sampled_from([1, 16, 32]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)


@settings(max_examples=30, deadline=None)
@given(shapes, st.integers(2, 260), st.sampled_from([0, 1, 30, 64, 100]), st.data())
def test_chunks_and_decodes_equal_the_whole_prompt(backend, shape, length, window, data):
    cache = filled(backend, shape, [length], seed=length)
    (sequence,) = cache.sequences
    torch.set_num_threads(1)
    (whole,) = attend(backend, cache, [(sequence, 0, length)], window=window)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=6))})
    pieces = [attend(backend, cache, [(sequence, a, b)], window=window)[0] for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(pieces), whole)
    (last,) = attend(backend, cache, [(sequence, length - 1, length)], window=window)
    assert torch.equal(last, whole[-1:])


@settings(max_examples=30, deadline=None)
@given(shapes, st.lists(st.integers(1, 200), min_size=2, max_size=6), st.data())
def test_alone_equals_in_a_batch_on_any_number_of_threads(backend, shape, lengths, data):
    cache = filled(backend, shape, lengths, seed=sum(lengths))
    rows = [(s, data.draw(st.integers(0, n - 1)), n) for s, n in zip(cache.sequences, lengths, strict=True)]
    torch.set_num_threads(1)
    alone = [attend(backend, cache, [row])[0] for row in rows]
    order = data.draw(st.permutations(range(len(rows))))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        together = attend(backend, cache, [rows[i] for i in order])
        for i, got in zip(order, together, strict=True):
            assert torch.equal(got, alone[i])


def test_threads_share_a_large_batch_bit_for_bit(backend):
    """Large enough for the threads to be woken: 600 + 300 prompt tokens and a decode, three times over."""
    shape = Shape(heads=6, kv_heads=2, dim=64)
    cache = filled(backend, shape, [600, 300, 500], seed=0)
    a, b, c = cache.sequences
    rows = [(a, 0, 600), (b, 0, 300), (c, 499, 500)]
    torch.set_num_threads(1)
    want = torch.cat(attend(backend, cache, rows))
    for threads in (2, 3, 2):
        torch.set_num_threads(threads)
        assert torch.equal(torch.cat(attend(backend, cache, rows)), want)


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_share_one_long_sequence_bit_for_bit(backend, dtype, window):
    """Fewer heads than threads: the keys are split, at places that the number of threads does not move."""
    shape = Shape(heads=7, kv_heads=1, dim=96, dtype=dtype)
    cache = filled(backend, shape, [3000], seed=1)
    (sequence,) = cache.sequences
    torch.set_num_threads(1)
    (whole,) = attend(backend, cache, [(sequence, 2400, 3000)], window=window)
    torch.testing.assert_close(
        whole.double(), exact(sequence, 2400, 3000, window=window), atol=1e-2, rtol=1e-2
    )
    for threads in (2, 3, 16):
        torch.set_num_threads(threads)
        (split,) = attend(backend, cache, [(sequence, 2999, 3000)], window=window)
        assert torch.equal(split, whole[-1:])
        (chunk,) = attend(backend, cache, [(sequence, 2980, 3000)], window=window)
        assert torch.equal(chunk, whole[-20:])


@pytest.mark.parametrize("group", [1, 4, 6, 7, 16, 17])
def test_a_decode_equals_its_row_of_a_prompt_for_any_group(backend, group):
    """bfloat16, denormals included: tiles of any number of rows, or rows in registers and in float32."""
    shape = Shape(heads=2 * group, kv_heads=2, dim=64, dtype=torch.bfloat16)
    cache = filled(backend, shape, [200], seed=group)
    (sequence,) = cache.sequences
    for tensor in (sequence.q, sequence.k, sequence.v):
        tensor[..., ::5] *= 2.0**-127
    cache.write(backend, sequence, 0, 200)
    (whole,) = attend(backend, cache, [(sequence, 0, 200)])
    for position in (0, 31, 32, 63, 64, 65, 130, 199):
        (one,) = attend(backend, cache, [(sequence, position, position + 1)])
        assert torch.equal(one, whole[position : position + 1])


def test_what_lies_in_foreign_and_unwritten_slots_is_irrelevant(backend):
    shape = Shape(heads=3, kv_heads=1, dim=64)
    cache = filled(backend, shape, [70], seed=1)
    (sequence,) = cache.sequences
    (first,) = attend(backend, cache, [(sequence, 0, 70)])
    assert torch.isfinite(first).all()
    owned = torch.zeros(len(cache.k) * 16, dtype=torch.bool)
    owned[cache.slots(sequence, 0, 70)] = True
    owned = owned.view(-1, 1, 1, 16)
    for garbage in (0.0, 1e30, float("inf")):
        cache.k.masked_fill_(~owned, garbage)
        cache.v.masked_fill_(~owned.transpose(2, 3), garbage)
        (again,) = attend(backend, cache, [(sequence, 0, 70)])
        assert torch.equal(again, first)

"""The fused operations: C++ against torch, torch against Hugging Face's Llama, and each row on its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

import kernels
from kernels.cpu.ops import CppOps
from kernels.fused import TorchOps, argmax, ops

CPP, TORCH = CppOps(), TorchOps()
DTYPES = [torch.float32, torch.bfloat16]
dtypes = st.sampled_from(DTYPES)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Float32 to a few ulp of the largest term; bfloat16 to one ulp, where a tie rounds the other way."""
    tolerance = {torch.float32: 4e-6, torch.bfloat16: 8e-3}[got.dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=30, deadline=None)
@given(dtypes, st.integers(1, 40), st.integers(1, 200), st.integers(0, 2**31))
def test_norms(dtype, tokens, hidden, seed):
    x, residual = random(seed, 2, tokens, hidden, dtype=dtype)
    weight = random(seed + 1, hidden, dtype=dtype)
    close(CPP.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))
    sums = residual.clone(), residual.clone()
    got, want = (o.add_rms_norm(x, r, weight, 1e-5) for o, r in zip((CPP, TORCH), sums, strict=True))
    close(got, want)
    assert torch.equal(sums[0], residual + x)
    assert torch.equal(sums[1], sums[0])
    assert torch.equal(got, CPP.rms_norm(sums[0], weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [CPP, TORCH], ids=lambda o: o.name)
def test_norm_is_llamas(implementation, dtype):
    layer = LlamaRMSNorm(96, eps=1e-6).to(dtype)
    layer.weight.data = random(1, 96, dtype=dtype)
    x = random(2, 5, 96, dtype=dtype)
    got, want = implementation.rms_norm(x, layer.weight.data, 1e-6), layer(x).detach()
    close(got, want)
    # Rounded where Llama rounds: nearly all values are the same bfloat16.
    assert dtype == torch.float32 or (got == want).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_in_place(dtype):
    """Qwen3 normalises each head of a slice of the fused projection, in place."""
    fused = random(3, 7, 6 * 32, dtype=dtype)
    kept = fused[:, 128:].clone()
    heads, weight = fused[:, :128].unflatten(1, (4, 32)), random(4, 32, dtype=dtype)
    want = TORCH.rms_norm(heads, weight, 1e-6)
    assert CPP.rms_norm(heads, weight, 1e-6, out=heads) is heads
    close(heads, want)
    assert torch.equal(fused[:, 128:], kept)
    x = random(5, 3, 32, dtype=dtype)
    want = CPP.rms_norm(x, weight, 1e-6)
    assert torch.equal(CPP.rms_norm(x, weight, 1e-6, out=x), want)


@settings(max_examples=30, deadline=None)
@given(dtypes, st.integers(1, 40), st.integers(1, 100), st.integers(0, 2**31))
def test_silu_mul(dtype, tokens, width, seed):
    gate_up = random(seed, tokens, 2 * width, dtype=dtype) * 5
    close(CPP.silu_mul(gate_up), TORCH.silu_mul(gate_up))
    into = torch.empty(tokens, width, dtype=dtype)
    assert CPP.silu_mul(gate_up, into) is into
    assert torch.equal(into, CPP.silu_mul(gate_up))


def test_silu_mul_of_extreme_gates():
    """Large gates saturate: no infinity, no NaN from 0 * infinity; a NaN stays visible."""
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 1e30, float("nan")])
    got = CPP.silu_mul(torch.stack([torch.cat([gate, torch.ones(7)])]))[0]
    torch.testing.assert_close(got, torch.nn.functional.silu(gate), atol=1e-30, rtol=1e-6, equal_nan=True)


@settings(max_examples=30, deadline=None)
@given(
    dtypes,
    st.integers(1, 30),
    st.sampled_from([(1, 1), (4, 2), (6, 3)]),
    st.sampled_from([2, 20, 32, 64]),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 2**31),
)
def test_rope_and_write(dtype, tokens, heads, dim, block_size, seed):
    """Both against Llama's rotation and the plain write; q and k are slices of one fused projection."""
    query_heads, kv_heads = heads
    angles = torch.rand(50, dim // 2, generator=torch.Generator().manual_seed(seed)) * 6
    cos, sin = (torch.cat([f, f], dim=1) for f in (angles.cos(), angles.sin()))
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(seed))
    blocks = tokens // block_size + 3
    slot = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(seed))[:tokens]
    slot[::5] = -1
    fused = random(seed, tokens, (query_heads + 2 * kv_heads) * dim, dtype=dtype)
    for implementation in (CPP, TORCH):
        copy = fused.clone()
        q, k, v = (
            part.unflatten(1, (-1, dim))
            for part in copy.split([query_heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        )
        turned = apply_rotary_pos_emb(
            q[None].float(), k[None].float(), cos[positions][None], sin[positions][None], unsqueeze_dim=2
        )
        want_q, want_k = (x[0].to(dtype) for x in turned)
        caches = [kernels.allocate_kv(blocks, block_size, kv_heads, dim, dtype, "cpu") for _ in range(2)]
        implementation.rope_write_kv(q, k, v, cos, sin, positions, *caches[0], slot)
        close(q, want_q)
        close(k, want_k)
        assert torch.equal(v.flatten(1), fused[:, -kv_heads * dim :])
        kernels.get_backend("torch").write_kv(k, v, *caches[1], slot)
        for got, want in zip(*caches, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(("block_size", "dim"), [(16, 64), (32, 80)])
def test_a_paired_cache_is_written_as_the_attention_writes_it(block_size, dim):
    backend, tokens = kernels.get_backend("cpp", "cpu", torch.bfloat16), 40
    q, k, v = random(1, 3, tokens, 2, dim, dtype=torch.bfloat16)
    slot = torch.randperm(3 * block_size)[:tokens] - 1
    still, zero = torch.ones(1, dim), torch.zeros(1, dim)  # nothing is turned
    got, want = (kernels.allocate_kv(3, block_size, 2, dim, torch.bfloat16, "cpu", backend) for _ in range(2))
    CPP.rope_write_kv(q, k, v, still, zero, torch.zeros(tokens, dtype=torch.int64), *got, slot)
    backend.write_kv(k, v, *want, slot)
    for a, b in zip(got, want, strict=True):
        assert a.dim() == 5
        assert a.any()
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(dtype):
    before = torch.get_num_threads()
    tokens, hidden, dim = 300, 576, 64
    x, residual = random(6, 2, tokens, hidden, dtype=dtype)
    weight, gate_up = random(7, hidden, dtype=dtype), random(8, tokens, 2 * 576, dtype=dtype)
    tables, positions = random(9, 2, tokens, dim, dtype=torch.float32), torch.arange(tokens)

    def everything(start: int, end: int) -> list[torch.Tensor]:
        total = residual[start:end].clone()
        q = x[start:end].clone().unflatten(1, (9, dim))
        k, v = q[:, :3].clone(), q[:, 3:6].clone()
        cache = kernels.allocate_kv(tokens, 1, 3, dim, dtype, "cpu")
        CPP.rope_write_kv(q, k, v, *tables, positions[start:end], *cache, positions[start:end])
        return [
            CPP.rms_norm(x[start:end], weight, 1e-5),
            CPP.add_rms_norm(x[start:end], total, weight, 1e-5),
            total,
            CPP.silu_mul(gate_up[start:end]),
            q,
            k,
            cache[0][start:end],
            cache[1][start:end],
        ]

    try:
        torch.set_num_threads(1)
        whole = everything(0, tokens)
        torch.set_num_threads(2)
        for start, end in [(0, tokens), (0, 1), (17, 20), (299, 300), (3, 290)]:
            for got, want in zip(everything(start, end), whole, strict=True):
                assert torch.equal(got, want[start:end])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_argmax_is_that_of_torch(dtype):
    """Ties, NaN, infinities, rows that are a view, and places in whole and in broken vectors."""
    random = torch.Generator().manual_seed(0)
    for n in (1, 7, 128, 1000, 49152):
        x = torch.randint(-50, 50, (9, n + 3), generator=random).to(dtype)[:, 2 : n + 2]
        x[1] = -float("inf")
        x[2, n // 2] = x[2, -1] = float("inf")
        x[3, n // 3] = x[3, -1] = float("nan")
        x[4] = 0.0
        x[5, -1] = 99.0
        x[6] = float("nan")
        assert argmax(x).tolist() == torch.argmax(x, dim=-1).tolist()
    assert argmax(x[:0]).shape == (0,)


def test_bad_tensors_are_refused():
    x, weight = torch.randn(3, 32), torch.randn(32)
    cache = kernels.allocate_kv(2, 16, 1, 32, torch.float32, "cpu")
    table, index = torch.randn(4, 32), torch.tensor([0, 1, 2])
    heads = x[:, None]
    bad = [
        ("weight", lambda: CPP.rms_norm(x, weight[:31], 1e-5)),
        ("x:", lambda: CPP.rms_norm(x.double(), weight.double(), 1e-5)),
        ("x:", lambda: CPP.rms_norm(torch.randn(32, 3).T, weight, 1e-5)),
        ("out", lambda: CPP.rms_norm(x, weight, 1e-5, out=torch.empty(2, 32))),
        ("residual", lambda: CPP.add_rms_norm(x, x[:2], weight, 1e-5)),
        ("gate_up", lambda: CPP.silu_mul(x[:, :31])),
        ("out", lambda: CPP.silu_mul(x, torch.empty(3, 32))),
        ("positions", lambda: CPP.rope_write_kv(heads, heads, heads, table, table, index + 2, *cache, index)),
        ("slot", lambda: CPP.rope_write_kv(heads, heads, heads, table, table, index, *cache, index + 30)),
        (
            "cos, sin",
            lambda: CPP.rope_write_kv(heads, heads, heads, table.bfloat16(), table, index, *cache, index),
        ),
        ("slot", lambda: CPP.rope_write_kv(heads, heads, heads, table, table, index, *cache, index[:2])),
    ]
    for name, call in bad:
        with pytest.raises(ValueError, match=name):
            call()


def test_choice():
    assert ops("cpu", torch.float32).name == "cpp"
    assert ops("cpu", torch.float16).name == "torch"
    assert ops("cuda", torch.float32).name == "torch"

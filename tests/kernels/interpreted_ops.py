"""Triton's cache writes and fused operations in Triton's interpreter, in float32, against the torch ones.

Not collected by itself: test_triton_interpreter.py runs it in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.fused import TorchOps
from kernels.reference import TorchBackend
from kernels.triton import cache, rows
from kernels.triton.backend import TritonBackend
from kernels.triton.ops import TritonOps
from tests.kernels.interpreted_attention import Stopping

OPS, WANT = TritonOps(), TorchOps()
TOKENS = 11  # no multiple of what a program takes
CANARY = 7.0


def caches(kv_heads: int, dim: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches full of canaries, and slots for the tokens: scattered, some skipped."""
    k_cache, v_cache = kernels.allocate_kv(40, block_size, kv_heads, dim, torch.float32, "cpu")
    slot = torch.randperm(40 * block_size, generator=torch.Generator().manual_seed(1))[:TOKENS]
    slot[[0, 5]] = -1
    return k_cache.fill_(CANARY), v_cache.fill_(CANARY), slot


def heads(count: int, dim: int, seed: int) -> torch.Tensor:
    """[T, count, dim], a slice of a wider row as the fused projection gives it."""
    wide = torch.randn(TOKENS, (count + 1) * dim, generator=torch.Generator().manual_seed(seed))
    return wide[:, dim:].unflatten(1, (count, dim))


@pytest.mark.parametrize(("dim", "block_size"), [(64, 16), (80, 1), (96, 3), (128, 24), (256, 16)])
def test_write_kv_stores_its_tokens_and_nothing_else(dim, block_size):
    k, v = heads(2, dim, 0), heads(2, dim, 1)
    k_cache, v_cache, slot = caches(2, dim, block_size)
    k_want, v_want = k_cache.clone(), v_cache.clone()
    TorchBackend().write_kv(k, v, k_want, v_want, slot)
    TritonBackend("cpu").write_kv(k, v, k_cache, v_cache, slot)
    assert torch.equal(k_cache, k_want)
    assert torch.equal(v_cache, v_want)


def rope_arguments(group: int, dim: int, block_size: int):
    generator = torch.Generator().manual_seed(2)
    cos, sin = torch.randn(50, dim, generator=generator), torch.randn(50, dim, generator=generator)
    positions = torch.randint(0, 50, (TOKENS,), generator=generator)
    k_cache, v_cache, slot = caches(2, dim, block_size)
    return (
        heads(2 * group, dim, 3),
        heads(2, dim, 4),
        heads(2, dim, 5),
        cos,
        sin,
        positions,
        k_cache,
        v_cache,
        slot,
    )


@pytest.mark.parametrize(
    ("group", "dim", "block_size"), [(1, 64, 16), (3, 80, 1), (4, 96, 3), (7, 128, 24), (8, 256, 16)]
)
def test_rope_write_kv(group, dim, block_size):
    got, want = rope_arguments(group, dim, block_size), rope_arguments(group, dim, block_size)
    OPS.rope_write_kv(*got)
    WANT.rope_write_kv(*want)
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine, right, atol=2e-6, rtol=2e-6)
    keys, values = got[6], got[7]
    assert (keys == CANARY).sum() == keys.numel() - (TOKENS - 2) * 2 * dim
    assert (values == CANARY).sum() == values.numel() - (TOKENS - 2) * 2 * dim


@pytest.mark.parametrize("axis", [0, 1])
def test_every_program_alone_writes_its_tokens_and_no_other(monkeypatch, axis):
    """Stopped after each program, every number is either still the old one or already the right one."""
    before, right = rope_arguments(3, 64, 16), rope_arguments(3, 64, 16)
    kernel = cache.rope_write_kv_kernel
    whole = Stopping(kernel)
    monkeypatch.setattr(cache, "rope_write_kv_kernel", whole)
    OPS.rope_write_kv(*right)
    done = 0
    for programs in range(1, whole.grid[axis] + 1):
        monkeypatch.setattr(cache, "rope_write_kv_kernel", Stopping(kernel, axis, programs))
        got = rope_arguments(3, 64, 16)
        OPS.rope_write_kv(*got)
        changed = [mine != old for mine, old in zip(got, before, strict=True)]
        for mine, wanted, there in zip(got, right, changed, strict=True):
            assert torch.equal(mine[there], wanted[there])
        count = sum(int(there.sum()) for there in changed)
        assert count > done
        done = count
    assert done == (6 + 2) * TOKENS * 64 + 2 * 2 * (TOKENS - 2) * 64


@pytest.mark.parametrize("width", [64, 96, 576, 1000])
def test_rms_norm(width):
    x, weight = torch.randn(TOKENS, width), torch.randn(width)
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5), WANT.rms_norm(x, weight, 1e-5))
    residual = torch.randn(TOKENS, width)
    summed = residual.clone()
    want = WANT.add_rms_norm(x, summed, weight, 1e-5)
    torch.testing.assert_close(OPS.add_rms_norm(x, residual, weight, 1e-5, out=x), want)
    assert torch.equal(residual, summed)
    torch.testing.assert_close(x, want)  # out may be x


def test_rms_norm_per_head_in_place():
    x, weight = heads(3, 64, 6), torch.randn(64)
    want = WANT.rms_norm(x, weight, 1e-5)
    assert OPS.rms_norm(x, weight, 1e-5, out=x) is x
    torch.testing.assert_close(x, want)


def test_every_norm_alone_writes_its_rows(monkeypatch):
    x, weight = torch.randn(TOKENS, 64), torch.randn(64)
    want, kernel = OPS.rms_norm(x, weight, 1e-5), rows.rms_norm_kernel
    monkeypatch.setattr(rows, "rms_norm_kernel", Stopping(kernel, 0, 1))
    out = OPS.rms_norm(x, weight, 1e-5, out=torch.full_like(x, float("nan")))
    assert torch.equal(out[:8], want[:8])
    assert out[8:].isnan().all()


@pytest.mark.parametrize("width", [64, 1000, 1536])
def test_silu_mul(monkeypatch, width):
    gate_up = torch.randn(5, 2 * width + 8)[:, : 2 * width]
    want = WANT.silu_mul(gate_up)
    torch.testing.assert_close(OPS.silu_mul(gate_up), want)
    monkeypatch.setattr(rows, "silu_mul_kernel", Stopping(rows.silu_mul_kernel, 1, 1))
    out = OPS.silu_mul(gate_up, out=torch.full((5, width), float("nan")))
    torch.testing.assert_close(out[:, :1024], want[:, :1024])
    assert out[:, 1024:].isnan().all()


def test_nothing_to_do_is_no_launch():
    empty = torch.empty(0, 2, 64)
    k_cache, v_cache, slot = caches(2, 64, 16)
    TritonBackend("cpu").write_kv(empty, empty, k_cache, v_cache, slot[:0])
    assert (k_cache == CANARY).all()
    assert OPS.silu_mul(torch.empty(0, 64)).shape == (0, 32)
    assert OPS.rms_norm(torch.empty(0, 64), torch.ones(64), 1e-5).shape == (0, 64)


def test_bad_tensors_are_refused_in_one_line():
    arguments = list(rope_arguments(3, 64, 16))
    names = ("q", "k", "v", "cos", "sin", "positions", "caches", "caches", "slot")
    for i, name in enumerate(names):
        bad = [*arguments[:i], arguments[i].half(), *arguments[i + 1 :]]
        with pytest.raises(ValueError, match=f"^{name}") as error:
            OPS.rope_write_kv(*bad)
        assert "\n" not in str(error.value)
    x, weight = torch.randn(4, 64), torch.ones(64)
    for text, call in [
        ("weight: needs", lambda: OPS.rms_norm(x, weight[:32], 1e-5)),
        ("x: needs", lambda: OPS.rms_norm(x.double(), weight, 1e-5)),
        ("out: needs", lambda: OPS.rms_norm(x, weight, 1e-5, out=x[:2])),
        ("residual: needs", lambda: OPS.add_rms_norm(x, x.half(), weight, 1e-5)),
        ("gate_up: needs", lambda: OPS.silu_mul(x[:, :63])),
        ("gate_up: needs", lambda: OPS.silu_mul(x.t())),
        ("out: needs", lambda: OPS.silu_mul(x, out=x)),
    ]:
        with pytest.raises(ValueError, match=text) as error:
            call()
        assert "\n" not in str(error.value)

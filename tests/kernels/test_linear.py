"""The C++ product of a linear layer, on every instruction set and in every way that this CPU has: against
float64, row by row on its own, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.model.linear import Linear
from kernels.cpu.arena import Arena
from kernels.cpu.isa import runnable
from kernels.cpu.library import load
from kernels.cpu.linear import WAYS, CppLinear, packable

FLOATS, WIDEN = 0, 1
EDGES = [*range(1, 20), 31, 32, 33, 48, 95, 96, 97, 192, 255, 256, 257, 300]
"""Where a tile of rows, or a block of them, ends."""


def ways() -> list[tuple[str, int]]:
    """(instruction set, way of forming products) that run here."""
    found = []
    for isa in runnable():
        best = load(isa).functions.bm_linear_way(True)
        found += [(isa, way) for way in dict.fromkeys((FLOATS, WIDEN, best))]
    return found


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def layer(
    isa: str, way: int, weight: torch.Tensor, bias: torch.Tensor | None = None, **kind: bool
) -> CppLinear:
    dtype = torch.float32 if way == FLOATS else torch.bfloat16
    return CppLinear(
        weight.to(dtype), None if bias is None else bias.to(dtype), **kind, library=load(isa), way=way
    )


@pytest.mark.parametrize(("isa", "way"), ways(), ids=lambda value: WAYS.get(value, value))
@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 70), outputs=st.integers(1, 200), pairs=st.integers(1, 400), seed=st.integers(0, 999)
)
def test_it_is_the_product(isa: str, way: int, rows: int, outputs: int, pairs: int, seed: int) -> None:
    weight, bias, x = (
        random(seed, outputs, 2 * pairs),
        random(seed + 1, outputs),
        random(seed + 2, rows, 2 * pairs),
    )
    linear = layer(isa, way, weight, bias)
    x, weight, bias = (t.to(linear.dtype) for t in (x, weight, bias))
    got, want = linear(x), exact(x, weight, bias)
    unit = {torch.float32: 1e-6, torch.bfloat16: 4e-3}[linear.dtype]
    # Rounding of the result, and of the sums of float32 under it.
    assert torch.all((got - want).abs() <= unit * want.abs() + 1e-6 * exact(x.abs(), weight.abs()))


@pytest.mark.parametrize(("isa", "way"), ways(), ids=lambda value: WAYS.get(value, value))
def test_a_rows_bits_are_its_own(isa: str, way: int) -> None:
    """Whatever stands beside it, wherever it stands, on any number of threads."""
    for outputs, inputs in ((200, 1300), (96, 64)):
        linear = layer(isa, way, random(1, outputs, inputs))
        x = random(2, EDGES[-1] + 7, inputs).to(linear.dtype)
        whole = linear(x)
        for rows in EDGES:
            assert torch.equal(linear(x[7 : 7 + rows]), whole[7 : 7 + rows]), rows
        x[1::2] = float("nan")
        assert torch.equal(linear(x)[::2], whole[::2])
    torch.set_num_threads(2)
    try:
        assert torch.equal(linear(x)[::2], whole[::2])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("isa", "way"), ways(), ids=lambda value: WAYS.get(value, value))
@pytest.mark.parametrize("half", [1, 16, 40, 96])
def test_gated_is_the_product_and_its_activation(isa: str, way: int, half: int) -> None:
    weight, x = random(3, 2 * half, 64), random(4, 37, 64)
    gated, plain = layer(isa, way, weight, gated=True), layer(isa, way, weight)
    got, sums = gated(x.to(plain.dtype)), plain(x.to(plain.dtype)).float()
    want = F.silu(sums[:, :half]) * sums[:, half:]
    tolerance = 4e-6 if way == FLOATS else 8e-3  # an ulp: a tie may round the other way
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)
    assert got.shape == (37, half)


def test_nothing_outside_the_result_is_written_and_no_row_but_its_own_read() -> None:
    wide = random(5, 9, 100)
    linear = CppLinear(random(6, 33, 40))
    want = linear(wide[:, 20:60].contiguous())
    wide[:, :20] = wide[:, 60:] = float("nan")
    assert torch.equal(linear(wide[:, 20:60]), want)
    assert linear(wide[:0, 20:60]).shape == (0, 33)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="weight: needs"):
        CppLinear(random(1, 8, 16).half())
    with pytest.raises(ValueError, match="in even for bfloat16"):
        CppLinear(random(1, 8, 15).bfloat16())
    with pytest.raises(ValueError, match="weight: needs contiguous"):
        CppLinear(random(1, 8, 16).T)
    with pytest.raises(ValueError, match="gated: needs an even number"):
        CppLinear(random(1, 7, 16), gated=True)
    with pytest.raises(ValueError, match=r"bias: needs torch.float32 \[8\]"):
        CppLinear(random(1, 8, 16), random(1, 7))
    linear = CppLinear(random(1, 8, 16))
    for x in (random(1, 2, 15), random(1, 2, 16).double(), random(1, 16, 2).T):
        with pytest.raises(ValueError, match=r"x: needs torch.float32 \[n, 16\]"):
            linear(x)


def test_without_it_a_linear_layer_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random(1, 24, 16), random(2, 5, 16)
    own = Linear(weight)
    assert own.kind.startswith("cpp") == packable(weight)
    monkeypatch.setattr("engines.model.linear.packable", lambda weight: False)
    torchs = Linear(weight)
    assert torchs.kind in ("onednn", "torch")
    torch.testing.assert_close(own(x), torchs(x), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="gated"):
        Linear(weight, gated=True)


def test_an_arena_keeps_its_tensors_apart_and_alive() -> None:
    arena = Arena()
    tensors = [arena.empty(count, torch.float32) for count in (1, 1000, 9_000_000, 0, 17)]
    for i, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(i)
    del arena
    for i, tensor in enumerate(tensors):
        assert bool((tensor == i).all())

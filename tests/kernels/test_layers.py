"""The layers of a model in one call: what it refuses. (That its bits are those of the operations one by one:
tests/engines/test_model_families.py.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import allocate_kv, fused, get_backend
from kernels.cpu.layers import CppLayers, LayerWeights
from kernels.cpu.library import available
from kernels.cpu.linear import CppLinear, packable

HEADS, KV_HEADS, DIM, HIDDEN, FFN, BLOCKS, BLOCK = 4, 2, 8, 32, 48, 5, 16
pytestmark = pytest.mark.skipif(
    not available() or not packable(torch.empty(4, 4)), reason="no C++ products here"
)


def layers(dtype: torch.dtype = torch.float32, count: int = 2) -> CppLayers:
    torch.manual_seed(0)

    def linear(out: int, width: int, gated: bool = False) -> CppLinear:
        return CppLinear((torch.randn(out, width) * 0.1).to(dtype), gated=gated)

    norm = torch.ones(HIDDEN, dtype=dtype)
    weights = [
        LayerWeights(
            input_norm=norm,
            q_norm=None,
            k_norm=None,
            mlp_norm=norm,
            qkv=linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            o=linear(HIDDEN, HEADS * DIM),
            gate_up=linear(2 * FFN, HIDDEN, gated=True),
            down=linear(HIDDEN, FFN),
            window=0,
        )
        for _ in range(count)
    ]
    table = torch.ones(64, DIM)
    return CppLayers(weights, HEADS, KV_HEADS, DIM, table, table, 1e-5, 0.5)


def arguments(dtype: torch.dtype = torch.float32, count: int = 2) -> dict[str, Any]:
    caches = [
        allocate_kv(BLOCKS, BLOCK, KV_HEADS, DIM, dtype, "cpu", get_backend("cpp", "cpu"))
        for _ in range(count)
    ]
    return {
        "residual": torch.randn(3, HIDDEN).to(dtype),
        "attended": torch.zeros(3, HEADS, DIM, dtype=dtype),
        "positions": torch.arange(3),
        "k_caches": [k for k, _ in caches],
        "v_caches": [v for _, v in caches],
        "slot": torch.arange(3) + BLOCK,
        "cu_q": torch.tensor([0, 3], dtype=torch.int32),
        "kv_len": torch.tensor([3], dtype=torch.int32),
        "block_table": torch.tensor([[1]], dtype=torch.int32),
        "real_tokens": 3,
    }


def test_it_writes_what_it_says_and_follows_other_caches() -> None:
    model, given = layers(), arguments()
    for _ in range(2):
        fresh = arguments()
        before = fresh["residual"].clone()
        model(**fresh)
        assert fresh["attended"].abs().sum() > 0
        assert not torch.equal(fresh["residual"], before)  # of the first layer
        for cache in (*fresh["k_caches"], *fresh["v_caches"]):
            assert cache[1].abs().sum() > 0
            assert cache[2:].abs().sum() == 0
    assert all(cache.abs().sum() == 0 for cache in given["k_caches"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"slot": torch.tensor([16, 17, BLOCKS * BLOCK])}, "slot lies outside the cache"),
        ({"positions": torch.tensor([0, 1, 64])}, "positions lie outside"),
        ({"positions": torch.tensor([0, 1, -1])}, "positions lie outside"),
        ({"block_table": torch.tensor([[BLOCKS]], dtype=torch.int32)}, "block_table names a block outside"),
        ({"block_table": torch.tensor([[1]])}, "block_table: needs contiguous int32"),
        ({"cu_q": torch.tensor([0, 2], dtype=torch.int32)}, "cu_q must rise"),
        ({"kv_len": torch.tensor([3])}, "kv_len: needs contiguous"),
        ({"residual": torch.randn(3, HIDDEN + 1)}, "residual: needs contiguous"),
        ({"residual": torch.randn(3, HIDDEN).bfloat16()}, "residual: needs contiguous"),
        ({"attended": torch.zeros(3, HEADS * DIM)}, "attended: needs contiguous"),
        ({"real_tokens": 4}, "real_tokens=4"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    given = arguments() | changed
    with pytest.raises(ValueError, match=message):
        layers()(**given)
    if "lies outside" in message or "lie outside" in message:
        assert all(cache.abs().sum() == 0 for cache in given["k_caches"])


def test_caches_of_another_dtype_are_refused() -> None:
    other = {name: arguments(torch.bfloat16)[name] for name in ("k_caches", "v_caches")}
    with pytest.raises(ValueError, match="caches: need"):
        layers()(**arguments() | other)


def test_it_serves_where_all_parts_are_in_cpp() -> None:
    model, cpp = layers(), get_backend("cpp", "cpu")
    assert model.suits(fused.ops("cpu", torch.float32), cpp)
    assert not model.suits(fused.ops("cpu", torch.float32), get_backend("torch", "cpu"))
    assert not model.suits(fused.TorchOps(), cpp)

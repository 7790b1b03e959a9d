"""All layers of a decoder in one call of C++ (kernels/cpu/layers.cpp): the structures that it reads, and the
check of what goes into them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu.backend import ERRORS, CppBackend, check_batch, check_caches, check_index
from kernels.cpu.library import best
from kernels.cpu.linear import CppLinear
from kernels.cpu.ops import CppOps

_i32, _i64, _f32, _ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Product(ctypes.Structure):
    _fields_ = [("packed", _ptr), ("bias", _ptr), ("outputs", _i64), ("inputs", _i64)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _ptr) for name in ("input_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, _Product) for name in ("qkv", "o", "gate_up", "down")),
        ("k_cache", _ptr),
        ("v_cache", _ptr),
        ("window", _i64),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("cos", _ptr),
        ("sin", _ptr),
        ("max_pos", _i64),
        ("num_blocks", _i64),
        *((name, _i32) for name in ("is_bf16", "way", "layers", "hidden", "heads", "kv_heads", "dim")),
        ("block_size", _i32),
        ("paired", _i32),
        ("eps", _f32),
        ("scale", _f32),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, _ptr) for name in ("residual", "attended", "x", "qkv", "activated", "positions", "slot")),
        *((name, _ptr) for name in ("cu_q", "kv_len", "table")),
        *((name, _i32) for name in ("table_width", "tokens", "real_tokens", "sequences", "threads")),
    ]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Norms [hidden], those of the heads [D] or None; products over packed weights, gate_up gated."""

    input_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    qkv: CppLinear
    o: CppLinear
    gate_up: CppLinear
    down: CppLinear
    window: int


class CppLayers:
    """The layers of one model in one call: nothing runs between their operations that would push a layer's
    code and data out of the near caches, and no thread of Python holds the next one up. The bits are those
    of the operations one by one."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        heads: int,
        kv_heads: int,
        dim: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
        scale: float,
    ) -> None:
        self._weights, self._tables = layers, (cos, sin)  # what the addresses below point at
        first = layers[0]
        self._hidden, self._ffn, self._dtype = len(first.input_norm), first.down.in_features, first.qkv.dtype
        self._query_heads, self._heads, self._width = heads, (kv_heads, dim), first.qkv.out_features
        self._model = _Model(
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            max_pos=len(cos),
            is_bf16=self._dtype is torch.bfloat16,
            way=first.qkv.way,
            layers=len(layers),
            hidden=self._hidden,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            eps=eps,
            scale=scale,
        )
        self._layers = (_Layer * len(layers))(*(_layer(layer) for layer in layers))
        self._run = best().functions.bm_layers
        self._caches: Sequence[torch.Tensor] | None = None

    def suits(self, ops: object, backend: object) -> bool:
        """Whether these are the operations and the attention that the layers call."""
        return isinstance(ops, CppOps) and isinstance(backend, CppBackend) and backend.isa == best().isa

    def __call__(
        self,
        residual: torch.Tensor,
        attended: torch.Tensor,
        positions: torch.Tensor,
        k_caches: Sequence[torch.Tensor],
        v_caches: Sequence[torch.Tensor],
        slot: torch.Tensor,
        cu_q: torch.Tensor,
        kv_len: torch.Tensor,
        block_table: torch.Tensor,
        real_tokens: int,
    ) -> None:
        """residual [T, hidden], the embedded tokens, and attended [T, heads, D] are written: they are then
        where the last layer's projection begins. The rest as in kernels.interface. Raises ValueError."""
        if self._caches is not k_caches:
            self._bind(k_caches, v_caches)
        tokens, (rows, width) = residual.shape[0], block_table.shape
        for name, x, shape in (
            ("residual", residual, (tokens, self._hidden)),
            ("attended", attended, (tokens, self._query_heads, self._heads[1])),
        ):
            if x.dtype is not self._dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
                raise ValueError(
                    f"{name}: needs contiguous {self._dtype} {list(shape)} on the CPU; "
                    f"got {x.dtype} {list(x.shape)} on {x.device}"
                )
        if not 0 <= real_tokens <= tokens:
            raise ValueError(f"real_tokens={real_tokens}: needs 0 to {tokens}")
        check_index("positions", positions, torch.int64, tokens)
        check_index("slot", slot, torch.int64, tokens)
        check_batch(cu_q, kv_len, block_table)
        x, qkv = residual.new_empty(tokens, self._hidden), residual.new_empty(tokens, self._width)
        activated = residual.new_empty(tokens, self._ffn)
        batch = _Batch(
            residual.data_ptr(),
            attended.data_ptr(),
            x.data_ptr(),
            qkv.data_ptr(),
            activated.data_ptr(),
            positions.data_ptr(),
            slot.data_ptr(),
            cu_q.data_ptr(),
            kv_len.data_ptr(),
            block_table.data_ptr(),
            width,
            tokens,
            real_tokens,
            rows,
            torch.get_num_threads(),
        )
        status = self._run(ctypes.byref(self._model), self._layers, ctypes.byref(batch))
        if status:
            raise ValueError(ERRORS[status])

    def _bind(self, k_caches: Sequence[torch.Tensor], v_caches: Sequence[torch.Tensor]) -> None:
        for layer, k, v in zip(self._layers, k_caches, v_caches, strict=True):
            blocks, *heads, block_size, paired = check_caches(k, v)
            if k.dtype is not self._dtype or (*heads,) != self._heads:
                raise ValueError(
                    f"caches: need {self._dtype} of (heads, size) {self._heads}; got {k.dtype} {heads}"
                )
            layer.k_cache, layer.v_cache = k.data_ptr(), v.data_ptr()
        self._model.num_blocks, self._model.block_size, self._model.paired = blocks, block_size, paired
        self._caches = k_caches


def _layer(w: LayerWeights) -> _Layer:
    return _Layer(
        input_norm=w.input_norm.data_ptr(),
        q_norm=None if w.q_norm is None else w.q_norm.data_ptr(),
        k_norm=None if w.k_norm is None else w.k_norm.data_ptr(),
        mlp_norm=w.mlp_norm.data_ptr(),
        **{name: _product(getattr(w, name)) for name in ("qkv", "o", "gate_up", "down")},
        window=min(w.window, 2**31 - 1),  # as far as a position reaches
    )


def _product(linear: CppLinear) -> _Product:
    return _Product(*linear.addresses, linear.out_features, linear.in_features)

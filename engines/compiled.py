"""`engine.compile=true`: the small operations between the matrix products through torch.compile.

Only these are compiled. The products are library calls, attention and the write into the paged cache are
kernels of our own, which a compiler would leave alone; and a whole model, with new shapes in every pass,
would be compiled again and again. Rows are a dynamic dimension, so each operation is compiled once."""

from __future__ import annotations

from typing import Any

import torch

from engines.config import ConfigError
from engines.model.base import DecoderModel
from engines.model.lean import LeanModel
from kernels.fused import FusedOps, TorchOps

POINTWISE = ("rms_norm", "add_rms_norm", "silu_mul")


class CompiledOps:
    """FusedOps whose pointwise operations are compiled; rope_write_kv stays that of `ops`."""

    name = "compiled"

    def __init__(self, ops: FusedOps, backend: str = "inductor") -> None:
        plain = TorchOps()
        self.rope_write_kv = ops.rope_write_kv
        compiled = (
            torch.compile(getattr(plain, name), dynamic=True, fullgraph=True, backend=backend)
            for name in POINTWISE
        )
        self.rms_norm: Any
        self.add_rms_norm: Any
        self.silu_mul: Any
        self.rms_norm, self.add_rms_norm, self.silu_mul = compiled


def compile_model(model: DecoderModel, device: torch.device) -> str:
    """What was compiled, for the record. Raises ConfigError where it cannot be."""
    if device.type != "cuda":
        raise ConfigError(f"engine.compile=true: needs device=cuda, this is {device.type}; use false")
    if not isinstance(model, LeanModel):
        raise ConfigError("engine.compile=true: needs model.impl=lean; use false")
    model.ops = CompiledOps(model.ops)
    return ", ".join(POINTWISE)

"""What every model implementation is given and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engines.model.config import ModelConfig
from kernels import AttentionBackend


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The ragged batch on the device. T counts padding rows, which stand behind the real ones and have slot
    -1; cu_q ends at the last real one, so attention never sees them."""

    backend: AttentionBackend
    k_caches: Sequence[torch.Tensor]  # per layer [N, Hk, D, bs]
    v_caches: Sequence[torch.Tensor]  # per layer [N, Hk, bs, D]
    slot: torch.Tensor  # [T] int64
    cu_q: torch.Tensor  # [S+1] int32
    kv_len: torch.Tensor  # [S] int32
    block_table: torch.Tensor  # [S, max_blocks] int32
    max_q_len: int
    real_tokens: int  # cu_q[-1]
    sample_rows: torch.Tensor  # [R] int64, indices into T


@dataclass(frozen=True, slots=True)
class LinearProbe:
    """One matrix product of the model, so that the runner can check it: rows [n, in_features] -> [n, out]."""

    in_features: int
    apply: Callable[[torch.Tensor], torch.Tensor]


class DecoderModel(Protocol):
    """A causal decoder over the paged cache."""

    config: ModelConfig
    parameters: int

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """token_ids, positions [T] int64 -> logits [R, vocab] of the rows ctx.sample_rows."""

    def linears(self) -> list[LinearProbe]:
        """One probe per distinct shape of matrix product."""

    def close(self) -> None:
        """Leave the process's globals as they were."""

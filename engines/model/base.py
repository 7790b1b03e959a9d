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
class RowProbe:
    """One operation of the model that works row by row, so that the runner can check that it really does:
    rows [n, in_features] -> [n, out]."""

    in_features: int
    apply: Callable[[torch.Tensor], torch.Tensor]
    sampled_only: bool = False  # sees only the rows that are sampled: at most one per sequence


class DecoderModel(Protocol):
    """A causal decoder over the paged cache."""

    config: ModelConfig
    parameters: int

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """token_ids, positions [T] int64 -> logits [R, vocab] of the rows ctx.sample_rows."""

    def row_probes(self) -> list[RowProbe]:
        """One probe per distinct shape of matrix product and per kind of small operation."""

    def close(self) -> None:
        """Leave the process's globals as they were."""

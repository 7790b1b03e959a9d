"""One runner for several engines: each has its own blocks of the KV pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engines.batch import NULL_BLOCK, Copies, RaggedBatch, StepResult


class SharedRunner:
    """One engine's view of the runner: its block b > 0 is block b + offset, the null block is everybody's."""

    def __init__(self, runner: Any, offset: int, block_size: int) -> None:
        self._runner = runner
        self._offset = offset
        self._slots = offset * block_size

    def run(self, batch: RaggedBatch) -> StepResult:
        if self._offset:
            table, slots = batch.block_table, batch.slot_mapping
            batch = replace(
                batch,
                block_table=np.where(table == NULL_BLOCK, table, table + np.int32(self._offset)),
                slot_mapping=np.where(slots < 0, slots, slots + self._slots),
            )
        result: StepResult = self._runner.run(batch)
        return result

    def copy(self, copies: Copies) -> None:
        """Host memory belongs to the default route alone: its blocks keep their numbers."""
        self._runner.copy(
            Copies(
                tuple((block + self._offset, host) for block, host in copies.out),
                tuple((host, block + self._offset) for host, block in copies.back),
            )
        )

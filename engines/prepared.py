"""One iteration between its plan and its results."""

from __future__ import annotations

from dataclasses import dataclass

from engines.batch import Copies, RaggedBatch
from engines.plan import Entry, Plan
from engines.sequence import Sequence
from engines.stats import Counters, Occupancy


@dataclass(frozen=True, slots=True)
class Prepared:
    """Planned and ready to run."""

    plan: Plan
    planned_at: float  # on the engine's clock
    batch: RaggedBatch
    sampled: list[Entry]  # in the order of batch.sample_rows
    copies: Copies | None  # of KV, before the pass
    tally: Counters
    occupancy: Occupancy
    entered: list[Sequence]  # for the first time
    blocked: str | None  # why the head of the queue is not in it

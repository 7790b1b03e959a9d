"""One run as the page needs it: read once, and what follows from it only when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from harness.comparison import Comparison, flatten
from harness.dashboard.colours import Style, styles
from harness.dashboard.seats import Seats, passes, seats
from harness.explain import Story
from harness.metrics.cancellations import HOLDING, next_admission_ns
from harness.metrics.engine import joined
from harness.metrics.latency import chunk_table
from harness.metrics.run import Run
from harness.table import lookup

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shown:
    """One run on the page. Arrays of figures are float64, with NaN where one was not measured."""

    name: str
    engine: str
    style: Style
    run: Run
    summary: dict[str, Any]

    @cached_property
    def config(self) -> dict[str, str]:
        """Flat: {"engine.max_num_seqs": "16"}."""
        return flatten(self.run.config)

    @cached_property
    def story(self) -> Story:
        return Story(self.run)

    @property
    def frame(self) -> pd.DataFrame:
        """harness.metrics.latency.per_request"""
        return self.story.frame

    @cached_property
    def chunks(self) -> pd.DataFrame:
        """harness.metrics.latency.chunk_table"""
        return chunk_table(self.run.requests)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """The passes of the run; start_ns counts from the start of the load."""
        return passes(self.run.steps)

    @cached_property
    def seats(self) -> Seats:
        return seats(self.run)

    @property
    def counts(self) -> dict[str, int]:
        return {k: int(v) for k, v in (self.summary.get("counts") or {}).items() if isinstance(v, int)}

    @property
    def duration_s(self) -> float:
        return float((self.summary.get("run") or {}).get("duration_s") or 0.0)

    @property
    def steady(self) -> tuple[float, float] | None:
        """Seconds; None where no steady state was found."""
        span = self.summary["steady"]["window"]
        return None if span["start_s"] is None else (span["start_s"], span["end_s"])

    def completed(self, column: str) -> Floats:
        """A column of the completed requests; "gap_ms" is every gap between two chunks of them."""
        done = (self.frame["outcome"] == "completed").to_numpy(dtype=bool)
        if column == "gap_ms":
            return self.chunks.loc[done[self.chunks["row"]], "gap_ms"].to_numpy(dtype=np.float64)
        return self.frame.loc[done, column].to_numpy(dtype=np.float64)

    def step(self, column: str) -> Floats:
        return self.steps[column].to_numpy(dtype=np.float64)

    @cached_property
    def reclaim(self) -> pd.DataFrame:
        """Of the requests whose users hung up and which the engine aborted: id, state, release_ms and
        reuse_ms (harness.metrics.cancellations)."""
        if self.run.engine.empty:
            return pd.DataFrame({"id": [], "state": [], "release_ms": [], "reuse_ms": []})
        gone = joined(self.run, self.frame)
        gone = gone[(gone["outcome"] == "cancelled") & (gone["finish_reason"] == "abort")]
        state, end = gone["abort_state"].to_numpy(), gone["end_ns"].to_numpy(np.float64)
        free = gone["finish_ns"].to_numpy(np.float64)
        again = next_admission_ns(self.run.engine, free)
        reuse = np.where(np.isin(state, HOLDING), (again - end) * 1e-6, np.nan)
        rows = {"id": gone["id"].to_numpy(), "state": state}
        return pd.DataFrame({**rows, "release_ms": (free - end) * 1e-6, "reuse_ms": reuse})

    def spent(self) -> Iterator[tuple[str, dict[str, float]]]:
        """The mean request of all and of each class: ms by part, and by what its queue waited for."""
        groups = self.summary.get("by_class") or {}
        for label, group in [("all", self.summary), *(groups.items() if len(groups) > 1 else ())]:
            whole = lookup(group, "latency_ms.e2e.from_intended.mean")
            shares = dict(group.get("attribution") or {})
            shares |= {f"queue_{name}": s for name, s in (group.get("queue_reasons") or {}).items()}
            if whole is not None and shares and None not in shares.values():
                yield label, {name: share * whole for name, share in shares.items()}


def shown_runs(comparison: Comparison) -> list[Shown]:
    """The runs of a comparison with a style each, told apart by engine."""
    named = list(zip(comparison.names, comparison.runs, comparison.summaries, strict=True))
    engines = [str(summary.get("engine") or name) for name, _, summary in named]
    return [
        Shown(name, engine, look, run, summary)
        for (name, run, summary), engine, look in zip(named, engines, styles(engines), strict=True)
    ]

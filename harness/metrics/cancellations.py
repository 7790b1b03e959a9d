"""Users who hung up: how many, where their request was, and how soon the engine let go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.engine import NO_ENGINE, joined
from harness.metrics.percentiles import describe, empty_block
from harness.metrics.run import Run

STATES = ("queued", "prefill", "decode", "preempted", "held")


def cancellations(run: Run, frame: pd.DataFrame) -> tuple[dict[str, Any], dict[str, str]]:
    """count (client), by_state and wasted_tokens (engine), release_ms: the client's hang-up to the blocks
    being free."""
    count = int((run.requests["outcome"] == "cancelled").sum())
    figures: dict[str, Any] = {
        "count": count,
        "by_state": dict.fromkeys(STATES),
        "wasted_tokens": None,
        "release_ms": empty_block(),
    }
    if run.engine.empty:
        return figures, dict.fromkeys(("by_state", "wasted_tokens", "release_ms"), NO_ENGINE)
    gone = joined(run, frame)
    gone = gone[gone["outcome"] == "cancelled"]
    figures["by_state"] = {state: int((gone["abort_state"] == state).sum()) for state in STATES}
    figures["wasted_tokens"] = int(np.nansum(gone["wasted_tokens"].to_numpy()))
    # Only what the engine aborted: a request that had finished by then held nothing any more.
    aborted = gone[gone["finish_reason"] == "abort"]
    figures["release_ms"] = describe((aborted["finish_ns"] - aborted["end_ns"]).to_numpy() * 1e-6)
    if figures["release_ms"]["n"] == 0:
        return figures, {"release_ms": "no request was cancelled" if not count else "the engine aborted none"}
    return figures, {}

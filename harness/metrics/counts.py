"""Who asked, how each request ended, and what was counted of its prompt and its answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.run import OUTCOMES, Run


def count_outcomes(run: Run) -> dict[str, int]:
    """scheduled, and how each request ended. scheduled comes from the schedule, the rest from the client's
    records."""
    outcome = run.requests["outcome"]
    counts = {name: int((outcome == name).sum()) for name in OUTCOMES}
    return {"scheduled": scheduled(run), **counts}


def scheduled(run: Run) -> int:
    """Requests that were due. A closed loop that ran out of time had fewer than its schedule holds; meta.json
    then has their number."""
    planned = (run.meta.get("planned") or {}).get("requests")
    if isinstance(planned, int):
        return planned
    return len(run.schedule) or len(run.requests)


def endings(run: Run, outcome: str) -> dict[str, list[str]]:
    """The error of every request with this outcome, by its reason: the server's code, else http_<status>."""
    rows = run.requests[run.requests["outcome"] == outcome]
    found: dict[str, list[str]] = {}
    for reason, status, error in zip(rows["reason"], rows["status"], rows["error"], strict=True):
        name = f"http_{int(status)}" if np.isfinite(status) else "unknown"
        found.setdefault(reason if isinstance(reason, str) else name, []).append(
            error if isinstance(error, str) else ""
        )
    return dict(sorted(found.items()))


def refusals(run: Run) -> dict[str, int]:
    """Refused requests by reason."""
    return {reason: len(errors) for reason, errors in endings(run, "rejected").items()}


def failures(run: Run) -> dict[str, dict[str, Any]]:
    """Failed requests by reason, with the first error of each: enough to know what to mend."""
    found = endings(run, "failed")
    return {reason: {"count": len(errors), "example": errors[0]} for reason, errors in found.items()}


def deadline_misses(run: Run, frame: pd.DataFrame) -> tuple[int | None, str | None]:
    """Requests with a deadline that were not whole by then, from the intended arrival; hang-ups and
    cut-offs aside."""
    if "deadline_ms" not in run.schedule or not run.schedule["deadline_ms"].notna().any():
        return None, "the workload sets no deadlines"
    due = run.schedule.set_index("id")["deadline_ms"]
    limit = frame["id"].map(due).to_numpy(dtype=np.float64)
    return int((frame["issued"].to_numpy() & (frame["late_ms"].to_numpy() > limit)).sum()), None


def token_source(run: Run) -> dict[str, int]:
    """Where each request's token count came from, and how often two sources disagreed."""
    source = run.requests["token_source"]
    counts = {name: int((source == name).sum()) for name in ("usage", "ids", "retokenised")}
    return {**counts, "mismatches": int(run.requests["token_mismatch"].sum())}


def prompt_tokens(run: Run) -> dict[str, int]:
    """Prompts that a server has counted: tokens planned for them, its count, and how many prompts are off."""
    counted = run.requests[np.isfinite(run.requests["prompt_tokens"])]
    return planned_and_counted(counted["planned_prompt_tokens"].fillna(0), counted["prompt_tokens"])


def output_tokens(run: Run) -> tuple[dict[str, Any], dict[str, str]]:
    """Answers that completed: tokens planned for them (stop_after), counted, and how many answers are off;
    and by channel, where the server's usage tells reasoning apart: reasoning, and other (text, tools)."""
    done = run.requests[(run.requests["outcome"] == "completed") & (run.requests["output_tokens"] > 0)]
    figures: dict[str, Any] = planned_and_counted(done["stop_after"], done["output_tokens"])
    told = done[np.isfinite(done["reasoning_tokens"])]
    if told.empty:
        names = ("reasoning", "other")
        return {**figures, **dict.fromkeys(names)}, dict.fromkeys(names, "no usage tells reasoning apart")
    reasoning = int(told["reasoning_tokens"].sum())
    return {**figures, "reasoning": reasoning, "other": int(told["output_tokens"].sum()) - reasoning}, {}


def planned_and_counted(planned: pd.Series, counted: pd.Series) -> dict[str, Any]:
    both = planned.notna() & counted.notna()
    planned, counted = planned[both], counted[both]
    return {
        "planned": int(planned.sum()),
        "counted": int(counted.sum()),
        "off": int((planned != counted).sum()),
    }

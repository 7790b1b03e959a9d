"""What the page's script needs of a run beside the charts, as columns: requests, iterations, seats, stalls.

Stamps are whole numbers of 10 us: finer than any stamp is true, and small numbers pack well. What is left out
is counted: `whole` beside `n`, which was kept."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.dashboard.figures import phases
from harness.dashboard.figures.plot import chosen
from harness.dashboard.seats import KINDS
from harness.dashboard.shown import Floats, Shown
from harness.dashboard.stalls import Stall
from harness.metrics.attribution import PARTS, QUEUE

TICK_NS = 10_000
"""10 us: the unit of every stamp on the page."""
MOST_REQUESTS = 45_000
"""On one page, over all its runs; so that 8 MB are not passed."""
MOST_STEPS = 160_000
STEP_COLUMNS = (
    *("num_seqs", "prefill_tokens", "decode_tokens", "recomputed_tokens", "cached_tokens"),
    *("ended_rows", "left_pad_tokens", "backend_pad_rows", "waiting", "running"),
    *("kv_live", "kv_cached", "kv_free", "preemptions"),
)
STAMPS = ("send", "arrival", "admitted", "token", "finish", "first", "last", "end")
"""From the intended arrival. arrival, admitted, token (the first) and finish (KV free) are the engine's."""


def run_data(run: Shown, stalls: tuple[list[Stall], int], runs: int) -> dict[str, Any]:
    """Everything of one run; `runs` share the page."""
    rows = _kept_rows(run, MOST_REQUESTS // runs)
    span = _kept_steps(run, MOST_STEPS // runs)
    return {
        "name": run.name,
        "engine": run.engine,
        "colour": run.style.colour,
        "requests": _requests(run, rows),
        "steps": _steps(run, *span),
        "seats": _seats(run, *span),
        "stalls": _stalls(run, stalls),
    }


def _kept_rows(run: Shown, most: int) -> np.ndarray:
    """Positions of the requests on the page, in order of arrival: all, or the slowest and fastest of each
    stretch and every k-th of the others."""
    at = run.frame["intended_s"].fillna(0).to_numpy(np.float64)
    slow = run.frame["e2e_ms"].fillna(0).to_numpy(np.float64)
    return chosen(at, slow, most)


def _kept_steps(run: Shown, most: int) -> tuple[int, int]:
    """[first, end): the middle of the run where there are too many."""
    count = len(run.steps)
    spare = max(0, count - most)
    return spare // 2, spare // 2 + min(count, most)


def _requests(run: Shown, rows: np.ndarray) -> dict[str, Any]:
    frame, requests = run.frame.iloc[rows], run.run.requests.iloc[rows]
    engine = run.run.engine.drop_duplicates(["id", "attempt"], keep="last")
    engine = requests[["id", "attempt"]].merge(engine, on=["id", "attempt"], how="left")
    lives = run.story.lives.reindex(requests["id"]) if not engine.empty else pd.DataFrame()
    gone = run.reclaim.drop_duplicates("id").set_index("id").reindex(requests["id"])
    intended = requests["intended_ns"].to_numpy(np.float64)
    stamps = {
        "send": requests["send_ns"],
        "arrival": engine["arrival_ns"],
        "admitted": engine["admitted_ns"],
        "token": engine["first_token_ns"],
        "finish": engine["finish_ns"],
        "first": frame["first_s"] * 1e9,
        "last": frame["last_s"] * 1e9,
        "end": requests["end_ns"],
    }
    columns: dict[str, Any] = {
        "id": requests["id"].tolist(),
        "class": coded(requests["request_class"]),
        "tenant": coded(requests["tenant"]),
        "outcome": coded(requests["outcome"]),
        "reason": coded(requests["reason"]),
        "state": coded(engine["abort_state"]),
        "finish_reason": coded(engine["finish_reason"]),
        "seq": whole(engine["seq_id"]),
        "intended": ticks(intended),
        **{name: ticks(value.to_numpy(np.float64) - intended) for name, value in stamps.items()},
        "prompt_tokens": whole(requests["prompt_tokens"]),
        "output_tokens": whole(requests["output_tokens"]),
        "max_tokens": whole(requests["max_tokens"]),
        "chunks": whole(frame["chunks"]),
        "cached_tokens": whole(engine["cached_tokens"]),
        "preemptions": whole(engine["preemptions"]),
        "wasted_tokens": whole(engine["wasted_tokens"]),
    }
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "normalized_ms", "longest_gap_ms"):
        columns[name] = exact(frame[name].to_numpy(np.float64))
    for name in ("release_ms", "reuse_ms"):
        columns[name] = exact(gone[name].to_numpy(np.float64))
    for name in (*PARTS, *QUEUE) if len(lives.columns) else ():
        values = lives[name].to_numpy(np.float64)
        if (np.abs(values[np.isfinite(values)]) >= 5e-4).any():
            columns[f"part_{name}"] = [None if not np.isfinite(v) else float(f"{v:.4g}") for v in values]
    kept = {name: column for name, column in columns.items() if not _blank(column)}
    return {"n": len(rows), "whole": len(run.run.requests), "columns": kept}


def _steps(run: Shown, first: int, end: int) -> dict[str, Any]:
    steps = run.steps.iloc[first:end]
    start = steps["start_ns"].to_numpy(np.float64)
    columns: dict[str, Any] = {
        "start": delta(np.round(start / TICK_NS).astype(np.int64).tolist()),
        "took": ticks(steps["duration_ns"].to_numpy(np.float64)),
        "gap": ticks(steps["host_gap_ns"].to_numpy(np.float64)),
        **{name: whole(steps[name]) for name in STEP_COLUMNS},
        "blocked": coded(steps["blocked"]),
    }
    kept = {name: column for name, column in columns.items() if not _blank(column)}
    number = steps["step"].iloc[0] if len(steps) else 0
    return {"n": len(steps), "whole": len(run.steps), "number": int(number), "columns": kept}


def _seats(run: Shown, first: int, end: int) -> dict[str, Any]:
    """Blocks whose passes are all on the page; first and last count from the first step on the page."""
    found = run.seats
    inside = (found.first >= first) & (found.last < end)
    columns = {
        "seat": found.seat[inside].tolist(),
        "seq": found.seq[inside].tolist(),
        "kind": found.kind[inside].tolist(),
        "first": delta((found.first[inside] - first).tolist()),
        "length": (found.last - found.first + 1)[inside].tolist(),
        "tokens": found.tokens[inside].tolist(),
        "pad": found.pad[inside].tolist(),
    }
    look = {
        "colours": phases.SEAT_COLOURS,
        "patterns": phases.SEAT_PATTERNS,
        "pad": phases.PAD,
        "kinds": KINDS,
    }
    return {"count": found.count, "whole": len(found.seat), "columns": columns, "look": look}


def _stalls(run: Shown, stalls: tuple[list[Stall], int]) -> dict[str, Any]:
    found, count = stalls
    ids = run.run.requests["id"]
    rows = [
        [
            ids.iloc[s.row],
            s.chunk,
            round(s.at_s, 4),
            float(f"{s.gap_ms:.5g}"),
            s.passes,
            s.culprits,
            s.all_tokens,
        ]
        for s in found
    ]
    return {"whole": count, "rows": rows}


def coded(values: pd.Series) -> dict[str, Any]:
    """A column of few words: {"words": [...], "at": [index or null]}."""
    codes, words = pd.factorize(values.where(values.notna() & (values != ""), None))
    return {"words": [str(word) for word in words], "at": [int(c) if c >= 0 else None for c in codes]}


def ticks(ns: Floats) -> list[int | None]:
    return [round(v / TICK_NS) if np.isfinite(v) else None for v in ns.tolist()]


def whole(values: pd.Series) -> list[int | None]:
    return [int(v) if np.isfinite(v) else None for v in values.to_numpy(np.float64).tolist()]


def exact(values: Floats) -> list[float | None]:
    """Six significant digits, as in summary.json."""
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in values.tolist()]


def delta(values: list[int]) -> dict[str, Any]:
    """A column that grows: each value as the step from the one before."""
    return {"delta": np.diff(np.array(values, np.int64), prepend=0).tolist()}


def _blank(column: Any) -> bool:
    """Nothing in it: the page does without."""
    values: Sequence[Any] = column if isinstance(column, list) else column.get("at", column.get("delta"))
    return all(value is None for value in values)


def pack(text: str) -> str:
    """For a script element of another type: gzip in base64. The same text gives the same bytes."""
    return base64.b64encode(gzip.compress(text.encode("utf-8"), 6, mtime=0)).decode("ascii")


def unpack(page: str, name: str) -> Any:
    """The JSON that `pack` put into the element of that id. Raises ValueError where there is none."""
    opening = f'id="{name}">'
    at = page.find(opening)
    if at < 0:
        raise ValueError(f"the page has no element {name!r}")
    packed = page[at + len(opening) : page.index("</script>", at)]
    return json.loads(gzip.decompress(base64.b64decode(packed)))

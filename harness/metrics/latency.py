"""Latency of every request and every gap, from the client's stamps alone. Milliseconds throughout.

A request's figures are NaN where they were not measured: no token, no first token, one chunk only.
`reference` is the intended arrival (headline: what the user felt) or the send (what the server did)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.metrics.percentiles import Floats, describe, describe_censored, describe_pooled, empty_block
from harness.slo import limit

MS = 1e-6  # nanoseconds to milliseconds

UNSERVED = ("failed", "timed_out", "rejected")
"""Outcomes that count as infinitely late. A user's own hang-up and the run's end are neither served nor
late."""


def chunk_table(requests: pd.DataFrame) -> pd.DataFrame:
    """A row per token-bearing chunk: row (position in `requests`), k, t_ns, tokens, gap_ms (NaN for k = 0),
    scaled.

    `scaled` is `tokens` stretched so that a request's chunks add up to its output_tokens, for servers whose
    chunks do not say what they hold."""
    sizes = np.array([len(c) for c in requests["chunk_ns"]], dtype=np.int64)
    if sizes.sum() == 0:
        kinds = {
            "row": np.int64,
            "k": np.int64,
            **dict.fromkeys(("t_ns", "tokens", "gap_ms", "scaled"), float),
        }
        return pd.DataFrame({name: np.array([], dtype=kind) for name, kind in kinds.items()})
    row = np.repeat(np.arange(len(requests)), sizes)
    starts = np.cumsum(sizes) - sizes
    k = np.arange(int(sizes.sum())) - np.repeat(starts, sizes)
    t = np.concatenate(requests["chunk_ns"].tolist())
    tokens = np.concatenate(requests["chunk_tokens"].tolist())
    gap = np.full(t.size, np.nan)
    gap[1:] = np.diff(t) * MS
    gap[k == 0] = np.nan
    held = np.bincount(row, weights=tokens, minlength=len(requests))
    claimed = requests["output_tokens"].to_numpy()
    factor = np.where(np.isfinite(claimed) & (claimed > 0) & (held > 0), claimed / np.maximum(held, 1), 1.0)
    return pd.DataFrame(
        {"row": row, "k": k, "t_ns": t, "tokens": tokens, "gap_ms": gap, "scaled": tokens * factor[row]}
    )


def per_request(requests: pd.DataFrame, slo: dict[str, Any] | None = None) -> pd.DataFrame:
    """A row per request: who it is, how it ended, and its latencies. See docs/metrics.md for every formula.

    Columns: id, request_class, tenant, outcome, reason, stream, intended_s, send_s, first_s, last_s, end_s,
    output_tokens, prompt_tokens, chunks, drained, ttft_ms, ttft_send_ms, ttfc_ms, ttfc_send_ms, ttfo_ms,
    ttfo_send_ms, tpot_ms, e2e_ms, e2e_send_ms, normalized_ms, longest_gap_ms, send_lag_ms, late_ms (adj_e2e),
    first_late_ms (adj_ttft), issued, judged and met (SLO)."""
    out = requests[["id", "request_class", "tenant", "outcome", "reason", "stream"]].copy()
    stamps, counts = requests["chunk_ns"], requests["chunk_tokens"]
    first = np.array([c[0] if len(c) else np.nan for c in stamps], dtype=np.float64)
    last = np.array([c[-1] if len(c) else np.nan for c in stamps], dtype=np.float64)
    opening = np.array([c[0] if len(c) else np.nan for c in counts], dtype=np.float64)
    held = np.array([c.sum() for c in counts], dtype=np.float64)
    chunks = np.array([len(c) for c in stamps], dtype=np.int64)
    intended, end = requests["intended_ns"].to_numpy(), requests["end_ns"].to_numpy()
    send = requests["send_ns"].to_numpy()
    claimed = requests["output_tokens"].to_numpy()
    n = np.where(np.isfinite(claimed) & (claimed > 0), claimed, np.where(held > 0, held, np.nan))

    # A whole body has no first token of its own: only the time at which all of it was there.
    streamed = out["stream"].to_numpy(dtype=bool)
    last = np.where(~streamed & np.isnan(last) & (n > 0), end, last)
    seen_first = np.where(streamed, first, np.nan)
    rest = n - opening
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where((rest > 0) & (chunks > 1), (last - first) * MS / rest, np.nan)
        out["intended_s"], out["send_s"], out["end_s"] = intended * 1e-9, send * 1e-9, end * 1e-9
        out["first_s"], out["last_s"] = seen_first * 1e-9, last * 1e-9
        out["output_tokens"] = n
        prompt = requests["prompt_tokens"].to_numpy()
        out["prompt_tokens"] = np.where(
            np.isfinite(prompt), prompt, requests["planned_prompt_tokens"].to_numpy()
        )
        out["chunks"] = chunks
        out["drained"] = streamed & (chunks == 1) & (n > 1)
        out["ttft_ms"] = (seen_first - intended) * MS
        out["ttft_send_ms"] = (seen_first - send) * MS
        for name, column in (("ttfc", "first_event_ns"), ("ttfo", "first_output_ns")):
            stamp = np.where(streamed, requests[column].to_numpy(), np.nan)
            out[f"{name}_ms"], out[f"{name}_send_ms"] = (stamp - intended) * MS, (stamp - send) * MS
        out["tpot_ms"] = np.where(streamed, tpot, np.nan)
        out["e2e_ms"] = (last - intended) * MS
        out["e2e_send_ms"] = (last - send) * MS
        out["normalized_ms"] = out["e2e_ms"] / n
    gaps = [np.diff(c).max() * MS if len(c) > 1 else np.nan for c in stamps]
    out["longest_gap_ms"] = np.where(streamed, np.array(gaps, dtype=np.float64), np.nan)
    out["send_lag_ms"] = (send - intended) * MS

    outcome = out["outcome"].to_numpy()
    completed = outcome == "completed"
    late = np.isin(outcome, UNSERVED) | ((outcome == "cut_off") & (out["reason"] == "shed").to_numpy())
    out["issued"] = completed | late
    out["judged"] = out["issued"] | gave_up_late(out, slo or {})
    out["late_ms"] = np.where(late, np.inf, np.where(completed, out["e2e_ms"], np.nan))
    out["first_late_ms"] = np.where(
        late & streamed, np.inf, np.where(completed, out["ttft_ms"], np.nan)
    )  # a whole body has no first token, served or not
    out["met"] = meets_slo(out, slo or {})
    return out


def gave_up_late(frame: pd.DataFrame, slo: dict[str, Any]) -> np.ndarray:
    """Hang-ups that had missed TTFT's limit by then: their first token came after it, or none had come when
    it passed. Whatever they waited for, the SLO was lost."""
    waited = frame["ttft_ms"].fillna((frame["end_s"] - frame["intended_s"]) * 1e3).to_numpy()
    late = waited > limit(slo, frame["request_class"], "ttft_ms")
    return (frame["outcome"] == "cancelled").to_numpy() & late


def meets_slo(frame: pd.DataFrame, slo: dict[str, Any]) -> np.ndarray:
    """Whether each completed request kept every limit of the SLO that is set, its class's own first.

    Where all tokens reach the user at once (drained, or not streamed) there is no pace to judge, and the
    first token was there no sooner than the last: TTFT's limit is held against that time."""
    met = (frame["outcome"] == "completed").to_numpy() & np.isfinite(frame["e2e_ms"].to_numpy())
    ttft, tpot = (limit(slo, frame["request_class"], name) for name in ("ttft_ms", "tpot_ms"))
    met &= frame["ttft_ms"].fillna(frame["e2e_ms"]).to_numpy() <= ttft
    met &= frame["tpot_ms"].fillna(0.0).to_numpy() <= tpot
    return met


def gap_table(requests: pd.DataFrame) -> pd.DataFrame:
    """The chunk table of streamed requests with more than one chunk: what has a pace."""
    table = chunk_table(requests)
    several = np.array([len(c) > 1 for c in requests["chunk_ns"]], dtype=bool) & requests["stream"].to_numpy(
        bool
    )
    return table[several[table["row"]]] if len(table) else table


def token_gaps(gaps: pd.DataFrame) -> tuple[Floats, Floats, np.ndarray]:
    """ITL as a weighted multiset: (gap_ms, how often, row). A chunk of m tokens is one gap and m - 1 zeros,
    so that n tokens give n - 1 gaps."""
    later = gaps[gaps["k"] > 0]
    bundled = gaps[gaps["tokens"] > 1]
    values = np.concatenate([later["gap_ms"].to_numpy(), np.zeros(len(bundled))])
    counts = np.concatenate([np.ones(len(later)), np.round(bundled["tokens"].to_numpy() - 1)])
    return values, counts, np.concatenate([later["row"].to_numpy(), bundled["row"].to_numpy()])


def why_no_pace(frame: pd.DataFrame) -> str:
    """Why TPOT, ITL and ICL of these completed requests are null."""
    if not len(frame):
        return "no completed request"
    if frame["drained"].any():
        return "drained: every answer came in one chunk"
    if not frame["stream"].any():
        return "not streamed"
    return "no answer of more than one chunk"


def latency_blocks(requests: pd.DataFrame, frame: pd.DataFrame) -> tuple[dict[str, Any], dict[str, str]]:
    """The client's part of summary.latency_ms over completed requests, and the reason of each null block.

    `frame` is per_request(requests), row for row."""
    done = (frame["outcome"] == "completed").to_numpy()
    completed = frame[done]
    reasons: dict[str, str] = {}
    none = "no completed request"
    no_token = none if completed.empty else "no token arrived"
    no_first = "not streamed" if len(completed) and not completed["stream"].any() else no_token

    def keep(name: str, block: dict[str, Any], reason: str) -> dict[str, Any]:
        if block["n"] == 0:
            reasons[name] = reason
        return block

    def both(name: str, reason: str) -> dict[str, Any]:
        """The same latency from the intended arrival and from the send."""
        return {
            ref: keep(f"{name}.{ref}", describe(completed[column].to_numpy()), reason)
            for ref, column in (("from_intended", f"{name}_ms"), ("from_send", f"{name}_send_ms"))
        }

    tokens = len(completed) and np.isfinite(completed["ttft_ms"].to_numpy()).any()
    blocks: dict[str, Any] = {
        "ttft": both("ttft", no_first),
        "ttfc": both("ttfc", "the records hold no first event" if tokens else no_first),
        "ttfo": both("ttfo", "the records hold no first token that is no reasoning" if tokens else no_first),
        "tpot": keep("tpot", describe(completed["tpot_ms"].to_numpy()), why_no_pace(completed)),
    }
    gaps = gap_table(requests[done].reset_index(drop=True))
    values, counts, owners = token_gaps(gaps)
    itl = describe_pooled(values, owners, counts) if len(gaps) else empty_block()
    total = counts.sum() if len(gaps) else 0.0
    itl["zero_share"] = float(counts[values == 0].sum() / total) if total > 0 else None
    blocks["itl"] = keep("itl", itl, why_no_pace(completed))
    later = gaps[gaps["k"] > 0]
    icl = describe_pooled(later["gap_ms"].to_numpy(), later["row"].to_numpy())
    blocks["icl"] = keep("icl", icl, why_no_pace(completed))
    blocks["e2e"] = both("e2e", no_token)
    blocks["normalized"] = keep("normalized", describe(completed["normalized_ms"].to_numpy()), no_token)
    blocks["adj_ttft"] = _censored("adj_ttft", frame["first_late_ms"].to_numpy(), reasons)
    blocks["adj_e2e"] = _censored("adj_e2e", frame["late_ms"].to_numpy(), reasons)
    return blocks, reasons


def _censored(name: str, values: Floats, reasons: dict[str, str]) -> dict[str, Any]:
    """adj_*: failures, time-outs and refusals are infinitely late; a figure that lands among them is null."""
    block = describe_censored(values)
    if block["n"] == 0:
        reasons[name] = "no request was served or refused"
        return block
    for figure in ("mean", "p50", "p90", "p95", "p99", "max"):
        if block[figure] is None:
            reasons[f"{name}.{figure}"] = (
                "infinite: that share of the requests failed, timed out or was refused"
            )
    return block

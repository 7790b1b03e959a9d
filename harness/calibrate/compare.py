"""What a client reported, held against what the truth server really did, request by request.

Truth: TTFT from the server's receipt of the whole request to right before the write of its first token; gaps
between those moments of successive tokens. The client's TTFT counts from its send. So an error holds the way
there and back and the server's own wake-up too: about 0.05 ms over loopback."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.metrics.arrivals import index_of_dispersion
from harness.request_log import RequestRecord

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
IOD_WINDOWS_S = (0.2, 1.0)


def compare(records: Iterable[RequestRecord], truth: Any, t0_ns: int) -> dict[str, Any]:
    """Figures in ms (rates in 1/s) over the completed requests; None where there was nothing to measure.
    truth: a TruthLog. `mismatched` counts requests whose tokens the client did not see one by one."""
    final = [r for r in records if r.final]
    done = [r for r in final if r.outcome == "completed" and r.id in truth.index]
    whole, mismatched = [], 0
    for record in done:
        sent = truth.sent_of(truth.index[record.id])
        if len(sent) == len(record.chunk_ns) and len(sent) and record.send_ns is not None:
            whole.append((record, truth.rows[truth.index[record.id]], sent))
        else:
            mismatched += 1
    figures: dict[str, Any] = {"requests": len(final), "completed": len(done), "mismatched": mismatched}
    figures |= {"tokens": int(sum(len(sent) for _, _, sent in whole))}
    figures |= _ttft(whole)
    figures |= _gaps([np.asarray(r.chunk_ns, np.int64) for r, _, _ in whole], [s for _, _, s in whole])
    read = [np.asarray(r.chunk_ns, np.int64) + t0_ns - sent for r, _, sent in whole]
    figures |= _levels("stamp_error", _joined(read), (50, 99, 99.9))
    arrived = np.array([row["arrived_ns"] - t0_ns - r.intended_ns for r, row, _ in whole], np.float64)
    figures |= _levels("lateness", arrived / 1e6, (50, 99, 100))
    send_lag = np.array([r.send_ns - r.intended_ns for r, _, _ in whole if r.send_ns is not None], np.float64)
    figures |= _levels("send_lag", send_lag / 1e6, (50, 99))
    figures |= _levels("server_lateness", truth.lateness_ns() / 1e6, (50, 99))
    return figures | _arrivals(final, truth)


def _ttft(whole: Sequence[tuple[RequestRecord, Any, Ints]]) -> dict[str, Any]:
    reported = np.array([r.chunk_ns[0] - r.send_ns for r, _, _ in whole if r.send_ns is not None]) / 1e6
    true = np.array([sent[0] - row["received_ns"] for _, row, sent in whole]) / 1e6
    from_kernel = np.array([sent[0] - row["arrived_ns"] for _, row, sent in whole]) / 1e6
    figures = _levels("ttft_true", true, (50, 99)) | _levels("ttft_reported", reported, (50, 99))
    for p in (50, 99):
        both = figures[f"ttft_reported_p{p}"], figures[f"ttft_true_p{p}"]
        figures[f"ttft_p{p}_error"] = None if None in both else both[0] - both[1]
    # Matched by request: two percentiles may be equal while every request is wrong.
    figures |= _levels("ttft_error", np.abs(reported - true), (50, 99))
    # Without the time until the server's process was woken, which no client can do anything about.
    return figures | _levels("ttft_error_kernel", np.abs(reported - from_kernel), (50, 99))


def _gaps(reported: list[Ints], true: list[Ints]) -> dict[str, Any]:
    several = [(r, t) for r, t in zip(reported, true, strict=True) if len(t) > 1]
    tpot = np.array([((r[-1] - r[0]) - (t[-1] - t[0])) / (len(t) - 1) for r, t in several]) / 1e6
    seen, real = _joined([np.diff(r) for r, _ in several]), _joined([np.diff(t) for _, t in several])
    figures = _levels("tpot_error", np.abs(tpot), (50, 99))
    figures |= _levels("gap_error", np.abs(seen - real), (50, 99, 99.9, 100))
    figures |= _levels("gap_reported", seen, (99, 100)) | _levels("gap_true", real, (99, 100))
    for name in ("p99", "max"):
        both = figures[f"gap_reported_{name}"], figures[f"gap_true_{name}"]
        figures[f"gap_{name}_error"] = None if None in both else both[0] - both[1]
    return figures


def _arrivals(records: list[RequestRecord], truth: Any) -> dict[str, Any]:
    """Rate and dispersion where they count, at the server, beside those of the schedule."""
    ids = {r.id for r in records}
    mine = np.array([k for row_id, k in truth.index.items() if row_id in ids], np.int64)
    arrived = np.sort(truth.rows["arrived_ns"][mine]).astype(np.float64) / 1e9
    planned = np.sort(np.array([r.intended_ns for r in records], np.float64)) / 1e9
    figures: dict[str, Any] = {"rate": _rate(arrived), "rate_planned": _rate(planned)}
    for width in IOD_WINDOWS_S:
        figures[f"iod_{width:g}s"] = index_of_dispersion(arrived, width)
        figures[f"iod_{width:g}s_planned"] = index_of_dispersion(planned, width)
    sent = np.concatenate([truth.sent_of(int(k)) for k in mine]) if len(mine) else truth.sent[:0]
    span_s = float(sent.max() - sent.min()) / 1e9 if len(sent) else 0.0
    figures["tokens_per_s"] = len(sent) / span_s if span_s else None
    return figures


def _rate(times_s: Floats) -> float | None:
    span = float(times_s[-1] - times_s[0]) if len(times_s) > 1 else 0.0
    return (len(times_s) - 1) / span if span > 0 else None


def _joined(parts: list[Ints]) -> Floats:
    """All of them one after the other, ns as ms."""
    return np.concatenate(parts).astype(np.float64) / 1e6 if parts else np.empty(0)


def _levels(name: str, values_ms: Floats, levels: Sequence[float]) -> dict[str, Any]:
    """{name_p50: ..}; 100 is called max."""
    keys = ["max" if level == 100 else f"p{level:g}" for level in levels]
    if not len(values_ms):
        return {f"{name}_{key}": None for key in keys}
    return {
        f"{name}_{key}": float(value)
        for key, value in zip(keys, np.percentile(values_ms, levels), strict=True)
    }

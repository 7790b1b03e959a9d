"""How long a client says it will wait, against how long the server may make it wait.

A client whose patience ends first leaves, and often comes again; what the engine did for it was for nobody.
It is told: a header of its answer, and a line in the log."""

from __future__ import annotations

from collections.abc import Mapping

from engines.server.errors import ApiError, shown

DECLARED = "X-Request-Timeout"
"""Seconds."""
_ALSO = ("X-Stainless-Read-Timeout", "X-Stainless-Timeout")  # OpenAI's client libraries send theirs
WARNING = "X-Batchmark-Warning"


def declared_timeout_s(headers: Mapping[str, str]) -> float | None:
    """Raises ApiError for a header of ours that is no time; what libraries send by themselves is used or left
    alone."""
    for name in (DECLARED, *_ALSO):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if 0 < seconds < float("inf"):
            return seconds
        if name == DECLARED:
            raise ApiError(f"{name}: {shown(value)}: needs seconds above 0", param=name, code="invalid_value")
    return None


def warning(declared_s: float | None, queue_timeout_ms: float | None, wait_s: float | None) -> str | None:
    """What the client should know, in ASCII, or None. wait_s: what the queue is estimated to take now."""
    if declared_s is None:
        return None
    if queue_timeout_ms is not None and declared_s * 1e3 < queue_timeout_ms:
        return (
            f"client timeout of {declared_s:g} s is shorter than engine.queue_timeout_ms="
            f"{queue_timeout_ms:g}: the request may be given up while it still waits"
        )
    if wait_s is not None and declared_s < wait_s:
        return f"client timeout of {declared_s:g} s is shorter than the estimated wait of {wait_s:.3g} s"
    return None

"""A log of requests to an OpenAI-style server: JSONL with a time, the `usage` of the response and, where it
was written down, latency, status, user and session, under the names that gateways and SDKs give them.

    {"timestamp": "2025-03-01T12:00:00.250Z", "model": "m", "status": 200, "latency_ms": 812, "usage":
     {"prompt_tokens": 812, "completion_tokens": 44, "prompt_tokens_details": {"cached_tokens": 512}}}

The time is taken as that of the request. A number is in seconds, milliseconds, microseconds or nanoseconds
since 1970, by its size. Requests with an error or a status from 400 up are left out and counted; an answer of
0 tokens is taken as 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workloads.readers.files import each_object
from workloads.readers.rows import Rows
from workloads.readers.values import NS, BadRow, is_number, shown, stamp_ns, tokens

TIMES = (
    *("timestamp", "time", "ts", "@timestamp", "created_at", "created", "start_time", "startTime"),
    *("request_time", "started_at", "date"),
)
INPUT = ("prompt_tokens", "input_tokens", "promptTokens", "num_prompt_tokens")
OUTPUT = ("completion_tokens", "output_tokens", "completionTokens", "num_generation_tokens")
LATENCY_S = ("latency", "latency_s", "duration", "duration_s", "e2e_latency", "response_time")
LATENCY_MS = ("latency_ms", "duration_ms", "response_time_ms", "elapsed_ms")
STATUS = ("status", "status_code", "http_status", "code")
SESSION = ("session_id", "conversation_id", "session", "thread_id", "chat_id")
USER = ("user", "user_id", "tenant", "api_key_alias", "team_id", "model")


def read(path: str, rows: Rows) -> None:
    def record(row: dict[str, Any]) -> None:
        outer, inner = row, row.get("response")
        if isinstance(inner, Mapping) and isinstance(inner.get("body"), Mapping):  # a batch's result
            outer, inner = {**inner, **row}, inner["body"]
        fields = {**inner, **outer} if isinstance(inner, Mapping) else outer
        if _failed(fields):
            rows.failed += 1
            return
        usage = fields.get("usage")
        usage = usage if isinstance(usage, Mapping) else fields
        prompt, cached = _prompt(usage)
        key = _first(usage, OUTPUT)
        answer = 0 if key is None else tokens(usage[key], key, 0)
        more: dict[str, Any] = {}
        for name, names in (("session", SESSION), ("user", USER)):
            found = _first(fields, names)
            more[name] = None if found is None else str(fields[found])
        at = _time(fields)
        rows.raised += answer == 0
        rows.add(at, prompt, max(answer, 1), reused_tokens=cached, latency_s=_latency(fields), **more)

    each_object(path, rows, record)


def looks_like(row: Mapping[str, Any]) -> bool:
    """Whether a JSON object may be a line of such a log."""
    inner = row.get("response")
    nested = inner if isinstance(inner, Mapping) else {}
    return (
        "usage" in row
        or "usage" in nested
        or "body" in nested
        or (_first(row, INPUT[:1]) is not None and _first(row, TIMES) is not None)
    )


def _failed(row: Mapping[str, Any]) -> bool:
    key = _first(row, STATUS)
    status: Any = row[key] if key else None
    if isinstance(status, str):
        if status.isdigit():
            status = int(status)
        else:
            return status.lower() in ("error", "failed", "failure", "timeout", "cancelled", "canceled")
    return bool(row.get("error")) or (is_number(status) and status >= 400)


def _prompt(usage: Mapping[str, Any]) -> tuple[int, int]:
    """(prompt tokens, those of them that came from a cache)."""
    key = _first(usage, INPUT)
    if key is None:
        raise BadRow(f"is missing; needs {' or '.join(INPUT[:2])}", "usage.prompt_tokens")
    prompt = tokens(usage[key], key, 0)
    details: Mapping[str, Any] = next(
        (
            usage[k]
            for k in ("prompt_tokens_details", "input_tokens_details")
            if isinstance(usage.get(k), Mapping)
        ),
        {},
    )
    cached = tokens(details.get("cached_tokens") or usage.get("cached_tokens") or 0, "cached_tokens", 0)
    # Anthropic's usage counts cached tokens beside input_tokens.
    for key in ("cache_read_input_tokens", "cache_creation_input_tokens"):
        beside = tokens(usage.get(key) or 0, key, 0)
        prompt += beside
        cached += beside if key.startswith("cache_read") else 0
    if cached > prompt:
        raise BadRow(f"{cached} is above the prompt's {prompt} tokens", "cached_tokens")
    return tokens(prompt, key), cached


def _time(row: Mapping[str, Any]) -> int:
    key = _first(row, TIMES)
    if key is None:
        raise BadRow(f"is missing; needs {', '.join(TIMES[:6])} or the like", "timestamp")
    value = row[key]
    if isinstance(value, str):
        try:
            value = float(value) if "." in value else int(value)
        except ValueError:
            return stamp_ns(value, key)
    if not is_number(value) or not 0 <= value < 1e19:
        raise BadRow(f"{shown(value)} is not a time", key)
    for most, ns in ((1e11, NS), (1e14, 1_000_000), (1e17, 1_000)):
        if value < most:
            return value * ns if type(value) is int else round(value * ns)
    return int(value)


def _latency(row: Mapping[str, Any]) -> float:
    for names, unit in ((LATENCY_MS, 1e3), (LATENCY_S, 1.0)):
        key = _first(row, names)
        if key is not None:
            value = row[key]
            if not is_number(value) or not 0 <= value < 1e12:
                raise BadRow(f"{shown(value)} is not a duration of 0 or more", key)
            return value / unit
    return math.nan


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if row.get(name) is not None), None)

"""What the server writes to standard error. text: warnings and errors, for people. json: every event as one
object a line, with a line for each request that ends, is refused or is turned away. Neither holds a prompt,
an answer or a key."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import orjson

from engines.server.answer import Answer
from engines.server.engine_client import Stream

EVENTS = logging.getLogger("batchmark.events")
"""Nothing is written to it unless it is enabled for INFO."""


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        event = getattr(record, "event", None)
        line |= event if isinstance(event, dict) else {"event": "log", "message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def configure(log_format: str) -> None:
    """For the whole process."""
    handler = logging.StreamHandler(sys.stderr)
    root = logging.getLogger()
    root.handlers = [handler]
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
        logging.getLogger("batchmark").setLevel(logging.INFO)
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))


def event(name: str, level: int = logging.INFO, /, **fields: Any) -> None:
    """One line, if anybody wants it."""
    if EVENTS.isEnabledFor(level):
        told = {"event": name, **{key: value for key, value in fields.items() if value is not None}}
        words = " ".join(f"{key}={value}" for key, value in told.items() if key != "event")
        EVENTS.log(level, "%s: %s", name, words, extra={"event": told})


def request_event(stream: Stream, answer: Answer, outcome: str, route: str) -> None:
    """The one line of a request that the engine has seen. outcome: as Metrics.on_ended has it."""
    if not EVENTS.isEnabledFor(logging.INFO):
        return
    request, refused = stream.request, outcome.startswith("refused ")
    now_ns = time.monotonic_ns()
    event(
        "refused" if refused else "request",
        answer=answer.id,
        run=request.label.get("run"),
        id=request.label.get("id"),
        attempt=request.label.get("attempt"),
        tenant=request.tenant,
        request_class=request.request_class,
        route=route,
        model=stream.tags.model,
        path=stream.tags.path,
        outcome="refused" if refused else outcome,
        reason=outcome.removeprefix("refused ") if refused else None,
        prompt_tokens=len(request.prompt_token_ids),
        max_tokens=request.max_tokens,
        output_tokens=stream.output_tokens,
        ttft_ms=_ms(stream.arrival_ns, stream.first_token_ns),
        e2e_ms=_ms(stream.arrival_ns, now_ns),
    )


def _ms(start_ns: int, end_ns: int | None) -> float | None:
    return None if end_ns is None else round((end_ns - start_ns) / 1e6, 3)

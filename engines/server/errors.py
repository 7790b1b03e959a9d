"""Errors as an OpenAI client expects them: an HTTP status and a JSON body that says what was wrong."""

from __future__ import annotations

from typing import Any

import orjson

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Becomes the answer `status` with an OpenAI error body. The message is one line: the field, its value
    and what would work."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        self.message = " ".join(message.split())[:500]  # whatever a client put into a name
        super().__init__(self.message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


def error_object(error: ApiError) -> dict[str, Any]:
    """The value of the key "error"."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"message": error.message, "type": kind, "param": error.param, "code": error.code}


def error_body(error: ApiError) -> bytes:
    """{"error": {"message", "type", "param", "code"}}"""
    return orjson.dumps({"error": error_object(error)})


def shown(value: Any, limit: int = 60) -> str:
    """A client's value for a message: JSON, on one line, cut when it is long."""
    try:
        text = orjson.dumps(value).decode()
    except TypeError:  # what JSON cannot say, or nested too deep to be written
        try:
            text = repr(value)
        except RecursionError:
            text = f"a deeply nested {'object' if isinstance(value, dict) else 'list'}"
    return text if len(text) <= limit else text[: limit - 1] + "…"

"""Checks of the settings that the harness owns. engine.* of our own engines is checked by engines.config and
workload.* by workloads; each names the setting, its value and what would work."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from omegaconf import DictConfig

MAX_PROCESSES = 64
"""Of one load: more than the cores of a host only get into each other's way."""

MAX_CONCURRENCY = 1_000_000
"""Places of one load: more than the ports that a host has."""
MAX_SECONDS = 1e9
"""30 years. Beyond lie overflows; null says that there is no limit."""

Rule = Callable[[Any], str | None]
"""Gives what would work, or None when the value does."""


def check(cfg: DictConfig) -> None:
    """Raises UsageError for the first setting that cannot work."""
    from omegaconf import OmegaConf

    from harness.conf import UsageError

    for key, rule in RULES.items():
        value = OmegaConf.select(cfg, key, default=_ABSENT)
        if value is _ABSENT:
            continue
        wanted = rule(value)
        if wanted:
            if rule is _variable:  # it may be the key itself
                raise UsageError(f"{key}: needs {wanted}")
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
            raise UsageError(f"{key}={shown}: needs {wanted}")
    if cfg.load.kind == "closed" and cfg.load.concurrency is None:
        raise UsageError("load.concurrency=null: load=closed needs a whole number above 0")
    if cfg.load.get("max_wait_s") is not None and cfg.load.concurrency is None:
        raise UsageError(
            f"load.max_wait_s={cfg.load.max_wait_s}: nobody waits without a cap; needs load.concurrency too"
        )
    if cfg.load.trust_env and cfg.load.backend == "lean":
        raise UsageError("load.trust_env=true: proxies take load.backend=aiohttp or auto")
    if cfg.engine.kind == "openai":
        _check_foreign(cfg)


def _check_foreign(cfg: DictConfig) -> None:
    """A server that somebody else runs. Values that may hold a secret are not repeated in the message."""
    from harness.conf import UsageError

    address = str(cfg.engine.base_url)
    try:
        url = urlsplit(address)
        odd = (
            re.search(r"[\s\x00-\x1f\x7f]", address) is not None
            or url.scheme not in ("http", "https")
            or not url.hostname
            or url.port == 0
            or url.query
            or url.fragment
        )
    except ValueError:  # a port that is no number, a bracket that does not close
        odd = True
    if "@" in address:
        raise UsageError("engine.base_url: must hold no password; name a variable with engine.api_key_env")
    if odd:
        raise UsageError(f"engine.base_url={address}: needs an address such as http://127.0.0.1:8000")


def _number(low: float, high: float = math.inf, *, above: bool = False, null: bool = False) -> Rule:
    def rule(value: Any) -> str | None:
        if value is None and null:
            return None
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        ok = ok and abs(value) <= sys.float_info.max  # no NaN, no infinity, no int that is no float
        if ok and (value > low if above else value >= low) and value <= high:
            return None
        bounds = f"above {low:g}" if above else f"from {low:g}"
        upper = f" to {high:g}" if high < math.inf else ""
        return f"a number {bounds}{upper}{' or null' if null else ''}"

    return rule


def _whole(low: int, high: float = math.inf, *, null: bool = False) -> Rule:
    def rule(value: Any) -> str | None:
        if value is None and null:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return None
        upper = f" to {int(high)}" if high < math.inf else ""
        return f"a whole number from {low}{upper}{' or null' if null else ''}"

    return rule


def _auto_or_whole(low: int, high: int) -> Rule:
    whole = _whole(low, high)
    return lambda value: None if value == "auto" or not whole(value) else f"auto or {whole(value)}"


def _one_of(*names: str) -> Rule:
    return lambda value: None if value in names else f"one of {', '.join(names)}"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "text"


def _text_or_null(value: Any) -> str | None:
    return None if value is None or (isinstance(value, str) and value) else "text or null"


def _variable(value: Any) -> str | None:
    """The name of an environment variable, not the key itself."""
    if value is None or (isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value)):
        return None
    return "the name of an environment variable, never the key itself"


_ABSENT = object()
RULES: dict[str, Rule] = {
    "seed": _whole(0, 2**63 - 1),
    "device": _one_of("auto", "cpu", "cuda"),
    "dtype": _one_of("auto", "fastest", "float32", "bfloat16", "float16"),
    "dry_run": _flag,
    "server.host": _text,
    "server.port": _whole(0, 65535),
    "server.log_format": _one_of("text", "json"),
    "server.metrics_tenants": _whole(0, 1000),
    "output.dir": _text,
    "output.text": _flag,
    "model.name": _text,
    "model.id": _text_or_null,
    "model.weights": _one_of("random", "real", "dummy"),
    "model.impl": _one_of("lean", "hf"),
    "load.kind": _one_of("open", "closed"),
    "load.requests": _whole(1, null=True),
    "load.duration_s": _number(0, MAX_SECONDS, above=True, null=True),
    "load.concurrency": _whole(1, MAX_CONCURRENCY, null=True),
    "load.timeout_s": _number(0, MAX_SECONDS, above=True, null=True),
    "load.max_wait_s": _number(0, MAX_SECONDS, above=True, null=True),
    "load.ramp_s": _number(0, MAX_SECONDS, above=True, null=True),
    "load.retries": _whole(0, 100),
    "load.retry_backoff_s": _number(0, 3600),
    "load.processes": _auto_or_whole(1, MAX_PROCESSES),
    "load.backend": _one_of("auto", "lean", "aiohttp"),
    "load.trust_env": _flag,
    "load.utilization": _number(0, 10, above=True, null=True),
    "slo.ttft_ms": _number(0, above=True),
    "slo.tpot_ms": _number(0, above=True),
    "slo.by_class": _flag,
    "slo.enforce": _flag,
    "slo.attainment": _number(0, 1),
    "slo.percentile_floor": _one_of("interval", "mlperf"),
    "slo.stall_factor": _number(1),
    "engine.kind": _one_of("reference", "openai"),
    "engine.api_key_env": _variable,
    "engine.admin_token_env": _variable,
    "engine.api": _one_of("completions", "chat"),
    "engine.model": _text_or_null,
    "engine.tokenizer": _text_or_null,
    "engine.base_url": _text,
    "capacity.queue_delay_p50_ms": _number(0, above=True, null=True),
    "capacity.itl_p99_ms": _number(0, above=True, null=True),
    "capacity.growth": _number(0, 1, above=True),
    "capacity.probe_s": _number(0, 3600, above=True),
    "capacity.requests": _whole(10, 100_000, null=True),
    "capacity.tolerance": _number(0.001, 1),
    "capacity.repeats": _whole(1, 20),
    "capacity.max_minutes": _number(0, 1e5, above=True, null=True),
    "cost.device_hour": _number(0, above=True, null=True),
    "over": _one_of("rate", "prompt_mix", "length_scale"),
    "points": _whole(2, 50),
    "rounds": _whole(2, 50),
    "confidence": _number(0.5, 0.999),
}

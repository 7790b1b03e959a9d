"""The client's own bias on this machine, kept between runs: $BATCHMARK_CACHE/calibration/ (default
~/.cache/batchmark), a file per host, backend and rough rate. A run reads it into meta.client.calibration."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.host import digest

SCHEMA_VERSION = 1


def cache_dir() -> Path:
    root = os.environ.get("BATCHMARK_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "batchmark") / "calibration"


def host_key(host: Mapping[str, Any]) -> str:
    """Of harness.host.facts(): the same machine as `fingerprint.host` of a run."""
    return digest({key: host.get(key) for key in ("cpu", "cores", "memory_gb")})


def rate_bucket(rate: float | None) -> int | None:
    """Rates within a factor of about 1.4 are one: the nearest power of two. None: no rate (all at once)."""
    return None if rate is None or rate <= 0 else round(math.log2(rate))


def save_calibration(
    host: Mapping[str, Any], backend: str, rate: float | None, bias: Mapping[str, Any]
) -> Path:
    """Replace what is known for this host, backend and rough planned rate (None: closed loop, or all at
    once). Raises OSError."""
    path = _path(host, backend, rate_bucket(rate))
    path.parent.mkdir(parents=True, exist_ok=True)
    value = {"schema_version": SCHEMA_VERSION, **bias, "backend": backend, "at_rate": rate}
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)
    return path


def load_calibration(
    host: Mapping[str, Any], backend: str, rate: float | None = None
) -> dict[str, Any] | None:
    """What save_calibration kept for this machine (harness.host.facts()) and backend: the one nearest in
    rate, `planned.rate` of a run; without a rate, one that had none either, else the newest. None when there
    is none that can be read."""
    found: list[tuple[float, float, str, dict[str, Any]]] = []
    for path in cache_dir().glob(f"{host_key(host)}-{backend}-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            value = json.loads(path.read_text())
            if value["schema_version"] == SCHEMA_VERSION:
                found.append((_distance(rate, value["at_rate"]), -path.stat().st_mtime, path.name, value))
    return min(found)[3] if found else None


def _distance(wanted: float | None, rate: float | None) -> float:
    if not wanted or not rate:
        return 0.0 if not wanted and not rate else math.inf
    return abs(math.log2(wanted / rate))


def _path(host: Mapping[str, Any], backend: str, bucket: int | None) -> Path:
    return cache_dir() / f"{host_key(host)}-{backend}-{'none' if bucket is None else bucket}.json"

"""dtype=fastest: which type's products are the quickest on this CPU. Measured at the start, on products of
the model's own shapes, and kept in the user's cache for the next start."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engines.model.config import ModelConfig
from engines.model.linear import Linear
from engines.model.smollm2 import cache_root
from kernels.cpu.isa import machine

CANDIDATES = ("float32", "bfloat16")
ROWS = (1, 32)
"""A decode of one stream reads weights, one of many computes."""
_ELEMENTS = 24 << 20
"""Of the weights that are read in turn, so that most last-level caches do not hold them."""
_ROUNDS = 5


def fastest_dtype(shape: ModelConfig, threads: int) -> dict[str, Any]:
    """{"dtype", "ms": {dtype: {rows: milliseconds}}, "cached"}: the type with the smallest sum of its times,
    each over float32's. Takes below a second for small models; an unwritable cache is none."""
    key = "\0".join((machine(), str(threads), torch.__version__, repr(_shapes(shape))))
    path = cache_root() / "dtypes" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text())
        if found["dtype"] in CANDIDATES:
            return {"dtype": found["dtype"], "ms": found["ms"], "cached": True}
    ms = _measure(shape)
    relative = {name: sum(ms[name][n] / ms["float32"][n] for n in ms[name]) for name in CANDIDATES}
    result = {"dtype": min(relative, key=lambda name: relative[name]), "ms": ms}
    with contextlib.suppress(OSError):
        _write(path, json.dumps(result))
    return result | {"cached": False}


def _shapes(c: ModelConfig) -> list[tuple[int, int]]:
    """[out, in] of a layer's products."""
    heads, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    return [(heads + 2 * kv, c.hidden), (c.hidden, heads), (2 * c.ffn, c.hidden), (c.hidden, c.ffn)]


def _measure(shape: ModelConfig) -> dict[str, dict[str, float]]:
    """Milliseconds, {dtype: {rows: median}}, in turn, so that a slow moment meets both."""
    layer = _shapes(shape)
    copies = max(1, _ELEMENTS // sum(out * inputs for out, inputs in layer))
    widest = max(inputs for _, inputs in layer)
    passes: dict[tuple[str, int], Callable[[], None]] = {}
    for name in CANDIDATES:
        dtype = getattr(torch, name)
        linears = [Linear(torch.zeros(size, dtype=dtype)) for _ in range(copies) for size in layer]
        for rows in ROWS:
            passes[name, rows] = functools.partial(_run, linears, torch.ones(rows, widest, dtype=dtype))
    times: dict[tuple[str, int], list[float]] = {key: [] for key in passes}
    for _ in range(_ROUNDS):
        for key, run in passes.items():
            start = time.perf_counter()
            run()
            times[key].append((time.perf_counter() - start) * 1e3)
    return {
        name: {str(rows): round(statistics.median(times[name, rows]), 3) for rows in ROWS}
        for name in CANDIDATES
    }


def _run(linears: list[Linear], x: torch.Tensor) -> None:
    for linear in linears:
        linear(x[:, : linear.in_features])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(text + "\n")
    scratch.replace(path)

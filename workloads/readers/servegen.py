"""ServeGen (Alibaba; arXiv 2505.09999), in its three forms.

    client windows   one row for 600 s of a client: rate, CV of the gaps, family. A CSV with a header, or
                     chunk-<client>-trace.csv without one, of which a folder holds many
    datasets         chunk-<client>-dataset.json: for every 6 h the shares of lengths, each as a text that
                     holds a Python dict
    offline          JSONL of jobs without times, with ids of 16-token blocks

Windows hold no requests: they are drawn, as many as rate x 600 s, with gaps of the family and CV, scaled so
that they fill the window. Lengths come from the client's dataset, or from quantiles of the whole model."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workloads import exact
from workloads.arrivals import MOST_REQUESTS
from workloads.errors import TraceError
from workloads.gaps import Renewal, unit_gaps
from workloads.readers.files import csv_fields, document, each_line, each_object, each_record, head, raw_lines
from workloads.readers.rows import Rows
from workloads.readers.values import MOST_TOKENS, NS, BadRow, needed, number_text, shown, tokens
from workloads.streams import stream

COLUMNS = ("client", "window_start_s", "rate_rps", "cv", "pattern")
WINDOW_S = 600
BLOCK_TOKENS = 16
FAMILIES = {
    "gamma": "gamma",
    "weibull": "weibull",
    "exponential": "poisson",
    "poisson": "poisson",
    "": "poisson",
}
CHUNK = re.compile(r"chunk-(\d+)-trace\.csv(\.gz)?")
_LARGEST_CV, _LATEST_S = 1e3, 4e9
_SMALLEST_CV = 0.01  # below, gaps are constant
_INPUTS, _OUTPUT = ("input_tokens", "text_tokens"), "output_tokens"
_SHARES = np.array([0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100]) / 100
_QUANTILES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "m-large": (
        (1, 60, 64, 74, 262, 601, 1073, 2371, 2404, 5452, 12730, 30712),
        (1, 1, 1, 1, 8, 53, 208, 461, 539, 872, 1595, 9307),
    ),
    "m-mid": (
        (8, 30, 133, 135, 144, 173, 248, 645, 864, 2583, 5310, 127377),
        (1, 1, 4, 9, 16, 34, 61, 95, 131, 397, 948, 15968),
    ),
    "m-small": (
        (9, 18, 19, 19, 20, 40, 53, 322, 573, 1478, 2998, 145912),
        (1, 1, 1, 1, 2, 3, 10, 44, 71, 142, 269, 10912),
    ),
    "deepseek-r1": (
        (4, 9, 13, 18, 41, 208, 482, 2092, 6714, 23423, 33783, 57284),
        (9, 141, 225, 287, 427, 792, 1499, 3432, 5701, 12607, 20833, 32768),
    ),
    "mm-image": (
        (29, 36, 41, 41, 76, 106, 1032, 1914, 2346, 3064, 3395, 4242),
        (2, 2, 3, 6, 29, 100, 185, 264, 336, 587, 2000, 2000),
    ),
}
"""(prompt, answer) tokens at _SHARES, over all clients by volume: measured on ServeGen's datasets."""


@dataclass(frozen=True, slots=True)
class Window:
    client: str
    start_s: float
    requests: int
    renewal: Renewal


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a client from start_s on: lengths and the shares of requests up to each."""

    start_s: float
    input: tuple[np.ndarray, np.ndarray]
    output: tuple[np.ndarray, np.ndarray]


def chunk_files(folder: Path) -> list[Path]:
    found = [(int(match[1]), p) for p in folder.iterdir() if (match := CHUNK.fullmatch(p.name))]
    return [p for _, p in sorted(found)]


def read(path: str, rows: Rows) -> None:
    windows: list[Window] = []
    lengths: dict[str, list[Lengths]] = {}
    if Path(path).is_dir():
        files = chunk_files(Path(path))
        if not files:
            raise TraceError(path, "is a folder without chunk-<n>-trace.csv")
        for file in files:
            _read_chunk(file, rows, windows, lengths)
    else:
        start = head(path).lstrip()
        if start.startswith(b"{"):
            _read_offline(path, rows)
            return
        if start.startswith(COLUMNS[0].encode()):
            each_record(path, rows, COLUMNS, lambda fields: _window(windows, *fields))
        else:
            _read_chunk(Path(path), rows, windows, lengths)
    _draw(path, rows, windows, lengths)


def _window(windows: list[Window], client: str, start: str, rate: str, cv: str, pattern: str) -> None:
    family = FAMILIES.get(pattern.lower())
    if family is None:
        raise BadRow(f"{shown(pattern)} is not one of Gamma, Weibull, Exponential", COLUMNS[4])
    start_s, per_s = number_text(start, COLUMNS[1]), number_text(rate, COLUMNS[2])
    spread = number_text(cv, COLUMNS[3]) if cv else 1.0
    count = round(per_s * WINDOW_S)
    if spread > _LARGEST_CV:
        raise BadRow(f"{spread:g} is above {_LARGEST_CV:g}", COLUMNS[3])
    if count > MOST_REQUESTS:
        raise BadRow(f"makes {count} requests in {WINDOW_S} s, the most is {MOST_REQUESTS}", COLUMNS[2])
    if start_s > _LATEST_S:
        raise BadRow(f"{start_s:g} is above {_LATEST_S:g} s", COLUMNS[1])
    if count:
        renewal = Renewal(family, spread) if spread >= _SMALLEST_CV else Renewal("constant")
        windows.append(Window(client, start_s, count, renewal))


def _read_chunk(path: Path, rows: Rows, windows: list[Window], lengths: dict[str, list[Lengths]]) -> None:
    match = CHUNK.fullmatch(path.name)
    client = match[1] if match else path.stem

    def line(text: str) -> None:
        fields = [field.strip() for field in csv_fields(text)]
        if not 4 <= len(fields) <= 6:
            raise BadRow(f"has {len(fields)} fields, needs start, rate, cv, pattern and two parameters")
        _window(windows, client, *fields[:4])

    each_line(str(path), rows, line, raw_lines(str(path)))
    for end in (".json", ".json.gz"):
        dataset = path.parent / f"chunk-{client}-dataset{end}"
        if dataset.is_file():
            lengths[client] = _dataset(str(dataset))


def _dataset(path: str) -> list[Lengths]:
    about = document(path)
    if not isinstance(about, dict):
        raise TraceError(path, "is not an object of start times")
    found = []
    for start, fields in about.items():
        try:
            start_s = number_text(str(start), "start")
            if not isinstance(fields, dict):
                raise BadRow(f"{shown(fields)} is not an object of fields", str(start))
            key = next((key for key in _INPUTS if key in fields), _INPUTS[0])
            given, made = _shares(fields.get(key, "{}"), key), _shares(fields.get(_OUTPUT, "{}"), _OUTPUT)
        except BadRow as bad:
            raise TraceError(path, bad.reason, column=f"{start}.{bad.column}") from bad
        if given and made:
            found.append(Lengths(start_s, given, made))
    return sorted(found, key=lambda lengths: lengths.start_s)


def _shares(text: Any, column: str) -> tuple[np.ndarray, np.ndarray] | None:
    """(tokens, share of requests up to them) of a text with a Python dict {tokens: share}; None: empty."""
    try:
        table = ast.literal_eval(text) if isinstance(text, str) else text
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        table = None
    if not isinstance(table, dict):
        raise BadRow(f"{shown(text)} is not a dict of lengths and shares", column)
    if not table:
        return None
    for length, share in table.items():
        tokens(length, column, 0)
        if not isinstance(share, int | float) or not 0 <= share < 1e12:
            raise BadRow(f"{shown(share)} is not a share", column)
    ordered = sorted(table.items())
    upto = np.cumsum(np.array([float(share) for _, share in ordered]))
    if not upto[-1] > 0:
        return None
    return np.array([max(1, int(length)) for length, _ in ordered]), upto / upto[-1]


def _draw(path: str, rows: Rows, windows: list[Window], lengths: dict[str, list[Lengths]]) -> None:
    planned = min(sum(window.requests for window in windows), rows.room)
    if planned > MOST_REQUESTS:
        raise TraceError(path, f"describes {planned} requests; set limit to {MOST_REQUESTS} at most")
    clients = sorted({window.client for window in windows})
    rows.names["user"] = {client: code for code, client in enumerate(clients)}
    model = next((name for name in _QUANTILES if name in path), None)
    quantiles = _QUANTILES[model or "m-large"]
    windows.sort(key=lambda window: window.start_s)
    at = 0
    missing: set[str] = set()
    while at < len(windows) and not rows.full:
        end = at
        while end < len(windows) and windows[end].start_s == windows[at].start_s:
            end += 1
        drawn = []
        for window in windows[at:end]:
            rng = stream(rows.seed, "servegen", window.client, f"{window.start_s:g}")
            gaps = np.cumsum(unit_gaps(rng, window.renewal, window.requests + 1))
            within = gaps[:-1] / max(float(gaps[-1]), 1e-300) * WINDOW_S
            u, v = rng.random(window.requests), rng.random(window.requests)
            known = lengths.get(window.client)
            if known:
                of = next((part for part in reversed(known) if part.start_s <= window.start_s), known[0])
                given, made = _pick(of.input, u), _pick(of.output, v)
            else:
                missing.add(window.client)
                given, made = (_quantile(points, w) for points, w in zip(quantiles, (u, v), strict=True))
            code = np.full(window.requests, rows.names["user"][window.client])
            stamps = np.rint((window.start_s + within) * NS).astype(np.int64)
            drawn.append(np.stack([stamps, given, made, code]))
        table = np.concatenate(drawn, axis=1)
        times, given, made, user = table[:, np.argsort(table[0], kind="stable")]
        rows.extend(times, given, made, user=user)
        at = end
    rows.notes.append(f"requests drawn from the windows of {len(clients)} clients (seed {rows.seed})")
    if missing:
        which = f"{len(missing)} of {len(clients)} clients have no dataset"
        rows.notes.append(
            f"{which}: their lengths are those of all clients of {model or 'm-large'} by volume"
        )


def _pick(table: tuple[np.ndarray, np.ndarray], u: np.ndarray) -> np.ndarray:
    lengths, upto = table
    return lengths[np.minimum(np.searchsorted(upto, u, side="right"), len(lengths) - 1)]


def _quantile(points: tuple[int, ...], u: np.ndarray) -> np.ndarray:
    made = np.rint(exact.interpolate(u, _SHARES, np.array(points, dtype=float)))
    return np.clip(made, 1, MOST_TOKENS).astype(np.int64)


def _read_offline(path: str, rows: Rows) -> None:
    rows.block_sizes = (BLOCK_TOKENS,)
    unknown = 0

    def record(row: dict[str, Any]) -> None:
        nonlocal unknown
        needed(row, "input_length")
        prompt = tokens(row["input_length"], "input_length")
        answer = row.get("output_length")
        unknown += answer is None
        ids = rows.filled_ids(row.get("hash_ids"), prompt)
        kind = row.get("type")
        made = 1 if answer is None else tokens(answer, "output_length", 0)
        rows.raised += made == 0
        rows.add(None, prompt, max(1, made), request_class=None if kind is None else str(kind))
        rows.add_ids(ids)

    each_object(path, rows, record)
    if unknown:
        rows.notes.append(f"{unknown} jobs without an output_length: taken as 1 token")

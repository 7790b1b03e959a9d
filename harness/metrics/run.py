"""The records of one run as tidy frames: every time is in nanoseconds from the run's start, null is NaN.

Nothing in a run directory has to be there. What is missing is an empty frame with the right columns; what
is damaged is read as far as it goes and named in `problems`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from harness import records
from harness.metrics.ending import read_ending
from harness.metrics.server_metrics import read_server_metrics
from harness.records import OUTCOMES
from harness.slo import problem as slo_problem

__all__ = ["OUTCOMES", "Run", "load_run", "request_frame"]

REQUEST_TEXT = (
    *("id", "tenant", "request_class", "session", "token_source"),
    *("outcome", "reason", "finish_reason", "error"),
)
REQUEST_NUMBERS = (
    *("intended_ns", "dispatch_ns", "send_ns", "headers_ns", "first_event_ns", "end_ns"),
    *("attempt", "priority", "turn", "prompt_tokens", "planned_prompt_tokens", "output_tokens"),
    *("max_tokens", "stop_after", "status", "first_output_ns", "reasoning_tokens", "reads", "coalesced"),
    "cached_tokens",
)
META_PARTS = ("fingerprint", "server", "host", "slo", "planned", "client")
SIGNS = ("meta.json", "config.yaml", "summary.json", "*requests*", "steps*", "telemetry*")
"""One of these is in every folder that a run has begun in."""
SCHEDULE_NUMBERS = ("arrival_s", "deadline_ms", "cancel_value", "timeout_s")


@dataclass(frozen=True)
class Run:
    """One run's records. `requests` has a row per request (list columns chunk_ns and chunk_tokens are
    arrays); the others have the columns of docs/architecture.md."""

    path: Path
    meta: dict[str, Any]
    requests: pd.DataFrame
    engine: pd.DataFrame
    steps: pd.DataFrame
    telemetry: pd.DataFrame
    schedule: pd.DataFrame
    config: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    closed: bool = True  # requests.jsonl has its footer
    retries: int = 0  # attempts that another one followed
    ending: dict[str, Any] = field(default_factory=dict)  # engine_end.json; empty where there is none
    server_metrics: tuple[dict[str, Any], ...] = ()  # what the server's /metrics said; t_ns from t0
    imported: dict[str, Any] | None = None  # another tool's result in our terms: there are no records of it

    @property
    def load_kind(self) -> str | None:
        """open | closed; None where the configuration is gone."""
        load = self.config.get("load")
        kind = load.get("kind") if isinstance(load, dict) else None
        return kind if isinstance(kind, str) else None

    def slo_setting(self, name: str) -> Any:
        """A setting of the slo group; None where the configuration is gone."""
        part = self.config.get("slo")
        return part.get(name) if isinstance(part, dict) else None

    def choose(self, rows: np.ndarray) -> Run:
        """The same run with only these rows of `requests` (a mask), and what the engine says of them."""
        chosen = self.requests[rows].reset_index(drop=True)
        engine = self.engine[self.engine["id"].isin(set(chosen["id"]))].reset_index(drop=True)
        return replace(self, requests=chosen, engine=engine)

    def subset(self, column: str, value: str) -> Run:
        """The same run with only the requests whose `column` (request_class or tenant) is value."""
        return replace(
            self,
            requests=self.requests[self.requests[column] == value].reset_index(drop=True),
            engine=self.engine[self.engine[column] == value].reset_index(drop=True),
        )


def load_run(run_dir: str | Path) -> Run:
    """Read a run directory, or a result file of another tool (harness.exchange). Raises FileNotFoundError
    only when there is no such folder, or one in which no run has ever been, and ResultError for such a file
    or its run directory."""
    folder = Path(run_dir)
    if not folder.is_dir() or (folder / "meta.json").is_file():
        from harness.exchange.kept import load_imported

        if (imported := load_imported(folder)) is not None:
            return imported
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; give the directory of a run")
    if not any(any(folder.glob(name)) for name in SIGNS):
        raise FileNotFoundError(f"{folder}: holds no records of a run; give the directory of a run")
    problems: list[str] = []

    def read(name: str, reader: Callable[[Path], Any], default: Any) -> Any:
        """A damaged file costs its own figures, never the report; paths are left out so that a moved run
        reads alike."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", records.RecordsWarning)
            try:
                value = reader(folder)
            except FileNotFoundError:
                value = default
                problems.append(f"{name}: no such file")
            except records.RecordsError as error:
                value = default
                problems.append(str(error))
            except Exception as error:
                value = default
                problems.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        problems.extend(str(w.message) for w in caught if issubclass(w.category, records.RecordsWarning))
        return value

    meta = read("meta.json", records.read_meta, {})
    file = read("requests.jsonl", records.read_run_file, None)
    if not isinstance(meta.get("t0_ns"), int):
        meta = {**meta, "t0_ns": file.t0_ns if file is not None else 0}
    for name in META_PARTS:
        if not isinstance(meta.get(name, {}), dict):
            problems.append(f"meta.json: {name} is no object")
            meta = {**meta, name: {}}
    client = meta.get("client", {})
    for part, name in ((meta, "clock_pairs"), (client, "loop_lag_ms"), (client, "read_lag_ms")):
        if not isinstance(part.get(name) or [], list):
            problems.append(f"meta.json: {name} is no list")
            part[name] = []
    if wrong := slo_problem(meta.get("slo", {})):
        problems.append(f"meta.json: {wrong}")
        meta = {**meta, "slo": {}}
    t0, run_id = meta["t0_ns"], meta.get("run")
    engine = engine_frame(
        read("engine_requests.jsonl", records.read_engine_requests, pd.DataFrame()), t0, run_id
    )
    steps = step_frame(read("steps", records.read_steps, pd.DataFrame()), t0)
    telemetry = read("telemetry.jsonl", records.read_telemetry, pd.DataFrame())
    scraped = read("server_metrics.jsonl", read_server_metrics, [])
    schedule = read("schedule.parquet", lambda d: pd.read_parquet(d / "schedule.parquet"), pd.DataFrame())
    config = read("config.yaml", lambda d: yaml.safe_load((d / "config.yaml").read_text()), {})
    prefix = f"{folder}/"
    written = file.records if file is not None else []
    return Run(
        path=folder,
        meta=meta,
        requests=request_frame([_fields(record) for record in written]),
        engine=engine,
        steps=steps,
        telemetry=_floats(telemetry, records.TELEMETRY_COLUMNS),
        schedule=schedule,
        config=config if isinstance(config, dict) else {},
        problems=tuple(dict.fromkeys(text.replace(prefix, "") for text in problems)),
        closed=bool(file and file.closed),
        retries=sum(1 for record in written if not record.final),
        ending=read_ending(folder),
        server_metrics=tuple(scraped),
    )


def request_frame(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Request records as a frame: a row per id (its final attempt), in order of intended arrival."""
    last: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        key = str(row.get("id"))
        if key not in last or _rank(row) >= _rank(last[key]):
            last[key] = row
    kept = list(last.values())
    frame = pd.DataFrame(
        {name: pd.Series([row.get(name) for row in kept], dtype=object) for name in REQUEST_TEXT}
    )
    for name in ("tenant", "request_class"):
        frame[name] = [value if isinstance(value, str) else "" for value in frame[name]]
    for name in REQUEST_NUMBERS:
        frame[name] = np.array([_number(row.get(name)) for row in kept], dtype=np.float64)
    frame["stream"] = np.array([row.get("stream") is not False for row in kept], dtype=bool)
    frame["token_mismatch"] = np.array([row.get("token_mismatch") is True for row in kept], dtype=bool)
    pairs = [_chunks(row) for row in kept]
    frame["chunk_ns"] = pd.Series([p[0] for p in pairs], dtype=object)
    frame["chunk_tokens"] = pd.Series([p[1] for p in pairs], dtype=object)
    return frame.sort_values(["intended_ns", "id"], kind="stable", na_position="last").reset_index(drop=True)


def _rank(row: Mapping[str, Any]) -> tuple[bool, int]:
    return row.get("final") is not False, row.get("attempt") or 0


def engine_frame(frame: pd.DataFrame, t0: int, run: str | None) -> pd.DataFrame:
    """engine_requests from t0, without the requests of other runs (a warm-up, for one)."""
    out = _floats(frame, records.ENGINE_REQUEST_COLUMNS, t0)
    if run is not None:
        out = out[np.array([value is None or value == run for value in out["run"]], dtype=bool)]
    return out.reset_index(drop=True)


def step_frame(frame: pd.DataFrame, t0: int) -> pd.DataFrame:
    """The steps from t0, in order of their start; ids, tokens and kind are kept as lists."""
    out = _floats(frame, records.STEP_COLUMNS, t0)
    return out[np.isfinite(out["start_ns"])].sort_values("start_ns", kind="stable").reset_index(drop=True)


CLOCKED = ("start_ns", "arrival_ns", "admitted_ns", "first_token_ns", "finish_ns", "abort_seen_ns")
"""Columns that hold the monotonic clock itself, which outgrows a float: t0 is taken off before the
conversion."""


def _floats(frame: pd.DataFrame, columns: Mapping[str, str], t0: int = 0) -> pd.DataFrame:
    """Number columns as float64 (NaN for null), text as objects (None for null), all of `columns` present."""
    out: dict[str, Any] = {}
    for name, kind in columns.items():
        if kind.startswith("list"):
            out[name] = frame[name] if name in frame else pd.Series([None] * len(frame), dtype=object)
        elif kind == records.TEXT:
            values = frame[name].tolist() if name in frame else [None] * len(frame)
            out[name] = pd.Series([v if isinstance(v, str) else None for v in values], dtype=object)
            if name in ("tenant", "request_class"):
                out[name] = out[name].fillna("")
        elif name not in frame:
            out[name] = pd.Series(np.full(len(frame), np.nan))
        else:
            column = frame[name].reset_index(drop=True)
            out[name] = pd.Series(
                (column - t0 if name in CLOCKED else column).to_numpy(np.float64, na_value=np.nan)
            )
    return pd.DataFrame(out)


def _fields(record: records.RequestRecord) -> dict[str, Any]:
    names = (*REQUEST_TEXT, *REQUEST_NUMBERS, "stream", "token_mismatch", "chunk_ns", "chunk_tokens")
    return {name: getattr(record, name) for name in names}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else float("nan")


def _chunks(row: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Stamps and token counts of the chunks that carry tokens; lists of unlike length are cut to the
    shorter."""
    pairs = [
        (_number(t), _number(n))
        for t, n in zip(row["chunk_ns"] or (), row["chunk_tokens"] or (), strict=False)
    ]
    kept = [(t, n) for t, n in pairs if np.isfinite(t) and n > 0 and np.isfinite(n)]
    return np.array([t for t, _ in kept], dtype=np.float64), np.array([n for _, n in kept], dtype=np.float64)

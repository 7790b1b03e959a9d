"""How long a run will take, before it is run: start-up, arrivals, drain, and the writing of its results.

Only the arrivals are known. How fast answers come is taken from the newest valid run of the same engine,
model and workload under output.dir; where there is none, they are taken to be as slow as the SLO allows. The
rest are the constants below."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from workloads.schedule import Schedule, ScheduledRequest

START_S = {"tiny": 6.0}
"""From the command to the first arrival: the server loads, three requests warm it up (two cores)."""
START_OTHERS_S = 20.0
START_FOREIGN_S = 3.0
CLOSE_S = 4.0
"""From the last answer to the last line: the server ends, tables, summary and page are written."""
RUNS_LOOKED_AT = 30


@dataclass(frozen=True, slots=True)
class Pace:
    """An answer of n tokens takes first_s + n * token_s."""

    first_s: float
    token_s: float
    source: str

    def answer_s(self, request: ScheduledRequest) -> float:
        return self.first_s + request.stop_after * self.token_s


@dataclass(frozen=True, slots=True)
class Eta:
    """Seconds. load_s ends with the last send."""

    start_s: float
    load_s: float
    drain_s: float
    close_s: float
    source: str  # how fast the answers are taken to come, and why

    @property
    def total_s(self) -> float:
        return self.start_s + self.load_s + self.drain_s + self.close_s

    def __str__(self) -> str:
        return (
            f"about {duration(self.total_s)}: start-up {duration(self.start_s)}, "
            f"arrivals {duration(self.load_s)}, drain {duration(self.drain_s)}, "
            f"results {duration(self.close_s)}; answers {self.source}"
        )


def eta(cfg: DictConfig, schedule: Schedule) -> Eta:
    """An estimate. Users who hang up are taken to stay."""
    pace = find_pace(cfg)
    if cfg.engine.kind == "reference":
        start_s = START_S.get(cfg.model.name, START_OTHERS_S)
    else:
        start_s = START_FOREIGN_S
    load_s, drain_s = closed(cfg, schedule, pace) if cfg.load.kind == "closed" else opened(schedule, pace)
    return Eta(start_s, load_s, drain_s, CLOSE_S, pace.source)


def opened(schedule: Schedule, pace: Pace) -> tuple[float, float]:
    """(until the last send, from there to the last end). A later turn of a session waits for the one before
    it."""
    last_send = last_end = 0.0
    ends: dict[str, float] = {}
    for request in schedule:
        send = request.arrival_s
        if request.session is not None:
            if request.think_s is not None:
                send = max(send, ends.get(request.session, 0.0) + request.think_s)
            ends[request.session] = send + pace.answer_s(request)
        last_send = max(last_send, send)
        last_end = max(last_end, send + pace.answer_s(request))
    return last_send, last_end - last_send


def closed(cfg: DictConfig, schedule: Schedule, pace: Pace) -> tuple[float, float]:
    """All answers, shared out evenly over the clients."""
    answers = [pace.answer_s(request) for request in schedule]
    whole = max(sum(answers) / min(cfg.load.concurrency, len(answers)), max(answers))
    drain_s = sum(answers) / len(answers)
    if cfg.load.duration_s is not None and whole - drain_s > cfg.load.duration_s:
        return float(cfg.load.duration_s), drain_s
    return max(0.0, whole - drain_s), drain_s


def find_pace(cfg: DictConfig) -> Pace:
    folders = sorted(Path(cfg.output.dir).expanduser().glob("*/summary.json"), reverse=True)
    for path in folders[:RUNS_LOOKED_AT]:
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            pace = measured(summary, cfg) if summary["valid"] else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue  # another version's, or no summary at all
        if pace is not None:
            return pace
    ttft_ms, tpot_ms = cfg.slo.ttft_ms, cfg.slo.tpot_ms
    slowest = f"{ttft_ms:g} ms, then {tpot_ms:g} ms a token"
    source = f"as slow as the SLO allows ({slowest}), since no run of this kind is in {cfg.output.dir}"
    return Pace(ttft_ms / 1e3, tpot_ms / 1e3, source)


def measured(summary: dict[str, Any], cfg: DictConfig) -> Pace | None:
    """The pace of a run, when it was of this kind: its 90th percentiles. Raises LookupError or TypeError for
    something else than a summary."""
    if (summary["engine"], summary["workload"]) != (cfg.engine.name, cfg.workload.name):
        return None
    if cfg.engine.kind == "reference":
        if summary["model"] != cfg.model.name:
            return None
    elif summary["setup"]["engine"].get("base_url") != cfg.engine.base_url:
        return None
    latency = summary["latency_ms"]
    first, token = latency["ttft"]["from_intended"]["p90"], latency["tpot"]["p90"]
    if first is None or token is None:  # answers that came whole
        first, token = 0.0, latency["normalized"]["p90"]
    source = f"as in run {summary['run']['id']} (p90)"
    return None if token is None else Pace(first / 1e3, token / 1e3, source)


def duration(seconds: float) -> str:
    """For people."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"

"""Whether a run may be believed. A run that may not says why, exits 3, and no gate uses it.

Two kinds of finding. A run is *invalid* when its figures are wrong or a selection: records are missing, too
much failed, the client sent or stamped late, the clock jumped. It carries a *warning* when its figures are
right but mean something else than a reader may think: tokens came in bundles, answers were longer than
planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.request_log import OUTCOMES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.metrics.run import Run

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Limit:
    """One number that a run is held to."""

    value: float
    unit: str
    reason: str


LIMITS: Mapping[str, Limit] = MappingProxyType(
    {
        "lag_ms": Limit(
            5.0,
            "ms",
            "99 % of the client's own send lags, and of its loop lags where the reader stamps: a tenth of a "
            "50 ms TPOT. A client beside a CPU engine on 2 otherwise idle cores stays below it (1.6 to 4.3 "
            "ms with aiohttp), one that is out of time passes it at once: 4 to 10 ms with twice as many busy "
            "processes as cores",
        ),
        "lag_share": Limit(
            0.05,
            "of the median TTFT",
            "the same, where answers are quick: a lag adds to TTFT as it is, and 5 % is less than what "
            "two runs of one engine differ by",
        ),
        "lag_floor_ms": Limit(
            2.0,
            "ms",
            "no run is held to less than this: waking up on a core that others use costs that much whatever "
            "the TTFT (alone on its core: p99 of 0.3 ms in an epoll loop with a timerfd, 0.9 in an event "
            "loop)",
        ),
        "client_busy": Limit(
            0.5,
            "of a core for each load process",
            "only what is said of a late client: from here on a queue of its own makes it late, not others",
        ),
        "error_rate": Limit(
            0.01,
            "of the requests that were issued",
            "failed and timed out: from here on the p99 of the rest describes what the failures left over",
        ),
        "rate_error": Limit(
            0.02,
            "of the drawn rate",
            "realised against drawn arrivals of an open loop without a cap, up to the last send: near "
            "saturation 2 % more load can double a queue",
        ),
        "rate_sends": Limit(
            50, "sends", "below this many sends a single late one moves the rate by more than rate_error"
        ),
        "clock_step_ms": Limit(
            5.0,
            "ms",
            "a jump of the wall clock against the monotonic clock beyond clock_slew: kernel stamps are wall "
            "clock, and a stamp off by as much as lag_ms is as bad",
        ),
        "clock_slew": Limit(
            1e-3, "of the time between two looks", "a clock under discipline drifts by up to 500 ppm; doubled"
        ),
        "read_lag_ms": Limit(
            50.0,
            "ms",
            "warning. p99 from a chunk's arrival in the kernel to its reading. Stamps do not move, but "
            "hang-ups after a number of tokens, and the next send of a closed loop, come that much late",
        ),
        "kernel_loop_lag_ms": Limit(
            50.0, "ms", "warning. p99 of the loop's lag where the kernel stamps: what read_lag_ms says"
        ),
        "tiny_gaps": Limit(
            0.01,
            "of the gaps between chunks",
            "warning. Gaps under 0.1 ms: chunks that left or came together. Each makes the gap before it too "
            "long, so above 1 % they reach the p99",
        ),
        "tokens_per_chunk": Limit(
            1.1,
            "tokens",
            "warning. Above it ITL holds zeros and ICL is a bundle's time; an end token that is counted but "
            "never sent gives 1.1 in answers of ten tokens",
        ),
        "length_error": Limit(
            0.02,
            "of the planned tokens",
            "warning. Prompts or answers off the plan by this: another load than was asked for",
        ),
    }
)


def judge(run: Run, figures: Mapping[str, Any], lags: Mapping[str, Floats]) -> tuple[list[str], list[str]]:
    """(invalid_reasons, warnings). figures: counts, client, arrivals, latency_ms, prompt_tokens and
    output_tokens of the summary; lags: "send lag" and "loop lag", ms. A sound run has none of either."""
    counts, client = figures["counts"], figures["client"]
    invalid = [
        *record_faults(run, counts),
        *error_faults(counts),
        *lag_faults(lags, client["stamps"], median_ttft_ms(figures), lag_cure(run)),
        *rate_faults(run, figures["arrivals"]),
        *clock_faults(run),
    ]
    return invalid, [*client_warnings(client), *length_warnings(figures)]


def record_faults(run: Run, counts: Mapping[str, int]) -> list[str]:
    """What is missing or damaged, and requests that are not accounted for."""
    found: list[str] = []
    if not run.meta.get("complete", False):
        why = run.meta.get("incomplete_reason")
        recorded = why and why != "running"  # which it was when it last wrote
        found.append(f"incomplete: {why if recorded else 'the run did not record its end'}")
    found.extend(f"records: {problem}" for problem in run.problems if _matters(problem))
    if not run.closed and run.meta.get("complete", False):
        found.append("records: requests.jsonl has no footer")
    ended = sum(counts[name] for name in OUTCOMES)
    known = len(run.requests)
    if ended != known:
        found.append(f"conservation: {known - ended} of {known} records have no known outcome")
    if counts["scheduled"] != ended:
        found.append(f"conservation: {counts['scheduled']} requests were scheduled, {ended} ended")
    leaked = leak(run.ending)
    if leaked is not None and run.meta.get("complete", False):
        found.append(leaked)
    if len(run.schedule) and "id" in run.schedule:
        strangers = int((~run.requests["id"].isin(set(run.schedule["id"]))).sum())
        if strangers:
            found.append(f"conservation: {strangers} of {known} records are of requests never scheduled")
    return found


def leak(ending: Mapping[str, Any]) -> str | None:
    """engine_end.json: why a run that ended so is invalid; None when nothing leaked, or nothing is known."""
    if not ending:
        return None
    left = {name: ending.get(name) for name in ("kv_live", "running", "waiting")}
    integrity = ending.get("integrity")
    if not any(left.values()) and integrity in ("ok", None):
        return None
    shown = ", ".join(f"{name} {value}" for name, value in left.items())
    return f"kv leak: at the engine's end {shown}; integrity: {integrity}"


def error_faults(counts: Mapping[str, int]) -> list[str]:
    found = ["no request completed"] if counts["completed"] == 0 else []
    issued = counts["scheduled"] - counts["cut_off"]
    errors = counts["failed"] + counts["timed_out"]
    limit = LIMITS["error_rate"].value
    if issued > 0 and errors / issued > limit:
        found.append(f"errors: {errors} of {issued} requests failed or timed out (limit {limit:.0%})")
    return found


def lag_limit_ms(ttft_ms: float | None) -> float:
    """What p99 of a lag is held to: lag_ms or lag_share of the median TTFT, whichever is less, but no less
    than lag_floor_ms."""
    limit = LIMITS["lag_ms"].value
    if ttft_ms is None:
        return limit
    return min(limit, max(LIMITS["lag_floor_ms"].value, LIMITS["lag_share"].value * ttft_ms))


def lag_faults(lags: Mapping[str, Floats], stamps: str | None, ttft_ms: float | None, cure: str) -> list[str]:
    """A client that was late to send, or, where it stamps itself, late to read: more than 1 % of the samples
    over the limit. A single one never counts: in a short run it is all that a p99 holds. cure: what would
    help."""
    limit = lag_limit_ms(ttft_ms)
    found: list[str] = []
    for label, values in lags.items():
        late = int((values > limit).sum())
        if late > max(1, 0.01 * values.size) and not (label == "loop lag" and stamps == "kernel"):
            found.append(
                f"client_bound: {label} p99 is {np.quantile(values, 0.99):.1f} ms, {late} of {values.size} "
                f"over {limit:.3g} ms (limit 1 %): {cure}"
            )
    return found


def lag_cure(run: Run) -> str:
    """What to do for a client that was late: it was busy itself, or it waited for a core that others had."""
    client, duration_s = run.meta.get("client") or {}, run.meta.get("duration_s")
    cpu_s, processes = client.get("cpu_s"), client.get("processes")
    if cpu_s and processes and duration_s and cpu_s > LIMITS["client_busy"].value * processes * duration_s:
        return (
            f"it was busy {cpu_s / processes / duration_s:.0%} of the time; raise load.processes={processes}"
        )
    threads = run.meta.get("engine_cpu_cores") or 0
    fewer = f", or lower engine.threads={threads}" if threads > 1 else ""
    return f"it waited for a core; end what else runs on this machine{fewer}"


def rate_faults(run: Run, arrivals: Mapping[str, Any]) -> list[str]:
    """An open loop that did not offer its own schedule. Under a cap arrivals wait for a place as asked."""
    error, sends, limit = arrivals["rate_error"], arrivals["sent_of_due"], LIMITS["rate_error"].value
    load = run.config.get("load")
    capped = isinstance(load, dict) and load.get("concurrency") is not None
    if error is None or capped or sends < LIMITS["rate_sends"].value or abs(error) <= limit:
        return []
    return [
        f"rate: realised {error:+.1%} off the drawn rate, {sends} of {arrivals['due']} due requests sent "
        f"(limit {limit:.0%})"
    ]


def clock_faults(run: Run) -> list[str]:
    step = clock_step_ns(run.meta.get("clock_pairs") or [])
    seen = (run.meta.get("client") or {}).get("clock_offset_step_ns")
    if isinstance(seen, int) and abs(seen) > LIMITS["clock_step_ms"].value * 1e6:
        step = max(step or 0, abs(seen))
    return (
        [] if step is None else [f"clock: the wall clock was stepped by {step / 1e6:.1f} ms during the run"]
    )


def clock_step_ns(pairs: list[Any]) -> int | None:
    """The largest jump of realtime against monotonic between two clock pairs, when it is more than
    slewing."""
    worst = 0
    known = [
        p
        for p in pairs
        if isinstance(p, (list, tuple)) and len(p) == 2 and all(isinstance(v, int) for v in p)
    ]
    allowed = LIMITS["clock_step_ms"].value * 1e6
    for (m0, r0), (m1, r1) in pairwise(known):
        jump = abs((r1 - m1) - (r0 - m0))
        if jump > allowed + LIMITS["clock_slew"].value * abs(m1 - m0):
            worst = max(worst, jump)
    return worst or None


def client_warnings(client: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    lags = [("read lag", "read_lag_ms", "read_lag_ms")]
    if client["stamps"] == "kernel":
        lags.append(("loop lag", "loop_lag_ms", "kernel_loop_lag_ms"))
    for label, name, key in lags:
        p99, limit = client[name]["p99"], LIMITS[key].value
        if p99 is not None and p99 > limit:
            found.append(
                f"client: {label} p99 is {p99:.1f} ms (limit {limit:g} ms): hang-ups and follow-up requests "
                "came that much late; stamps did not move"
            )
    tiny, limit = client["gaps_under_0.1ms_share"], LIMITS["tiny_gaps"].value
    if tiny is not None and tiny > limit:
        found.append(
            f"ITL is chunked: {tiny:.1%} of the gaps are under 0.1 ms (limit {limit:.0%}), so tokens came "
            "together and the gaps before them are too long"
        )
    held, limit = client["tokens_per_chunk"], LIMITS["tokens_per_chunk"].value
    if held is not None and held > limit:
        found.append(
            f"ITL is chunked: {held:.3g} tokens a chunk (limit {limit:g}); TPOT holds, ITL is mostly zeros"
        )
    return found


def length_warnings(figures: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    hints = {
        "prompt_tokens": ("prompts", "engine.tokenizer names the server's tokenizer, which makes them exact"),
        "output_tokens": ("answers", "the server ended them elsewhere than planned"),
    }
    for name, (label, hint) in hints.items():
        planned, counted, off = (figures[name][key] for key in ("planned", "counted", "off"))
        if planned and abs(counted / planned - 1) > LIMITS["length_error"].value:
            found.append(
                f"lengths: {label} held {counted / planned:.3g} times the tokens planned "
                f"({off} are off): {hint}"
            )
    return found


def median_ttft_ms(figures: Mapping[str, Any]) -> float | None:
    """From the send: what the server did, whatever the client's own lag."""
    value = figures["latency_ms"]["ttft"]["from_send"]["p50"]
    return float(value) if value is not None and np.isfinite(value) else None


def _matters(problem: str) -> bool:
    """A foreign server leaves no engine records, and that is no fault."""
    return "no such file" not in problem or problem.startswith(("meta", "requests"))

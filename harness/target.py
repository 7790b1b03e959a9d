"""What a run is aimed at: our server once it is ready, or somebody else's once it has answered."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.foreign import api_key, probe

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from harness.loadgen import Target
    from workloads.prompts import PromptBook
    from workloads.schedule import Schedule

WARM_UP_RUN = "warmup"
"""The label under which the engine records the warm-up, so that no figure counts it."""
WARM_UP_PROMPTS = (16, 64, 256)
WARM_UP_ANSWER = 8
WARM_UP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RunTarget:
    """A server and what the run has to know of it. server: the ready line; {} for a foreign one."""

    load: Target
    server: Mapping[str, Any]
    max_model_len: int | None

    @property
    def length_mode(self) -> str:
        return "stop_after" if self.load.dialect == "batchmark" else "exact"


def our_target(ready: Mapping[str, Any], cfg: DictConfig) -> RunTarget:
    """The reference server of this run, from its ready line."""
    from harness.loadgen import Target
    from harness.tokenizer import load_tokenizer

    host = f"[{ready['host']}]" if ":" in ready["host"] else ready["host"]
    target = Target(
        base_url=f"http://{host}:{ready['port']}",
        model=ready["model"],
        api_key=api_key(cfg.engine),
        tokenizer=load_tokenizer(ready["tokenizer"]),
    )
    return RunTarget(target, ready, ready["max_model_len"])


def foreign_target(cfg: DictConfig) -> RunTarget:
    """A server that is already running. Raises UsageError when it is not, or lacks what the run needs."""
    from harness.loadgen import Target
    from harness.tokenizer import load_tokenizer

    found = probe(cfg.engine)
    target = Target(
        base_url=found.root,
        model=found.model,
        api=cfg.engine.api,
        dialect="openai",
        api_key=api_key(cfg.engine),
        send_ids=cfg.engine.tokenizer is not None,  # without the server's tokenizer there are no ids to send
        tokenizer=load_tokenizer(cfg.engine.tokenizer),
    )
    return RunTarget(target, {}, found.max_model_len)


def prompt_book(target: RunTarget, seed: int) -> PromptBook:
    """The prompts of a schedule, in the token ids of the served model."""
    import numpy as np

    from workloads.prompts import PromptBook, load_text

    tokenizer = target.load.tokenizer
    assert tokenizer is not None
    return PromptBook(np.asarray(tokenizer.encode(load_text()), dtype=np.int64), seed)


def warm_up(target: RunTarget, prompts: PromptBook, folder: Path) -> str | None:
    """A few small requests through the whole path, so that the first measured one does not pay for what
    happens once (allocations, kernels, connections). Nothing is kept. Returns what went wrong as a line."""
    from harness.loadgen import LoadSettings, Stop, run_load
    from harness.records import RequestLog, read_requests

    log_folder = folder / "warmup"
    log_folder.mkdir()
    log = RequestLog(log_folder / "requests.jsonl", run=WARM_UP_RUN, t0_ns=0)
    settings = LoadSettings(run_id=WARM_UP_RUN, timeout_s=WARM_UP_TIMEOUT_S)
    schedule = warm_up_schedule(target.max_model_len)
    try:
        with Stop() as stop:
            t0_ns = time.monotonic_ns()
            run_load(schedule.requests, prompts, target.load, settings, log, t0_ns=t0_ns, stop=stop)
        log.close()
        bad = [record for record in read_requests(log_folder) if record.outcome != "completed"]
    finally:
        log.close()
        (log_folder / "requests.jsonl").unlink(missing_ok=True)
        log_folder.rmdir()
    if not bad:
        return None
    status = f"HTTP {bad[0].status}, " if bad[0].status else ""
    return " ".join(f"{status}{_message(bad[0].error) or bad[0].reason or bad[0].outcome}".split())


def _message(error: str | None) -> str | None:
    """The sentence inside an OpenAI error body; anything else as it is."""
    try:
        return str(json.loads(error or "")["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return error


def warm_up_schedule(max_model_len: int | None) -> Schedule:
    """Three requests at once, none longer than a quarter of what the server takes."""
    from workloads.schedule import Schedule, ScheduledRequest, Segment

    room = max(2, (max_model_len or 4096) // 4)
    requests = []
    for index, wanted in enumerate(WARM_UP_PROMPTS):
        tokens = min(wanted, room - 1)
        answer = min(WARM_UP_ANSWER, room - tokens)
        requests.append(
            ScheduledRequest(
                id=f"w{index:06d}",
                arrival_s=0.0,
                segments=(Segment(f"warmup-{index}", tokens),),
                prompt_tokens=tokens,
                max_tokens=answer,
                stop_after=answer,
            )
        )
    return Schedule(requests=tuple(requests), name=WARM_UP_RUN, seed=0)

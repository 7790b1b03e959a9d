"""What a run is aimed at: our server once it is ready, or somebody else's once it has answered."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from harness.foreign import api_key, probe, takes_websockets

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from harness.loadgen.settings import LoadSettings, Target
    from workloads.schedule import Schedule, ScheduledRequest

WARM_UP_PROMPTS = (16, 64, 256)
WARM_UP_ANSWER = 8
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class RunTarget:
    """A server and what the run has to know of it. server: the ready line; {} for a foreign one."""

    load: Target
    server: Mapping[str, Any]
    max_model_len: int | None

    @property
    def on_this_host(self) -> bool:
        """Whether its address is this host's own: then its GPUs may be ours to read."""
        return urlsplit(self.load.base_url).hostname in LOOPBACK

    @property
    def length_mode(self) -> str:
        return "stop_after" if self.load.dialect == "batchmark" else "exact"


def our_target(ready: Mapping[str, Any], cfg: DictConfig) -> RunTarget:
    """The reference server of this run, from its ready line."""
    from harness.loadgen.settings import Target
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
    from harness.loadgen.settings import Target
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


def asked_over(target: RunTarget, schedule: Schedule) -> tuple[Sequence[ScheduledRequest], str | None]:
    """The requests as this server can be asked, and what there is to say of it. Who would come over a
    WebSocket gets SSE from a foreign server that has no such route: the schedule and its digest stay, so that
    it can be compared."""
    from harness.loadgen.bodies import path_of

    sockets = schedule.websockets()
    load = target.load
    if not sockets or target.server or takes_websockets(load.root_url, path_of(load), load.api_key):
        return schedule.requests, None
    return schedule.over_http(), (
        f"note: {load.root_url} has no WebSocket at /{path_of(load)}/ws: {sockets} of {len(schedule)} "
        "requests that would have come over one are sent as SSE"
    )


def load_settings(cfg: DictConfig, run_id: str) -> LoadSettings:
    """load.* of a configuration. Raises LoadError."""
    from harness.loadgen.settings import LoadSettings

    load = cfg.load
    return LoadSettings(
        run_id=run_id,
        kind=load.kind,
        # An open schedule was drawn to its length.
        duration_s=load.duration_s if load.kind == "closed" else None,
        concurrency=load.concurrency,
        timeout_s=load.timeout_s,
        max_wait_s=load.get("max_wait_s"),
        ramp_s=load.get("ramp_s"),
        retries=load.retries,
        retry_backoff_s=load.retry_backoff_s,
        backend=load.backend,
        trust_env=load.trust_env,
        processes=load.processes,
        keep_text=cfg.output.text,
    )


def load_processes(
    cfg: DictConfig, requests: Sequence[ScheduledRequest], server: Mapping[str, Any] | None = None
) -> int:
    """How many processes share the load: load.processes, which is obeyed, or what its auto comes to. server:
    the ready line of ours, where there is one already."""
    from harness.loadgen.slices import auto_processes

    if cfg.load.processes != "auto":
        return int(cfg.load.processes)
    return auto_processes(requests, load_settings(cfg, ""), _cores_left(cfg, server or {}))


def _cores_left(cfg: DictConfig, server: Mapping[str, Any]) -> int:
    """The cores of this host that no engine on it has been given."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cfg.engine.kind == "openai":
        local = urlsplit(str(cfg.engine.base_url)).hostname in LOOPBACK
        return cores // 2 if local else cores  # nobody says how many it uses
    if server.get("device", cfg.device) == "cuda":
        return cores - 1  # its host thread
    threads = server.get("threads") or cfg.engine.get("threads") or cores - 1
    return cores - int(threads)


def warm_up_requests(max_model_len: int | None) -> list[ScheduledRequest]:
    """Three requests at once, none longer than a quarter of what the server takes."""
    from workloads.schedule import ScheduledRequest, Segment

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
    return requests

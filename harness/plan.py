"""What a run is about to do: the schedule, its totals, and what will not fit, before anything is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from harness.slo import limits_of, shown

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from workloads.schedule import Schedule

GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""What drivers put there: NVIDIA's, the one of Windows for WSL, AMD's."""
SHOWN_LIMITS = (
    *("scheduler", "reservation", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("num_kv_blocks", "kv_memory_gb", "block_size", "prefill_chunk_size", "threads"),
)


def draw_schedule(cfg: DictConfig) -> Schedule:
    """The schedule of a configuration. It depends on workload.*, load.requests, load.duration_s and seed,
    so every engine of a sweep is sent the same. Raises WorkloadError."""
    from omegaconf import OmegaConf

    from workloads import draw

    workload: Any = OmegaConf.to_container(cfg.workload, resolve=True)
    duration_s = cfg.load.duration_s if cfg.load.kind == "open" else None
    return draw(workload, seed=cfg.seed, requests=cfg.load.requests, duration_s=duration_s)


def check_workloads(configs: Iterable[DictConfig]) -> None:
    """Raises WorkloadError for a workload that cannot be drawn: one request of each that differs."""
    from omegaconf import OmegaConf

    from workloads import draw

    seen = []
    for cfg in configs:
        workload: Any = OmegaConf.to_container(cfg.workload, resolve=True)
        if workload not in seen:
            seen.append(workload)
            draw(workload, seed=cfg.seed, requests=1)


def check_engine(cfg: DictConfig) -> None:
    """Raises engines.config.ConfigError for an engine that cannot work; costs no torch and no server."""
    if cfg.engine.kind == "reference":
        from engines.config import ConfigError, EngineConfig

        EngineConfig.from_mapping(dict(cfg.engine))
        if cfg.server.routes:
            raise ConfigError("server.routes: a measured run has one scheduler; compare two runs instead")


def missing_device(cfg: DictConfig) -> str | None:
    """One line when the device that is asked for is not on this machine. No torch is asked: loading it takes
    seconds."""
    if cfg.engine.kind != "reference" or cfg.device != "cuda":
        return None
    from pathlib import Path

    if any(map(Path.exists, map(Path, GPU_DEVICES))):
        return None
    return "device=cuda: no GPU is seen on this machine, so the run cannot start here; use device=cpu or auto"


def check_lengths(schedule: Schedule, max_model_len: int | None, kv_tokens: int | None = None) -> str | None:
    """One line when some requests are longer than the engine takes; they will count as failed. kv_tokens:
    what the KV pool holds."""
    limits = (
        (max_model_len, "engine.max_model_len={limit} tokens", "engine.max_model_len={longest}"),
        (kv_tokens, "the {limit} tokens of the KV pool (engine.num_kv_blocks)", "more engine.num_kv_blocks"),
    )
    for limit, what, cure in limits:
        over = [n for n in (r.prompt_tokens + r.max_tokens for r in schedule) if limit and n > limit]
        if limit and over:
            longest = max(over)
            scale = _floor(schedule.length_scale * limit / longest)
            return (
                f"warning: {len(over)} of {len(schedule)} requests pass {what.format(limit=limit)} (the "
                f"longest has {longest}) and will fail; what would work: workload.length_scale={scale} or "
                f"{cure.format(longest=longest)}"
            )
    return None


def pool_tokens(num_kv_blocks: int | None, block_size: int | None) -> int | None:
    """Tokens that the KV pool holds: one block of it belongs to nobody."""
    return (num_kv_blocks - 1) * block_size if num_kv_blocks and block_size else None


def describe(cfg: DictConfig, schedule: Schedule) -> str:
    """The plan for people, several lines."""
    from harness.eta import eta
    from harness.samples import describe_needs

    expected = eta(cfg, schedule)
    prompts = sum(r.prompt_tokens for r in schedule)
    declared = sum(r.max_tokens for r in schedule)
    answers = sum(r.stop_after for r in schedule)
    cancels = sum(r.cancel_kind != "none" for r in schedule)
    classes = Counter(r.request_class for r in schedule)
    lines = [
        f"workload   {schedule.name}: {len(schedule)} requests, {traffic(cfg, schedule)}",
        f"lengths    workload.length_scale={schedule.length_scale:g}: {prompts} prompt tokens, "
        f"{answers} answer tokens ({declared} declared); {cancels} users hang up",
        *([f"classes    {', '.join(f'{n} {c}' for c, n in classes.items())}"] if len(classes) > 1 else []),
        *([peak(schedule)] if cfg.load.kind == "open" else []),
        f"schedule   seed {schedule.seed}, sha256 {schedule.sha256()}",
    ]
    if cfg.engine.kind == "reference":
        limits = ", ".join(f"{k}={cfg.engine[k]}" for k in SHOWN_LIMITS if cfg.engine.get(k) is not None)
        lines.append(f"engine     {cfg.engine.name}: {limits}")
        lines.append(f"model      {cfg.model.name}, device={cfg.device}, dtype={cfg.dtype}")
        pool = pool_tokens(cfg.engine.num_kv_blocks, cfg.engine.block_size)
        warning = check_lengths(schedule, cfg.engine.max_model_len, pool)
    else:
        lines.append(
            f"engine     {cfg.engine.base_url} (not ours; model {cfg.engine.model or 'the first listed'})"
        )
        warning = None
    lines.append(f"client     {clients(cfg, schedule)}")
    lines.append(f"slo        {shown(limits_of(cfg))}")
    lines.append(f"output     {cfg.output.dir}/<run id>")
    lines.append(f"time       {expected}")
    lines += describe_needs(schedule, expected.load_s, expected.total_s - expected.load_s)
    lines.extend(f"note       {note}" for note in schedule.notes)
    if warning:
        lines.append(warning)
    return "\n".join(lines)


def describe_sweep(configs: Sequence[DictConfig], names: Sequence[Sequence[str]]) -> str:
    """The plans of all runs, one after the other, and how long they take together. names: what is not the
    same in all."""
    from harness.eta import eta

    lines: list[str] = []
    totals: list[float] = []
    drawn: list[tuple[Any, Schedule]] = []  # engines of a sweep mostly share their traffic
    for number, (cfg, differs) in enumerate(zip(configs, names, strict=True), 1):
        key = (cfg.workload, cfg.seed, cfg.load.kind, cfg.load.requests, cfg.load.duration_s)
        schedule = next((s for k, s in drawn if k == key), None)
        if schedule is None:
            schedule = draw_schedule(cfg)
            drawn.append((key, schedule))
        totals.append(eta(cfg, schedule).total_s)
        lines += [f"run {number} of {len(configs)}: {' '.join(differs) or 'as configured'}"]
        lines += [describe(cfg, schedule), ""]
    lines += sweep_times(totals, names)
    return "\n".join(lines)


def sweep_times(totals: Sequence[float | None], names: Sequence[Sequence[str]]) -> list[str]:
    """How long a sweep takes, as a whole and point by point. totals: seconds; None for a finished point."""
    from harness.eta import duration

    left = [total for total in totals if total is not None]
    done = len(totals) - len(left)
    about = f"about {duration(sum(left))}"
    lines = [f"sweep      {len(left)} runs one after the other: {about}"]
    if done:
        lines = [f"sweep      {done} of {len(totals)} points are finished; {len(left)} left, {about}"]
    for total_s, differs in zip(totals, names, strict=True):
        shown = "finished" if total_s is None else duration(total_s)
        lines.append(f"{'':11}{shown:>8}  {' '.join(differs) or 'as configured'}")
    return lines


def clients(cfg: DictConfig, schedule: Schedule) -> str:
    """Who sends: how many processes, and by which path."""
    from harness.target import load_processes

    count = load_processes(cfg, schedule.requests)
    return (
        f"{count} load process{'es' if count > 1 else ''} (load.processes={cfg.load.processes}), "
        f"backend {cfg.load.backend}"
    )


def peak(schedule: Schedule) -> str:
    """What the busiest second asks for."""
    requests: Counter[int] = Counter()
    prompts: Counter[int] = Counter()
    answers: Counter[int] = Counter()
    for request in schedule:
        second = int(request.arrival_s)
        requests[second] += 1
        prompts[second] += request.prompt_tokens
        answers[second] += request.stop_after
    busiest = max(requests, key=lambda second: prompts[second] + answers[second])
    span = max(1, max(requests) + 1)
    mean = (sum(prompts.values()) + sum(answers.values())) / span
    return (
        f"peak       {prompts[busiest] + answers[busiest]} tokens/s asked for in second {busiest}, by "
        f"{requests[busiest]} requests ({answers[busiest]} of answers); mean {mean:.0f} tokens/s"
    )


def traffic(cfg: DictConfig, schedule: Schedule) -> str:
    """When the requests leave, in words."""
    if cfg.load.kind == "closed":
        limit = f", no new ones after {cfg.load.duration_s:g} s" if cfg.load.duration_s else ""
        return f"closed loop of {cfg.load.concurrency} clients{limit}"
    last = schedule.requests[-1].arrival_s if len(schedule) else 0.0
    cap = f", at most {cfg.load.concurrency} under way" if cfg.load.concurrency else ""
    sessions = {r.session for r in schedule if r.session is not None}
    if sessions:
        return f"open loop, {len(sessions)} sessions within {last:.1f} s at the earliest{cap}"
    if schedule.planned_rate is None:
        return f"open loop, all within {last:.1f} s{cap}"
    return f"open loop at {schedule.planned_rate:.3g} requests/s for {last:.1f} s{cap}"


def _floor(value: float) -> float:
    """Rounded down to two significant digits, so that the hint itself fits."""
    from math import floor, log10

    step = 10.0 ** (floor(log10(value)) - 1)
    return round(floor(value / step) * step, 6)

"""What a run is about to do: the schedule, its totals, and what will not fit, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from workloads.schedule import Schedule

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
        from engines.config import EngineConfig

        EngineConfig.from_mapping(dict(cfg.engine))


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
    prompts = sum(r.prompt_tokens for r in schedule)
    declared = sum(r.max_tokens for r in schedule)
    answers = sum(r.stop_after for r in schedule)
    cancels = sum(r.cancel_kind != "none" for r in schedule)
    lines = [
        f"workload   {schedule.name}: {len(schedule)} requests, {traffic(cfg, schedule)}",
        f"lengths    workload.length_scale={schedule.length_scale:g}: {prompts} prompt tokens, "
        f"{answers} answer tokens ({declared} declared); {cancels} users hang up",
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
    lines.append(f"slo        TTFT {cfg.slo.ttft_ms:g} ms, TPOT {cfg.slo.tpot_ms:g} ms")
    lines.append(f"output     {cfg.output.dir}/<run id>")
    lines.extend(f"note       {note}" for note in schedule.notes)
    if warning:
        lines.append(warning)
    return "\n".join(lines)


def traffic(cfg: DictConfig, schedule: Schedule) -> str:
    """When the requests leave, in words."""
    if cfg.load.kind == "closed":
        limit = f", no new ones after {cfg.load.duration_s:g} s" if cfg.load.duration_s else ""
        return f"closed loop of {cfg.load.concurrency} clients{limit}"
    last = schedule.requests[-1].arrival_s if len(schedule) else 0.0
    if schedule.planned_rate is None:
        return f"open loop, all within {last:.1f} s"
    return f"open loop at {schedule.planned_rate:.3g} requests/s for {last:.1f} s"


def _floor(value: float) -> float:
    """Rounded down to two significant digits, so that the hint itself fits."""
    from math import floor, log10

    step = 10.0 ** (floor(log10(value)) - 1)
    return round(floor(value / step) * step, 6)

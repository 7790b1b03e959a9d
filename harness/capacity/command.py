"""The command line: `python -m harness.capacity [crossover] [--virtual] [--dry-run] key=value…`"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli import PASS, put, say
from harness.conf import UsageError, compose

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from harness.capacity.point import Limits

HELP = """\
usage: python -m harness.capacity [--virtual] [--dry-run] [key=value ...]
       python -m harness.capacity crossover [--virtual] [--dry-run] [key=value ...]

The highest rate at which an engine keeps its SLO, found by bisection on a server that stays, and goodput,
latencies and cost over the rate. crossover: at which rate (or share of long prompts, or length) one engine
overtakes another.

  python -m harness.capacity +workload=chat +engine=chunked              under 6 minutes
  python -m harness.capacity +workload=rag 'engines=[static,continuous,chunked]' cost.device_hour=1.20
  python -m harness.capacity +workload=chat +engine=chunked slo.ttft_ms=500 capacity.itl_p99_ms=100
  python -m harness.capacity crossover +workload=rag 'engines=[continuous,chunked]' metric=ttft_p99 over=rate
  python -m harness +workload=chat +engine=chunked load.utilization=0.8  afterwards: a run at 80 % of it

options
  --virtual    in virtual time: the engine's own scheduler over a model that only takes time; no server
  --dry-run    print the plan and how long it takes, and stop
  -h, --help   print this and stop

settings, beside those of a run (`python -m harness --help`)
  engines=[a,b,c]              several, whose probes take turns
  slo.ttft_ms slo.tpot_ms      limits of each request; slo.attainment (0.99): the share that keeps both
  capacity.queue_delay_p50_ms  limit of the median time in the queue (2000; null: none)
  capacity.itl_p99_ms          limit of the p99 gap between tokens (null: none)
  capacity.growth              share of arrivals by which the requests under way may grow (0.05)
  capacity.probe_s             arrivals of a probe, seconds (20); capacity.requests: how many
  capacity.tolerance           width of the interval that is looked for (0.05)
  capacity.repeats             probes of one rate at most (3)
  capacity.max_minutes         of everything (null: 6 an engine)
  capacity.curve=[0.5,1.3]     more points, at multiples of the capacity
  cost.device_hour             price of an hour of the device, in any currency
  crossover: metric over range points rounds confidence

exit codes: 0 found, 1 the SLO is out of reach at every rate, 2 usage error, 3 invalid or interrupted,
4 inconclusive. The last line is `results: <folder>`: capacity.json, report.html, a run directory per probe.
docs/capacity.md says how to read them.
"""
OWN = ("engines", "capacity", "cost", "metric", "over", "range", "points", "rounds", "confidence")
"""Settings of this command, which are none of a run."""
MINUTES = 6.0
"""An engine's, where capacity.max_minutes is null."""


@dataclass(frozen=True)
class Asked:
    """What the command line asks for. settings: the whole configuration; engines: that of a run for each."""

    settings: DictConfig
    engines: dict[str, DictConfig]
    virtual: bool
    overrides: list[str]

    @property
    def seconds(self) -> float:
        minutes = self.settings.capacity.max_minutes
        return 60 * float(MINUTES * len(self.engines) if minutes is None else minutes)

    @property
    def limits(self) -> Limits:
        from harness.capacity.point import Limits

        of = self.settings.capacity
        return Limits(
            attainment=self.settings.slo.attainment,
            growth=of.growth,
            queue_delay_p50_ms=of.queue_delay_p50_ms,
            itl_p99_ms=of.itl_p99_ms,
        )


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if "-h" in args or "--help" in args:
        print(HELP, end="")
        return PASS
    crossover = args[:1] == ["crossover"]
    options = [arg for arg in args[crossover:] if arg.startswith("-")]
    if unknown := [arg for arg in options if arg not in ("--virtual", "--dry-run")]:
        raise UsageError(f"{unknown[0]}: no such option; there are --virtual, --dry-run and --help")
    overrides = [arg for arg in args[crossover:] if arg not in options]
    if "--dry-run" in options:
        overrides.append("dry_run=true")
    asked = read(overrides, "crossover" if crossover else "capacity", virtual="--virtual" in options)
    if crossover:
        from harness.capacity.crossing import run_crossover

        return run_crossover(asked)
    from harness.capacity.run import run_capacity

    return run_capacity(asked)


def read(overrides: list[str], root: str, *, virtual: bool) -> Asked:
    """Raises UsageError and its like: everything is checked before anything is started."""
    from omegaconf import OmegaConf

    from harness.capacity.configs import check_workload
    from harness.plan import check_engine, check_workloads

    settings = compose(overrides, root)
    names = [settings.engine.name] if settings.engines is None else settings.engines
    if not names or not (settings.engines is None or OmegaConf.is_list(names)):
        raise UsageError(f"engines={settings.engines}: needs a list, as 'engines=[static,chunked]'")
    if len(set(names)) != len(names):
        raise UsageError(f"engines=[{','.join(map(str, names))}]: holds an engine twice")
    configs = {}
    for name in map(str, names):
        extra = [] if settings.engines is None else [f"engine={name}"]
        of_engine = [text for text in overrides if settings.engines is None or not _is_engine(text)]
        cfg = compose([*of_engine, *extra], root)
        if cfg.load.get("utilization") is not None:
            raise UsageError(
                "load.utilization: is a share of the capacity, which is looked for here; leave it out"
            )
        for key in OWN:
            OmegaConf.set_struct(cfg, False)
            cfg.pop(key, None)
        OmegaConf.set_struct(cfg, True)
        check_workload(cfg)
        check_engine(cfg)
        configs[name] = cfg
    check_workloads(configs.values())
    gap = settings.capacity.itl_p99_ms
    if virtual and root == "capacity" and gap is not None:  # a limit that nothing is held to is no limit
        raise UsageError(
            f"capacity.itl_p99_ms={gap}: --virtual has no gaps between tokens; leave out --virtual"
        )
    for multiple in settings.capacity.curve or []:
        if not isinstance(multiple, int | float) or not 0 < multiple <= 5:
            raise UsageError(
                f"capacity.curve={settings.capacity.curve}: needs numbers above 0 to 5, as [0.5,1.3]"
            )
    return Asked(settings, configs, virtual, overrides)


def _is_engine(text: str) -> bool:
    return text.lstrip("+").startswith("engine=")


def new_folder(asked: Asked, kind: str) -> Path:
    """A fresh folder under output.dir. Raises UsageError."""
    output = Path(asked.settings.output.dir).expanduser()
    folder = output / f"{datetime.now():%Y%m%d-%H%M%S}-{kind}-{secrets.token_hex(2)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"output.dir={output}: cannot be written ({error.strerror})") from None
    return folder


def about(asked: Asked) -> dict[str, Any]:
    """What every result says of itself."""
    from harness.host import facts
    from harness.slo import limits_of, shown

    cfg = next(iter(asked.engines.values()))
    own = asked.settings.capacity
    text = f"{shown(limits_of(cfg))}, {cfg.slo.attainment:.4g} of requests"
    for name, label in (("queue_delay_p50_ms", "median queue delay"), ("itl_p99_ms", "p99 gap")):
        text += f", {label} {own[name]:g} ms" if own[name] is not None else ""
    return {
        "workload": str(cfg.workload.name),
        "model": "none (virtual time)" if asked.virtual else str(cfg.model.name),
        "virtual": asked.virtual,
        "seed": int(cfg.seed),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "overrides": asked.overrides,
        "host": facts(),
        "slo_text": text,
        "limits": {
            "ttft_ms": cfg.slo.ttft_ms,
            "tpot_ms": cfg.slo.tpot_ms,
            "attainment": cfg.slo.attainment,
            **{name: own[name] for name in ("queue_delay_p50_ms", "itl_p99_ms", "growth")},
        },
        "cost_device_hour": asked.settings.cost.device_hour,
    }


__all__ = ["Asked", "about", "main", "new_folder", "put", "read", "say"]

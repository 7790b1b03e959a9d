"""The settings of a reference engine, checked once, before anything is built."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from engines.plugins import PluginError

if TYPE_CHECKING:
    from engines.lanes import LaneSettings

SALTS = ("none", "tenant")
DETERMINISMS = ("bitwise", "fast")
PREEMPTIONS = ("recompute", "swap")
VICTIMS = ("newest", "least_urgent")
RESERVATIONS = ("on_demand", "prompt", "prompt_plus_max_tokens", "max_model_len", "predicted_peak")
LONGEST_MS = 1e9
"""The longest wait that a setting may ask for, 11 days: a lock of the system cannot wait for ever longer."""

MOST_PER_S = 1e6
MOST_GB = 1e9
MOST = 2**31 - 1
"""Of whole numbers: tables of blocks and positions are int32."""

_NODES = ("policy", "queue_policy", "lanes")
_POSITIVE_OR_NULL = (
    *("num_kv_blocks", "prefill_chunk_size", "threads", "max_waiting_requests", "max_waiting_tokens"),
    *("tenant_burst", "preempt_every"),
)


class ConfigError(ValueError):
    """A setting cannot work. The message is one line: the setting, its value and what would work."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine. Field by field the keys of harness/conf/engine/_reference.yaml, which explains them."""

    name: str
    scheduler: str
    reservation: str = "on_demand"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 4096
    max_model_len: int = 4096
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_memory_gb: float | None = 1.0
    prefill_chunk_size: int | None = None
    threads: int | None = None
    cpu_affinity: tuple[int, ...] | None = None
    determinism: str = "bitwise"
    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    queue_timeout_ms: float | None = None
    deadline_admission: bool = False
    tenant_rate: float | None = None
    tenant_burst: int | None = None
    kv_high_watermark: float | None = None
    kv_reject_watermark: float | None = None
    stream_idle_timeout_ms: float | None = None
    api_key_env: str | None = None
    admin_token_env: str | None = None
    max_queue_delay_ms: float = 0.0
    drain: bool = True
    pad_finished: bool = True
    left_pad: bool = True
    queue: str = "fcfs"
    victim: str = "newest"
    kv_watermark: float = 0.0
    preemption: str = "recompute"
    swap_memory_gb: float = 1.0
    prefix_cache: bool = False
    prefix_cache_salt: str = "none"
    policy: Mapping[str, Any] = field(default_factory=dict)
    queue_policy: Mapping[str, Any] = field(default_factory=dict)
    lanes: Mapping[str, Any] = field(default_factory=dict)
    overlap: bool = False
    cuda_graphs: bool | None = None
    cuda_graph_sizes: tuple[int, ...] | None = None
    compile: bool = False
    preempt_every: int | None = None
    preempt_seed: int | None = None

    def __post_init__(self) -> None:
        whole_prompts = self._check_policies()
        _choice("engine.determinism", self.determinism, DETERMINISMS)
        if self.cpu_affinity is not None:
            check_affinity(self.cpu_affinity)
        _choice("engine.victim", self.victim, VICTIMS)
        _choice("engine.preemption", self.preemption, PREEMPTIONS)
        _choice("engine.reservation", self.reservation, RESERVATIONS)
        _choice("engine.prefix_cache_salt", self.prefix_cache_salt, SALTS)
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
            _positive(name, getattr(self, name))
        for name in _POSITIVE_OR_NULL:
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.max_model_len == 1:
            raise ConfigError("engine.max_model_len=1: needs at least 2, for a prompt and an answer")
        for name in ("queue_timeout_ms", "stream_idle_timeout_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= LONGEST_MS:
                raise ConfigError(
                    f"engine.{name}={value}: needs a time above 0, or null; at most {LONGEST_MS:g}"
                )
        self._check_admission()
        self._check_graph_sizes()
        if not 0 <= self.max_queue_delay_ms <= LONGEST_MS:
            raise ConfigError(
                f"engine.max_queue_delay_ms={self.max_queue_delay_ms}: needs 0 or more, at most "
                f"{LONGEST_MS:g}"
            )
        if not 0 < self.swap_memory_gb <= MOST_GB:
            raise ConfigError(
                f"engine.swap_memory_gb={self.swap_memory_gb}: needs a size above 0, at most {MOST_GB:g}"
            )
        if not 0 <= self.kv_watermark < 1:
            raise ConfigError(
                f"engine.kv_watermark={self.kv_watermark}: needs a share of the pool, from 0 to below 1"
            )
        if self.num_kv_blocks == 1:
            raise ConfigError(
                "engine.num_kv_blocks=1: needs at least 2, since the null block belongs to nobody"
            )
        if self.num_kv_blocks is None and not 0 < (self.kv_memory_gb or 0) <= MOST_GB:
            raise ConfigError(
                f"engine.kv_memory_gb={self.kv_memory_gb}: give a size above 0, at most {MOST_GB:g}, or set "
                "engine.num_kv_blocks"
            )
        if whole_prompts and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"engine.max_num_batched_tokens={self.max_num_batched_tokens} is below engine.max_model_len="
                f"{self.max_model_len}: engine={self.name} runs whole prompts, so it needs at least that many"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_num_batched_tokens={self.max_num_batched_tokens} is below engine.max_num_seqs="
                f"{self.max_num_seqs}: every running sequence needs a token in an iteration"
            )

    def _check_graph_sizes(self) -> None:
        sizes = self.cuda_graph_sizes
        if sizes is not None and not (sizes and all(1 <= size <= self.max_num_seqs for size in sizes)):
            raise ConfigError(
                f"engine.cuda_graph_sizes={list(sizes)}: needs batch sizes from 1 to engine.max_num_seqs="
                f"{self.max_num_seqs}, or null"
            )

    def _check_admission(self) -> None:
        if self.tenant_rate is not None and not 0 < self.tenant_rate <= MOST_PER_S:
            raise ConfigError(
                f"engine.tenant_rate={self.tenant_rate}: needs requests per second above 0, or null; "
                f"at most {MOST_PER_S:g}"
            )
        if self.tenant_burst is not None and self.tenant_rate is None:
            raise ConfigError(f"engine.tenant_burst={self.tenant_burst}: needs engine.tenant_rate beside it")
        for name in ("kv_high_watermark", "kv_reject_watermark"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(
                    f"engine.{name}={value}: needs a share of the pool above 0, at most 1, or null"
                )
        high, reject = self.kv_high_watermark, self.kv_reject_watermark
        if high is not None and reject is not None and reject < high:
            raise ConfigError(
                f"engine.kv_reject_watermark={reject} is below engine.kv_high_watermark={high}: requests "
                "wait from the high one on and are refused from the reject one on, so it needs at least that"
            )

    def _check_policies(self) -> bool:
        """The files that the names stand for, and their own settings. True: whole prompts only."""
        from engines import queues, schedulers  # they are built from this configuration

        try:
            setting, name = "engine.queue", self.queue
            queue = queues.queue_class(name)
            setting, name = "engine.scheduler", self.scheduler
            scheduler = schedulers.scheduler_class(name)
            lanes = lanes_of(self.lanes)
            settings_of(self.queue_policy, queue.Settings, "queue_policy")
            for lane, its in lanes.items():
                if its.queue is not None:
                    setting, name = f"engine.lanes.{lane}.queue", its.queue
                    its_queue = queues.queue_class(name)
                    settings_of(its.queue_policy, its_queue.Settings, f"lanes.{lane}.queue_policy")
        except PluginError as error:
            raise ConfigError(f"{setting}={name}: {error}") from None
        settings_of(self.policy, scheduler.Settings)
        if self.overlap and not scheduler.overlaps:
            raise ConfigError(
                f"engine.overlap=true: engine.scheduler={self.scheduler} plans by what the pass before has "
                "ended and cannot be ahead of it; use false, or continuous, chunked, prefill_first, tgi"
            )
        if lanes and not scheduler.in_turn:
            raise ConfigError(
                f"engine.lanes={', '.join(lanes)}: engine.scheduler={self.scheduler} takes the whole queue "
                "at once and cannot have lanes; use another one, or engine.lanes={}"
            )
        return scheduler.whole_prompts

    @classmethod
    def from_mapping(cls, engine: Mapping[str, Any]) -> EngineConfig:
        """From the `engine` node of the resolved configuration. Raises ConfigError."""
        known = {f.name: str(f.type) for f in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in engine.items():
            if key == "kind":
                continue
            if key not in known:
                raise ConfigError(f"engine.{key} is not a setting; choose from: {', '.join(sorted(known))}")
            if key not in _NODES:
                values[key] = typed(key, value, known[key])
            elif value is None or isinstance(value, Mapping):
                values[key] = dict(value or {})
            else:
                raise ConfigError(f"engine.{key}={value}: needs settings, as {{name: value}}, or {{}}")
        config = cls(**values)
        _check_effects(config)
        return config


def _check_effects(config: EngineConfig) -> None:
    """What would be without effect from the start. (Later, limits may change without asking for more.)"""
    from engines import schedulers

    if config.preempt_seed is not None and config.preempt_every is None:
        raise ConfigError(
            f"engine.preempt_seed={config.preempt_seed}: draws among the iterations of engine.preempt_every, "
            "so it needs that beside it, or null"
        )
    _check_read(config)
    settings = settings_of(config.policy, schedulers.scheduler_class(config.scheduler).Settings)
    if hasattr(settings, "check"):
        try:
            settings.check(config)
        except ValueError as error:
            raise ConfigError(f"engine.policy.{error}") from None


BATCHES = ("static", "dynamic", "sliced")
READ_BY = {"drain": BATCHES, "pad_finished": BATCHES, "left_pad": BATCHES, "prefill_chunk_size": ("chunked",)}
"""Settings that only some schedulers of this package read. One of `module:Class` may read any."""


def _check_read(config: EngineConfig) -> None:
    """A setting that nothing reads must not seem to have been measured."""
    defaults = {f.name: f.default for f in fields(config)}
    for key, readers in READ_BY.items():
        value = getattr(config, key)
        if value != defaults[key] and ":" not in config.scheduler and config.scheduler not in readers:
            default = "null" if defaults[key] is None else str(defaults[key]).lower()
            raise ConfigError(
                f"engine.{key}={str(value).lower()}: has no effect on scheduler {config.scheduler}, only on "
                f"{', '.join(readers)}; leave it at {default}"
            )
    if config.cuda_graphs is False and config.cuda_graph_sizes is not None:
        raise ConfigError(
            f"engine.cuda_graph_sizes={list(config.cuda_graph_sizes)}: has no effect with "
            "engine.cuda_graphs=false; leave one of them at null"
        )
    if config.scheduler == "sliced" and config.reservation != defaults["reservation"]:
        raise ConfigError(
            f"engine.reservation={config.reservation}: has no effect on scheduler sliced, which reserves its "
            f"slice; leave it at {defaults['reservation']}"
        )
    if config.name == "past_future" and config.reservation != "predicted_peak":
        raise ConfigError(
            f"engine.reservation={config.reservation}: past_future is prefill_first with predicted_peak and "
            "nothing else; use engine=prefill_first with this reservation"
        )


def settings_of(policy: Mapping[str, Any], settings: type[Any], key: str = "policy") -> Any:
    """The keys of engine.<key> as a `Settings` dataclass. Raises ConfigError."""
    known = {f.name: _written(f.type) for f in fields(settings)}
    values = {}
    for name, value in policy.items():
        if name not in known:
            choice = f"choose from: {', '.join(sorted(known))}" if known else "there is none here"
            raise ConfigError(f"engine.{key}.{name} is not a setting; {choice}")
        values[name] = typed(f"{key}.{name}", value, known[name])
    try:
        return settings(**values)
    except ValueError as error:
        raise ConfigError(f"engine.{key}.{error}") from None


def _written(kind: Any) -> str:
    """An annotation as `typed` reads it, whether or not its file postpones annotations."""
    text = kind.__name__ if isinstance(kind, type) else str(kind)
    return text.replace("collections.abc.", "").replace("typing.", "")


def lanes_of(lanes: Mapping[str, Any]) -> dict[str, LaneSettings]:
    """engine.lanes. Raises ConfigError."""
    from engines.lanes import LaneSettings

    found: dict[str, LaneSettings] = {}
    names: dict[str, str] = {}  # of lanes, by class
    for name, lane in lanes.items():
        if lane is not None and not isinstance(lane, Mapping):
            raise ConfigError(f"engine.lanes.{name}={lane!r}: needs settings, as {{weight: 1}}")
        found[name] = settings_of(lane or {}, LaneSettings, f"lanes.{name}")
        for of_class in found[name].classes or (name,):
            other = names.setdefault(of_class, name)
            if other != name:
                raise ConfigError(
                    f"engine.lanes.{name}.classes={of_class}: is in lane {other} already; one lane for each"
                )
    return found


def allowed_cores() -> list[int]:
    """The cores that this process may use; where the system cannot tell (macOS, Windows), all of them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def check_affinity(cores: Sequence[int]) -> None:
    """engine.cpu_affinity. Raises ConfigError."""
    text = ",".join(map(str, cores))
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"engine.cpu_affinity=[{text}]: this system cannot pin threads; use null")
    allowed = allowed_cores()
    if not cores or len(set(cores)) < len(cores) or not set(cores) <= set(allowed):
        raise ConfigError(
            f"engine.cpu_affinity=[{text}]: needs different cores out of those that this process may use, "
            f"{','.join(map(str, allowed))}"
        )


def thread_count(threads: int | None, cpu_affinity: Sequence[int] | None = None) -> int:
    """CPU threads of a pass; None: one for each core of cpu_affinity, or all cores that this process may use
    but one, which is left to the client. Raises ConfigError for more than the machine has, where passes take
    minutes and starting never ends."""
    cores = os.cpu_count() or 1
    if threads is not None and threads > cores:
        raise ConfigError(f"engine.threads={threads}: this machine has {cores} cores; use at most that")
    return threads or len(cpu_affinity or ()) or max(1, len(allowed_cores()) - 1)


def typed(key: str, value: Any, kind: str) -> Any:
    """`value` as the annotation `kind` has it. Raises ConfigError for engine.<key>."""
    if value is None:
        if "None" in kind:
            return None
        raise ConfigError(f"engine.{key}=null: needs a value")
    base = kind.split(" ")[0]
    ok = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, int | float) and not isinstance(value, bool),
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
        "tuple[int,": _is_list_of(int, value),
        "tuple[str,": _is_list_of(str, value),
        "Mapping[str,": isinstance(value, Mapping),
    }.get(base)
    if ok is None:
        raise ConfigError(
            f"engine.{key}={value!r}: no value can be given for the type {kind}; its Settings may hold int, "
            "float, bool, str, tuple[int, ...], tuple[str, ...] and Mapping[str, float]"
        )
    if not ok or (base == "float" and not abs(value) <= sys.float_info.max):
        words = {"int": "a whole number", "float": "a finite number", "bool": "true or false", "str": "text"}
        words |= {"tuple[int,": "a list of whole numbers", "tuple[str,": "a list of names"}
        words["Mapping[str,"] = "keys and values"
        raise ConfigError(f"engine.{key}={value!r}: needs {words[base]}")
    if base.startswith("tuple"):
        return tuple(value)
    if base == "Mapping[str,":
        number = "Any" not in kind
        return {str(k): typed(f"{key}.{k}", v, "float") if number else v for k, v in value.items()}
    return float(value) if base == "float" else value


def _is_list_of(kind: type, value: Any) -> bool:
    """Whatever kind of list the configuration was read into."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(type(v) is kind for v in value)


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value}: choose from {', '.join(choices)}")


def _positive(name: str, value: int) -> None:
    if not 1 <= value <= MOST:
        raise ConfigError(f"engine.{name}={value}: needs a whole number above 0, at most {MOST}")

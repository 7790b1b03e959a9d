from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import make_dataclass
from typing import Any

import pytest

from engines.config import ConfigError, EngineConfig, allowed_cores, settings_of, thread_count
from harness.conf import compose

GOOD: dict[str, Any] = {"kind": "reference", "name": "x", "scheduler": "chunked"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheduler": "magic"}, "engine.scheduler=magic: choose from chunked, continuous, dynamic"),
        ({"queue": "lifo"}, "engine.queue=lifo: choose from .*fcfs"),
        ({"scheduler": "no_such:Thing"}, "engine.scheduler=no_such:Thing: cannot be imported"),
        ({"scheduler": "engines.plan:Plan"}, "engine.scheduler=engines.plan:Plan: is not a subclass of"),
        (
            {"scheduler": "engines.schedulers.base:Scheduler"},
            "engine.scheduler=engines.schedulers.base:Scheduler: has no schedule, which a Scheduler needs",
        ),
        ({"queue": "engines.queues.base:WaitingQueue"}, "engine.queue=.*: has no key, which a WaitingQueue"),
        ({"queue": "..x:Y"}, "engine.queue=..x:Y: cannot be imported"),
        ({"num_kv_blocks": 10**400}, "engine.num_kv_blocks=1000.*: needs .* above 0, at most 2147483647"),
        ({"tenant_rate": 10**400}, "engine.tenant_rate=1000.*: needs a finite number"),
        ({"kv_memory_gb": 1e300}, "engine.kv_memory_gb=1e.300: give a size above 0, at most 1e.09"),
        ({"swap_memory_gb": 1e300}, "engine.swap_memory_gb=1e.300: needs a size above 0, at most 1e.09"),
        ({"victim": "oldest"}, "engine.victim=oldest: choose from newest, least_urgent"),
        ({"policy": {"colour": 1}}, "engine.policy.colour is not a setting; choose from: "),
        ({"reservation": "all"}, "engine.reservation=all: choose from on_demand"),
        ({"policy": [1]}, r"engine.policy=\[1\]: needs settings, as"),
        ({"queue_policy": "x"}, "engine.queue_policy=x: needs settings, as"),
        ({"preempt_seed": 0}, "engine.preempt_seed=0: .* engine.preempt_every, so it needs that beside it"),
        (
            {"scheduler": "dynamic", "max_num_batched_tokens": 9999, "max_num_seqs": 6}
            | {"policy": {"preferred_batch_sizes": [2, 8]}},
            r"engine.policy.preferred_batch_sizes=\[2, 8\]: no batch has more than engine.max_num_seqs=6",
        ),
        ({"max_num_seqs": 0}, "engine.max_num_seqs=0: needs a whole number above 0"),
        ({"max_waiting_requests": 0}, "engine.max_waiting_requests=0: needs a whole number above 0"),
        ({"block_size": 16.0}, "engine.block_size=16.0: needs a whole number"),
        ({"block_size": None}, "engine.block_size=null: needs a value"),
        ({"drain": 1}, "engine.drain=1: needs true or false"),
        ({"queue_timeout_ms": 0}, "engine.queue_timeout_ms=0.0: needs a time above 0, or null"),
        ({"max_queue_delay_ms": -1}, "engine.max_queue_delay_ms=-1.0: needs 0 or more"),
        ({"queue_timeout_ms": float("nan")}, "engine.queue_timeout_ms=nan: needs a finite number"),
        ({"queue_timeout_ms": 1e300}, "engine.queue_timeout_ms=1e.300: needs .* at most 1e.09"),
        ({"max_queue_delay_ms": float("inf")}, "engine.max_queue_delay_ms=inf: needs a finite number"),
        ({"max_queue_delay_ms": 1e20}, "engine.max_queue_delay_ms=1e.20: needs .* at most 1e.09"),
        ({"kv_memory_gb": float("inf")}, "engine.kv_memory_gb=inf: needs a finite number"),
        ({"max_model_len": 1}, "engine.max_model_len=1: needs at least 2"),
        (
            {"kv_memory_gb": 0.0},
            "engine.kv_memory_gb=0.0: give a size above 0, .*or set engine.num_kv_blocks",
        ),
        ({"kv_memory_gb": None}, "engine.kv_memory_gb=None: give a size above 0"),
        ({"colour": "red"}, "engine.colour is not a setting; choose from: .*scheduler"),
        (
            {"scheduler": "continuous", "max_num_batched_tokens": 512},
            "engine.max_num_batched_tokens=512 is below engine.max_model_len=4096: engine=x runs whole",
        ),
        (
            {"max_num_batched_tokens": 8},
            "engine.max_num_batched_tokens=8 is below engine.max_num_seqs=16: every running sequence needs",
        ),
        ({"drain": False}, "engine.drain=false: has no effect on scheduler chunked, only on static"),
        ({"left_pad": False}, "engine.left_pad=false: has no effect on scheduler chunked"),
        (
            {"scheduler": "prefill_first", "prefill_chunk_size": 64},
            "engine.prefill_chunk_size=64: has no effect on scheduler prefill_first, only on chunked",
        ),
        (
            {"cuda_graphs": False, "cuda_graph_sizes": [1, 2]},
            r"engine.cuda_graph_sizes=\[1, 2\]: has no effect with engine.cuda_graphs=false",
        ),
        (
            {"scheduler": "sliced", "reservation": "prompt"},
            "engine.reservation=prompt: has no effect on .*sliced",
        ),
        (
            {"name": "past_future", "scheduler": "prefill_first", "reservation": "prompt"},
            "engine.reservation=prompt: past_future is prefill_first with predicted_peak",
        ),
    ],
)
def test_what_cannot_work_is_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        EngineConfig.from_mapping({**GOOD, **change})
    assert "\n" not in str(error.value)


def test_settings_may_be_of_a_file_that_postpones_no_annotations() -> None:
    """As the example of docs/add-an-order.md."""
    kinds = [("a", float), ("b", int | None), ("c", tuple[int, ...]), ("d", Mapping[str, float]), ("e", bool)]
    settings = make_dataclass("Settings", kinds)
    made = settings_of({"a": 1, "b": None, "c": [2], "d": {"x": 3}, "e": True}, settings)
    assert (made.a, made.b, made.c, made.d, made.e) == (1.0, None, (2,), {"x": 3.0}, True)
    with pytest.raises(ConfigError, match=r"engine.policy.a='x': needs a finite number"):
        settings_of({"a": "x"}, settings)
    with pytest.raises(ConfigError, match=r"a=1: no value can be given for the type list\[int\]"):
        settings_of({"a": 1}, make_dataclass("Settings", [("a", list[int])]))


def test_cores_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"name": "x", "scheduler": "chunked", "max_num_batched_tokens": 64, "max_num_seqs": 4}
    allowed = allowed_cores()
    config = EngineConfig.from_mapping(base | {"cpu_affinity": allowed})
    assert thread_count(None, config.cpu_affinity) == len(allowed)
    assert thread_count(1, config.cpu_affinity) == 1
    for cores in ([max(allowed) + 1], [], [allowed[0]] * 2, [-1]):
        with pytest.raises(ConfigError, match=r"engine.cpu_affinity=.*: needs different cores out of those"):
            EngineConfig.from_mapping(base | {"cpu_affinity": cores})
    with pytest.raises(ConfigError, match=r"engine.cpu_affinity=0: needs a list of whole numbers"):
        EngineConfig.from_mapping(base | {"cpu_affinity": 0})
    monkeypatch.delattr(os, "sched_setaffinity")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert allowed_cores() == list(range(os.cpu_count() or 1))
    with pytest.raises(ConfigError, match=r"engine.cpu_affinity=.*: this system cannot pin threads"):
        EngineConfig.from_mapping(base | {"cpu_affinity": [0]})


def test_threads_are_at_most_the_cores_of_the_machine() -> None:
    cores = os.cpu_count() or 1
    assert thread_count(cores) == cores
    assert 1 <= thread_count(None) <= cores
    with pytest.raises(ConfigError, match=f"engine.threads={cores + 1}: this machine has {cores} cores"):
        thread_count(cores + 1)


def test_null_and_whole_numbers_for_times() -> None:
    cfg = EngineConfig.from_mapping(
        {**GOOD, "queue_timeout_ms": 500, "kv_memory_gb": None, "num_kv_blocks": 9}
    )
    assert cfg.queue_timeout_ms == 500.0
    assert cfg.num_kv_blocks == 9


def test_a_chunked_engine_may_have_a_budget_below_the_longest_prompt() -> None:
    assert EngineConfig.from_mapping({**GOOD, "max_num_batched_tokens": 64}).max_num_batched_tokens == 64


@pytest.mark.parametrize("name", ["static", "continuous", "chunked"])
def test_the_presets_are_what_their_files_say(name: str) -> None:
    cfg = EngineConfig.from_mapping(compose([f"engine={name}"])["engine"])
    assert (cfg.name, cfg.scheduler) == (name, name)
    assert cfg.reservation == ("max_model_len" if name == "static" else "on_demand")

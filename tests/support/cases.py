"""Random engines and random traffic: every preset of harness/conf/engine, made small, with every order of the
queue, reservation, victim and preemption, with and without the prefix cache; and what has to come out."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

from engines import queues, schedulers
from engines.config import PREEMPTIONS, READ_BY, RESERVATIONS, SALTS, VICTIMS, ConfigError, EngineConfig
from engines.request import Refused, Request
from harness.conf import choices, compose
from tests.support.engine_driver import Driver
from tests.support.mock_runner import VOCAB, answer

PRESETS = tuple(name for name in choices("engine") if name != "openai")
EOS = range(0, VOCAB, 13)
EARLY = ("abort", "queue_timeout", "deadline", "error")  # reasons of an answer that is not whole
TENANTS, CLASSES = ("a", "a", "b"), ("chat", "chat", "batch")

T = TypeVar("T")


class Pick(Protocol):
    """Where a choice comes from: from hypothesis, which can shrink it, or from a seed."""

    def number(self, least: int, most: int) -> int: ...

    def one_of(self, options: Sequence[T]) -> T: ...


class Drawn:
    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def number(self, least: int, most: int) -> int:
        return self._draw(st.integers(least, most))

    def one_of(self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))


class Seeded:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def number(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def one_of(self, options: Sequence[T]) -> T:
        return self._random.choice(options)


@dataclass(frozen=True)
class Arrival:
    step: int
    family: int  # prompts of one family begin alike
    shared: int  # for so many tokens
    own: int
    max_tokens: int
    stop_after: int | None = None
    ignore_eos: bool = True
    abort_at: int | None = None  # iterations after its arrival
    tenant: str = ""
    request_class: str = ""
    priority: int = 0
    deadline_ms: float | None = None

    def request(self, number: int) -> Request:
        common = range(self.family * 100_000, self.family * 100_000 + self.shared)
        own = range(1_000_000 * (number + 1), 1_000_000 * (number + 1) + self.own)
        return Request(
            [*common, *own],
            self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop_after=self.stop_after,
            priority=self.priority,
            tenant=self.tenant,
            request_class=self.request_class,
            deadline_ms=self.deadline_ms,
        )


@dataclass(frozen=True)
class Case:
    config: EngineConfig
    num_kv_blocks: int
    num_host_blocks: int
    arrivals: list[Arrival]
    limits: dict[int, dict[str, Any]] = field(default_factory=dict)  # by tick: what changes while it runs
    fail_at: tuple[int, ...] = ()  # passes that raise

    @property
    def ticks(self) -> int:
        return max((a.step for a in self.arrivals), default=0) + 1


@functools.cache
def preset(name: str) -> Mapping[str, Any]:
    return dict(compose([f"engine={name}", "workload=chat"]).engine)


def small(name: str, **changes: Any) -> EngineConfig:
    """The preset in a size for the mock model. Limits that `changes` do not name are those of the tests."""
    size = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 24, "block_size": 4}
    return EngineConfig.from_mapping({**preset(name), **size, **changes})


def random_case(
    pick: Pick, name: str, *, requests: tuple[int, int] = (3, 12), ticks: int = 6, **fixed: Any
) -> Case:
    """So many requests, at least and at most. `fixed` are settings that are not left to chance."""
    max_model_len = pick.one_of([20, 30, pick.number(4, 30)])
    seats = fixed.get("max_num_seqs") or pick.one_of([2, 3, 4, 5, 1])
    block_size = pick.one_of([1, 2, 2, 4, 7])
    scheduler = schedulers.scheduler_class(preset(name)["scheduler"])
    least = max(seats, max_model_len) if scheduler.whole_prompts else seats
    whole = -(-max_model_len // block_size)
    maybe = [True, False, False]
    changes: dict[str, Any] = {
        "reservation": pick.one_of([preset(name)["reservation"], "on_demand", "prompt", *RESERVATIONS]),
        "queue": pick.one_of(queues.names()),
        "victim": pick.one_of(VICTIMS),
        "preemption": pick.one_of(PREEMPTIONS),
        "prefix_cache": pick.one_of([True, False]),
        "prefix_cache_salt": pick.one_of(SALTS),
        "max_num_seqs": seats,
        "max_num_batched_tokens": least + pick.number(0, 20),
        "max_model_len": max_model_len,
        "block_size": block_size,
        "prefill_chunk_size": pick.one_of([None, 1, 3, 9]),
        "max_queue_delay_ms": pick.one_of([0, 3, 50]),
        "drain": pick.one_of([True, False]),
        "pad_finished": pick.one_of([True, False]),
        "left_pad": pick.one_of([True, False]),
        "kv_watermark": pick.one_of([preset(name)["kv_watermark"], 0.2]),
        "policy": _policy(pick, preset(name)["scheduler"], preset(name)["policy"], seats),
    }
    if pick.one_of(maybe):
        changes["preempt_every"] = pick.number(1, 6)
        changes["preempt_seed"] = pick.one_of([None, 0, 1])
    if pick.one_of(maybe):
        changes["queue_timeout_ms"] = pick.number(5, 50)
    if pick.one_of(maybe):
        changes["max_waiting_requests"] = pick.number(2, 6)
        changes["max_waiting_tokens"] = pick.one_of([None, 20])
    if pick.one_of(maybe):
        changes["kv_high_watermark"] = pick.one_of([0.3, 0.7])
        changes["kv_reject_watermark"] = pick.one_of([None, 0.8])
    if pick.one_of(maybe) and scheduler.in_turn:
        changes["lanes"] = _lanes(pick)
    config = EngineConfig.from_mapping({**preset(name), **_read(name, changes | fixed)})
    usable = pick.one_of([whole, whole + whole // 3, whole + whole // 2, 3 * whole])
    return Case(
        config,
        usable + 1,
        pick.number(0, 2 * whole),
        [_arrival(pick, config, ticks) for _ in range(pick.number(*requests))],
        _limits(pick, config, ticks),
        tuple(pick.number(0, 30) for _ in range(pick.one_of([0, 0, 0, 0, 1]))),
    )


def _arrival(pick: Pick, config: EngineConfig, ticks: int) -> Arrival:
    longest = config.max_model_len
    return Arrival(
        step=pick.number(0, ticks),
        family=pick.number(0, 1),
        shared=pick.one_of(
            [pick.number(0, longest // 3), pick.number(0, longest // 3), pick.number(0, longest)]
        ),
        own=pick.number(0, 4),
        max_tokens=pick.one_of([pick.number(0, longest), longest // 2, longest]),
        stop_after=pick.one_of([None, None, None, pick.number(1, longest)]),
        ignore_eos=pick.one_of([True, True, False]),
        abort_at=pick.one_of([None, None, None, pick.number(0, 20)]),
        tenant=pick.one_of(TENANTS),
        request_class=pick.one_of(CLASSES),
        priority=pick.one_of([0, 0, 1]),
        deadline_ms=pick.one_of([None, None, 60.0, float(pick.number(1, 60))]),
    )


def _policy(pick: Pick, scheduler: str, policy: Mapping[str, Any], seats: int) -> dict[str, Any]:
    """The preset's own settings in the size of the tests."""
    sizes: dict[str, dict[str, Any]] = {
        "chunked": {
            "whole_input_must_fit": pick.one_of([policy.get("whole_input_must_fit", True), False]),
            "decode_seq_budget": pick.one_of([None, 1, 2]),
            "pieces_in_blocks": pick.one_of([True, False]),
        },
        "dynamic": {
            "preferred_batch_sizes": pick.one_of(
                [None, *(sizes for sizes in ([], [2], [2, 3]) if max(sizes, default=1) <= seats)]
            )
        },
        "prefill_first": {"delay_factor": pick.one_of([0.0, 0.0, 1.0])},
        "sliced": {"slice_tokens": pick.one_of([1, 3, 8])},
        "tgi": {
            "waiting_served_ratio": pick.one_of([0.3, 1.5]),
            "max_waiting_tokens": pick.one_of([0, 2, 5]),
            "max_batch_prefill_tokens": pick.one_of([None, 6]),
        },
    }
    return {**policy, **sizes.get(scheduler, {})}


def _lanes(pick: Pick) -> dict[str, Any]:
    return {
        "interactive": {
            "classes": ["chat"],
            "weight": pick.one_of([1.0, 4.0]),
            "max_num_seqs": pick.one_of([None, 1, 2]),
            "patience_tokens": pick.one_of([0, 10, 8192]),
        },
        "batch": {
            "max_num_batched_tokens": pick.one_of([None, 3, 10]),
            "queue": pick.one_of([None, *queues.names()]),
        },
    }


def _limits(pick: Pick, config: EngineConfig, ticks: int) -> dict[int, dict[str, Any]]:
    changes: dict[int, dict[str, Any]] = {}
    for more in range(1, 1 + pick.one_of([0, 0, 0, 1, 2])):  # the budget always changes
        seats = pick.number(1, config.max_num_seqs + 2)
        budget = max(seats, config.max_num_batched_tokens) + more
        changes[pick.number(0, ticks)] = {"max_num_seqs": seats, "max_num_batched_tokens": budget}
    return changes


def play(case: Case, limit: int = 20_000) -> tuple[Driver, dict[int, Request]]:
    """Drive one case to its end. The driver's checker looks at every iteration; here the aborts are checked,
    and what must be left when everything has ended."""
    driver = Driver(
        case.config,
        case.num_kv_blocks,
        case.fail_at,
        num_host_blocks=case.num_host_blocks,
        eos_token_ids=EOS,
    )
    engine = driver.engine
    accepted: dict[int, Request] = {}
    aborts: dict[int, list[int]] = {}
    by_step: dict[int, list[tuple[int, Arrival]]] = {}
    for number, arrival in enumerate(case.arrivals):
        by_step.setdefault(arrival.step, []).append((number, arrival))
    refused = tick = 0
    while tick <= case.ticks or engine.has_work or any(at >= tick for at in aborts):
        assert tick < limit, "the engine does not come to an end"
        if tick in case.limits:
            engine.set_limits(case.limits[tick])
        for number, arrival in by_step.get(tick, []):
            request = arrival.request(number)
            try:
                seq_id = engine.add(request)
            except Refused:
                refused += 1
                continue
            accepted[seq_id] = request
            if arrival.abort_at is not None:
                aborts.setdefault(tick + arrival.abort_at, []).append(seq_id)
        for seq_id in aborts.get(tick, []):
            driver.abort(seq_id)
        if engine.has_work:
            driver.step()
        else:
            driver.clock.now += driver.TICK
        tick += 1
    check_end(driver, len(accepted), refused)
    return driver, accepted


def check_end(driver: Driver, accepted: int, refused: int) -> None:
    """Nothing is left, and everyone is accounted for."""
    stats = driver.engine.stats()
    assert stats.kv_live == stats.running == stats.waiting == 0
    assert stats.received == refused + accepted
    assert sum(stats.refusals.values()) == refused
    assert sum(stats.finished.values()) == accepted
    assert set(driver.log.requests) == set(range(stats.received)), "one record for each request"
    assert not driver.engine.scheduler.ended
    ending = driver.engine.end()
    assert (ending.integrity, ending.aborted, ending.kv_live) == ("ok", 0, 0)


def expected(request: Request, max_model_len: int) -> tuple[list[int], str]:
    """The answer and its finish_reason, from the rules alone."""
    limit = min(request.max_tokens, max_model_len - len(request.prompt_token_ids))
    tokens = answer(request.prompt_token_ids, limit)
    if request.stop_after is not None:
        return tokens[: request.stop_after], "length" if request.stop_after >= limit else "stop"
    ends = [i for i, token in enumerate(tokens) if token in EOS and not request.ignore_eos]
    return (tokens[: ends[0] + 1], "stop") if ends else (tokens, "length")


def check_answers(case: Case, driver: Driver, accepted: Mapping[int, Request]) -> None:
    """Every answer is that of the request alone, whole or, where it ended early, from its beginning."""
    answers, reasons = driver.answers(), driver.reasons()
    assert set(reasons) == set(accepted)
    for seq_id, request in accepted.items():
        tokens, reason = expected(request, case.config.max_model_len)
        record, got = driver.log.requests[seq_id], answers[seq_id]
        assert record.finish_reason == reasons[seq_id]
        assert record.finish_ns is not None
        if reasons[seq_id] not in EARLY:
            assert (got, reasons[seq_id]) == (tokens, reason)
            assert record.output_tokens == len(tokens)
            continue
        assert got == tokens[: len(got)]
        if reasons[seq_id] in ("queue_timeout", "deadline"):
            assert got == []
            assert record.admitted_ns is None
        if reasons[seq_id] == "abort":
            assert record.abort_state in ("queued", "prefill", "decode", "preempted", "held")
            assert record.admitted_ns is not None or record.wasted_tokens == 0


def _read(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Without the settings that the preset's scheduler does not read: it would refuse them."""
    scheduler = preset(name)["scheduler"]
    unread = {key for key, readers in READ_BY.items() if scheduler not in readers}
    if name in ("sliced", "past_future"):
        unread.add("reservation")
    return {key: value for key, value in changes.items() if key not in unread}


def quiet(case: Case) -> Case:
    """The same without anything that ends a request early."""
    config = replace(case.config, queue_timeout_ms=None)
    arrivals = [replace(a, abort_at=None, deadline_ms=None) for a in case.arrivals]
    return replace(case, config=config, arrivals=arrivals, fail_at=())


def valid(name: str, **changes: Any) -> bool:
    """Whether the preset takes these settings at all."""
    try:
        EngineConfig.from_mapping({**preset(name), **changes})
    except ConfigError:
        return False
    return True

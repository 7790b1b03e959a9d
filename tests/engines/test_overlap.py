"""The overlapped loop gives what the plain loop gives, whatever happens, over random arrivals, ends, aborts,
preemptions, prefixes and failures; and what it does otherwise is what it says it does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import schedulers
from engines.batch import Copies, RaggedBatch, StepResult
from engines.config import ConfigError
from engines.launch import DeviceQueue
from engines.overlap import OverlappedEngine, build_engine
from engines.plan import Kind
from engines.request import Request, SamplingParams
from engines.routes import routes_of
from engines.runner import ModelRunner, build_runner
from tests.support.cases import PRESETS, Drawn, check_answers, play, preset, quiet, random_case, small
from tests.support.engine_driver import Driver, MemoryLog, config
from tests.support.mock_runner import MockRunner

AHEAD = tuple(p for p in PRESETS if schedulers.scheduler_class(preset(p)["scheduler"]).overlaps)
EXAMPLES = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_which_presets_plan_ahead() -> None:
    assert {"continuous", "chunked", "prefill_first", "orca"} <= set(AHEAD)
    assert {"static", "dynamic", "sliced"}.isdisjoint(AHEAD)


@pytest.mark.parametrize("name", AHEAD)
@EXAMPLES
@given(st.data())
def test_whatever_happens(name: str, data: st.DataObject) -> None:
    """Each answer is the oracle's, each block is accounted for after every step, and everything ends."""
    case = random_case(Drawn(data.draw), name, overlap=True)
    check_answers(case, *play(case))


@pytest.mark.parametrize("name", AHEAD)
@EXAMPLES
@given(st.data())
def test_every_token_is_useful_once(name: str, data: st.DataObject) -> None:
    """What is computed of an answer beyond its end is an ended row, and no part of the useful tokens."""
    case = quiet(random_case(Drawn(data.draw), name, overlap=True))
    driver, accepted = play(case)
    check_answers(case, driver, accepted)
    stats, steps = driver.engine.stats(), driver.log.steps
    outputs = sum(len(tokens) for tokens in driver.answers().values())
    prompts = sum(len(request.prompt_token_ids) for request in accepted.values())
    assert stats.prefill_tokens + stats.prefix_cache_hits == prompts
    assert stats.output_tokens == outputs
    assert stats.decode_tokens == outputs - len(accepted)
    assert stats.decode_tokens == sum(step.decode_tokens for step in steps)
    assert stats.ended_rows == sum(step.ended_rows for step in steps)
    for step in steps:
        computed = step.prefill_tokens + step.decode_tokens + step.recomputed_tokens + step.ended_rows
        assert computed == sum(step.tokens)
        if case.config.preempt_every is None:  # else a row may be recomputed for a sequence that had ended
            assert step.ended_rows == step.kind.count(Kind.ENDED)
    by_themselves = [r for r in driver.reasons().values() if r == "stop"]
    if not by_themselves and not any(a.stop_after for a in case.arrivals):
        assert stats.ended_rows == 0, "an end by max_tokens is known in time"


@pytest.mark.parametrize("name", AHEAD)
def test_where_ends_are_known_and_kv_is_plenty_the_iterations_are_those_of_the_plain_loop(name: str) -> None:
    requests = [(9, 6), (5, 8), (12, 3), (1, 1), (7, 9), (3, 2), (8, 8)]
    traces = []
    for overlap in (False, True):
        driver = Driver(small(name, max_queue_delay_ms=0, overlap=overlap), 200)
        for prompt_len, max_tokens in requests:
            driver.add(prompt_len, max_tokens)
        driver.run()
        traces.append((driver.trace(), driver.answers(), driver.reasons()))
    assert traces[0] == traces[1]


def test_an_answer_that_ends_by_itself_costs_one_row_and_no_other() -> None:
    driver = Driver(config("continuous", overlap=True))
    short, long = driver.add(4, 9, stop_after=3), driver.add(4, 6)
    driver.run()
    assert driver.trace() == ["p0:4 p1:4", "d0 d1", "d0 d1", "e0 d1", "d1", "d1"]
    assert driver.reasons() == {short: "stop", long: "length"}
    assert [step.ended_rows for step in driver.log.steps] == [0, 0, 0, 1, 0, 0]
    assert driver.log.requests[short].output_tokens == 3


@pytest.mark.parametrize("name", AHEAD)
def test_an_abort_at_every_moment(name: str) -> None:
    for victim in range(3):
        for moment in range(100):
            driver = Driver(small(name, max_queue_delay_ms=0, prefix_cache=True, overlap=True), 9)
            for request in [(9, 6), (5, 8), (12, 3)]:
                driver.add(*request)
            for _ in range(moment):
                driver.step()
            over = not driver.engine.has_work
            driver.abort(victim)
            driver.run()
            assert driver.engine.end().integrity == "ok"
            assert sorted(driver.reasons()) == [0, 1, 2]
            if over:
                break
        else:
            raise AssertionError("the run does not come to an end")


class Slow(MockRunner):
    """Passes that wait until they are let go, and note what else has been launched meanwhile."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.go = threading.Semaphore(0)
        self.began = threading.Semaphore(0)

    def run(self, batch: RaggedBatch) -> StepResult:
        self.began.release()
        assert self.go.acquire(timeout=20)
        return super().run(batch)


def test_the_next_pass_is_launched_while_this_one_runs() -> None:
    runner = Slow(100, 4)
    cfg = config("continuous", overlap=True)
    engine = build_engine(cfg, runner, num_kv_blocks=100)
    engine.add(Request([1, 2, 3], 3))
    assert engine.step() == []
    assert runner.began.acquire(timeout=20)  # the first pass is running, and nothing has been waited for
    assert isinstance(engine, OverlappedEngine)
    launched, launch = threading.Event(), engine._launcher.launch

    def note(*args: Any) -> Any:
        handle = launch(*args)
        launched.set()
        return handle

    engine._launcher.launch = note  # type: ignore[method-assign]
    done: list[int] = []
    stepper = threading.Thread(target=lambda: done.extend(len(o.token_ids) for o in engine.step()))
    stepper.start()
    assert launched.wait(20), "the second pass is launched while the first one is under way"
    assert not runner.batches
    runner.go.release(10)
    stepper.join()
    assert done == [1]
    while engine.has_work:
        engine.step()
    assert engine.end().integrity == "ok"


def test_a_pass_that_fails_costs_those_that_were_launched_on_it_and_the_engine_goes_on() -> None:
    driver = Driver(config("continuous", overlap=True, max_num_seqs=2), fail_at=(2,))
    first, second = driver.add(4, 8), driver.add(4, 8)
    for _ in range(4):
        driver.step()
    third = driver.add(4, 5)
    driver.run()
    assert driver.reasons() == {first: "error", second: "error", third: "length"}
    assert driver.engine.end().integrity == "ok"


def test_kv_that_is_lost_ends_the_engine() -> None:
    class Broken(MockRunner):
        def copy(self, copies: Copies) -> None:
            raise RuntimeError("the bus is on fire")

    cfg = config("continuous", overlap=True, preemption="swap", preempt_every=1)
    engine = build_engine(cfg, Broken(50, 4), num_kv_blocks=50, num_host_blocks=20)
    engine.add(Request([1, 2, 3], 8))

    def run() -> None:
        for _ in range(10):
            engine.step()

    with pytest.raises(RuntimeError, match="RuntimeError: the bus is on fire"):
        run()


def test_what_cannot_be_ahead_is_refused() -> None:
    for name in ("static", "dynamic", "sliced"):
        with pytest.raises(ConfigError, match=rf"^engine.overlap=true: engine.scheduler={name} plans by"):
            small(name, overlap=True)
    route = {"name": "slow", "match": {"tenant": "a"}, "kv_share": 0.5}
    with pytest.raises(ConfigError, match=r"^engine.overlap=true: routes take turns"):
        routes_of({"server": {"routes": [route]}, "engine": {**preset("chunked"), "overlap": True}})


# -- a real model --

LIMITS: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 128, "block_size": 16, "threads": 1}


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    cfg = config(
        "continuous",
        **LIMITS,
        num_kv_blocks=49,
        max_num_batched_tokens=256,
        preemption="swap",
        swap_memory_gb=1e-2,
    )
    made = build_runner({"name": "tiny", "id": None, "weights": "random"}, cfg, "cpu", "float32")
    yield made
    made.close()


def generate(runner: Any, name: str, blocks: int, temperature: float, **changes: Any) -> dict[int, list[int]]:
    budget = 24 if name == "chunked" else 256
    cfg = config(name, **{**LIMITS, "max_num_batched_tokens": budget, "prefix_cache": True, **changes})
    host = runner.num_host_blocks
    engine = build_engine(
        cfg, runner, num_kv_blocks=blocks, num_host_blocks=host, seed=5, step_log=MemoryLog()
    )
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 256, 40).tolist()
    answers: dict[int, list[int]] = {}
    lengths = [(1, 20), (15, 9), (17, 24), (32, 1), (33, 30), (90, 12), (7, 25), (64, 16)]
    for number, (length, limit) in enumerate(lengths):
        prompt = (shared + rng.integers(0, 256, length).tolist())[-length if number % 2 else 0 :][:90]
        stop = limit // 2 if number % 3 == 0 and limit > 2 else None
        request = Request(prompt, limit, SamplingParams(temperature), stop_after=stop)
        answers[engine.add(request)] = []
        if number % 2:
            _step(engine, answers)
    while engine.has_work:
        _step(engine, answers)
    assert engine.end().integrity == "ok"
    return answers


@pytest.fixture(scope="module")
def plain(runner: ModelRunner) -> Callable[[str, float], dict[int, list[int]]]:
    """The answers of the plain loop, with all the KV that they want, to a preset and a temperature."""
    return cache(lambda name, temperature: generate(runner, name, 49, temperature))


def _step(engine: Any, answers: dict[int, list[int]]) -> None:
    for output in engine.step():
        assert output.error is None
        answers[output.seq_id] += output.token_ids
    engine.check_integrity()


@pytest.mark.parametrize("name", ["continuous", "chunked", "prefill_first"])
@pytest.mark.parametrize(
    "changes", [{}, {"preempt_every": 3}, {"preempt_every": 3, "preemption": "swap"}], ids=str
)
def test_bit_for_bit_the_tokens_of_the_plain_loop(
    runner: ModelRunner, plain: Callable[..., Any], name: str, changes: dict[str, Any]
) -> None:
    assert generate(runner, name, 49, 0.0, overlap=True, **changes) == plain(name, 0.0)
    assert generate(runner, name, 10, 0.0, overlap=True, **changes) == plain(name, 0.0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_with_tokens_that_never_leave_the_device(
    runner: ModelRunner, plain: Callable[..., Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of CUDA, where the second pass takes the first one's results from the device."""
    expected = plain("chunked", temperature)
    queues: list[DeviceQueue] = []

    def queue(*args: Any) -> DeviceQueue:
        queues.append(DeviceQueue(*args))
        return queues[-1]

    monkeypatch.setattr("engines.overlap.launcher_for", queue)
    assert generate(runner, "chunked", 49, temperature, overlap=True) == expected
    assert queues


def test_settings_are_the_loops_of_their_names() -> None:
    cfg = config("chunked")
    assert not isinstance(build_engine(cfg, MockRunner(9, 4), num_kv_blocks=9), OverlappedEngine)
    assert isinstance(
        build_engine(replace(cfg, overlap=True), MockRunner(9, 4), num_kv_blocks=9), OverlappedEngine
    )

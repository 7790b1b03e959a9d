"""Random configurations, arrivals, aborts and pool sizes: what must hold after every iteration, whatever
happens.

engine.check_integrity() runs after each (every sequence in one place, order of arrival, block tables,
reference counts and free list), the mock model raises when KV is crossed, lost or read before it is written,
and every answer is compared with the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.config import RESERVATIONS, EngineConfig
from engines.plan import Kind
from engines.request import Refused, Request, SamplingParams
from engines.sequence import Status
from tests.support.engine_driver import SCHEDULERS, Driver, config
from tests.support.mock_runner import VOCAB, answer

EOS = range(0, VOCAB, 13)


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt_len: int
    max_tokens: int
    stop_after: int | None
    ignore_eos: bool
    abort_at: int | None  # iterations after its arrival


@dataclass(frozen=True)
class Case:
    config: EngineConfig
    num_kv_blocks: int
    arrivals: list[Arrival]


@st.composite
def cases(draw: st.DrawFn, aborts: bool = True) -> Case:
    scheduler = draw(st.sampled_from(SCHEDULERS))
    block_size = draw(st.sampled_from([1, 2, 4, 7]))
    max_model_len = draw(st.integers(2, 30))
    seats = draw(st.integers(1, 5))
    least = seats if scheduler == "chunked" else max(seats, max_model_len)
    reservation = draw(st.sampled_from(RESERVATIONS))
    whole = -(-max_model_len // block_size)
    cfg = EngineConfig(
        name=scheduler,
        scheduler=scheduler,
        reservation=reservation,
        max_num_seqs=seats,
        max_num_batched_tokens=least + draw(st.integers(0, 20)),
        max_model_len=max_model_len,
        block_size=block_size,
        prefill_chunk_size=draw(st.none() | st.integers(1, 9)),
        max_waiting_requests=draw(st.none() | st.integers(1, 4)),
        queue_timeout_ms=draw(st.none() | st.integers(1, 30)),
        max_queue_delay_ms=draw(st.sampled_from([0.0, 3.0, 50.0])),
        drain=draw(st.booleans()),
        pad_finished=draw(st.booleans()),
        left_pad=draw(st.booleans()),
        preempt_every=draw(st.none() | st.integers(1, 6)),
    )
    usable = draw(st.integers(whole if reservation == "max_model_len" else 1, 3 * whole))
    arrival = st.builds(
        Arrival,
        step=st.integers(0, 25),
        prompt_len=st.integers(0, max_model_len + 1),
        max_tokens=st.integers(0, max_model_len),
        stop_after=st.none() | st.integers(1, max_model_len),
        ignore_eos=st.booleans(),
        abort_at=st.none() | st.integers(0, 20) if aborts else st.none(),
    )
    return Case(cfg, usable + 1, draw(st.lists(arrival, min_size=1, max_size=10)))


def expected(request: Request, max_model_len: int) -> tuple[list[int], str]:
    """The answer and its finish_reason, from the rules alone."""
    limit = min(request.max_tokens, max_model_len - len(request.prompt_token_ids))
    tokens = answer(request.prompt_token_ids, limit)
    if request.stop_after is not None:
        return tokens[: request.stop_after], "length" if request.stop_after >= limit else "stop"
    ends = [i for i, token in enumerate(tokens) if token in EOS and not request.ignore_eos]
    return (tokens[: ends[0] + 1], "stop") if ends else (tokens, "length")


def play(case: Case) -> tuple[Driver, dict[int, Request]]:
    """Drive one case to its end, with the checks that belong between two iterations."""
    driver = Driver(case.config, case.num_kv_blocks, eos_token_ids=EOS)
    engine, scheduler = driver.engine, driver.engine.scheduler
    accepted: dict[int, Request] = {}
    aborts: list[tuple[int, int]] = []
    refused = tick = 0
    while tick <= 25 or engine.has_work or any(at >= tick for at, _ in aborts):
        assert tick < 3000, "the engine does not come to an end"
        for arrival in [a for a in case.arrivals if a.step == tick]:
            start = 10_000 * (engine.counters.received + 1)
            prompt = list(range(start, start + arrival.prompt_len))
            request = Request(
                prompt, arrival.max_tokens, ignore_eos=arrival.ignore_eos, stop_after=arrival.stop_after
            )
            try:
                seq_id = engine.add(request)
            except Refused:
                refused += 1
                continue
            accepted[seq_id] = request
            if arrival.abort_at is not None:
                aborts.append((tick + arrival.abort_at, seq_id))
        for at, seq_id in aborts:
            if at == tick:
                engine.abort(seq_id)
                engine.abort(seq_id)  # harmless when repeated
        step(driver)
        tick += 1
    stats = engine.stats()
    assert stats.kv_live == stats.running == stats.waiting == 0
    assert stats.received == refused + len(accepted)
    assert sum(stats.refusals.values()) == refused
    assert sum(stats.finished.values()) == len(accepted)
    assert set(driver.log.requests) == set(range(stats.received)), (
        "one record for each request, refused or not"
    )
    assert not scheduler.ended
    return driver, accepted


def step(driver: Driver) -> None:
    engine = driver.engine
    scheduler, limits = engine.scheduler, engine.config
    wakeup = engine.next_wakeup(driver.clock.now)
    due = wakeup is not None and wakeup <= driver.clock.now
    assert engine.has_work == (wakeup is not None)
    decoding = {s.seq_id for s in scheduler.running if s.decoding}
    steps, outputs = len(driver.log.steps), len(driver.outputs)
    timed_out = engine.counters.finished.get("queue_timeout", 0)
    driver.step()
    record = driver.log.steps[-1] if len(driver.log.steps) > steps else None
    if due:
        assert record is not None or len(driver.outputs) > outputs, "a step with work did nothing"
    if record is None:
        assert not decoding
        return
    computed = sum(record.tokens) + record.left_pad_tokens
    assert 1 <= computed <= limits.max_num_batched_tokens
    assert len(record.ids) == len(set(record.ids)) <= limits.max_num_seqs
    served = {i for i, kind in zip(record.ids, record.kind, strict=True) if kind != Kind.ENDED}
    assert served
    parts = record.prefill_tokens + record.decode_tokens + record.recomputed_tokens
    assert computed == parts + record.ended_rows + record.left_pad_tokens
    gone = {s.seq_id for s in scheduler.waiting if s.status is Status.PREEMPTED}
    assert decoding <= served | gone, "a decode was made to wait for more than one iteration"
    if limits.prefill_chunk_size and limits.scheduler == "chunked":
        assert max(record.tokens) <= limits.prefill_chunk_size
    assert engine.counters.finished.get("queue_timeout", 0) >= timed_out


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_whatever_happens(case: Case) -> None:
    driver, accepted = play(case)
    answers, reasons = driver.answers(), driver.reasons()
    for seq_id, request in accepted.items():
        tokens, reason = expected(request, case.config.max_model_len)
        record = driver.log.requests[seq_id]
        assert record.finish_reason == reasons[seq_id]
        assert record.finish_ns is not None
        if reasons[seq_id] == "abort":
            got = answers[seq_id]
            assert got == tokens[: len(got)]
            assert record.abort_state in ("queued", "prefill", "decode", "preempted", "held")
            assert (record.wasted_tokens == 0) == (record.admitted_ns is None)
        elif reasons[seq_id] == "queue_timeout":
            assert case.config.queue_timeout_ms is not None
            assert answers[seq_id] == []
            assert record.admitted_ns is None
        else:
            assert (answers[seq_id], reasons[seq_id]) == (tokens, reason)
            assert record.output_tokens == len(tokens)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(aborts=False))
def test_every_token_is_useful_once(case: Case) -> None:
    """Prompt and answer of a finished request are computed for the first time exactly once, whatever was
    preempted; its last token is sampled and never computed."""
    driver, accepted = play(replace(case, config=replace(case.config, queue_timeout_ms=None)))
    stats = driver.engine.stats()
    prompts = sum(len(request.prompt_token_ids) for request in accepted.values())
    outputs = sum(len(tokens) for tokens in driver.answers().values())
    assert stats.prefill_tokens == prompts
    assert stats.decode_tokens == outputs - len(accepted)
    assert stats.output_tokens == outputs
    assert stats.recomputed_tokens == sum(r.recomputed_tokens for r in driver.log.requests.values())
    assert stats.preemptions == sum(r.preemptions for r in driver.log.requests.values())
    assert stats.preemptions == sum(s.preemptions for s in driver.log.steps)
    worst_case = case.config.reservation in ("prompt_plus_max_tokens", "max_model_len")
    if worst_case and case.config.preempt_every is None:
        assert stats.preemptions == 0


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_answers_survive_forced_preemption(scheduler: str, every: int) -> None:
    """Sampled ones too: the draw depends on the seed and the position, not on neighbours or preemption."""
    requests = [(3, 9), (7, 5), (1, 12), (8, 8), (5, 1), (4, 11)]

    def run(**changes: object) -> Driver:
        driver = Driver(config(scheduler, **changes), seed=7)
        for i, (prompt_len, max_tokens) in enumerate(requests):
            driver.add(prompt_len, max_tokens, sampling=SamplingParams(temperature=float(i % 2)))
        driver.run()
        return driver

    plain, forced = run(), run(preempt_every=every)
    assert plain.engine.stats().preemptions == 0
    assert forced.engine.stats().preemptions > 0
    assert forced.engine.stats().recomputed_tokens > 0
    assert plain.answers() == forced.answers()
    assert plain.answers() == run(max_num_seqs=1).answers()

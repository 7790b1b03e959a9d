"""Whatever shares KV, is evicted, put away and brought back: every answer is that of the request alone.

Random pools, prompts with common beginnings, arrivals, aborts; prefix cache on and off, recompute and swap,
every scheduler. engine.check_integrity() runs after every step (tests/support/engine_driver.py)."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.config import RESERVATIONS, EngineConfig
from engines.request import Refused, Request
from engines.schedulers import Scheduler
from tests.support.engine_driver import SCHEDULERS, Driver
from tests.support.mock_runner import answer

FAST = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Arrival:
    step: int
    family: int  # those of one family begin alike
    shared: int  # this long
    own: int
    max_tokens: int
    abort_at: int | None
    tenant: str
    run: str | None
    priority: int = 0

    def prompt(self, number: int) -> list[int]:
        common = range(self.family * 100_000, self.family * 100_000 + self.shared)
        return [*common, *range(1_000_000 * (number + 1), 1_000_000 * (number + 1) + self.own)]


@dataclass(frozen=True)
class Case:
    config: EngineConfig
    num_kv_blocks: int
    num_host_blocks: int
    arrivals: list[Arrival]


@st.composite
def cases(draw: st.DrawFn, prefix_cache: bool | None = None) -> Case:
    scheduler = draw(st.sampled_from(SCHEDULERS))
    block_size = draw(st.sampled_from([1, 2, 4, 7]))
    max_model_len = draw(st.integers(4, 30))
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
        drain=draw(st.booleans()),
        pad_finished=draw(st.booleans()),
        left_pad=draw(st.booleans()),
        victim=draw(st.sampled_from(["newest", "least_urgent"])),
        kv_watermark=draw(st.sampled_from([0.0, 0.2])),
        preempt_every=draw(st.none() | st.integers(1, 6)),
        prefix_cache=draw(st.booleans()) if prefix_cache is None else prefix_cache,
        prefix_cache_salt=draw(st.sampled_from(["none", "tenant"])),
        preemption=draw(st.sampled_from(["recompute", "swap"])),
    )
    usable = draw(st.integers(whole if reservation == "max_model_len" else 1, 3 * whole))
    arrival = st.builds(
        Arrival,
        step=st.integers(0, 25),
        family=st.integers(0, 2),
        shared=st.integers(0, max_model_len - 1),
        own=st.integers(0, 4),
        max_tokens=st.integers(1, max_model_len),
        abort_at=st.none() | st.none() | st.integers(0, 20),
        tenant=st.sampled_from(["a", "b"]),
        run=st.none() | st.sampled_from(["one", "two"]),
    )
    arrivals = draw(st.lists(arrival, min_size=1, max_size=10))
    return Case(cfg, usable + 1, draw(st.integers(0, 2 * whole)), arrivals)


def play(case: Case) -> tuple[Driver, dict[int, Request]]:
    d = Driver(case.config, case.num_kv_blocks, num_host_blocks=case.num_host_blocks)
    engine = d.engine
    accepted: dict[int, Request] = {}
    aborts: list[tuple[int, int]] = []
    tick = 0
    while tick <= 25 or engine.has_work:
        assert tick < 3000, "the engine does not come to an end"
        for number, arrival in enumerate(case.arrivals):
            if arrival.step == tick:
                label = {} if arrival.run is None else {"run": arrival.run}
                request = Request(
                    arrival.prompt(number), arrival.max_tokens, tenant=arrival.tenant, label=label
                )
                try:
                    seq_id = engine.add(request)
                except Refused:
                    continue
                accepted[seq_id] = request
                if arrival.abort_at is not None:
                    aborts.append((tick + arrival.abort_at, seq_id))
        for at, seq_id in aborts:
            if at == tick:
                engine.abort(seq_id)
        if engine.has_work:
            d.step()
            pool = engine.pool
            assert pool.num_free + pool.num_cached + pool.num_live == pool.usable
            if not any(arrival.run for arrival in case.arrivals):  # nothing is forgotten
                check_shared(engine.scheduler)
        tick += 1
    return d, accepted


def check_shared(scheduler: Scheduler) -> None:
    """There is one copy of everything: the full blocks that a running sequence has computed are what others
    find."""
    pool = scheduler.pool
    for seq in scheduler.running if pool.prefix_cache else ():
        full = seq.num_computed // pool.block_size
        assert pool.find(seq.block_keys, full) == seq.block_table[:full].tolist()


@FAST
@given(cases())
def test_answers_are_those_of_the_request_alone(case: Case) -> None:
    d, accepted = play(case)
    answers, reasons = d.answers(), d.reasons()
    for seq_id, request in accepted.items():
        limit = min(request.max_tokens, case.config.max_model_len - len(request.prompt_token_ids))
        whole = answer(request.prompt_token_ids, limit)
        if reasons[seq_id] == "abort":
            assert answers[seq_id] == whole[: len(answers[seq_id])]
        else:
            assert (answers[seq_id], reasons[seq_id]) == (whole, "length")
    stats = d.engine.stats()
    assert stats.kv_live == 0
    assert stats.kv_cached == 0 or case.config.prefix_cache
    assert d.engine.scheduler.preemption.host.num_free == (
        case.num_host_blocks if case.config.preemption == "swap" else 0
    )
    assert stats.swapped_in <= stats.swapped_out
    assert d.engine.end().integrity == "ok"


@FAST
@given(cases(prefix_cache=True))
def test_every_prompt_token_is_computed_once_or_found(case: Case) -> None:
    quiet = [Arrival(**{**vars(a), "abort_at": None}) for a in case.arrivals]
    d, accepted = play(Case(case.config, case.num_kv_blocks, case.num_host_blocks, quiet))
    stats, records = d.engine.stats(), d.log.requests.values()
    prompts = sum(len(request.prompt_token_ids) for request in accepted.values())
    assert stats.prefill_tokens + stats.prefix_cache_hits == prompts == stats.prefix_cache_queries
    assert stats.decode_tokens == stats.output_tokens - len(accepted)
    assert stats.prefix_cache_hits == sum(r.cached_tokens for r in records)
    assert stats.prefix_cache_hits == sum(s.cached_tokens for s in d.log.steps)
    assert all(r.cached_tokens < r.prompt_tokens for r in records if r.finish_reason != "refused")
    assert stats.recomputed_tokens == sum(r.recomputed_tokens for r in records)
    assert sum(r.swaps for r in records) <= stats.preemptions


@FAST
@given(cases(prefix_cache=True))
def test_each_request_is_preempted_a_bounded_number_of_times(case: Case) -> None:
    """A seat is lost only when somebody at or ahead of it in the order of preemption needs a block, and what
    it needs blocks for is bounded (bound)."""
    changes = {"preempt_every": None, "victim": "least_urgent"}
    cfg = EngineConfig(**{**{f: getattr(case.config, f) for f in case.config.__slots__}, **changes})
    d, accepted = play(Case(cfg, case.num_kv_blocks, case.num_host_blocks, case.arrivals))
    for seq_id in accepted:
        assert d.log.requests[seq_id].preemptions <= bound(d, cfg, seq_id)


def bound(d: Driver, cfg: EngineConfig, seq_id: int) -> int:
    """Those ahead are the earlier ones (fcfs). Where prompts are computed whole, only decodes ask for more
    blocks, one for each block of the answer; where they come in chunks, so does each chunk, again after every
    preemption."""
    total = 0
    for i, record in d.log.requests.items():
        if i > seq_id or record.refusal is not None:
            continue
        if cfg.scheduler == "chunked":
            blocks = -(-(record.prompt_tokens + record.output_tokens) // cfg.block_size) + 1
            total += blocks * (1 + (record.preemptions if i < seq_id else 0))
        else:
            total += -(-record.output_tokens // cfg.block_size) + 1
    return total

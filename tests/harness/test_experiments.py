"""The experiments of docs/experiments.md: what has to hold whatever the machine, in virtual time."""

from __future__ import annotations

import pytest

from engines.config import EngineConfig
from engines.virtual import Clock, VirtualRunner
from harness.conf import compose
from harness.experiments import anyscale_throughput, orca_latency
from harness.experiments import sarathi_stalls as stalls
from harness.experiments.experiment import Bench
from harness.experiments.outcome import outcome
from harness.experiments.ratios import ratios
from harness.experiments.simulation import Cost, as_request, play_virtual, simulate
from harness.plan import draw_schedule
from workloads.schedule import Schedule, ScheduledRequest, Segment


def request(
    number: int, prompt: int, answer: int, arrival_s: float = 0.0, **more: object
) -> ScheduledRequest:
    return ScheduledRequest(
        id=f"r{number:06d}",
        arrival_s=arrival_s,
        segments=(Segment(f"test/{number}", prompt),),
        prompt_tokens=prompt,
        max_tokens=2 * answer,
        stop_after=answer,
        **more,  # type: ignore[arg-type]
    )


def engine(name: str, *changes: str) -> EngineConfig:
    settings = [f"engine.{change}" for change in ("max_model_len=640", *changes)]
    return EngineConfig.from_mapping(dict(compose([f"engine={name}", *settings]).engine))


# -- the simulation --


def test_time_is_the_cost_of_what_was_computed():
    config = engine("continuous", "num_kv_blocks=99")
    log = simulate(config, [request(0, 10, 3)], Cost(step=1.0, row=0.1, token=0.01))
    assert [step.duration_ns / 1e9 for step in log.steps] == pytest.approx([1.19, 1.1, 1.1])
    (record,) = log.requests
    assert (record.id, record.output_tokens, record.finish_reason) == ("r000000", 3, "stop")
    assert record.finish_ns == 3_390_000_000


def test_a_request_is_there_when_it_arrives_and_time_jumps_over_idle_hours():
    config = engine("continuous", "num_kv_blocks=99")
    log = simulate(config, [request(0, 10, 2), request(1, 10, 2, arrival_s=3600.0)])
    assert [r.arrival_ns for r in log.requests] == [0, 3600_000_000_000]
    assert [r.admitted_ns for r in log.requests] == [0, 3600_000_000_000]


def test_prompts_share_the_tokens_of_the_segments_that_they_share():
    one, two = (
        ScheduledRequest(
            id=f"r00000{i}",
            arrival_s=0.0,
            segments=(Segment("system", 5), Segment(f"own/{i}", 4)),
            prompt_tokens=9,
            max_tokens=2,
            stop_after=1,
        )
        for i in (0, 1)
    )
    a, b = as_request(one).prompt_token_ids, as_request(two).prompt_token_ids
    assert a[:5] == b[:5]
    assert not set(a[5:]) & set(b[5:])


def test_a_simulation_has_to_know_its_pool():
    with pytest.raises(ValueError, match=r"needs engine\.num_kv_blocks"):
        simulate(engine("continuous"), [request(0, 10, 3)])


def test_the_ratios_of_a_schedule():
    rows = [request(0, 20, 10), request(1, 40, 30, arrival_s=4.0)]
    config = engine("continuous", "num_kv_blocks=41", "max_num_seqs=8")
    found = ratios(rows, config, Cost(step=0.9, row=0.1, token=0.1), capacity=20.0)
    assert found.prefill_to_decode == pytest.approx((0.9 + 0.1 + 2.9) / (1.0 * 20))
    assert found.pool_to_request == pytest.approx(40 / 4)  # 30 + 20 tokens: four blocks of 16
    assert found.seats_to_ridge == pytest.approx(8 / 9)
    assert found.answer_cv == pytest.approx(0.5)
    assert found.answer_cap_to_mean == pytest.approx(2.0)
    assert found.load_to_capacity == pytest.approx(40 / 4 / 20)
    assert found.text().count("\n") == 4


def test_users_hang_up_when_they_said_so_and_their_seat_is_free_for_the_next():
    rows = [
        request(0, 10, 50, cancel_kind="after_s", cancel_value=3.5),
        request(1, 10, 2, arrival_s=1.0),
        request(2, 10, 5, arrival_s=30.0, cancel_kind="after_tokens", cancel_value=3),
        request(3, 10, 5, arrival_s=60.0, cancel_kind="before_first_token", cancel_value=0.5),
    ]
    config = engine("continuous", "num_kv_blocks=99", "max_num_seqs=1")
    (played,) = play_virtual(config, rows, Cost(step=1.0, row=0.0, token=0.0))
    gone, next_one, read_enough, in_time = played.seen
    assert (gone.hung_up, gone.end_s, gone.count) == (True, 3.5, 3)  # its pass goes on until 4
    assert [at for at, _ in next_one.tokens] == [5.0, 6.0]
    assert (read_enough.hung_up, read_enough.count) == (True, 3)
    assert (in_time.hung_up, in_time.count) == (True, 0)
    assert played.hang_ups_s == [3.5, 33.0, 60.5]
    assert [r.finish_reason for r in played.log.requests] == ["abort", "stop", "abort", "abort"]


def test_the_next_turn_comes_after_the_answer_and_a_thought():
    rows = [
        request(0, 10, 3, session="s", turn=0),
        request(1, 20, 2, session="s", turn=1, think_s=10.0),
    ]
    (played,) = play_virtual(
        engine("continuous", "num_kv_blocks=99"), rows, Cost(step=1.0, row=0.0, token=0.0)
    )
    assert [seen.intended_s for seen in played.seen] == [0.0, 13.0]


def test_what_a_user_sees_of_a_drained_answer_is_one_piece_and_its_figures_are_his():
    rows = [request(0, 10, 4), request(1, 10, 2)]
    cost = Cost(step=1.0, row=0.0, token=0.0)
    (static,) = play_virtual(engine("static", "num_kv_blocks=99"), rows, cost)
    found = outcome(static)
    assert found.ttft_p50_ms == found.e2e_p50_ms == 4000
    assert found.tpot_p50_ms != found.tpot_p50_ms
    assert (found.batch_mean, found.slot_waste) == (1.5, 2 / 6)
    (continuous,) = play_virtual(engine("continuous", "num_kv_blocks=99"), rows, cost)
    found = outcome(continuous)
    assert (found.ttft_p50_ms, found.tpot_p50_ms, found.gap_max_ms, found.e2e_p99_ms) == (
        1000,
        1000,
        1000,
        3980,
    )
    assert outcome(continuous, lambda seen: seen.planned.id == "r000001").output_tokens_per_s == 0.5


def test_a_second_pass_on_one_engine_finds_the_first_ones_prefixes():
    rows = [request(0, 64, 2), request(1, 64, 2, arrival_s=9.0)]
    config = engine("continuous", "num_kv_blocks=99", "prefix_cache=true")
    cold, warm = play_virtual(config, rows, Cost(), times=2)
    assert sum(r.cached_tokens for r in cold.log.requests) == 0
    assert [r.cached_tokens for r in warm.log.requests] == [48, 48]
    assert min(seen.intended_s for seen in warm.seen) >= max(seen.end_s or 0 for seen in cold.seen)


# -- stalls --


@pytest.mark.parametrize("length", [300, 1000])
def test_whole_prompts_stall_the_readers_for_as_long_as_they_take(length):
    cost = Cost()
    for name in ("prefill_first", "continuous"):
        clock = Clock()
        gaps = stalls.play(stalls.engine_config(name), VirtualRunner(clock, cost), clock, length)
        whole = cost(9, length + 8) if name == "continuous" else cost(1, length) + cost(9, 9)
        assert gaps.longest == pytest.approx(whole * 1e3, rel=1e-6), name


@pytest.mark.parametrize("budget", [64, 128, 512])
@pytest.mark.parametrize("length", [300, 1000])
def test_under_chunked_no_gap_is_longer_than_a_pass_of_the_budget(budget, length):
    clock, cost = Clock(), Cost()
    config = stalls.engine_config("chunked", f"engine.max_num_batched_tokens={budget}")
    gaps = stalls.play(config, VirtualRunner(clock, cost), clock, length)
    assert gaps.most_tokens == min(budget, length + 8)
    assert gaps.longest <= cost(9, budget) * 1e3 * (1 + 1e-6)
    assert gaps.first_ms >= cost(9, length + 8) * 1e3 * (1 - 1e-6), "the price is its own first token"


def test_without_readers_the_longest_pass_is_that_of_the_budget():
    clock, cost = Clock(), Cost()
    config = stalls.engine_config("chunked", "engine.max_num_batched_tokens=128")
    assert stalls.longest_pass(config, VirtualRunner(clock, cost), clock, 300) == pytest.approx(
        cost(1, 128) * 1e3, rel=1e-6
    )


# -- what has to hold in some of them, whatever the figures --


def test_the_slot_factor_of_static_batches_is_what_their_lengths_say():
    rows = [request(i, 8, n) for i, n in enumerate((1, 3, 2, 2))]
    assert anyscale_throughput.predicted_slots(rows, 2) == (2 * 3 + 2 * 2) / 8
    (played,) = Bench("anyscale_throughput").play("engine=static", "load.requests=32")
    planned = [seen.planned for seen in played.seen]
    assert {row.max_tokens for row in planned} == {384}
    measured = anyscale_throughput.measured_slots(played)
    assert measured == pytest.approx(anyscale_throughput.predicted_slots(planned, 4), rel=0.001)


def test_a_rate_at_a_limit_lies_between_the_points_of_a_curve():
    curve = [(1.0, 10.0), (2.0, 20.0), (4.0, 20.0), (8.0, 60.0)]
    assert orca_latency.rate_at(curve, 15.0) == (1.5, "")
    assert orca_latency.rate_at(curve, 40.0) == (6.0, "")
    assert orca_latency.rate_at(curve, 9.0) == (1.0, "<")
    assert orca_latency.rate_at(curve, 61.0) == (8.0, ">")


def test_a_ratio_of_rates_says_when_it_is_a_bound():
    assert orca_latency.times_as_much((6.0, ""), (1.5, "")) == (4.0, "")
    assert orca_latency.times_as_much((6.0, ""), (1.5, "<")) == (4.0, ">")
    assert orca_latency.times_as_much((6.0, ">"), (1.5, "")) == (4.0, ">")
    assert orca_latency.times_as_much((6.0, ""), (1.5, ">")) == (4.0, "<")
    assert orca_latency.times_as_much((6.0, ">"), (1.5, ">")) == (4.0, "?")


# -- the committed configurations --


@pytest.mark.parametrize("name", ["all_engines", "eviction"])
def test_every_request_of_an_experiment_fits_its_engine(name):
    for seed in (0, 1, 2):
        cfg = compose([f"experiment={name}", f"seed={seed}"])
        schedule: Schedule = draw_schedule(cfg)
        assert max(r.prompt_tokens + r.max_tokens for r in schedule) <= cfg.engine.max_model_len

"""The experiments of docs/experiments.md: what has to hold whatever the machine, in virtual time."""

from __future__ import annotations

import pytest

from engines.virtual import Clock, VirtualRunner
from harness.conf import compose
from harness.experiments import eviction, slices, stalls
from harness.experiments.ratios import ratios
from harness.experiments.simulation import Cost, as_request, simulate
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


# -- the simulation --


def test_time_is_the_cost_of_what_was_computed():
    config = slices.engine("continuous", "num_kv_blocks=99")
    log = simulate(config, [request(0, 10, 3)], Cost(step=1.0, row=0.1, token=0.01))
    assert [step.duration_ns / 1e9 for step in log.steps] == pytest.approx([1.19, 1.1, 1.1])
    (record,) = log.requests
    assert (record.id, record.output_tokens, record.finish_reason) == ("r000000", 3, "stop")
    assert record.finish_ns == 3_390_000_000


def test_a_request_is_there_when_it_arrives_and_time_jumps_over_idle_hours():
    config = slices.engine("continuous", "num_kv_blocks=99")
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
        simulate(slices.engine("continuous"), [request(0, 10, 3)])


def test_the_ratios_of_a_schedule():
    rows = [request(0, 20, 10), request(1, 40, 30, arrival_s=4.0)]
    config = slices.engine("continuous", "num_kv_blocks=41", "max_num_seqs=8")
    found = ratios(rows, config, Cost(step=0.9, row=0.1, token=0.1), capacity=20.0)
    assert found.prefill_to_decode == pytest.approx((0.9 + 0.1 + 2.9) / (1.0 * 20))
    assert found.pool_to_request == pytest.approx(40 / 4)  # 30 + 20 tokens: four blocks of 16
    assert found.seats_to_ridge == pytest.approx(8 / 9)
    assert found.answer_cv == pytest.approx(0.5)
    assert found.answer_cap_to_mean == pytest.approx(2.0)
    assert found.load_to_capacity == pytest.approx(40 / 4 / 20)
    assert found.text().count("\n") == 4


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


# -- slices --


def test_a_longer_slice_wastes_slots_and_a_shorter_one_computes_again():
    schedule = slices.traffic(0, 48)
    found = {}
    for size in (16, 64, slices.LIMIT):
        config = slices.engine("sliced", "num_kv_blocks=401", f"policy.slice_tokens={size}")
        found[size] = slices.outcome(str(size), simulate(config, schedule))
    assert found[16].recomputed > 2 * found[64].recomputed > found[slices.LIMIT].recomputed == 0
    assert found[16].slot_waste < found[slices.LIMIT].slot_waste > 2 * found[64].slot_waste
    assert found[64].output_tokens_per_s > found[16].output_tokens_per_s
    assert found[64].output_tokens_per_s > found[slices.LIMIT].output_tokens_per_s

    cached = slices.engine("sliced", "num_kv_blocks=2401", "policy.slice_tokens=16", "prefix_cache=true")
    outcome = slices.outcome("cached", simulate(cached, schedule))
    assert outcome.recomputed < 0.1 * found[16].recomputed
    assert outcome.output_tokens_per_s > 1.5 * found[16].output_tokens_per_s

    incremental = slices.engine("continuous", "num_kv_blocks=401")
    assert slices.outcome("", simulate(incremental, schedule)).output_tokens_per_s > max(
        o.output_tokens_per_s for o in (*found.values(), outcome)
    )


def test_answers_of_slices_are_cut_at_what_clients_declare():
    rows = slices.traffic(1, 500)
    assert {r.max_tokens for r in rows} == {slices.LIMIT}
    assert max(r.stop_after for r in rows) <= slices.LIMIT
    assert slices.traffic(1, 500).sha256() == rows.sha256() != slices.traffic(2, 500).sha256()


# -- eviction --


def test_max_utilization_pays_where_a_bigger_batch_does_and_costs_where_it_does_not():
    found = eviction.experiment(requests=24)
    for title, part in found.items():
        calm, full = part["no_evict"], part["max_utilization"]
        if title.endswith("none"):
            assert calm == full
            continue
        assert calm["preemptions"] == calm["recomputed"] == 0 < full["recomputed"]
        assert full["tpot_p99_ms"] > 1.2 * calm["tpot_p99_ms"]
        faster = full["output_tokens_per_s"] > calm["output_tokens_per_s"]
        assert faster == title.startswith("below")


# -- the committed configurations --


@pytest.mark.parametrize("name", ["all_engines", "eviction"])
def test_every_request_of_an_experiment_fits_its_engine(name):
    for seed in (0, 1, 2):
        cfg = compose([f"experiment={name}", f"seed={seed}"])
        schedule: Schedule = draw_schedule(cfg)
        assert max(r.prompt_tokens + r.max_tokens for r in schedule) <= cfg.engine.max_model_len

"""Failures that other engines have had, the invariant that each one gives, and the tests that hold us to it.

Beside these, every test that drives an engine runs tests/support/checker.py after each iteration, and
test_invariants.py and test_invariants_long.py do so over every preset."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from engines.request import Refused, Request
from tests.support.cases import PRESETS, small
from tests.support.engine_driver import Driver
from tests.support.mock_runner import answer

HERE = Path(__file__).parent


class Row(NamedTuple):
    failure: str  # and where it was seen
    invariant: str
    tests: tuple[str, ...]  # file::function below tests/engines


RANDOM = (
    "test_invariants.py::test_whatever_happens",
    "test_invariants_long.py::test_thousands_of_iterations_under_load",
)
THIS = "test_invariants_rows.py"

ROWS: dict[int, Row] = {
    1: Row(
        "one request longer than the pool waits at the head for ever, and all behind it (vllm#39734, #35541)",
        "what can never fit is refused at once; nobody waits for a seat that would hold it",
        (f"{THIS}::test_a_pool_of_exactly_what_it_needs", f"{THIS}::test_what_can_never_fit_stops_nobody"),
    ),
    2: Row(
        "livelock at the last block: a null block was forgotten (vllm PR#52530)",
        "a pool of blocks(prompt + limit) is enough, one less is refused; who is alone is not preempted",
        (f"{THIS}::test_a_pool_of_exactly_what_it_needs",),
    ),
    3: Row(
        "a sequence alone preempts itself, and the step is empty (nano-vllm#274)",
        "a step with work computes a token or ends a request; never does everyone lose its seat",
        RANDOM,
    ),
    4: Row(
        "two that are admitted by half hold what the other one needs (vllm#45387, #45388)",
        "random pools: every run ends within a bound of iterations",
        (*RANDOM, "test_invariants_long.py::test_every_combination_of_the_decisions"),
    ),
    5: Row(
        "blocks leak on an abort, or on half an allocation (vllm#46283)",
        "after an abort in every state free + cached = usable; allocation is all or nothing",
        (f"{THIS}::test_an_abort_at_every_moment", "test_kv_pool.py::test_growing_is_all_or_nothing"),
    ),
    6: Row(
        "at idle available + evictable is not the total (sglang#11970, #6888)",
        "the sums are looked at when the engine falls idle, in production too",
        (
            "test_prefix_cache.py::test_the_sums_are_looked_at_when_the_engine_falls_idle",
            "test_engine_end.py::test_a_block_that_nobody_gave_back_is_told",
        ),
    ),
    7: Row(
        "what the prefix cache keeps is taken for a leak (sglang#6778)",
        "three gauges: live, cached, free; at the end nothing is live",
        (*RANDOM, "test_engine_end.py::test_nothing_is_left_wherever_the_requests_were"),
    ),
    8: Row(
        "an abort that meets the end is a double free, a late one a crash (mini-sglang PR#111)",
        "release and abort are idempotent, at any moment",
        (
            f"{THIS}::test_an_abort_at_every_moment",
            "test_engine_aborts.py::test_an_abort_of_the_unknown_and_of_the_finished_does_nothing",
            "test_kv_pool.py::test_release_is_harmless_when_repeated",
        ),
    ),
    9: Row(
        "a table points to pages that were freed when prefixes were merged (mini-sglang PR#142)",
        "reference count = tables that hold the block, after every step",
        (*RANDOM, "test_prefix_cache.py::test_the_same_content_twice_becomes_one_block"),
    ),
    10: Row(
        "off by one at the border of a block (nano-vllm PR#66)",
        "prompts and answers of 1, b - 1, b, b + 1, 2b tokens",
        (f"{THIS}::test_block_borders",),
    ),
    11: Row(
        "blocks could be found before the pass that fills them (text-generation-inference PR#2489)",
        "a block is found only after the step that wrote it; two alike in one step are both right",
        (
            "test_prefix_cache.py::test_two_alike_in_one_step_are_both_right_and_share_afterwards",
            "test_prefix_cache.py::test_a_chunk_is_found_by_the_next_step_only",
        ),
    ),
    12: Row(
        "paused twice; a token of a paused request was appended or lost (TensorRT-LLM#9931)",
        "each sampled token is delivered once, nothing after an end, and each preempted request ends",
        (*RANDOM, "test_invariants.py::test_answers_survive_forced_preemption"),
    ),
    13: Row(
        "outputs of before a preemption end in the wrong place (vllm#41190)",
        "with preemptions forced at every k steps the tokens are those without",
        (
            "test_invariants.py::test_answers_survive_forced_preemption",
            "test_bit_identical.py::test_every_preset_in_a_small_pool_with_preemptions_at_random",
        ),
    ),
    14: Row(
        "a preempted request loses its place; two evict each other in turn (vllm#41951, #40004)",
        "of equals the earlier enters first; seats are lost from the end of one total order",
        (*RANDOM, "test_kv_random.py::test_each_request_is_preempted_a_bounded_number_of_times"),
    ),
    15: Row(
        "thrash: throughput falls by 40 % when KV is oversubscribed (TensorRT-LLM#16827)",
        "recomputed tokens are counted, once, and apart from the useful ones",
        ("test_invariants.py::test_every_token_is_useful_once",),
    ),
    16: Row(
        "deferred requests hold seats, and admission stops (vllm#53130)",
        "who waits holds neither seat nor KV; nobody waits while there are seat, KV and budget",
        RANDOM,
    ),
    17: Row(
        "a client that leaves during its prefill is not noticed (vllm#320; aiohttp's handler_cancellation)",
        "over a real socket seat and KV are free within two steps: FIN, RST, half-closed, not reading",
        (
            "server/test_server_disconnect.py::test_slot_and_kv_are_free_within_two_steps",
            "server/test_server_disconnect.py::test_a_full_connection_that_is_half_closed_is_given_up",
            "server/test_server_disconnect_presets.py::test_seat_and_kv_are_free_within_two_steps",
        ),
    ),
    18: Row(
        "writing after the peer has left raises (aiohttp#2499, #3966)",
        "leaving at every moment of an answer is a cancellation and no error",
        ("server/test_server_disconnect.py::test_leaving_at_every_moment_of_an_answer",),
    ),
    19: Row(
        "a slow reader fills an unbounded queue",
        "who reads nothing holds little, stops nobody and is disconnected",
        (
            "server/test_server_disconnect.py::test_a_client_that_reads_nothing_holds_little_and_stops_nobody",
            "server/test_server_disconnect_presets.py::test_a_client_that_stops_reading_is_disconnected",
        ),
    ),
    20: Row(
        "gauges stay above 0 when all have been cancelled (vllm#29928, #31503)",
        "received = running + waiting + refused + finished after every step; at idle the gauges are 0",
        (*RANDOM, "server/test_server_http.py::test_refusals_are_statuses_and_everything_is_counted_once"),
    ),
    21: Row(
        "two clients send one id, and their streams cross (vllm#10583, #15041)",
        "internal ids are ours, a client's id is a label",
        ("server/test_server_http.py::test_clients_with_the_same_id_do_not_cross",),
    ),
    22: Row(
        "a stop string over the border of two chunks leaks, or holds text too long (vllm#3574)",
        "for every split the text is that before the first stop; what is held may still become one",
        ("server/test_server_detokenizer.py::test_held_text_is_only_the_beginning_of_a_stop",),
    ),
    23: Row(
        "held text is lost when the answer ends by length (llama.cpp PR#9867)",
        "the stream is the whole answer, for every reason to finish",
        (
            "server/test_server_detokenizer.py::test_stream_is_the_whole_answer_for_any_chunking",
            "server/test_server_http.py::test_stream_and_whole_answer_are_the_same_and_right",
        ),
    ),
    24: Row(
        "UTF-8 that is cut between tokens becomes U+FFFD, or holds the stream (vllm#17448)",
        "at most three bytes are held",
        ("server/test_server_detokenizer.py::test_at_most_three_bytes_are_held",),
    ),
    25: Row(
        "greedy answers change with the batch (transformers#25921)",
        "on the CPU in fp32 the tokens are bit for bit those of the request alone, under every preset",
        (
            "test_bit_identical.py::test_every_preset_in_a_small_pool_with_preemptions_at_random",
            "test_runner.py::test_a_batch_gives_the_bits_of_a_request_alone",
        ),
    ),
    26: Row(
        "a seed is ignored when a neighbour has none (vllm#51226)",
        "what is drawn depends on seed and position, not on neighbours or preemption",
        (
            "test_bit_identical.py::test_sampled_tokens_depend_on_the_seed_alone",
            "test_sampler.py::test_a_row_is_independent_of_its_neighbours_and_its_place",
        ),
    ),
    27: Row(
        "pad rows write to or read live KV (vllm#43810)",
        "pad rows belong to the null block, and nothing writes it",
        (
            "test_engine_passes.py::test_pads_are_rows_of_their_own_over_the_null_block",
            "test_runner.py::test_pad_rows_of_a_static_batch_change_nothing",
        ),
    ),
    28: Row(
        "one long prompt blocks the short ones (vllm#21495, #10774)",
        "no step computes more than the budget, and under chunked every decode is in every step",
        (f"{THIS}::test_a_decode_waits_for_one_budget_at_most", *RANDOM),
    ),
    29: Row(
        "hashes of prefixes collide between domains (vllm#44701, PR#12621)",
        "a hit compares the tokens themselves",
        (
            "test_prefix_cache.py::test_hashes_that_collide_share_nothing",
            "test_prefix_cache.py::test_tenants_are_kept_apart_where_it_is_asked_for",
        ),
    ),
    30: Row(
        "retracting the only request is a crash (sglang PR#19881)",
        "it never is for want of KV; by force it comes back",
        (f"{THIS}::test_a_pool_of_exactly_what_it_needs", f"{THIS}::test_the_only_request_may_lose_its_seat"),
    ),
    31: Row(
        "an assertion that only preemption at an odd moment finds (vllm PR#4451)",
        "preempt_every and preempt_seed take seats away at random, in every random run",
        ("test_invariants.py::test_answers_survive_forced_preemption", *RANDOM),
    ),
    32: Row(
        "an engine leaves the model changed (transformers PR#45943)",
        "what the adapter sets is as it was",
        ("test_model_hf_adapter.py::test_the_process_is_left_as_it_was",),
    ),
    33: Row(
        "under a small pool answers drift into those of others (ROCm/ATOM PR#2028)",
        "a model that says what it reads in its KV: canaries that count, and a hash of all that is read",
        ("test_kv_canary.py::test_everybody_counts_in_his_own_range", *RANDOM),
    ),
    34: Row(
        "a turn that can neither admit nor preempt: an empty batch turns no counter (vllm fork, #733)",
        "a step with work does something, under every order of the queue and with lanes",
        ("test_invariants_long.py::test_every_combination_of_the_decisions", *RANDOM),
    ),
    35: Row(
        "preemption without need; silent drops; no swap space ends the engine (sarathi, vLLM v0)",
        "a seat is lost only if everyone's next tokens do not fit; a full host means recompute",
        (*RANDOM, "test_swap.py::test_where_the_host_is_full_it_is_computed_again"),
    ),
}


def test_every_row_names_tests_that_exist() -> None:
    assert sorted(ROWS) == list(range(1, 36))
    for number, row in ROWS.items():
        for test in row.tests:
            file, _, function = test.partition("::")
            text = (HERE / file).read_text()
            assert re.search(rf"^(async )?def {function}\(", text, re.MULTILINE), f"row {number}: {test}"


def drive(name: str, num_kv_blocks: int, requests: list[tuple[int, int]], **changes: object) -> Driver:
    """To the end, with the answers checked."""
    driver = Driver(small(name, **{"max_queue_delay_ms": 0, **changes}), num_kv_blocks)
    for request in requests:
        driver.add(*request)
    driver.run()
    answers = driver.answers()
    for seq_id, (prompt_len, max_tokens) in enumerate(requests):
        start = 10_000 * (seq_id + 1)
        assert answers[seq_id] == answer(list(range(start, start + prompt_len)), max_tokens)
    return driver


def needs_everything(name: str) -> bool:
    """It holds max_model_len for each, whatever the request is."""
    return small(name).reservation == "max_model_len"


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("request_", [(1, 7), (7, 1), (9, 8), (8, 8), (15, 9)])
def test_a_pool_of_exactly_what_it_needs(name: str, request_: tuple[int, int]) -> None:
    tokens = 24 if needs_everything(name) else sum(request_)
    blocks = -(-tokens // 4)
    driver = drive(name, blocks + 1, [request_, request_, request_])
    alone = drive(name, blocks + 1, [request_])
    assert alone.engine.stats().preemptions == 0
    assert set(driver.reasons().values()) == {"length"}
    if not needs_everything(name):
        with pytest.raises(Refused) as refused:
            drive(name, blocks, [request_])
        assert refused.value.reason == "never_fits"


@pytest.mark.parametrize("name", PRESETS)
def test_what_can_never_fit_stops_nobody(name: str) -> None:
    blocks = 7 if needs_everything(name) else 4
    driver = Driver(small(name, max_queue_delay_ms=0), blocks)
    first = driver.add(4, 6)
    with pytest.raises(Refused):
        driver.add(24 if needs_everything(name) else 20, 5)
    second = driver.add(3, 4)
    driver.run()
    assert driver.reasons() == {first: "length", second: "length"}


@pytest.mark.parametrize("name", PRESETS)
def test_block_borders(name: str) -> None:
    lengths = (1, 3, 4, 5, 8)
    requests = [(prompt, limit) for prompt in lengths for limit in lengths]
    drive(name, 8, requests)
    drive(name, 8, requests, prefix_cache=True, preempt_every=2)


@pytest.mark.parametrize("name", PRESETS)
def test_an_abort_at_every_moment(name: str) -> None:
    """Of each of three requests after each iteration, until none is left to abort."""
    for victim in range(3):
        for moment in range(100):
            driver = Driver(small(name, max_queue_delay_ms=0, prefix_cache=True), 9)
            for request in [(9, 6), (5, 8), (12, 3)]:
                driver.add(*request)
            for _ in range(moment):
                driver.step()
            over = not driver.engine.has_work
            driver.abort(victim)
            driver.run()
            assert driver.engine.end().integrity == "ok"
            assert driver.engine.stats().kv_live == 0
            assert sorted(driver.reasons()) == [0, 1, 2]
            if over:
                break
        else:
            raise AssertionError("the run does not come to an end")


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_only_request_may_lose_its_seat(name: str, preemption: str) -> None:
    driver = drive(name, 7, [(9, 8)], preempt_every=1, preemption=preemption)
    assert driver.engine.stats().preemptions == 7


@pytest.mark.parametrize("name", ["chunked", "max_utilization", "no_evict"])
def test_a_decode_waits_for_one_budget_at_most(name: str) -> None:
    """Two short requests decode while prompts of three budgets each arrive."""
    driver = Driver(small(name, max_num_seqs=4, max_num_batched_tokens=6), 100)
    short = [driver.add(2, 15), driver.add(2, 15)]
    driver.step()
    for _ in range(4):
        driver.engine.add(Request(list(range(18)), 3))
    driver.run()
    for step in driver.log.steps:
        assert sum(step.tokens) <= 6
    for seq_id in short:
        served = [i for i, step in enumerate(driver.log.steps) if seq_id in step.ids]
        assert served == list(range(served[0], served[0] + 15)), "a decode was left out"

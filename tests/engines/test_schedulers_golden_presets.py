"""Every preset of harness/conf/engine runs. Those that compute whole prompts are held to batches that were
worked out by hand from their systems' rules here, the others in test_schedulers_golden_pieces.py.

p prefill, d decode, r recompute, e ended row; the number of a request, and tokens if not 1. Blocks are of 4
tokens, and an answer of n tokens is one prefill and n - 1 decodes."""

from __future__ import annotations

import pytest

from harness.conf import choices
from tests.support.engine_driver import Driver
from tests.support.mock_runner import answer
from tests.support.preset_driver import add, live, preset, small

PRESETS = [name for name in choices("engine") if name != "openai"]

# prompt and answer length
SIX = [(3, 2), (5, 4), (2, 1), (4, 2), (1, 3), (6, 2)]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs_as_it_is(name: str) -> None:
    """The YAML alone, with its own limits; `dynamic` and `sliced` may not wait for ever."""
    driver = preset(name, blocks=2048)
    requests = [(700, 40), (1, 1), (300, 70), (20, 5), (64, 33), (1500, 2)]
    add(driver, *requests)
    driver.run()
    for seq_id, (prompt_len, max_tokens) in enumerate(requests):
        start = 10_000 * (seq_id + 1)
        assert driver.answers()[seq_id] == answer(list(range(start, start + prompt_len)), max_tokens)


# -- whole batches


def test_static() -> None:
    """Three seats. The batch of 0, 1 and 2 ends with number 1; the rows of 2 and then 0 are computed to its
    end, and nobody joins. Each holds 16 tokens, 4 blocks, to the end. The prompts are padded to 5 and 6."""
    driver = small("static")
    add(driver, *SIX)
    driver.run()
    assert driver.trace() == [
        "p0:3 p1:5 p2:2",
        "d0 d1 e2",
        "d1 e2 e0",
        "d1 e2 e0",
        "p3:4 p4:1 p5:6",
        "d3 d4 d5",
        "d4 e3 e5",
    ]
    assert live(driver) == [12] * 7
    assert [s.left_pad_tokens for s in driver.log.steps] == [2 + 3, 0, 0, 0, 2 + 5, 0, 0]
    assert [o.seq_id for o in driver.outputs] == [2, 0, 1, 3, 5, 4]
    assert {len(o.token_ids) for o in driver.outputs} == {1, 2, 3, 4}, "an answer leaves whole"


@pytest.mark.parametrize(
    ("switch", "trace", "held", "outputs"),
    [
        ("drain", ["p0:2 p1:2", "d0 e1", "d0 e1"], [8, 8, 8], [2, 1, 1]),
        ("pad_finished", ["p0:2 p1:2", "d0", "d0"], [8, 4, 4], [0, 0, 2]),
        ("left_pad", ["p0:2 p1:2", "d0 e1", "d0 e1"], [8, 8, 8], [0, 0, 2]),
    ],
)
def test_static_without_one_of_its_switches(
    switch: str, trace: list[str], held: list[int], outputs: list[int]
) -> None:
    """0 has three tokens to give, 1 has one. Without drain tokens leave when they come; without pad_finished
    the row and the KV of 1 go at once, its answer still waits."""
    driver = small("static", f"engine.{switch}=false")
    add(driver, (2, 3), (2, 1))
    assert [len(driver.step()) for _ in trace] == outputs
    assert (driver.trace(), live(driver)) == (trace, held)


def test_dynamic() -> None:
    """Preferred size 2, a delay of 10 ms. Number 0 waits for company; with 1, which comes at 4 ms, they are
    two. Of 2, 3 and 4, which come meanwhile, two are the preferred size. Number 4, alone, starts when it has
    waited 10 ms; 5 and 6 start at once."""
    driver = small(
        "dynamic", "engine.max_queue_delay_ms=10", "engine.policy.preferred_batch_sizes=[2]", budget=64
    )
    start = driver.clock.now
    add(driver, (2, 2))
    assert driver.step() == []
    assert driver.engine.next_wakeup(driver.clock.now) == pytest.approx(start + 0.010)
    driver.clock.now = start + 0.004
    add(driver, (2, 2))
    driver.step()
    add(driver, (2, 2), (2, 2), (2, 2))  # at 5 ms
    driver.run()
    add(driver, (2, 2), (2, 2))
    driver.run()
    assert driver.trace() == ["p0:2 p1:2", "d0 d1", "p2:2 p3:2", "d2 d3", "p4:2", "d4", "p5:2 p6:2", "d5 d6"]
    began = [(s.start_ns / 1e9 - start) * 1e3 for s in driver.log.steps]
    assert began == pytest.approx([4, 5, 6, 7, 15, 16, 17, 18])


def test_dynamic_starts_a_full_batch_whatever_is_preferred() -> None:
    """Three is the most that a batch takes, and no size is preferred; two then wait for 50 ms."""
    driver = small(
        "dynamic", "engine.max_queue_delay_ms=50", "engine.policy.preferred_batch_sizes=[]", budget=64
    )
    start = driver.clock.now
    add(driver, (2, 1), (3, 1), (2, 1), (1, 1), (2, 2))
    driver.run()
    assert driver.trace() == ["p0:2 p1:3 p2:2", "p3:1 p4:2", "d4 e3"]
    began = [(s.start_ns / 1e9 - start) * 1e3 for s in driver.log.steps]
    assert began == pytest.approx([0, 50, 51])


# -- every iteration, whole prompts

PRESSURE = [(4, 4), (4, 2), (4, 4), (2, 2), (3, 3), (4, 1)]


def test_orca_reserves_the_maximum() -> None:
    """Of 8 blocks each takes 4, whatever it needs: two at a time, though there are three seats. The blocks of
    what has ended are free for the next iteration."""
    driver = small("orca", blocks=8)
    add(driver, *PRESSURE)
    driver.run()
    assert driver.trace() == [
        "p0:4 p1:4",
        "d0 d1",
        "d0 p2:4",
        "d0 d2",
        "d2 p3:2",
        "d2 d3",
        "p4:3 p5:4",
        "d4",
        "d4",
    ]
    assert live(driver) == [8, 8, 8, 8, 8, 8, 8, 4, 4]


def test_continuous_takes_what_it_needs() -> None:
    """The same requests in the same pool: three at a time, two iterations less, and nobody is preempted."""
    driver = small("continuous", blocks=8)
    add(driver, *PRESSURE)
    driver.run()
    assert driver.trace() == [
        "p0:4 p1:4 p2:4",
        "d0 d1 d2",
        "d0 d2 p3:2",
        "d0 d2 d3",
        "p4:3 p5:4",
        "d4",
        "d4",
    ]
    assert live(driver) == [3, 6, 5, 5, 2, 1, 2]
    assert driver.engine.stats().preemptions == 0


def test_continuous_mixes_whole_prompts_with_decodes() -> None:
    driver = small("continuous")
    add(driver, *SIX)
    driver.run()
    assert driver.trace() == ["p0:3 p1:5 p2:2", "d0 d1 p3:4", "d1 d3 p4:1", "d1 d4 p5:6", "d4 d5"]


def test_prefill_first() -> None:
    """The same requests: prompts in iterations of their own, and the decodes stand still meanwhile."""
    driver = small("prefill_first")
    add(driver, *SIX)
    driver.run()
    assert driver.trace() == ["p0:3 p1:5 p2:2", "p3:4", "d0 d1 d3", "p4:1 p5:6", "d1 d4 d5", "d1 d4"]


def test_prefill_first_keeps_the_watermark_and_recomputes() -> None:
    """5 blocks. While others run, a prompt may not take the last free one (1 % of 5 is more than none), so 3
    waits though it would fit. At iteration 5 numbers 0 and 1 both need a third block: 1 gives up its two. It
    comes back with its prompt of 4 and 5 tokens, in front of 3; 4 would take the last block. Then 4 enters
    before 3 decodes."""
    driver = small("prefill_first", blocks=5)
    add(driver, (4, 6), (4, 6), (3, 2), (2, 2), (3, 1))
    driver.run()
    assert driver.trace() == [
        "p0:4 p1:4 p2:3",
        "d0 d1 d2",
        "d0 d1",
        "d0 d1",
        "d0 d1",
        "d0",
        "r1:9 p3:2",
        "p4:3",
        "d3",
    ]
    assert live(driver) == [3, 5, 4, 4, 4, 3, 4, 2, 1]
    assert [s.preemptions for s in driver.log.steps] == [0, 0, 0, 0, 0, 1, 0, 0, 0]


def test_prefill_first_lets_prompts_gather_for_a_delay() -> None:
    """delay_factor=2.5. The first prompt takes 1 ms, so the next one, which comes with the first decode, may
    enter when it has waited for more than 2.5 ms: in the fourth iteration. By then another one has come."""
    driver = small("prefill_first", "engine.policy.delay_factor=2.5")
    add(driver, (2, 6))
    driver.step()
    add(driver, (2, 2))
    driver.step()
    add(driver, (3, 2))
    driver.run()
    assert driver.trace() == ["p0:2", "d0", "d0", "d0", "p1:2 p2:3", "d0 d1 d2", "d0"]


def test_prefill_first_brings_swapped_ones_back_with_the_decodes() -> None:
    """5 blocks. Number 1 goes to host memory at iteration 5, as above. In 6 nobody is running and it comes
    back: a decode, since its 8 tokens of KV come with it. Number 2 enters after it, alone."""
    driver = small("prefill_first", "engine.preemption=swap", "engine.swap_memory_gb=1", blocks=5)
    driver = Driver(driver.engine.config, num_kv_blocks=6, num_host_blocks=8)
    add(driver, (4, 7), (4, 6))
    driver.run()
    assert driver.trace() == ["p0:4 p1:4", "d0 d1", "d0 d1", "d0 d1", "d0 d1", "d0", "d0", "d1"]
    assert driver.engine.stats().recomputed_tokens == 0

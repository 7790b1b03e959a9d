"""Every preset under random settings, pools, arrivals, aborts, forced preemptions, failing passes and changes
of limits: what must hold after every iteration, whatever happens.

The checker of tests/support runs after each (with engine.check_integrity), the mock model raises when KV is
crossed, lost or read before it is written, and every answer is compared with the oracle.
test_invariants_rows.py says which failures of other engines are held off by what."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.request import SamplingParams
from tests.support.cases import PRESETS, Case, Drawn, check_answers, play, quiet, random_case, small
from tests.support.checker import WORST_CASE
from tests.support.engine_driver import Driver

EXAMPLES = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    return random_case(Drawn(draw), name)


@pytest.mark.parametrize("name", PRESETS)
@EXAMPLES
@given(st.data())
def test_whatever_happens(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name))
    check_answers(case, *play(case))


@pytest.mark.parametrize("name", PRESETS)
@EXAMPLES
@given(st.data())
def test_every_token_is_useful_once(name: str, data: st.DataObject) -> None:
    """Prompt and answer of a finished request are computed for the first time exactly once, or found in the
    prefix cache, whatever was preempted; its last token is sampled and never computed."""
    case = quiet(data.draw(cases(name)))
    driver, accepted = play(case)
    check_answers(case, driver, accepted)
    stats, records = driver.engine.stats(), driver.log.requests.values()
    prompts = sum(len(request.prompt_token_ids) for request in accepted.values())
    outputs = sum(len(tokens) for tokens in driver.answers().values())
    assert stats.prefill_tokens + stats.prefix_cache_hits == prompts
    assert stats.decode_tokens == outputs - len(accepted)
    assert stats.output_tokens == outputs
    assert stats.recomputed_tokens == sum(r.recomputed_tokens for r in records)
    assert stats.preemptions == sum(r.preemptions for r in records)
    assert stats.preemptions == sum(s.preemptions for s in driver.log.steps)
    if case.config.reservation in WORST_CASE and case.config.preempt_every is None:
        assert stats.preemptions == 0


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("every", "seed"), [(1, None), (3, None), (1, 0), (2, 1)])
def test_answers_survive_forced_preemption(name: str, every: int, seed: int | None) -> None:
    """Sampled ones too: the draw depends on the seed and the position, not on neighbours or preemption."""
    requests = [(3, 9), (7, 5), (1, 12), (8, 8), (5, 1), (4, 11)]

    def run(**changes: object) -> Driver:
        driver = Driver(small(name, num_kv_blocks=100, **changes), seed=7)
        for i, (prompt_len, max_tokens) in enumerate(requests):
            driver.add(prompt_len, max_tokens, sampling=SamplingParams(temperature=float(i % 2)))
        driver.run()
        return driver

    plain, forced = run(), run(preempt_every=every, preempt_seed=seed)
    assert plain.engine.stats().preemptions == 0
    assert forced.engine.stats().preemptions > 0
    assert forced.engine.stats().recomputed_tokens > 0
    assert plain.answers() == forced.answers()
    assert plain.answers() == run(max_num_seqs=1).answers()

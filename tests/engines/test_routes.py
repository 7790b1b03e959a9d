"""Routes: what a configuration may say, and two engines over one runner that never touch each other's KV."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from engines.config import ConfigError
from engines.engine import Engine
from engines.request import Request
from engines.routes import DEFAULT, Route, resolved, routes_of, shares, sized_for_all
from engines.shared_runner import SharedRunner
from engines.turns import Engines
from harness.conf import compose
from tests.support.engine_driver import Clock, config
from tests.support.mock_runner import MockRunner, answer


def configuration(*routes: Any, engine: str = "chunked") -> dict[str, Any]:
    values = OmegaConf.to_container(compose([f"engine={engine}"]), resolve=True)
    assert isinstance(values, dict)
    values["server"]["routes"] = list(routes)
    return {str(key): value for key, value in values.items()}


SLOW = {"name": "slow", "match": {"tenant": "acme"}, "preset": "static", "kv_share": 0.25}


def test_a_route_takes_a_preset_and_shares_what_there_is_one_of() -> None:
    config = configuration(SLOW | {"engine": {"max_num_seqs": 3}})
    config["engine"] |= {"max_model_len": 512, "threads": 1, "max_num_seqs": 9}
    slow, default = routes_of(config)
    assert (slow.engine.scheduler, slow.engine.max_num_seqs, slow.kv_share) == ("static", 3, 0.25)
    assert (slow.engine.max_model_len, slow.engine.threads) == (512, 1)
    assert (default.name, default.engine.scheduler, default.kv_share) == (DEFAULT, "chunked", 0.75)
    assert sized_for_all([slow, default]).max_num_seqs == 9
    assert sized_for_all([slow, default]).max_num_batched_tokens == slow.engine.max_num_batched_tokens


def test_without_a_preset_a_route_changes_the_engine_that_there_is() -> None:
    route = {"name": "few", "match": {"path": ["/v1/completions"]}, "kv_share": 0.5}
    few, default = routes_of(configuration(route | {"engine": {"max_num_seqs": 2}}))
    assert (few.engine.scheduler, few.engine.max_num_seqs) == ("chunked", 2)
    assert default.engine.max_num_seqs == 16


def test_a_process_without_presets_reads_the_same_routes() -> None:
    config = configuration(SLOW, {"name": "x", "match": {"model": "y"}, "kv_share": 0.1})
    config["engine"] |= {"cuda_graph_sizes": [1, 2], "cpu_affinity": [min(os.sched_getaffinity(0))]}
    routes = routes_of(config)
    written = resolved(config, routes)
    assert "preset" not in written["server"]["routes"][0]
    assert routes_of(written) == routes


def test_host_memory_stays_with_the_default_route() -> None:
    config = configuration(SLOW | {"preset": None})
    config["engine"]["preemption"] = "swap"
    routes = routes_of(config)
    assert [route.engine.preemption for route in routes] == ["recompute", "swap"]
    assert routes_of(resolved(config, routes)) == routes


def test_all_that_is_given_must_fit_and_the_first_route_wins() -> None:
    match = {"tenant": ["a", "b"], "path": "/v1/completions"}
    route = routes_of(configuration(SLOW | {"match": match}))[0]
    assert route.fits("a", "tiny", "/v1/completions")
    assert not route.fits("c", "tiny", "/v1/completions")
    assert not route.fits("a", "tiny", "/v1/chat/completions")


@pytest.mark.parametrize(
    ("route", "words"),
    [
        (5, "server.routes[0]=5: needs an object of name, match, "),
        ([SLOW], "server.routes[0]=[{"),
        (SLOW | {"colour": 1}, "server.routes[0].colour is not a setting"),
        (SLOW | {"name": "a b"}, "server.routes[0].name=a b"),
        (SLOW | {"name": ["x"]}, "server.routes[0].name=['x']: needs 1 to 40 letters"),
        (SLOW | {"name": DEFAULT}, "server.routes[0].name=default: is the name of engine.* itself; needs"),
        (SLOW | {"engine": 0}, "server.routes[0].engine=0: needs an object of engine settings"),
        (SLOW | {"engine": {"preempt_seed": 1}}, "server.routes[0]: engine.preempt_seed=1: draws"),
        (SLOW | {"match": {"path": "/v1/chat"}}, "match.path=/v1/chat: no request comes there; choose from"),
        (SLOW | {"match": {"path": ["/v1/completions", "/x"]}}, "server.routes[0].match.path=/x: no request"),
        (SLOW | {"kv_share": 1}, "server.routes[0].kv_share=1"),
        (SLOW | {"kv_share": None}, "server.routes[0].kv_share=None"),
        (SLOW | {"match": {}}, "server.routes[0].match={}: needs an object of tenant, model, path"),
        (SLOW | {"match": None}, "server.routes[0].match=None: needs an object of tenant, model, path"),
        (SLOW | {"match": {"user": "a"}}, "server.routes[0].match={'user': 'a'}: needs"),
        (SLOW | {"match": {"tenant": []}}, "server.routes[0].match.tenant=[]"),
        (SLOW | {"preset": "nope"}, "server.routes[0].preset=nope"),
        (SLOW | {"preset": "openai"}, "server.routes[0].preset=openai"),
        (SLOW | {"engine": {"block_size": 99}}, "server.routes[0].engine.block_size: is one for all routes"),
        (SLOW | {"engine": {"cpu_affinity": [0]}}, "engine.cpu_affinity: is one for all routes"),
        (SLOW | {"engine": {"determinism": "fast"}}, "engine.determinism: is one for all routes"),
        (SLOW | {"engine": {"policy": [1]}}, "server.routes[0]: engine.policy=[1]: needs settings"),
        (SLOW | {"engine": {"preemption": "swap"}}, "server.routes[0].engine.preemption=swap: host memory"),
        (SLOW | {"engine": {"max_num_seqs": 0}}, "server.routes[0]: engine.max_num_seqs=0"),
    ],
)
def test_what_cannot_work_is_said(route: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        routes_of(configuration(route))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        (3, "server.routes=3: needs a list of routes, each an object of name, "),
        (0, "server.routes=0: needs a list"),
        (False, "server.routes=False: needs a list"),
        ("slow", "server.routes=slow: needs a list"),
        (SLOW, "server.routes={'name': 'slow', "),
        ([1, 2], "server.routes[0]=1: needs an object"),
        ([SLOW, SLOW], "server.routes[1].name=slow: is the name of server.routes[0]; needs one of its own"),
        ([SLOW] * 17, "server.routes: has 17 routes, needs at most 16"),
    ],
)
def test_routes_that_are_no_list_of_routes_are_shown(routes: Any, words: str) -> None:
    config = configuration()
    config["server"]["routes"] = routes
    with pytest.raises(ConfigError) as error:
        routes_of(config)
    assert str(error.value).startswith(words)
    assert len(str(error.value)) < 200


def test_no_routes_at_all() -> None:
    config = configuration()
    config["server"]["routes"] = None
    assert [route.name for route in routes_of(config)] == [DEFAULT]


def test_shares_must_leave_something() -> None:
    with pytest.raises(ConfigError, match="needs less than 1"):
        routes_of(configuration(SLOW | {"kv_share": 0.5}, SLOW | {"name": "b", "kv_share": 0.5}))
    with pytest.raises(ConfigError, match="too small"):
        shares(routes_of(configuration(SLOW | {"kv_share": 0.01})), 10)


@given(st.lists(st.floats(0.05, 0.3), max_size=3), st.integers(40, 500))
def test_shares_are_disjoint_and_use_every_block(parts: list[float], num_kv_blocks: int) -> None:
    engine = config("continuous")
    routes = [Route(f"r{i}", engine, part) for i, part in enumerate(parts)]
    found = shares([*routes, Route(DEFAULT, engine)], num_kv_blocks)
    blocks = [offset + block for offset, count in found for block in range(1, count)]
    assert sorted(blocks) == list(range(1, num_kv_blocks))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 10), st.integers(1, 6)), min_size=1, max_size=12),
    st.integers(0, 30),
)
def test_engines_that_share_a_runner_never_touch_each_others_kv(
    requests: list[tuple[int, int, int]], abort_at: int
) -> None:
    """The mock model's answers are a function of its KV: any crossing changes them."""
    clock, runner, ids = Clock(), MockRunner(40, 4), itertools.count()
    routes = [
        Route("static", config("static"), 0.3),
        Route("prefill_first", config("prefill_first", preempt_every=2), 0.3),
        Route(DEFAULT, config("chunked", prefill_chunk_size=3), 0.4),
    ]
    made = {
        route.name: Engine(
            route.engine,
            SharedRunner(runner, offset, 4),
            num_kv_blocks=blocks,
            clock=clock,
            ids=ids,
        )
        for route, (offset, blocks) in zip(routes, shares(routes, 40), strict=True)
    }
    engines = Engines(made)
    expected, got = {}, {}
    for i, (route, prompt_len, max_tokens) in enumerate(requests):
        prompt = list(range(1000 * i, 1000 * i + prompt_len))
        seq_id = engines.add(Request(prompt, max_tokens), route=route)
        expected[seq_id] = answer(prompt, max_tokens)
    gone = None
    for tick in range(2000):
        if not engines.has_work:
            break
        if tick == abort_at:
            gone = max(expected)
            engines.abort(gone)
            engines.abort(gone)
        for output in engines.step():
            got.setdefault(output.seq_id, []).extend(output.token_ids)
        for engine in made.values():
            engine.check_integrity()
        clock.now += 0.001
    assert not engines.has_work
    for seq_id, tokens in expected.items():
        assert got[seq_id] == tokens or (seq_id == gone and tokens[: len(got[seq_id])] == got[seq_id])
    total = engines.stats()
    assert total.received == len(requests) == sum(total.finished.values())
    assert [ending.integrity for ending in engines.end()] == ["ok"] * 3


def test_engines_take_turns_while_both_have_work() -> None:
    clock, ids = Clock(), itertools.count()
    runner = MockRunner(40, 4)
    made = {
        name: Engine(
            config("continuous"),
            SharedRunner(runner, offset, 4),
            num_kv_blocks=20,
            clock=clock,
            ids=ids,
        )
        for name, offset in (("a", 0), ("b", 19))
    }
    engines = Engines(made)
    for route in (0, 0, 1):
        engines.add(Request([1, 2], 5), route=route)
    owners = []
    while engines.has_work:
        owners.append({output.seq_id // 2 for output in engines.step()})
    assert owners == [{0}, {1}] * 5  # two sequences of the one, one of the other

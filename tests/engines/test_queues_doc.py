"""The order of docs/add-an-order.md does what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from engines.config import ConfigError
from tests.support.engine_driver import Driver, config

PAGE = (Path(__file__).parents[2] / "docs" / "add-an-order.md").read_text()


@pytest.fixture
def shortest(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which engine.queue finds it."""
    (code,) = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    module = ModuleType("doc_queue")
    monkeypatch.setitem(sys.modules, "doc_queue", module)
    exec(compile(code, "add-an-order.md", "exec"), vars(module))
    return "doc_queue:ShortestQueue"


def test_the_shortest_prompt_goes_first_until_others_have_waited(shortest: str) -> None:
    policy = {"tokens_per_s": 1000.0}
    driver = Driver(config("continuous", max_num_seqs=1, queue=shortest, queue_policy=policy))
    for prompt in (1, 9, 3):
        driver.add(prompt, 1, tenant=str(prompt))  # of equals the checker wants the earlier one first
    driver.clock.now += 0.007  # the one of 9 tokens is 7 ms ahead of what comes now
    driver.add(1, 1, tenant="late")
    driver.add(4, 1, tenant="later")
    driver.run()
    assert driver.trace() == ["p0:1", "p2:3", "p3:1", "p1:9", "p4:4"]


def test_its_settings_are_checked(shortest: str) -> None:
    with pytest.raises(ConfigError, match=r"engine.queue_policy.tokens is not a setting; choose from: tok"):
        config("continuous", queue=shortest, queue_policy={"tokens": 1})


def test_the_lanes_of_the_page_are_a_configuration() -> None:
    (text,) = re.findall(r"```yaml\n(lanes:.*?)```", PAGE, re.DOTALL)
    driver = Driver(config("chunked", **yaml.safe_load(text)))
    for request_class in ("chat", "rag", "batch", "x"):
        driver.add(5, 2, request_class=request_class)
    driver.run()
    assert set(driver.reasons().values()) == {"length"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"queue_policy": {"aging_s": 1}},
            "engine.queue_policy.aging_s is not a setting; there is none here",
        ),
        ({"queue": "priority", "queue_policy": {"aging_s": 0}}, "engine.queue_policy.aging_s=0.0: needs sec"),
        ({"queue": "deadline", "queue_policy": {"pace": "slow"}}, "pace=slow: choose from fastest, usual"),
        ({"queue": "fair", "queue_policy": {"weights": {"a": 0}}}, "queue_policy.weights.a=0.0: needs a num"),
        ({"queue": "fair", "queue_policy": {"weights": {"a": 1e-320}}}, "weights.a=1e-320: .* from 1e-06 to"),
        (
            {"queue": "fair", "queue_policy": {"output_cost": 1e300}},
            "output_cost=1e.300: .* at most 1e.06",
        ),
        ({"lanes": {"a": {"weight": 1e300}}}, "engine.lanes.a.weight=1e.300: .* from 1e-06 to 1e.06"),
        ({"queue": "fair", "queue_policy": {"weights": {"a": "x"}}}, "weights.a='x': needs a finite number"),
        ({"lanes": {"a": {"wait": 1}}}, "engine.lanes.a.wait is not a setting; choose from: classes"),
        ({"lanes": {"a": 3}}, "engine.lanes.a=3: needs settings"),
        ({"lanes": {"a": {"weight": -1}}}, "engine.lanes.a.weight=-1.0: needs a number above 0"),
        ({"lanes": {"a": {"max_num_seqs": 0}}}, "engine.lanes.a.max_num_seqs=0: needs 1 or more, or null"),
        ({"lanes": {"a": {"queue": "lifo"}}}, "engine.lanes.a.queue=lifo: choose from deadline"),
        ({"lanes": {"a": {}, "b": {"classes": ["a"]}}}, "engine.lanes.b.classes=a: is in lane a already"),
        ({"lanes": {"a": {"queue_policy": {"aging_s": 1}}}}, "engine.lanes.a.queue_policy=.*needs queue bes"),
    ],
)
def test_what_cannot_work_is_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        config("chunked", **changes)
    assert "\n" not in str(error.value)


def test_a_scheduler_that_takes_the_whole_queue_has_no_lanes() -> None:
    with pytest.raises(ConfigError, match=r"engine.lanes=a: engine.scheduler=sliced takes the whole queue"):
        config("sliced", lanes={"a": {}})

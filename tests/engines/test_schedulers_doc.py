"""The example of docs/add-a-scheduler.md does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from engines.config import EngineConfig
from tests.support.engine_driver import Driver, config
from tests.support.mock_runner import answer

PAGE = Path(__file__).parents[2] / "docs" / "add-a-scheduler.md"


def driver_of_the_example(cfg: EngineConfig, **more: Any) -> Driver:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    driver = Driver(cfg, **more)
    old = driver.engine.scheduler
    driver.engine.scheduler = names["PrefillFirst"](
        cfg, old.pool, old.waiting, old.reservation, old.preemption
    )
    return driver


def test_prompts_go_first_and_in_iterations_of_their_own() -> None:
    driver = driver_of_the_example(config("continuous"))
    for prompt_len, max_tokens in [(3, 2), (5, 4), (2, 1), (4, 2), (1, 3)]:
        driver.add(prompt_len, max_tokens)
    driver.run()
    assert driver.trace() == ["p0:3 p1:5 p2:2", "p3:4", "d0 d1 d3", "p4:1", "d1 d4", "d1 d4"]


def test_it_survives_a_small_pool() -> None:
    driver = driver_of_the_example(config("continuous"), num_kv_blocks=6)
    requests = [(4, 9), (4, 6), (3, 2), (8, 8), (1, 12)]
    for prompt_len, max_tokens in requests:
        driver.add(prompt_len, max_tokens)
    driver.run()
    assert driver.engine.stats().preemptions > 0
    for seq_id, (prompt_len, max_tokens) in enumerate(requests):
        start = 10_000 * (seq_id + 1)
        assert driver.answers()[seq_id] == answer(list(range(start, start + prompt_len)), max_tokens)


def test_the_page_names_what_the_base_class_has() -> None:
    scheduler = Driver(config("continuous")).engine.scheduler
    words = set(re.findall(r"`self\.(\w+)", PAGE.read_text()))
    assert {"admit", "make_room", "budget", "free_seats", "waiting"} <= words
    assert all(hasattr(scheduler, word) for word in words)

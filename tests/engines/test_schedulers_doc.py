"""docs/add-a-scheduler.md, followed to the letter: its files saved under the names that it gives, found,
composed, and run."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import engines.schedulers
import harness.conf
from engines.config import ConfigError, EngineConfig
from tests.support.engine_driver import Driver, config
from tests.support.mock_runner import answer

PAGE = (Path(__file__).parents[2] / "docs" / "add-a-scheduler.md").read_text()
CODE, TEST = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(YAML,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
SCHEDULER, PRESET = "engines/schedulers/polite.py", "harness/conf/engine/polite.yaml"


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both files are saved, in folders that are searched beside, or as copies of, the repository's own."""
    assert f"`{SCHEDULER}`" in PAGE
    assert f"`{PRESET}`" in PAGE
    plugins, conf = tmp_path / "schedulers", tmp_path / "conf"
    plugins.mkdir()
    (plugins / Path(SCHEDULER).name).write_text(CODE)
    monkeypatch.setattr(engines.schedulers, "__path__", [*engines.schedulers.__path__, str(plugins)])
    shutil.copytree(harness.conf.FOLDER, conf, ignore=shutil.ignore_patterns("__pycache__"))
    (conf / "engine" / Path(PRESET).name).write_text(YAML)
    monkeypatch.setattr(harness.conf, "FOLDER", conf)
    yield
    sys.modules.pop("engines.schedulers.polite", None)
    vars(engines.schedulers).pop("polite", None)


def preset(*overrides: str) -> EngineConfig:
    engine: Any = OmegaConf.to_container(harness.conf.compose(["engine=polite", *overrides]).engine)
    return EngineConfig.from_mapping(engine)


@pytest.mark.usefixtures("followed")
def test_the_test_of_the_page_passes() -> None:
    names: dict[str, Any] = {}
    exec(compile(TEST, "docs/add-a-scheduler.md", "exec"), names)
    names["test_polite"]()


@pytest.mark.usefixtures("followed")
def test_the_preset_composes_and_answers() -> None:
    cfg = preset("engine.policy.max_wait_ms=200")
    assert (cfg.name, cfg.policy) == ("polite", {"short_prompts": 256, "max_wait_ms": 200})
    driver = Driver(cfg, num_kv_blocks=600)
    requests = [(300, 9), (700, 20), (3, 2), (2000, 5), (1, 12)]
    for prompt_len, max_tokens in requests:
        driver.add(prompt_len, max_tokens)
        driver.step()
    driver.run()
    for seq_id, (prompt_len, max_tokens) in enumerate(requests):
        start = 10_000 * (seq_id + 1)
        assert driver.answers()[seq_id] == answer(list(range(start, start + prompt_len)), max_tokens)


@pytest.mark.usefixtures("followed")
def test_it_survives_a_small_pool() -> None:
    driver = Driver(config("polite"), num_kv_blocks=6)
    for prompt_len, max_tokens in [(4, 9), (4, 6), (3, 2), (8, 8), (1, 12)]:
        driver.add(prompt_len, max_tokens)
    driver.run()
    assert driver.engine.stats().preemptions > 0


@pytest.mark.usefixtures("followed")
def test_wrong_settings_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^engine.policy.short_prompts=-1: needs 0 or more$"):
        preset("engine.policy.short_prompts=-1")
    with pytest.raises(ConfigError, match=r"^engine.policy.max_wait is not a setting"):
        preset("engine.policy.max_wait=1")
    with pytest.raises(ConfigError, match="runs whole prompts"):
        preset("engine.max_num_batched_tokens=100")


@pytest.mark.usefixtures("followed")
def test_a_class_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_policies.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    cfg = preset("engine.scheduler=own_policies:PoliteScheduler")
    assert type(Driver(cfg).engine.scheduler).__module__ == "own_policies"
    sys.modules.pop("own_policies")


def test_the_page_is_short_and_names_what_the_base_class_has() -> None:
    assert len(CODE.splitlines()) <= 45
    scheduler = Driver(config("continuous")).engine.scheduler
    words = set(re.findall(r"`self\.(\w+)", PAGE))
    assert {"admit", "decode", "entering", "make_room", "budget", "free_seats"} <= words
    assert all(hasattr(scheduler, word) for word in words)

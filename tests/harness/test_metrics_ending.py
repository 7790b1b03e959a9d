"""engine_end.json: what a run says of an engine that leaked, or that left no word."""

import json

import pytest

from engines.step_log import Ending
from harness.metrics import build_summary
from harness.metrics.ending import NO_ENDING, kv_live_end, read_ending
from harness.validity import leak
from tests.support.run_factory import steady_requests, write_run

CLEAN = {
    "at_ns": 5, "aborted": 2, "running": 0, "waiting": 0, "kv_live": 0, "kv_cached": 3, "kv_free": 7,
    "integrity": "ok", "graphs": None,
}  # fmt: skip


def test_the_fields_are_those_that_the_engine_writes():
    assert list(CLEAN) == list(Ending.__dataclass_fields__)


def test_an_engine_that_let_go_of_everything_is_clean(tmp_path):
    (tmp_path / "engine_end.json").write_text(json.dumps(CLEAN))
    ending = read_ending(tmp_path)
    assert ending == CLEAN
    assert kv_live_end(ending) == (0, None)
    assert leak(ending) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_live": 3}, "kv leak: at the engine's end kv_live 3, running 0, waiting 0; integrity: ok"),
        ({"running": 1}, "running 1"),
        ({"waiting": 2}, "waiting 2"),
        ({"integrity": "block 4 is in 0 tables and counts 1"}, "integrity: block 4 is in 0 tables"),
    ],
)
def test_whatever_is_left_is_a_leak(changes, words):
    assert words in leak({**CLEAN, **changes})
    assert kv_live_end({**CLEAN, **changes}) == (changes.get("kv_live", 0), None)


@pytest.mark.parametrize("text", [None, "", "[1]", "{", '{"kv_live": "many"}', '{"kv_live": true}'])
def test_no_word_is_null_with_a_reason_and_no_leak(tmp_path, text):
    if text is not None:
        (tmp_path / "engine_end.json").write_text(text)
    ending = read_ending(tmp_path)
    assert kv_live_end(ending) == (None, NO_ENDING)
    if "kv_live" not in ending:
        assert leak(ending) is None


def run_with(folder, ending, **meta):
    run_dir = write_run(folder / "run", steady_requests(30, tokens=2), **meta)
    if ending is not None:
        (run_dir / "engine_end.json").write_text(json.dumps(ending))
    return build_summary(run_dir)


def test_a_complete_run_that_leaked_is_invalid(tmp_path):
    good = run_with(tmp_path / "a", CLEAN)
    assert (good["valid"], good["steps"]["kv_live_end"]) == (True, 0)
    leaked = run_with(tmp_path / "b", {**CLEAN, "kv_live": 3})
    assert (leaked["valid"], leaked["steps"]["kv_live_end"]) == (False, 3)
    assert leaked["invalid_reasons"] == [
        "kv leak: at the engine's end kv_live 3, running 0, waiting 0; integrity: ok"
    ]
    silent = run_with(tmp_path / "c", None)
    assert (silent["valid"], silent["steps"]["kv_live_end"]) == (True, None)
    assert silent["null_reasons"]["steps.kv_live_end"] == NO_ENDING
    cut = run_with(tmp_path / "d", {**CLEAN, "kv_live": 3}, complete=False, incomplete_reason="interrupted")
    assert not any("kv leak" in reason for reason in cut["invalid_reasons"])

"""What is compared, in which order, and what is refused before or after it has been measured."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest

from harness.compare.arms import make_arms
from harness.compare.metric import metric
from harness.compare.order import orders
from harness.compare.refusal import refusals, uncovered
from harness.compare.rounds import Pass, Round
from harness.compare.settings import settings, split
from harness.conf import UsageError


def test_own_settings_are_told_from_those_of_the_runs():
    own, rest = split(
        ["+workload=rag", "engines=[static,chunked]", "rounds=4", "seed=3", "metrics=[fluidity]"]
    )
    assert own == {"engines": ["static", "chunked"], "rounds": 4, "metrics": ["fluidity"]}
    assert rest == ["+workload=rag", "seed=3"]


def test_engines_and_arms_in_all_their_forms():
    assert [arm.cfg.engine.name for arm in make_arms([], ["static", "chunked"], None)] == [
        "static",
        "chunked",
    ]
    arms = make_arms(
        ["engine=chunked"],
        None,
        [
            {"name": "small", "engine.max_num_seqs": 8, "engine.prefix_cache": True},
            "engine=static engine.max_num_seqs=4",
            {"engine.max_num_seqs": 8},
            {"engine.max_num_seqs": 8},
            {"name": "as it is"},
        ],
    )
    assert [arm.name for arm in arms] == [
        *(
            "small",
            "engine=static engine.max_num_seqs=4",
            "engine.max_num_seqs=8 #1",
            "engine.max_num_seqs=8 #2",
        ),
        "as it is",
    ]
    assert [arm.cfg.engine.max_num_seqs for arm in arms[:4]] == [8, 4, 8, 8]
    assert arms[0].cfg.engine.prefix_cache is True
    assert arms[1].cfg.engine.name == "static"
    assert not uncovered(arms[1], arms[0])


@pytest.mark.parametrize(
    ("engines", "arms", "said"),
    [
        (None, None, "needs 'engines="),
        (["static", "chunked"], ["engine=static"], "not both"),
        (["static"], None, "engines: has 1 entries; needs 2 to 12"),
        (5, None, "engines=5: needs a list"),
        (["static", "engine=chunked"], None, "needs names of engines"),
        (["static", "chnked"], None, "did you mean chunked"),
        (None, ["engine=static", {"engine.max_seqs": 3}], "engine.max_seqs is not a setting"),
        (
            None,
            ["engine=static", "workload.rate=9"],
            "workload.rate=9.*has 5: arms are sent the same requests",
        ),
        (None, ["engine=static", "load=closed"], "set load for all"),
        (None, ["engine=static", 7], "arms: 7: needs an object or overrides"),
        (None, ["engine='static", "engine=chunked"], "arms: engine='static: cannot be read .No closing"),
        (None, [{"name": "a"}, {"name": "a again"}], "two arms would be called 'a again'"),
        (None, [{"name": "x #1"}, {"name": "x"}, {"name": "x"}], "two arms would be called 'x #1'"),
    ],
)
def test_arms_that_make_no_sense_are_refused_in_one_line(engines, arms, said):
    with pytest.raises(UsageError, match=said) as caught:
        make_arms([], engines, arms)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rounds": 1}, "rounds=1: needs a whole number from 2 to 100"),
        ({"rounds": "many"}, "rounds=many: needs"),
        ({"until": "bored"}, "until=bored: needs rounds or decided"),
        ({"limit": 0}, "limit=0: needs a share above 0"),
        ({"aa": None}, "aa=null: needs true or false"),
        ({"max_rounds": 9}, "max_rounds=9: only with until=decided"),
        ({"until": "decided", "rounds": 9, "max_rounds": 5}, "max_rounds=5: needs at least rounds=9"),
        ({"metrics": ["kv.nonsense"]}, "metrics: kv.nonsense: is no figure"),
        ({"metrics": ["fluidity:up"]}, "needs fluidity:lower or fluidity:higher"),
        ({"metrics": {}}, "needs a list of figures"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(values, said):
    with pytest.raises(UsageError, match=said):
        settings(values)


def test_looks_are_counted_from_the_first_verdict_that_is_asked_for():
    assert settings({}).looks == 1
    assert settings({}).confidence_after(5) == 0.95
    chosen = settings({"until": "decided", "rounds": 4, "max_rounds": 6})
    assert (chosen.looks, chosen.max_rounds) == (3, 6)
    assert [round(chosen.confidence_after(n), 4) for n in (4, 5, 6)] == [0.975, 0.9875, 0.9875]
    assert settings({"until": "decided"}).max_rounds == 15


def test_which_direction_is_good():
    assert metric("latency_ms.itl.p99").better == "lower"
    assert metric("steady.throughput.output_tokens_per_s").better == "higher"
    assert metric("by_class.chat.latency_ms.ttft.from_send.p90").better == "lower"
    assert metric("prefix_cache.hit_rate_tokens").better == "higher"
    assert metric("utilization.device_busy:lower").better == "lower"
    assert metric("latency_ms.ttft.from_intended.p99").column == "ttft_ms"
    assert metric("throughput.output_tokens_per_s").column is None


def test_orders_are_shuffled_balanced_and_the_same_for_a_seed():
    names = ("a", "b", "c", "d")
    found = list(islice(orders(names, 3), 200))
    assert found == list(islice(orders(names, 3), 200))
    assert found != list(islice(orders(names, 4), 200))
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert second == first[::-1]  # so that a straight drift is the same for all over the two
    assert len(set(found)) == 24
    places = Counter((name, order.index(name)) for order in found for name in names)
    assert min(places.values()) > 30  # of 50


def measured(folder: Path, arm: str, tokens: list[int], changes: dict, server: dict) -> Pass:
    run_dir = folder / arm
    run_dir.mkdir()
    (run_dir / "meta.json").write_text(
        json.dumps({"server": {"device": "cpu", "num_kv_blocks": 64, **server}})
    )
    prints = {"schedule": "s", "config": "c", "host": "h", "device": "d", **changes}
    requests = pd.DataFrame({"id": range(len(tokens)), "outcome": "completed", "output_tokens": tokens})
    return Pass(run_dir, {"run": {"fingerprint": prints}, "invalid_reasons": []}, requests)


@pytest.mark.parametrize(
    ("arm", "tokens", "changes", "server", "said"),
    [
        ("engine=chunked", [5, 6], {}, {}, None),
        ("engine=chunked", [5, 6], {"config": "other"}, {}, None),
        ("engine=chunked", [5, 7], {}, {}, "output lengths differ: 1 of 2 answers"),
        ("engine=chunked", [5, 6], {"schedule": "t"}, {}, "fingerprint.schedule differs"),
        ("engine=chunked", [5, 6], {"host": "i"}, {}, "fingerprint.host differs"),
        (
            "engine=chunked",
            [5, 6],
            {"device": "e"},
            {"device": "cuda"},
            "fingerprint.device differs.*: device cuda, not device cpu",
        ),
        ("engine.threads=2", [5, 6], {"device": "e"}, {"threads": 2}, None),
        (
            "engine=chunked",
            [5, 6],
            {},
            {"num_kv_blocks": 32},
            "room for 32 KV blocks.*set engine.num_kv_blocks",
        ),
        ("engine.num_kv_blocks=33", [5, 6], {}, {"num_kv_blocks": 32}, None),
    ],
)
def test_what_differs_without_having_been_asked_to_is_refused_and_named(
    tmp_path, arm, tokens, changes, server, said
):
    arms = make_arms([], None, [{"name": "first", "engine": "continuous"}, arm])
    passes = {
        "first": measured(tmp_path, "first", [5, 6], {}, {}),
        arms[1].name: measured(tmp_path, "second", tokens, changes, server),
    }
    found = refusals(Round(1, passes), arms)
    if said is None:
        assert found == []
    else:
        (reason,) = found
        assert re.search(said, reason), reason
        assert reason.startswith(f"{arms[1].name}: ")


def test_a_setting_that_no_arm_was_asked_to_change_is_named(tmp_path):
    arms = make_arms([], ["continuous", "chunked"], None)
    assert uncovered(replace(arms[1], overrides=()), replace(arms[0], overrides=("engine.scheduler=x",)))

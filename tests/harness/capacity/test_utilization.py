"""load.utilization: a share of a capacity that was measured here, for this very kind of run."""

import pytest

from harness.capacity import store
from harness.capacity.command import read
from harness.conf import UsageError, compose


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHMARK_CACHE", str(tmp_path))


def keep(*args):
    cfg = next(iter(read(list(args), "capacity", virtual=False).engines.values()))
    store.save(cfg, {"rps": 5.0, "low": 5.0, "high": 5.2})


def test_the_rate_is_a_share_of_the_capacity_of_its_kind():
    keep("+workload=chat", "+engine=chunked")
    cfg = compose(["+workload=chat", "+engine=chunked", "load.utilization=0.8", "seed=7", "load.requests=50"])
    assert cfg.workload.rate == 4.0
    assert cfg.workload.arrivals.pinned is True
    assert cfg.load.utilization == 0.8


@pytest.mark.parametrize(
    "other",
    [
        "engine=continuous",
        "engine.max_num_seqs=8",
        "workload.length_scale=0.5",
        "slo.ttft_ms=500",
        "dtype=bfloat16",
    ],
)
def test_another_kind_of_run_has_no_capacity_and_the_error_names_the_command(other):
    keep("+workload=chat", "+engine=chunked")
    asked = ["+workload=chat", "+engine=chunked", other, "load.utilization=0.8", "load.requests=9", "seed=3"]
    with pytest.raises(UsageError) as caught:
        compose(asked)
    message = str(caught.value)
    assert "\n" not in message
    command = message.partition("python -m harness.capacity ")[2].split()
    assert "+workload=chat" in command
    assert other in [text.lstrip("+") for text in command]
    assert not any(text.startswith(("load.", "seed")) for text in command)
    keep(*command)  # what it names is what is missing
    assert compose(asked).workload.rate == 4.0


def test_a_rate_beside_it_and_a_broken_file_are_refused():
    keep("+workload=chat", "+engine=chunked")
    with pytest.raises(UsageError, match=r"workload\.rate"):
        compose(["+workload=chat", "+engine=chunked", "load.utilization=0.8", "workload.rate=3"])
    for path in store.folder().iterdir():
        path.write_text("{")
    with pytest.raises(UsageError, match=r"harness\.capacity"):
        compose(["+workload=chat", "+engine=chunked", "load.utilization=0.8"])
    with pytest.raises(UsageError, match=r"load\.utilization=-1"):
        compose(["load.utilization=-1"])


def test_a_server_or_a_closed_loop_knows_no_utilization():
    with pytest.raises(UsageError, match="not a setting"):
        compose(["load=closed", "load.utilization=0.5"])

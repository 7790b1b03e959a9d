"""The same traffic over server-sent events and, half of it, over WebSockets: a whole run of each."""

from __future__ import annotations

import pandas as pd
import pytest

from harness.records import read_engine_requests, read_requests
from tests.support.harness_command import SHORT, HarnessCommand, meta, results, summary
from workloads.schedule import Schedule

pytestmark = pytest.mark.e2e

TRAFFIC = (
    *("workload=short", "workload.length_scale=1", "workload.stream_fraction=0.9"),
    *("load.requests=16", "output.text=true", "engine=chunked"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of two runs, started at once: without WebSockets, and with them."""
    folder = tmp_path_factory.mktemp("transports")
    shares = [f"workload.websocket_fraction={share}" for share in (0, 0.5)]
    commands = [HarnessCommand(folder, *SHORT, *TRAFFIC, share) for share in shares]
    return [results(command.finish()[1]) for command in commands]


def test_every_transport_brings_the_same_tokens(runs):
    plain, mixed = ({r.id: r for r in read_requests(run)} for run in runs)
    over = [r for r in mixed.values() if r.transport == "websocket"]
    assert 2 < len(over) < len(mixed)
    assert {r.transport for r in plain.values()} == {"http"}
    whole = [id for id in plain if plain[id].outcome == mixed[id].outcome == "completed"]
    assert len({r.id for r in over} & set(whole)) > 2
    for id in whole:
        assert plain[id].text
        assert mixed[id].text == plain[id].text
        assert mixed[id].output_tokens == plain[id].output_tokens == mixed[id].stop_after
    assert not any(r.token_mismatch for r in over)
    assert all(len(r.chunk_ns) > 1 for r in over if r.outcome == "completed" and r.stop_after > 8)


def test_the_run_is_whole_and_says_who_came_how(runs):
    run = runs[1]
    assert meta(run)["complete"] is True
    counts = summary(run)["counts"]
    assert counts["scheduled"] == counts["completed"] + counts["cancelled"] == 16
    assert [
        why for why in summary(run)["invalid_reasons"] if "client_bound" not in why
    ] == []  # a busy machine
    schedule = {r.id: r.transport for r in Schedule.from_parquet(run / "schedule.parquet").requests}
    frame = pd.read_parquet(run / "requests.parquet")
    assert dict(zip(frame["id"], frame["transport"], strict=True)) == schedule
    engine = read_engine_requests(run)
    assert set(schedule) <= set(engine["id"])

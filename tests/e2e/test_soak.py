"""Many short requests, a third of them hanging up wherever they are: each has its ending, and the engine is
left empty."""

import json
from collections import Counter

import pytest

from harness.conf import compose
from harness.plan import draw_schedule
from harness.records import OUTCOMES
from tests.support.harness_command import harness, results, summary
from workloads.schedule import Schedule


def test_the_soak_is_ten_thousand_short_requests_of_which_a_third_mean_to_leave():
    schedule = draw_schedule(compose(["experiment=soak", "engine=chunked"]))
    assert len(schedule) == 10_000
    assert max(r.prompt_tokens for r in schedule) <= 32
    assert max(r.max_tokens for r in schedule) <= 32
    kinds = Counter(r.cancel_kind for r in schedule)
    assert 1 - kinds["none"] / 10_000 == pytest.approx(0.32, abs=0.02)
    assert all(kinds[kind] > 400 for kind in ("before_first_token", "after_tokens", "after_s"))


@pytest.mark.e2e
@pytest.mark.parametrize("engine", ["static", "continuous", "chunked", "sliced"])
def test_every_request_is_accounted_for_and_nothing_is_left_in_the_engine(tmp_path, engine):
    args = ("+experiment=soak", f"+engine={engine}", "load.requests=150", "workload.rate=80")
    if engine == "chunked":
        args += ("engine.prefill_chunk_size=4",)
    code, out, stderr = harness(tmp_path, *args)
    run_dir = results(out)
    figures = summary(run_dir)
    # A busy machine may bend the client's own times; what is counted here does not depend on them.
    assert code == 0 or all(r.startswith("client") for r in figures["invalid_reasons"]), stderr
    counts = figures["counts"]
    assert counts["scheduled"] == 150 == sum(counts[name] for name in OUTCOMES)
    assert counts["failed"] == counts["timed_out"] == counts["rejected"] == counts["cut_off"] == 0
    assert 15 <= counts["cancelled"] <= 75
    lines = [json.loads(line) for line in (run_dir / "engine_requests.jsonl").read_text().splitlines()]
    ours = Counter(line["id"] for line in lines if line["run"] == run_dir.name)
    assert set(ours.values()) == {1}
    schedule = Schedule.from_parquet(run_dir / "schedule.parquet")
    assert set(ours) <= {r.id for r in schedule}
    gone = [line["id"] for line in lines if line["finish_reason"] == "abort"]
    assert len(gone) >= 10
    records = [json.loads(line) for line in (run_dir / "requests.jsonl").read_text().splitlines()]
    outcome = {r["id"]: r["outcome"] for r in records if r["type"] == "request"}
    assert {outcome[request_id] for request_id in gone} == {"cancelled"}
    # Who leaves at once may be gone before the engine has heard of the request.
    assert {outcome[request_id] for request_id in set(outcome) - set(ours)} <= {"cancelled"}
    end = json.loads((run_dir / "engine_end.json").read_text())
    assert [end[name] for name in ("running", "waiting", "kv_live", "integrity")] == [0, 0, 0, "ok"]

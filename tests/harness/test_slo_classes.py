"""Limits of the SLO by class: whose they are, and what the command line does to them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.conf import compose
from harness.metrics.latency import meets_slo
from harness.slo import limit, limits_of, problem, shown


def test_a_class_is_held_to_its_own_limits_and_the_others_to_the_runs():
    slo = {"ttft_ms": 2000, "tpot_ms": None, "classes": {"code": {"ttft_ms": 500, "tpot_ms": 50}}}
    classes = pd.Series(["chat", "code", "code", "code"])
    assert limit(slo, classes, "ttft_ms").tolist() == [2000, 500, 500, 500]
    assert limit(slo, classes, "tpot_ms").tolist() == [np.inf, 50, 50, 50]
    frame = pd.DataFrame(
        {
            "request_class": classes,
            "outcome": "completed",
            "e2e_ms": 3000.0,
            "ttft_ms": [1000.0, 1000.0, 400.0, 400.0],
            "tpot_ms": [90.0, 40.0, 40.0, 60.0],
        }
    )
    assert meets_slo(frame, slo).tolist() == [True, False, True, False]
    assert meets_slo(frame, {"ttft_ms": 2000, "tpot_ms": 70}).tolist() == [False, True, True, True]


def test_limits_on_the_command_line_hold_for_all():
    own = limits_of(compose(["workload=mixed"]))
    assert own["classes"]["code"] == {"ttft_ms": 500, "tpot_ms": 50}
    assert "batch" not in own["classes"]
    assert "code: TTFT 500 ms, TPOT 50 ms" in shown(own)
    assert limits_of(compose(["workload=mixed", "slo.ttft_ms=900"])) == {"ttft_ms": 900, "tpot_ms": 200}
    both = limits_of(compose(["workload=mixed", "slo.ttft_ms=900", "slo.by_class=true"]))
    assert (both["ttft_ms"], both["classes"]["code"]["ttft_ms"]) == (900, 500)
    assert limits_of(compose(["workload=trace", "workload.path=x"])) == {"ttft_ms": 2000, "tpot_ms": 200}


def test_damaged_limits_are_named():
    assert problem({"ttft_ms": 1, "classes": {"a": {"tpot_ms": None}}}) is None
    assert problem({"ttft_ms": -1}) == "slo holds something else than numbers above 0"
    assert problem({"classes": {"a": {"ttft_ms": "soon"}}}) == "slo holds something else than numbers above 0"
    assert problem({"classes": [1]}) == "slo.classes is no object of objects"

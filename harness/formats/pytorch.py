"""Records of the PyTorch open-source benchmark database, schema v3: one a metric.

Every `extra_info` maps strings to strings, as the database's columns do (pytorch/test-infra,
clickhouse_db_schema/oss_ci_benchmark_v3). A field that nobody knows is left out, never zero."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from harness.formats.report import Figure, Report, dumps
from harness.table import lookup

CI_FIELDS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    # field, the variables of GitHub and GitLab that tell it (the first that is set), whether it is a number
    ("repo", ("GITHUB_REPOSITORY", "CI_PROJECT_PATH"), False),
    ("head_branch", ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME"), False),
    ("head_sha", ("GITHUB_SHA", "CI_COMMIT_SHA"), False),
    ("workflow_id", ("GITHUB_RUN_ID", "CI_PIPELINE_ID"), True),
    ("run_attempt", ("GITHUB_RUN_ATTEMPT",), True),
    ("job_id", ("CI_JOB_ID",), True),
)


def pytorch(report: Report, environ: Mapping[str, str]) -> str:
    """A JSON array. Another machine's figures stay: a record says where it was measured."""
    shared = _shared(report, environ)
    return dumps([{**shared, "metric": _metric(figure)} for figure in report.measured()])


def _shared(report: Report, environ: Mapping[str, str]) -> dict[str, Any]:
    summary, run = report.summary, report.summary["run"]
    prints = run["fingerprint"]
    record: dict[str, Any] = {"schema_version": "v3", "name": "batchmark gate"}
    with contextlib.suppress(ValueError):
        record["timestamp"] = int(datetime.fromisoformat(str(run.get("started_at"))).timestamp())
    record |= _ci(environ)
    where = {"device": summary.get("device"), **{f"{k}_fingerprint": prints[k] for k in ("host", "device")}}
    record["runners"] = [{"extra_info": _strings(where)}]
    about = {
        "workload": summary.get("workload"),
        "run": run["id"],
        "gate": report.outcome,
        "seed": run.get("seed"),
        **{f"{k}_fingerprint": prints[k] for k in ("schedule", "config")},
    }
    benchmark = {"name": report.name, "mode": "inference", "dtype": lookup(summary, "setup.runner.dtype")}
    record["benchmark"] = {**_known(benchmark), "extra_info": _strings(about)}
    model = {"name": summary.get("model"), "type": "serving", "backend": summary.get("engine")}
    record["model"] = _known(model)
    return record


def _metric(figure: Figure) -> dict[str, Any]:
    low, high = figure.ci95 or (None, None)
    change_low, change_high = figure.effect or (None, None)
    about = {
        "unit": figure.unit or None,
        "better": figure.better,
        "ci95_low": low,
        "ci95_high": high,
        "baseline": figure.baseline,
        "change_low": change_low,
        "change_high": change_high,
        "verdict": figure.word,
    }
    metric: dict[str, Any] = {"name": figure.metric}
    metric["benchmark_values"] = list(figure.rounds) or [figure.value]
    if figure.limit is not None:
        metric["target_value"] = figure.limit
    return {**metric, "extra_info": _strings(about)}


def _ci(environ: Mapping[str, str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for field, names, is_number in CI_FIELDS:
        value = next((environ[name] for name in names if environ.get(name)), None)
        if value is None or (is_number and not value.isdecimal()):
            continue
        fields[field] = int(value) if is_number else value
    return fields


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _strings(values: dict[str, Any]) -> dict[str, str]:
    return {k: f"{v:.6g}" if isinstance(v, float) else str(v) for k, v in _known(values).items()}

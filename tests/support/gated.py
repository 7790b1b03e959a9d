"""A slower run and the baseline that it is held against: one regression, two passes, one null figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.gate import PASS, main
from harness.metrics import write_summary
from tests.support.run_factory import request, write_run

METRICS = ("latency_ms.ttft.from_intended.p50", "latency_ms.tpot.p50", "throughput.output_tokens_per_s")
UNKNOWN = "steps.useful_token_fraction"  # a server that records no steps
PRINTS = {"schedule": "e9293c78a98d8813", "config": "9c37765ff3f91ab2", "host": "b52b", "device": "04df"}


def rows(gap: float, count: int = 80) -> list[dict[str, Any]]:
    """Answers whose TPOT lies within 10 % of gap, in seconds."""
    return [
        request(
            i, [(i * 0.1 + 0.2 + k * gap * (0.9 + 0.2 * i / count), 1) for k in range(11)], intended=i * 0.1
        )
        for i in range(count)
    ]


def gated(folder: Path, *, gap: float = 0.026, unknown: bool = True, **meta: Any) -> tuple[Path, Path]:
    """(run, baseline) in folder: TPOT rose from 20 ms to gap. meta changes the run's meta.json."""
    first = write_run(folder / "first", rows(0.02), fingerprint=PRINTS)
    path = folder / "chat.json"
    assert main([str(first), "--baseline", str(path), "--write-baseline"]) == PASS
    data = json.loads(path.read_text())
    data["metrics"] = {name: data["metrics"][name] for name in METRICS}
    if unknown:
        data["metrics"][UNKNOWN] = {"value": 0.9, "better": "higher", "absolute": 0.02}
    path.write_text(json.dumps(data))
    run = write_run(folder / "run", rows(gap), **{"fingerprint": PRINTS, **meta})
    write_summary(run)
    return run, path


def of_another(baseline: Path, part: str) -> Path:
    """The baseline, as if one of its fingerprints were another's."""
    data = json.loads(baseline.read_text())
    data["fingerprint"][part] = "other"
    baseline.write_text(json.dumps(data))
    return baseline

"""From the start of `python -m harness` against a URL to its first request at the server."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.calibrate.truth import truth_server
from harness.request_log import RecordsError, read_request_file

OVERRIDES = ("+engine=openai", "workload=chat", "load=open", "load.requests=5", "workload.rate=20")
TIMEOUT_S = 120.0


def start_to_first_request(server_core: int, *, runs: int = 3) -> dict[str, float | None]:
    """Medians in seconds: `at_server` until the first request came (one of the warm-up), `of_load` until the
    first measured one was sent. None when no run got that far."""
    at_server, of_load = [], []
    for _ in range(runs):
        first, sent = _one(server_core)
        at_server += [first] if first is not None else []
        of_load += [sent] if sent is not None else []
    return {
        "at_server": statistics.median(at_server) if at_server else None,
        "of_load": statistics.median(of_load) if of_load else None,
    }


def _one(server_core: int) -> tuple[float | None, float | None]:
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        with truth_server(instant=True, core=server_core) as server:
            command = [sys.executable, "-m", "harness", *OVERRIDES]
            command += [f"engine.base_url={server.base_url}", f"output.dir={folder}"]
            # The lock that keeps measured runs apart lies in TMPDIR, and this process holds it.
            quiet = subprocess.DEVNULL
            started_ns = time.monotonic_ns()
            subprocess.run(
                command, env=os.environ | {"TMPDIR": folder}, stdout=quiet, stderr=quiet, timeout=TIMEOUT_S
            )
            received = server.stop().rows["received_ns"]
        first = (int(received.min()) - started_ns) / 1e9 if len(received) else None
        for log in Path(folder).glob("*/requests.jsonl"):
            try:
                run = read_request_file(log)
            except RecordsError:
                continue
            sends = [run.t0_ns + r.send_ns - started_ns for r in run.records if r.send_ns is not None]
            if sends:
                return first, min(sends) / 1e9
        return first, None

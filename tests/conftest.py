"""What every test may rely on, and what may run beside what (`make test`: pytest-xdist, in groups)."""

from __future__ import annotations

import os
import signal

import pytest

# A shell starts background jobs with SIGINT ignored, nohup its command with SIGHUP. Children inherit that,
# and tests would press Ctrl-C in vain.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported: each of several processes with a thread for every core, which wait for each
    # other spinning, takes longer than one thread does. Engines that are started choose their own number.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

WHOLE_RUNS = (
    "tests/conformance/",
    "tests/e2e/",
    "tests/harness/test_calibrate.py",
    "tests/harness/test_loadgen_golden.py",
    "tests/harness/test_pacing.py",
    "tests/harness/test_peers.py",
    "tests/harness/test_truth_server.py",
)
"""Loads and servers at their own pace: one at a time, beside whatever else runs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups for --dist loadgroup: a file stays together, since its fixtures are shared, and whole runs are
    one group. It comes first, as its files do, so that the other processes share the rest meanwhile."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        file = item.nodeid.partition("::")[0]
        group = "whole runs" if file.startswith(WHOLE_RUNS) else file
        item.add_marker(pytest.mark.xdist_group(group))

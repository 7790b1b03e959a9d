"""What every test may rely on, and which ones want the machine to themselves."""

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

ALONE = (
    "tests/conformance/",
    "tests/e2e/",
    "tests/harness/test_calibrate.py",
    "tests/harness/test_lean_backend.py",
    "tests/harness/test_loadgen_",
    "tests/harness/test_pacing.py",
    "tests/harness/test_peers.py",
    "tests/harness/test_truth_server.py",
)
"""Loads and servers at their own pace: nothing runs beside them, also where JOBS share the other tests."""


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(ALONE):
            item.add_marker(pytest.mark.alone)

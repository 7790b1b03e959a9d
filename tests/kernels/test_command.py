"""Commands that are interrupted or that nobody reads end with a code and one line."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).parents[2] / "kernels")

COMMAND = """
import sys, time
sys.path.insert(0, {folder!r})  # not as kernels.command: that would import torch
from command import guard
def run():
    print("begun", flush=True)
    {what}
    return 1
sys.exit(guard(run))
"""


def start(what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(what=what, folder=FOLDER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_one_line(number: signal.Signals) -> None:
    with start("time.sleep(60)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (3, "interrupted: nothing is reported\n")


def test_a_reader_that_has_gone_is_no_fault() -> None:
    with start("sys.stdin.read(); print('more')") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stdin is not None
        process.stdin.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "")


def test_a_full_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", COMMAND.format(what="pass", folder=FOLDER)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (3, "error: No space left on device\n")


def test_other_codes_are_the_commands_own() -> None:
    with start("return 1") as process:
        process.communicate()
    assert process.returncode == 1

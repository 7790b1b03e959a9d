"""The progress bar shows what the records say, and nothing where nobody looks."""

from __future__ import annotations

import asyncio
import io
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from harness.loadgen import LoadSettings, Stop, Target
from harness.loadgen.channel import Channel
from harness.loadgen.job import Job
from harness.loadgen.processes import LoadProcesses
from harness.loadgen.progress import Progress, Tally, is_interactive
from harness.loadgen.worker import LIVE_S, LiveFigures
from harness.records import RequestRecord
from harness.tokenizer import ByteTokenizer
from tests.support.load import drive, every
from tests.support.script_process import ScriptProcess
from tests.support.script_server import ScriptServer, answer, refusal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(folder: Path, tally: Tally) -> dict[str, RequestRecord]:
    async def go() -> dict[str, RequestRecord]:
        async with ScriptServer(lambda body, n: refusal(503) if n == 2 else answer(5, 0.01)) as server:
            return (await drive(server.base_url, every(0.02, 6), folder, on_event=tally)).records

    return asyncio.run(go())


def shown(*tallies: Tally) -> Progress:
    """What the parent shows of its workers, whose figures came as JSON."""
    progress = Progress(6, enabled=False)
    for number, tally in enumerate(tallies):
        progress.update(number, orjson.loads(orjson.dumps(tally.frame())))
    return progress


def test_live_figures_are_those_of_the_records(tmp_path: Path) -> None:
    tally = Tally()
    records = load(tmp_path, tally)
    progress = shown(tally)
    assert (tally.launched, progress.under_way) == (6, 0)
    assert progress.outcomes == {"completed": 5, "rejected": 1}
    assert tally.tokens == sum(r.output_tokens or 0 for r in records.values()) == 25
    ttft = sorted((r.chunk_ns[0] - r.intended_ns) / 1e6 for r in records.values() if r.chunk_ns)[2]
    tpot = sorted((r.chunk_ns[-1] - r.chunk_ns[0]) / 4e6 for r in records.values() if r.chunk_ns)[2]
    live = progress.live()
    assert f"TTFT {ttft:.0f} ms" in live
    assert f"TPOT {tpot:.1f} ms" in live
    assert "rejected 1" in live


def test_the_figures_of_several_workers_are_put_together(tmp_path: Path) -> None:
    records = [r for r in load(tmp_path, Tally()).values() if r.chunk_ns]
    all_of_them, parts = Tally(), [Tally(), Tally()]
    for n, record in enumerate(records):
        for tally in (all_of_them, parts[n % 2]):
            tally("sent", None)
            tally("ended", record)
    for tally in (all_of_them, parts[1]):
        tally("sent", None)
        tally("retried", None)
        tally("sent", None)
    assert shown(*parts).live() == shown(all_of_them).live()
    assert shown(*parts).under_way == 1
    assert "tok/s" not in shown(*parts).live()  # in no time


def test_throughput_is_that_of_the_last_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = next(r for r in load(tmp_path, Tally()).values() if r.chunk_ns)
    now = 100.0
    monkeypatch.setattr("harness.loadgen.progress.time.monotonic", lambda: now)
    parts, progress = [Tally(), Tally()], Progress(6, enabled=False)
    for _ in range(20):
        for number, tally in enumerate(parts):  # a later frame of a worker takes the place of its earlier one
            tally("sent", None)
            tally("ended", replace(record, output_tokens=100 if now < 110 else 30))
            progress.update(number, tally.frame())
        now += 1
    assert progress.outcomes["completed"] == 40
    live = progress.live()
    assert 55 < float(live.split(" tok/s")[0].split()[-1]) < 70  # not the 200 of the time before
    assert live.startswith("in flight 0 ")


def test_a_worker_tells_a_display_when_it_has_nothing_else_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("harness.loadgen.worker.time.monotonic", lambda: now)
    ours, theirs = socket.socketpair()
    parent, tally = Channel(ours), Tally()
    live = LiveFigures(Channel(theirs), tally)
    assert not live()  # nothing has happened
    tally("sent", None)
    assert live()
    tally("sent", None)
    assert not live()  # too soon
    now += LIVE_S
    assert live()
    now += LIVE_S
    assert not live()
    assert [frame["launched"] for frame in parent.receive()] == [1, 2]


@pytest.mark.parametrize("backend", ["lean", "aiohttp"])
def test_a_display_gets_figures_more_often_than_nobody(tmp_path: Path, backend: str) -> None:
    with ScriptProcess() as server:
        server.play(answer(2, 0.01))
        without = frames_of_a_load(tmp_path / "without", server.base_url, backend, live=False)
        shown = frames_of_a_load(tmp_path / "with", server.base_url, backend, live=True)
    assert len(shown) > len(without) + 3
    assert shown == sorted(shown)


def frames_of_a_load(folder: Path, url: str, backend: str, *, live: bool) -> list[int]:
    """How many attempts had been launched, in each frame of a worker's load of 2 s."""
    folder.mkdir()
    target = Target(url, "m", tokenizer=ByteTokenizer())
    log = folder / "requests.jsonl"
    job = Job(target, LoadSettings("run", backend=backend), every(0.02, 100), 0, log, live=live)
    launched: list[int] = []
    with LoadProcesses() as load, Stop() as stop:
        load.prepare(job)
        assert load.wait_ready() is None
        t0_ns = time.monotonic_ns() + 50_000_000
        result = load.run(t0_ns, stop, lambda k, frame: launched.append(frame["launched"]))
    assert (result.backend, result.counts["completed"]) == (backend, 100)
    return launched


def test_no_figures_without_answers() -> None:
    assert Progress(1, enabled=False).live() == "in flight 0"
    assert shown(Tally()).live() == "in flight 0"


def test_bundled_and_single_chunk_answers_have_no_invented_pace(tmp_path: Path) -> None:
    tally = Tally()
    record = next(r for r in load(tmp_path, Tally()).values() if r.chunk_ns)
    tally("ended", replace(record, chunk_ns=record.chunk_ns[:1], chunk_tokens=(5,)))
    assert "TPOT" not in shown(tally).live()
    assert "TTFT" in shown(tally).live()


def test_a_terminal_sees_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    tally = Tally()
    load(tmp_path, tally)
    with Progress(6, enabled=True) as progress:
        progress.update(0, tally.frame())
    assert "6/6" in terminal.getvalue()


@pytest.mark.parametrize(
    ("stream", "ci", "shown"),
    [
        (Terminal(), None, True),
        (Terminal(), "true", False),
        (Terminal(), "1", False),
        (io.StringIO(), None, False),
    ],
)
def test_who_sees_it(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, ci: str | None, shown: bool
) -> None:
    if ci is None:
        monkeypatch.delenv("CI", raising=False)
    else:
        monkeypatch.setenv("CI", ci)
    assert is_interactive(stream) == shown
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(1) as progress:
        progress.update(0, Tally().frame())
    assert bool(stream.getvalue()) == shown


def test_pointing_a_load_at_a_server_imports_nothing_heavy() -> None:
    program = (
        "import sys, harness.loadgen.worker\n"
        "heavy = {'torch', 'pandas', 'pyarrow', 'transformers', 'scipy', 'rich', 'aiohttp', 'hydra'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"

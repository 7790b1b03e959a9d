"""The progress bar shows what the records say, and nothing where nobody looks."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from harness.loadgen.progress import Progress, Tally, is_interactive
from harness.records import RequestRecord
from tests.support.load import drive, every
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

"""The progress bar shows what the records say, and nothing where nobody looks."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.loadgen.progress import Progress, is_interactive
from harness.records import RequestRecord
from tests.support.load import drive, every
from tests.support.script_server import ScriptServer, answer, refusal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(folder: Path, progress: Progress) -> dict[str, RequestRecord]:
    async def go() -> dict[str, RequestRecord]:
        async with ScriptServer(lambda body, n: refusal(503) if n == 2 else answer(5, 0.01)) as server:
            return (await drive(server.base_url, every(0.02, 6), folder, on_event=progress)).records

    return asyncio.run(go())


def test_live_figures_are_those_of_the_records(tmp_path: Path) -> None:
    with Progress(enabled=False) as progress:
        records = load(tmp_path, progress)
    assert progress.scheduled == 6
    assert progress.under_way == 0
    assert progress.outcomes == {"completed": 5, "rejected": 1}
    ttft = sorted((r.chunk_ns[0] - r.intended_ns) / 1e6 for r in records.values() if r.chunk_ns)[2]
    tpot = sorted((r.chunk_ns[-1] - r.chunk_ns[0]) / 4e6 for r in records.values() if r.chunk_ns)[2]
    live = progress.live()
    assert f"TTFT {ttft:.0f} ms" in live
    assert f"TPOT {tpot:.1f} ms" in live
    assert "tok/s" in live
    assert "rejected 1" in live


def test_no_figures_without_answers() -> None:
    assert Progress(enabled=False).live() == "in flight 0"


def test_bundled_and_single_chunk_answers_have_no_invented_pace(tmp_path: Path) -> None:
    progress = Progress(enabled=False)
    record = next(r for r in load(tmp_path, Progress(enabled=False)).values() if r.chunk_ns)
    progress("ended", replace(record, chunk_ns=record.chunk_ns[:1], chunk_tokens=(5,)))
    assert "TPOT" not in progress.live()
    assert "TTFT" in progress.live()


def test_a_terminal_sees_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Progress(enabled=True) as progress:
        load(tmp_path, progress)
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
    with Progress() as progress:
        progress("scheduled", None)
    assert bool(stream.getvalue()) == shown


def test_pointing_a_load_at_a_server_imports_nothing_heavy() -> None:
    program = (
        "import sys, harness.loadgen, harness.loadgen.progress\n"
        "print(sorted({'torch', 'pandas', 'pyarrow', 'transformers', 'scipy', 'rich'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"

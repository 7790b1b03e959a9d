"""Records: what is written comes back, and what a kill or a full disk leaves is read as far as it goes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import records
from harness.records import (
    STEP_COLUMNS,
    RecordsError,
    RecordsWarning,
    RecordsWriteError,
    RequestLog,
    RequestRecord,
)

RECORD = RequestRecord(
    id="r000000",
    attempt=1,
    tenant="t",
    request_class="c",
    priority=-1,
    session=None,
    turn=0,
    stream=True,
    intended_ns=1,
    dispatch_ns=2,
    send_ns=3,
    headers_ns=None,
    first_event_ns=None,
    end_ns=9,
    chunk_ns=(4, 5),
    chunk_tokens=(1, 2),
    prompt_tokens=None,
    planned_prompt_tokens=3,
    output_tokens=3,
    token_source="ids",
    token_mismatch=False,
    max_tokens=4,
    stop_after=3,
    outcome="completed",
    reason=None,
    status=200,
    finish_reason="stop",
    error=None,
)
NEWER = ("final", "first_output_ns", "reasoning_tokens", "reads", "coalesced", "cached_tokens", "text")
T0 = 2**60  # a monotonic clock of 36 years: no float holds it to the nanosecond


def write(folder: Path, rows: list[RequestRecord], close: bool = True) -> Path:
    log = RequestLog(folder / "requests.jsonl", run="run", t0_ns=T0)
    for row in rows:
        log.append(row)
    if close:
        log.close()
    return log.path


def test_the_file_is_the_contract(tmp_path: Path) -> None:
    path = write(tmp_path, [RECORD, replace(RECORD, id="r1", text="hi")])
    header, first, second, footer = (orjson.loads(line) for line in path.read_bytes().splitlines())
    assert header == {"type": "header", "schema_version": 1, "run": "run", "t0_ns": T0}
    assert footer == {"type": "footer", "records": 2}
    assert first["type"] == "request"
    assert list(first)[1:] == [f.name for f in fields(RequestRecord) if f.name != "text"]
    assert second["text"] == "hi"
    contract = Path(__file__).parents[2] / "docs/architecture.md"
    block = contract.read_text().split("A request line:\n\n```\n")[1].split("```")[0]
    named = set(re.findall(r"\w+", block))
    for name in first:
        assert name in named, f"{name} is not in the contract"


ints = st.integers(0, 2**62) | st.none()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.builds(
            RequestRecord,
            id=st.uuids().map(str),
            **{
                f.name: st.just(getattr(RECORD, f.name))
                for f in fields(RECORD)
                if f.name not in ("id", "text")
            }
            | {
                "session": st.none() | st.text(max_size=5),
                "end_ns": ints,
                "output_tokens": ints,
                "chunk_ns": st.lists(st.integers(0, 2**62), max_size=3).map(tuple),
                "error": st.none() | st.text(max_size=9),
            },
            text=st.none() | st.text(max_size=9),
        ),
        max_size=5,
    ),
)
def test_every_record_comes_back(tmp_path: Path, rows: list[RequestRecord]) -> None:
    rows = [replace(row, chunk_tokens=(1,) * len(row.chunk_ns)) for row in rows]
    (tmp_path / "requests.jsonl").unlink(missing_ok=True)
    write(tmp_path, rows)
    assert records.read_requests(tmp_path) == rows
    frame = records.requests_frame(rows)
    assert list(frame.columns) == list(records.REQUEST_COLUMNS)
    assert [None if v is records_na(frame, v) else int(v) for v in frame["end_ns"]] == [
        r.end_ns for r in rows
    ]


def records_na(frame: Any, value: Any) -> Any:
    import pandas as pd

    return value if value is pd.NA else object()


def test_a_line_from_before_a_field_existed_reads_as_its_default(tmp_path: Path) -> None:
    newer = {"first_output_ns": 4, "reasoning_tokens": 1, "reads": 2, "coalesced": 1, "cached_tokens": 1}
    row = replace(RECORD, final=False, text="t", **newer)
    path = write(tmp_path, [row])
    assert records.read_requests(tmp_path) == [row]
    line = orjson.loads(path.read_bytes().splitlines()[1])
    older = {k: v for k, v in line.items() if k not in NEWER}
    assert len(older) == len(line) - len(NEWER)
    assert RequestRecord.from_mapping(older) == RECORD
    assert RequestRecord.from_mapping({**older, "unknown": 1}) == RECORD
    with pytest.raises(KeyError, match="send_ns"):
        RequestRecord.from_mapping({k: v for k, v in older.items() if k != "send_ns"})


def test_a_cut_anywhere_loses_the_last_line_only(tmp_path: Path) -> None:
    rows = [replace(RECORD, id=f"r{i}", text="ü🙂") for i in range(3)]
    path = write(tmp_path, rows)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 0x0A]
    cuts = {c for end in ends for c in range(end - 2, end + 3)} | set(range(ends[0], len(whole), 23))
    for cut in sorted(c for c in cuts if ends[0] <= c < len(whole)):
        path.write_bytes(whole[:cut])
        complete = sum(end <= cut for end in ends)
        # A line that only lacks its newline is whole.
        lines = complete + (cut + 1 in ends)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            file = records.read_request_file(path)
        assert len(file.records) == min(lines - 1, 3)
        assert file.closed == (lines == 5)
        cut_inside = cut not in ends and cut + 1 not in ends
        assert file.dropped == cut_inside
        assert bool(caught) == cut_inside


def test_a_killed_writer_leaves_every_ended_request(tmp_path: Path) -> None:
    program = (
        "import sys, os, signal\n"
        "from tests.harness.test_records import RECORD, replace\n"
        "from harness.records import RequestLog\n"
        f"log = RequestLog({str(tmp_path / 'requests.jsonl')!r}, run='run', t0_ns=5)\n"
        "for i in range(50): log.append(replace(RECORD, id=str(i)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert done.returncode == -signal.SIGKILL
    file = records.read_request_file(tmp_path / "requests.jsonl")
    assert [r.id for r in file.records] == [str(i) for i in range(50)]
    assert not file.closed


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, [RECORD, replace(RECORD, id="r1")])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\0\0\0\n", *lines[1:]]))
    with pytest.warns(RecordsWarning, match="line 2 is cut off or broken"):
        file = records.read_request_file(path)
    assert (len(file.records), file.dropped) == (2, 1)


def test_a_footer_that_counts_more_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, [RECORD, replace(RECORD, id="r1")])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2] + lines[3])
    with pytest.warns(RecordsWarning, match="counts 2 records, 1 were read"):
        records.read_request_file(path)


def test_no_header_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"")
    with pytest.raises(RecordsError, match="no header line"):
        records.read_requests(tmp_path)


def test_counts_made_after_the_run(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl", run="run", t0_ns=5)
    log.append(replace(RECORD, output_tokens=None, token_source=None))
    log.set_tokens("r000000", 1, 7)
    log.close()
    (record,) = records.read_requests(tmp_path)
    assert (record.output_tokens, record.token_source) == (7, "retokenised")


def test_a_full_disk_is_one_line_and_keeps_whole_lines(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.jsonl", run="run", t0_ns=5)
    log.append(RECORD)
    kept = log.path.read_bytes()

    class Full:
        """Takes half a line, then no more."""

        closed = False

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 20

        def write(self, data: memoryview) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            taken, self.room = self.file.write(data[: self.room]), 0
            return int(taken)

        def truncate(self, size: int) -> None:
            self.file.truncate(size)

        def close(self) -> None:
            self.file.close()

    log._file = Full(log._file)  # type: ignore[assignment]
    with pytest.raises(RecordsWriteError) as error:
        log.append(replace(RECORD, id="r1"))
    assert str(error.value) == f"cannot write {log.path}: No space left on device; what was written is kept"
    assert error.value.path == log.path
    with pytest.raises(RecordsWriteError):
        log.append(replace(RECORD, id="r2"))
    log.close()
    assert log.path.read_bytes() == kept
    assert not records.read_request_file(log.path).closed


def test_a_log_never_overwrites_another(tmp_path: Path) -> None:
    write(tmp_path, [RECORD])
    with pytest.raises(RecordsWriteError, match="File exists"):
        RequestLog(tmp_path / "requests.jsonl", run="run", t0_ns=5)


def test_parts_and_the_file_they_are_merged_into_read_alike(tmp_path: Path) -> None:
    rows = [replace(RECORD, id=f"r{i}", end_ns=100 - i) for i in range(4)]
    rows += [replace(RECORD, id="r1", attempt=2, end_ns=200), replace(RECORD, id="r9", end_ns=None)]
    for number in (2, 10):
        log = RequestLog(tmp_path / records.part_name(number, 11), run="run", t0_ns=T0)
        for row in rows[number // 10 :: 2]:
            log.append(row)
        log.close()
    (tmp_path / "requests.old.jsonl").write_bytes(b"not ours")
    assert [p.name for p in records.part_paths(tmp_path)] == ["requests.2.jsonl", "requests.10.jsonl"]
    before = records.read_run_file(tmp_path)
    assert [r.id for r in before.records] == ["r3", "r2", "r1", "r0", "r1", "r9"]
    assert (before.run, before.t0_ns, before.closed, before.dropped) == ("run", T0, True, 0)
    records.merge_parts(tmp_path, records.read_run_file(tmp_path))
    assert records.read_run_file(tmp_path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["requests.jsonl", "requests.old.jsonl"]
    # Killed between the rename and the removal: what is merged stands.
    (tmp_path / "requests.2.jsonl").write_bytes(b"rest")
    assert records.read_run_file(tmp_path) == before


def test_parts_as_kills_leave_them(tmp_path: Path) -> None:
    for number in range(3):
        log = RequestLog(tmp_path / records.part_name(number, 3), run="run", t0_ns=T0)
        log.append(replace(RECORD, id=f"r{number}", end_ns=number))
        log.close()
    torn = tmp_path / "requests.1.jsonl"
    torn.write_bytes(torn.read_bytes()[:-80])  # in the middle of its record, so no footer either
    with pytest.warns(RecordsWarning, match=r"requests\.1\.jsonl: line 2"):
        file = records.read_run_file(tmp_path)
    assert ([r.id for r in file.records], file.closed, file.dropped) == (["r0", "r2"], False, 1)
    torn.write_bytes(b"")
    file = records.read_run_file(tmp_path)
    assert ([r.id for r in file.records], file.closed) == (["r0", "r2"], False)
    lost = replace(RECORD, id="r1", end_ns=None, outcome="cut_off", reason="not_recorded")
    records.merge_parts(tmp_path, file, missing=[lost])
    file = records.read_run_file(tmp_path)
    assert ([r.id for r in file.records], file.closed) == (["r0", "r2", "r1"], True)
    assert file.records[-1] == lost


def test_parts_without_a_header_are_no_record(tmp_path: Path) -> None:
    (tmp_path / "requests.0.jsonl").write_bytes(b"")
    with pytest.raises(RecordsError, match="no header line"):
        records.read_run_file(tmp_path)


def test_a_merge_that_the_disk_refuses_leaves_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        log = RequestLog(tmp_path / records.part_name(number, 2), run="run", t0_ns=T0)
        log.append(replace(RECORD, id=f"r{number}"))
        log.close()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = records.read_run_file(tmp_path)
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RecordsWriteError, match="No space left"):
        records.merge_parts(tmp_path, file)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["requests.0.jsonl", "requests.1.jsonl"]
    assert len(records.read_requests(tmp_path)) == 2


def step_batches() -> list[pa.RecordBatch]:
    schema = records._schema(STEP_COLUMNS)
    row: dict[str, Any] = dict.fromkeys(STEP_COLUMNS, 1) | {
        "ids": [7, 8],
        "tokens": [1, 2],
        "kind": [0, 1],
        "preempted": [9],
        "blocked": "seats",
    }
    return [
        pa.RecordBatch.from_pylist(
            [row | {"step": 2 * b + i, "start_ns": T0 + i} for i in range(2)], schema=schema
        )
        for b in range(3)
    ]


def write_steps(path: Path) -> None:
    batches = step_batches()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)


def test_steps_cut_anywhere_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    path = tmp_path / "steps.arrow"
    write_steps(path)
    whole = path.read_bytes()
    counts = set()
    for cut in [*range(0, len(whole), len(whole) // 50), len(whole)]:
        path.write_bytes(whole[:cut])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecordsWarning)
            frame = records.read_steps(tmp_path)
        assert list(frame.columns) == list(STEP_COLUMNS)
        assert list(frame["step"]) == list(range(len(frame)))
        counts.add(len(frame))
    assert counts == {0, 2, 4, 6}
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.warns(RecordsWarning, match="cut off after"):
        records.read_steps(tmp_path)


def test_finalise_makes_parquet_of_everything_and_may_be_repeated(tmp_path: Path) -> None:
    write(tmp_path, [RECORD, replace(RECORD, id="r1", chunk_ns=(), chunk_tokens=(), output_tokens=None)])
    write_steps(tmp_path / "steps.arrow")
    (tmp_path / "telemetry.jsonl").write_bytes(
        b'{"t_ns":5,"client_cpu_pct":1.5}\n{"t_ns":6,"gpu_util_pct":null}\n{"t'
    )
    for _ in range(2):
        with pytest.warns(RecordsWarning, match=r"telemetry\.jsonl: line 3"):
            records.finalise(tmp_path)
        assert not (tmp_path / "steps.arrow").exists()
        assert pq.read_table(tmp_path / "requests.parquet").num_rows == 2
        chunks = pq.read_table(tmp_path / "chunks.parquet").to_pylist()
        assert chunks == [
            {"id": "r000000", "attempt": 1, "k": 0, "t_ns": 4, "tokens": 1},
            {"id": "r000000", "attempt": 1, "k": 1, "t_ns": 5, "tokens": 2},
        ]
        assert pq.read_table(tmp_path / "telemetry.parquet").column_names == list(records.TELEMETRY_COLUMNS)
        steps = records.read_steps(tmp_path)
        assert len(steps) == 6
        assert steps["start_ns"].tolist()[:2] == [T0, T0 + 1]
        assert list(steps["ids"][0]) == [7, 8]
        assert not list(tmp_path.glob("*.partial"))


def test_a_run_that_was_killed_before_anything_ended(tmp_path: Path) -> None:
    write(tmp_path, [], close=False)
    records.finalise(tmp_path)
    assert pq.read_table(tmp_path / "requests.parquet").num_rows == 0
    assert pq.read_table(tmp_path / "steps.parquet").num_rows == 0
    assert records.read_engine_requests(tmp_path).empty
    assert list(records.read_telemetry(tmp_path).columns) == list(records.TELEMETRY_COLUMNS)


def test_engine_requests_keep_nanoseconds_beside_nulls(tmp_path: Path) -> None:
    lines = [{"seq_id": 1, "arrival_ns": T0 + 1, "first_token_ns": None}, {"seq_id": 2, "arrival_ns": T0 + 2}]
    (tmp_path / "engine_requests.jsonl").write_bytes(b"\n".join(orjson.dumps(x) for x in lines))
    frame = records.read_engine_requests(tmp_path)
    assert frame["arrival_ns"].tolist() == [T0 + 1, T0 + 2]
    assert frame["first_token_ns"].isna().all()


def test_meta_is_replaced_in_one_step(tmp_path: Path) -> None:
    records.write_meta(tmp_path, {"run": "a", "complete": False})
    records.write_meta(tmp_path, {"run": "b", "complete": True})
    assert records.read_meta(tmp_path) == {"schema_version": 1, "run": "b", "complete": True}
    assert [p.name for p in tmp_path.iterdir()] == ["meta.json"]
    with pytest.raises(RecordsWriteError):
        records.write_meta(tmp_path / "nowhere", {})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        (b"{", "cannot be read"),
        (b'{"schema_version":9}', "schema_version 9"),
        (b"[]", "None"),
    ],
)
def test_meta_that_cannot_be_used(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "meta.json").write_bytes(content)
    with pytest.raises(RecordsError, match=says):
        records.read_meta(tmp_path)


def test_importing_records_loads_no_tables() -> None:
    program = "import sys, harness.records; print(sorted({'pandas', 'pyarrow', 'torch'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"

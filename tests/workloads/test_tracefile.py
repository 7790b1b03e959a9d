from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads import TraceError, WorkloadError
from workloads.readers import read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
GOOD = "2023-11-16 18:15:46.6805900,374,44"


@pytest.fixture
def write(tmp_path):
    def _write(content, name="trace.csv"):
        data = content if isinstance(content, bytes) else content.encode("utf-8")
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return _write


def row(**changes) -> str:
    return json.dumps(
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1], **changes}
    )


def message(path, **options) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    return text.removeprefix(str(path))


def test_azure_with_crlf_seven_digits_and_no_last_newline(write):
    trace = read_trace(write(f"{HEADER}\r\n{GOOD}\r\n2023-11-16 18:15:50.9951690,396,109"))
    assert trace.format == "azure"
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([374, 396], [44, 109])
    assert trace.blocks is None
    assert np.diff(trace.time_ns).tolist() == [4_314_579_000]


@pytest.mark.parametrize(
    ("stamp", "ns"),
    [
        ("2024-05-12 00:00:01+00:00", 1_000_000_000),
        ("2024-05-12 00:00:01.009930+00:00", 1_009_930_000),
        ("2024-05-12T00:00:00.269Z", 269_000_000),
        ("2024-05-12 02:00:00.5+02:00", 500_000_000),
        ("2024-05-12 00:00:00", 0),
        ("2024-05-12 00:00:00.1234567891", 123_456_789),
    ],
)
def test_times_with_any_fraction_and_zone(write, stamp, ns):
    trace = read_trace(write(f"{HEADER}\n2024-05-12 00:00:00,1,1\n{stamp},1,1\n"))
    assert trace.time_ns[-1] - trace.time_ns[0] == ns


def test_columns_are_found_by_name_behind_a_bom(write):
    content = '\ufeff"GeneratedTokens",Extra,TIMESTAMP,ContextTokens\n44,é,"2023-11-16 18:15:46",374\n'
    trace = read_trace(write(content))
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([374], [44])


def test_mooncake_rows(write):
    path = write("\n".join([row(timestamp=0), row(timestamp=3000.5, hash_ids=[0, 7]), ""]), "t.jsonl")
    trace = read_trace(path)
    assert trace.format == "mooncake"
    assert (trace.blocks.start.tolist(), trace.blocks.ids.tolist()) == ([0, 2, 4], [0, 1, 0, 7])
    assert trace.time_ns[1] == 3_000_500_000
    bare = write(json.dumps({"timestamp": 1, "input_length": 600, "output_length": 5.0}))
    assert read_trace(bare).blocks is None


@pytest.mark.parametrize("name", ["trace.csv.gz", "trace.csv"])
def test_gzip_is_known_by_its_content(write, name):
    trace = read_trace(write(gzip.compress(f"{HEADER}\n{GOOD}\n".encode()), name))
    assert len(trace) == 1


def test_limit_reads_no_further_than_it_needs(write):
    path = write(f"{HEADER}\n{GOOD}\n{GOOD}\nbroken\n")
    assert len(read_trace(path, limit=2)) == 2
    assert "line 4" in message(path, limit=3)


def test_times_that_go_back_are_sorted_and_said(write):
    early = GOOD.replace("18:15", "17:15").replace("374", "1")
    trace = read_trace(write(f"{HEADER}\n{GOOD}\n{early}\n{GOOD}\n"))
    assert trace.input_tokens.tolist() == [1, 374, 374]
    assert any("go back 1 times" in note for note in trace.notes)


READ_BOTH = """
import resource, sys
from workloads.readers import read_trace
peaks = []
for path in sys.argv[1:]:
    trace = read_trace(path)
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes
    peaks.append(kib if sys.platform == "darwin" else kib * 1024)
print(len(trace), peaks[1] - peaks[0])
"""


def test_memory_grows_by_the_columns_alone(tmp_path):
    paths = []
    for rows in (20_000, 200_000):
        path = tmp_path / f"{rows}.csv"
        lines = (f"2024-05-12 00:00:{i % 60:02d}.{i % 1000:03d},{i},{i}\n" for i in range(1, rows + 1))
        path.write_text(HEADER + "\n" + "".join(lines))
        paths.append(str(path))
    out = subprocess.run(
        [sys.executable, "-c", READ_BOTH, *paths], capture_output=True, text=True, check=True
    )
    rows, grown = map(int, out.stdout.split())
    assert rows == 200_000
    assert grown / 180_000 < 120, "bytes a row: 3 columns of 8, here sorted, so twice, and their order"


def test_missing_empty_and_headless_files(write, tmp_path):
    assert "no such file" in message(tmp_path / "nowhere.csv")
    assert "no regular file" in message(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "no regular file" in message(pipe)  # nobody writes to it: it would be waited for without end
    assert "no regular file" in message("/dev/null")
    assert "is empty" in message(write(""))
    assert "is empty" in message(write("\n \r\n"))
    assert "is empty" in message(write(gzip.compress(b"")))
    assert "has a header but no rows" in message(write(HEADER + "\r\n"))
    text = message(write("time,in,out\n1,2,3\n"))
    assert "line 1" in text
    assert "workload.format" in text
    text = message(write("TIMESTAMP,ContextTokens,Generated\n"))
    assert "line 1, column GeneratedTokens" in text
    assert "2 times" in message(write("TIMESTAMP,TIMESTAMP,ContextTokens,GeneratedTokens\n"))
    assert "column TIMESTAMP" in message(write(row()), format="azure")
    assert "is not JSON" in message(write(HEADER), format="mooncake")
    with pytest.raises(WorkloadError, match="format=csv: choose from auto, aiperf, azure"):
        read_trace(write(HEADER), format="csv")


def test_gzip_that_is_cut_short_or_damaged(write):
    rows = "".join(f"2023-11-16 18:15:46.{i:07d},{i},44\n" for i in range(1, 5000))
    packed = gzip.compress(f"{HEADER}\n{rows}".encode())
    for data in (packed[: len(packed) // 2], packed[:-8], packed[:500] + b"\0" * 40 + packed[540:]):
        text = message(write(data), on_bad_row="skip")
        assert "cut short or damaged" in text
        assert ", line " in text


@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        ("2023-11-16 18:15:46.68,0,44", "ContextTokens", "0 is below 1 token"),
        ("2023-11-16 18:15:46.68,-5,44", "ContextTokens", "-5 is below 1 token"),
        ("2023-11-16 18:15:46.68,374,0", "GeneratedTokens", "0 is below 1 token"),
        ("2023-11-16 18:15:46.68,374,4.5", "GeneratedTokens", "'4.5' is not a whole number"),
        ("2023-11-16 18:15:46.68,374,nan", "GeneratedTokens", "'nan' is not a whole number"),
        ("2023-11-16 18:15:46.68,374,", "GeneratedTokens", "'' is not a whole number"),
        ("2023-11-16 18:15:46.68,1e3,4", "ContextTokens", "'1e3' is not a whole number"),
        ("2023-11-16 18:15:46.68,1_000,4", "ContextTokens", "'1_000' is not a whole number"),
        ("2023-11-16 18:15:46.68,３７４,4", "ContextTokens", "'\\uff13\\uff17\\uff14' is not a whole number"),
        ("2023-11-16 18:15:46.68,99999999999999999999,4", "ContextTokens", "is above 10000000 tokens"),
        ("2023-11-16 18:15:46.68,374", None, "has 2 fields, the header has 3"),
        ("2023-11-16 18:15:46.68,374,44,1", None, "has 4 fields, the header has 3"),
        ('2023-11-16 18:15:46.68,"374,44', None, "is not CSV"),
        ("16/11/2023 18:15,374,44", "TIMESTAMP", "'16/11/2023 18:15' is not a time such as"),
        ("2023-13-45 18:15:46.68,374,44", "TIMESTAMP", "is not a time such as"),
        ("2023-11-16 25:15:46,374,44", "TIMESTAMP", "is not a time such as"),
        (",374,44", "TIMESTAMP", "'' is not a time"),
    ],
)
def test_a_bad_azure_row_is_named_or_skipped_and_counted(write, line, column, reason):
    path = write(f"{HEADER}\n{GOOD}\n{line}\n{GOOD}\n")
    text = message(path)
    where = ", line 3" + (f", column {column}" if column else "")
    assert text.startswith(where + ": ")
    assert reason in text
    trace = read_trace(path, on_bad_row="skip")
    assert (len(trace), trace.skipped) == (2, 1)
    assert "1 bad rows skipped" in trace.notes[0]
    assert "line 3" in trace.notes[0]


@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        ("{", None, "is not JSON"),
        ("[1, 2]", None, "is not a JSON object"),
        ("[" * 100_000, None, "is not JSON"),
        ('{"timestamp": 1, "input_length": 2}', "output_length", "is missing"),
        (row(timestamp="0"), "timestamp", "'0' is not a time in milliseconds"),
        (row(timestamp=-1), "timestamp", "-1 is not a time"),
        (row(timestamp=float("nan")), "timestamp", "nan is not a time"),
        (row(timestamp=True), "timestamp", "True is not a time"),
        (row(input_length=0), "input_length", "0 is below 1 token"),
        (row(input_length=600.5), "input_length", "600.5 is not a whole number"),
        (row(input_length=float("nan")), "input_length", "nan is not a whole number"),
        (row(output_length=None), "output_length", "None is not a whole number"),
        (row(output_length=10**400), "output_length", "is above 10000000 tokens"),
        (row(hash_ids=[1]), "hash_ids", "has 1 ids, 600 tokens need 2 blocks of 512"),
        (row(hash_ids=[1, -2]), "hash_ids", "is not a list of whole numbers"),
        (row(hash_ids="12"), "hash_ids", "is not a list of whole numbers"),
    ],
)
def test_a_bad_mooncake_row_is_named_or_skipped_and_counted(write, line, column, reason):
    path = write(f"{row()}\n{line}\n{row()}\n", "t.jsonl")
    text = message(path)
    where = ", line 2" + (f", column {column}" if column else "")
    assert text.startswith(where + ": ")
    assert reason in text
    trace = read_trace(path, on_bad_row="skip")
    assert (len(trace), trace.skipped) == (2, 1)


def test_bytes_that_are_no_text(write):
    path = write(f"{HEADER}\n{GOOD}\n".encode() + b"\xff\xfe,1,2\n")
    assert message(path).startswith(", line 3: byte 0 is not UTF-8 text")
    assert read_trace(path, on_bad_row="skip").skipped == 1
    assert "is not UTF-8" in message(write(f"{HEADER}\n{GOOD}\n".encode("utf-16")))
    assert "is longer than" in message(write(f"{HEADER}\n".encode() + b"1" * 2_000_000), on_bad_row="skip")


def test_nothing_usable_is_an_error_also_when_skipping(write):
    text = message(write(f"{HEADER}\nx\ny\n"), on_bad_row="skip")
    assert "no usable row; skipped 2, first: " in text
    assert "line 2" in text


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=300), head=st.sampled_from([b"", HEADER.encode() + b"\n", b"\x1f\x8b", b"{"]))
def test_no_bytes_make_anything_but_rows_or_a_one_line_error(tmp_path_factory, data, head):
    path = tmp_path_factory.mktemp("t") / "trace"
    path.write_bytes(head + data)
    for on_bad_row in ("error", "skip"):
        try:
            trace = read_trace(path, on_bad_row=on_bad_row)
        except TraceError as exc:
            assert "\n" not in str(exc)  # noqa: PT017
        else:
            assert len(trace)

"""ServeGen's three forms: requests are drawn from windows, as many as they say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from workloads import TraceError
from workloads.readers import read_trace


@pytest.fixture
def write(tmp_path):
    def _write(content, name="trace"):
        if isinstance(content, list):
            content = "\n".join(c if isinstance(c, str) else json.dumps(c) for c in content)
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return _write


def lengths(trace) -> list[tuple[int, int]]:
    return list(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True))


def test_servegen_offline_jobs_have_no_times(write):
    rows = [
        {"request_id": 1, "type": "score", "input_length": 40, "hash_ids": [1, 2, 3], "img_ids": []},
        {
            "request_id": 2,
            "type": "gen",
            "input_length": 32,
            "hash_ids": [1, 2],
            "output_length": 9,
            "duration": 80,
        },
    ]
    trace = read_trace(write(rows))
    assert (trace.format, trace.time_ns, lengths(trace)) == ("servegen", None, [(40, 1), (32, 9)])
    assert trace.blocks.tokens == 16
    assert any("1 jobs without an output_length" in note for note in trace.notes)


def chunks(write):
    write("0,0.5,2.0,Gamma,0.25,8.0\n600,0.0,0.0,,,\n1200,0.1,1.0,Exponential,1,10", "sg/chunk-0-trace.csv")
    write("0,0.25,3.0,Weibull,0.4,1.2\n600,0.05,1,Gamma,1,1\n", "sg/chunk-1-trace.csv")
    tables = {"0": {"input_tokens": "{100: 0.5, 200: 0.5}", "output_tokens": "{7: 1.0}"}, "600": {}}
    return write(json.dumps(tables), "sg/chunk-0-dataset.json").parent


def test_servegen_requests_are_drawn_from_windows(write):
    folder = chunks(write)
    trace = read_trace(folder)
    assert (trace.format, len(trace)) == ("servegen", 300 + 60 + 150 + 30)
    assert (np.diff(trace.time_ns) >= 0).all()
    user = np.array(trace.user.list())
    assert [(user == client).sum() for client in ("0", "1")] == [360, 180]
    assert set(trace.input_tokens[user == "0"].tolist()) == {100, 200}
    assert set(trace.output_tokens[user == "0"].tolist()) == {7}
    assert trace.times_s()[-1] < 1800
    assert any("1 of 2 clients have no dataset" in note for note in trace.notes)
    again, other = read_trace(folder), read_trace(folder, seed=1)
    assert again.time_ns.tolist() == trace.time_ns.tolist()
    assert other.time_ns.tolist() != trace.time_ns.tolist()
    first = read_trace(folder, limit=100)
    assert first.time_ns.tolist() == trace.time_ns[:100].tolist()
    gaps = np.diff(trace.time_ns[user == "0"][:300] / 1e9)
    assert 1.5 < gaps.std() / gaps.mean() < 2.6
    assert len(read_trace(folder / "chunk-1-trace.csv")) == 180


def test_servegen_shares_are_python_dicts_and_nothing_that_runs(write):
    folder = chunks(write)
    write(json.dumps({"0": {"input_tokens": "__import__('os').getcwd()"}}), "sg/chunk-0-dataset.json")
    with pytest.raises(TraceError, match=r"column 0.input_tokens: .*is not a dict of lengths and shares"):
        read_trace(folder)


def test_servegen_client_windows_as_a_table(write):
    rows = ["client,window_start_s,rate_rps,cv,pattern,shape,scale", "61,0,0.5,1.0,Gamma,1,2"]
    trace = read_trace(write([*rows, "142,0,0.01,12,Weibull,0.3,9"], "servegen_m-mid_client_windows.csv"))
    assert len(trace) == 306
    assert any("all clients of m-mid" in note for note in trace.notes)
    with pytest.raises(TraceError, match="column pattern: 'Zipf' is not one of Gamma"):
        read_trace(write([rows[0], "1,0,1,1,Zipf,1,1"]))

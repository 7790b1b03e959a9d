"""What each format's files look like, and the quirks of each: small files made here, and the public traces
where they are."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from tests.workloads.test_traces import real
from workloads import TraceError
from workloads.readers import FORMATS, read_trace


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


def nan_as_none(column) -> list[float | None]:
    return [None if value != value else value for value in column.tolist()]


def test_a_git_lfs_pointer_is_named_as_such(write):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4bb378\nsize 52283111\n"
    with pytest.raises(TraceError, match=r"BurstGPT_1.csv: is a Git LFS pointer, not the data.*git lfs pull"):
        read_trace(write(pointer, "BurstGPT_1.csv"))


def test_azure_2025_has_image_requests(write):
    rows = ["TIMESTAMP,NumImages,ContextTokens,GeneratedTokens"]
    rows += ["2024-10-15T12:00:00.269Z,0,100,10", "2024-10-15T12:00:01Z,2,1500,20"]
    trace = read_trace(write(gzip.compress("\r\n".join(rows).encode())))
    assert (trace.format, lengths(trace)) == ("azure", [(100, 10), (1500, 20)])
    assert trace.request_class.list() == ["text", "image"]
    assert np.diff(trace.time_ns).tolist() == [731_000_000]


def test_burstgpt_1_drops_and_counts_failures_and_keeps_its_clock(write):
    rows = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"]
    rows += ["5,ChatGPT,472,18,490,Conversation log", "45,ChatGPT,0,0,0,Conversation log"]
    rows += ["45,GPT-4,1087,230,1317,API log", ""]
    trace = read_trace(write(rows))
    assert (trace.format, lengths(trace)) == ("burstgpt", [(472, 18), (1087, 230)])
    assert (trace.failed, trace.skipped) == (1, 0)
    assert "1 failed requests (without tokens) left out" in trace.notes
    assert trace.times_s().tolist() == [0, 40]
    assert trace.user.list() == ["ChatGPT", "GPT-4"]
    assert trace.request_class.list() == ["Conversation log", "API log"]
    assert trace.session is None


def test_burstgpt_3_has_two_columns_more_in_the_middle(write):
    rows = ["Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"]
    rows += [
        "19440110.0,7,4.0,ChatGPT,10,2,12,Conversation log",
        "19440112.0,,1.0,ChatGPT,11,3,14,API log",
        "19440120.0,7,0.0,ChatGPT,30,4,34,Conversation log",
    ]
    trace = read_trace(write(rows))
    assert trace.session.list() == ["7", None, "7"]
    assert nan_as_none(trace.think_s) == [None, None, 6.0], "from the end of the answer before"
    assert trace.times_s().tolist() == [0, 2, 10]


def test_burstgpt_as_jsonl(write):
    rows = [{"request_arrival_ts_s": 5.5, "input_tokens": 9, "output_tokens": 3}]
    trace = read_trace(write([*rows, {**rows[0], "output_tokens": 0}]))
    assert (trace.format, lengths(trace), trace.failed) == ("burstgpt", [(9, 3)], 1)


def test_bailian_chats_are_sessions_of_16_token_blocks(write):
    def row(chat, parent, at, tokens, ids, **more):
        more = {"type": "text", "turn": 1, **more}
        return {
            "chat_id": chat,
            "parent_chat_id": parent,
            "timestamp": at,
            "input_length": tokens,
            "output_length": 5,
            "hash_ids": ids,
            **more,
        }

    rows = [
        row(10, -1, 0.25, 33, [1, 2, 3]),
        row(11, 9, 0.5, 16, [4], type="image"),  # its parent is from before the trace
        row(12, 10, 7.25, 48, [1, 2, 5]),
        row(13, 12, 9.0, 50, [1, 2, 5], turn=3),  # the rest of 2 tokens has no id
    ]
    trace = read_trace(write(rows))
    assert trace.format == "bailian"
    assert trace.session.list() == ["10", "11", "10", "10"]
    assert nan_as_none(trace.think_s) == [None, None, 7.0, 1.75]
    assert trace.request_class.list() == ["text", "image", "text", "text"]
    assert trace.blocks.tokens == 16
    assert np.diff(trace.blocks.start).tolist() == [3, 1, 3, 4]
    assert trace.blocks.ids[-1] not in trace.blocks.ids[:-1]
    text = "column hash_ids: has 1 ids, 33 tokens have 2 full blocks of 16"
    with pytest.raises(TraceError, match=text):
        read_trace(write([row(1, -1, 0, 33, [1])]))


def ragpulse(write, lines, **lengths_of):
    kinds = ["1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search"]
    for kind in kinds:
        name = kind[2:].rstrip("s") if kind == "2_passages" else kind[2:]
        table = lengths_of.get(kind[2:], {999: 1})
        write([{f"{name}_id": i, "token_length": n} for i, n in table.items()], f"rag/{kind}.jsonl")
    return write("\n".join(lines) + "\n\n", "rag/0_trace.jsonl").parent


def rag_row(at, tokens, passages, session="1757476916095-x", **more):
    ids = {
        "sys_prompt": [1, 2],
        "passages_ids": passages,
        "history": [3],
        "web_search": [],
        "user_input": [4],
    }
    return json.dumps(
        {"timestamp": at, "input_length": tokens, "output_length": 9, "hash_ids": ids, "session_id": session}
        | more
    )


def test_ragpulse_parts_string_stamps_and_the_second_week(write):
    tables = {"sys_prompt": {1: 512, 2: 100}, "passages": {7: 200, 8: 300}}
    tables |= {"history": {3: 11}, "user_input": {4: 6}}
    rows = [rag_row("82", 1136, [7, 8]), rag_row("600000", 837, [7]), rag_row("0", 836, [7])]
    folder = ragpulse(write, rows, **tables)
    for path in (folder, folder / "0_trace.jsonl"):
        trace = read_trace(path)
        assert (trace.format, len(trace)) == ("ragpulse", 3)
        assert trace.times_s().tolist() == [0, 599_918, 604_718]
        assert trace.parts.totals().tolist() == [1136, 837, 836]
        names = trace.parts.ids()
        assert names[:7] == [
            *("sys_prompt/1", "sys_prompt/2", "passages_ids/7", "passages_ids/8", "history/3"),
            *("user_input/4", "rest/0"),
        ]
        assert trace.parts.tokens[:7].tolist() == [512, 100, 200, 300, 11, 6, 7]
        assert any("starts again 1 times" in note for note in trace.notes)
    assert trace.session.list() == ["1757476916095-x"] * 3
    (folder / "2_passages.jsonl").unlink()
    bare = read_trace(folder)
    assert bare.parts is None
    assert any("are not all beside it" in note for note in bare.notes)


def test_ragpulse_rows_that_do_not_add_up(write):
    folder = ragpulse(write, [rag_row("1", 100, [7])], sys_prompt={1: 512, 2: 1}, passages={7: 1})
    with pytest.raises(
        TraceError, match=r"line 1, column hash_ids.history: names 3, which 3_history does not"
    ):
        read_trace(folder)
    tables = {"sys_prompt": {1: 512, 2: 1}, "passages": {7: 1}, "history": {3: 1}, "user_input": {4: 1}}
    folder = ragpulse(write, [rag_row("1", 100, [7])], **tables)
    with pytest.raises(TraceError, match="the parts have 516 tokens, input_length is 100"):
        read_trace(folder)


WEKA = {
    "id": "trace_0001",
    "models": ["m"],
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        {
            "t": 0,
            "type": "n",
            "in": 130,
            "out": 9,
            "hash_ids": [0, 1],
            "input_types": ["text"],
            "api_time": 2.5,
        },
        {
            "type": "subagent",
            "requests": [
                {"t": 0, "type": "n", "in": 64, "out": 0, "hash_ids": [2], "input_types": ["text"]},
                {"t": 3, "type": "n", "in": 65, "out": 4, "hash_ids": [2], "think_time": 2},
            ],
        },
        {"t": 9, "type": "s", "in": 192, "out": 7, "hash_ids": [0, 1, 3], "think_time": 5, "stop": ""},
    ],
}


def test_weka_sessions_nest_sub_agents_and_count_ids_for_themselves(write):
    write(json.dumps(WEKA, indent=1), "weka/trace_0001.json")
    second = {**WEKA, "id": "trace_0002", "requests": WEKA["requests"][:1]}
    folder = write(json.dumps(second), "weka/trace_0002.json").parent
    trace = read_trace(folder)
    assert (trace.format, trace.time_ns) == ("weka", None)
    assert lengths(trace) == [(130, 9), (64, 1), (65, 4), (192, 7), (130, 9)]
    sub = "trace_0001/main/agent_001"
    assert trace.session.list() == ["trace_0001/main", sub, sub, "trace_0001/main", "trace_0002/main"]
    assert trace.user.list() == ["trace_0001"] * 4 + ["trace_0002"]
    assert nan_as_none(trace.think_s) == [None, None, 2.0, 5.0, None]
    assert "1 answers of 0 tokens taken as 1" in trace.notes
    rows = [
        trace.blocks.ids[a:b].tolist()
        for a, b in zip(trace.blocks.start, trace.blocks.start[1:], strict=False)
    ]
    assert trace.blocks.tokens == 64
    assert rows[0][:2] == rows[3][:2]
    assert rows[1] == rows[2][:1]
    assert len(rows[0]) == 3, "the part of a block at the end has an id of its own"
    assert not set(rows[4]) & {i for row in rows[:4] for i in row}
    assert len(read_trace(folder / "trace_0001.json", limit=2)) == 2
    write(json.dumps({**WEKA, "requests": [{"in": 300, "out": 1, "hash_ids": [1]}]}), "weka/trace_0002.json")
    text = r"trace_0002.json, column requests\[0\].hash_ids: has 1 ids, 300 tokens have 4 full blocks of 64"
    with pytest.raises(TraceError, match=text):
        read_trace(folder)
    assert read_trace(folder, on_bad_row="skip").skipped == 1


def test_weka_as_csv(write):
    head = "trace,agent,depth,turn,t_s,type,model,input_tokens,output_tokens,prefix_hit_tokens,api_time_s,"
    rows = [head + "think_time_s,stop,input_types,output_types"]
    rows += [
        "0001,main,0,0,0,n,m,1000,169,0,,0,tool_use,text,text",
        "0001,main,0,1,19,s,m,1300,0,960,9,12,,,",
    ]
    trace = read_trace(write(rows))
    assert (trace.format, lengths(trace)) == ("weka", [(1000, 169), (1300, 1)])
    assert trace.reused_tokens.tolist() == [0, 960]
    assert nan_as_none(trace.think_s) == [None, 12.0]
    assert trace.request_class.list() == ["text", None]


def tracelab_row(number, asked, at, answered, total, prefix):
    events = [{"event_type": asked, "timestamp": at}, {"event_type": "text", "timestamp": answered}]
    return {
        "provider": "claude",
        "session_id": "s1",
        "round_index": number,
        "input_tokens_total": total,
        "prefix_tokens": prefix,
        "newly_append_tokens": total - prefix,
        "output_tokens": 4,
        "timing_events": events,
        "tools": [],
    }


def test_tracelab_calls_wait_from_the_end_of_the_one_before(write):
    rows = [
        tracelab_row(0, "user_message", "2026-05-01T00:00:00Z", "2026-05-01T00:00:02.500Z", 64, 0),
        tracelab_row(1, "tool_result", "2026-05-01T00:00:03Z", "2026-05-01T00:00:05Z", 128, 64),
    ]
    trace = read_trace(write(rows))
    assert (trace.format, lengths(trace)) == ("tracelab", [(64, 4), (128, 4)])
    assert nan_as_none(trace.think_s) == [None, 0.5]
    assert trace.reused_tokens.tolist() == [0, 64]
    assert trace.request_class.list() == ["user_message", "tool_result"]
    rows[1]["timing_events"] = []
    with pytest.raises(TraceError, match="line 2, column timing_events"):
        read_trace(write(rows))


def test_tracelab_csv_appends_to_its_prefix_and_is_closed(write):
    rows = ["id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len"]
    rows += ["3,100,10,500,0,250,0", "3,20,11,500,1,0,100", "4,50,12,900.5,0,0,0"]
    trace = read_trace(write(rows))
    assert (trace.format, trace.closed) == ("tracelab", True)
    assert lengths(trace) == [(100, 10), (120, 11), (50, 12)]
    assert trace.time_ns.tolist() == [500_000_000, 750_000_000, 900_500_000]
    assert nan_as_none(trace.think_s) == [None, 0.25, None]


def test_lengths_with_and_without_times(write):
    rows = [
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio",
        "3772,54,3826,69.85",
        "73,3900,1,1",
    ]
    trace = read_trace(write(rows))
    assert (trace.format, trace.time_ns, lengths(trace)) == ("lengths", None, [(3772, 54), (73, 3900)])
    rows = ["arrived_at,num_prefill_tokens,num_decode_tokens", "0.0,374.0,44", "4.314579,396,109"]
    assert read_trace(write(rows)).times_s().tolist() == [0, 4.314579]


def usage(prompt, answer, cached=None):
    made = {"prompt_tokens": prompt, "completion_tokens": answer}
    return made if cached is None else {**made, "prompt_tokens_details": {"cached_tokens": cached}}


def test_a_request_log_of_an_openai_style_server(write):
    rows = [
        {
            "timestamp": "2025-03-01T12:00:00.25Z",
            "usage": usage(812, 44, 512),
            "latency": 1.5,
            "session_id": "a",
        },
        {"timestamp": "2025-03-01T12:00:01Z", "status": 429, "error": "rate limit"},
        {"timestamp": "2025-03-01T12:00:04.75Z", "usage": usage(900, 0), "status": 200, "session_id": "a"},
    ]
    trace = read_trace(write(rows))
    assert (trace.format, lengths(trace)) == ("requestlog", [(812, 44), (900, 1)])
    assert (trace.failed, trace.reused_tokens.tolist()) == (1, [512, 0])
    assert nan_as_none(trace.think_s) == [None, 3.0]


@pytest.mark.parametrize(
    "row",
    [
        {"created": 1740830400, "usage": usage(10, 2)},
        {"time": 1740830400.0, "usage": {"input_tokens": 10, "output_tokens": 2}, "status_code": "200"},
        {"ts": 1740830400000, "prompt_tokens": 10, "completion_tokens": 2, "latency_ms": 5},
        {"created_at": "2025-03-01 12:00:00", "response": {"usage": usage(10, 2), "model": "m"}},
        {"startTime": "2025-03-01T13:00:00+01:00", "usage": {**usage(4, 2), "cache_read_input_tokens": 6}},
        {
            "custom_id": "x",
            "response": {"status_code": 200, "body": {"created": 1740830400, "usage": usage(10, 2)}},
        },
    ],
)
def test_the_common_variants_of_a_request_log(write, row):
    trace = read_trace(write([row]))
    assert (trace.format, lengths(trace)) == ("requestlog", [(10, 2)])
    assert trace.time_ns.tolist() == [1740830400 * 10**9]


def test_files_of_vllm_and_dynamo_have_other_names_and_blocks(write):
    rows = [{"timestamp": 0, "input_length": 33, "output_length": 5, "hash_ids": [1, 2, 3]}]
    trace = read_trace(write([*rows, {**rows[0], "timestamp": 5.5, "hash_ids": []}]))
    assert (trace.format, trace.blocks.tokens, trace.time_ns.tolist()) == ("mooncake", 16, [0, 5_500_000])
    assert np.diff(trace.blocks.start).tolist() == [3, 0]
    dynamo = {"created_time": 12.5, "input_tokens": 600, "output_tokens": 5, "hash_ids": [0, 1]}
    trace = read_trace(write([dynamo]))
    assert (trace.format, lengths(trace), trace.blocks.tokens) == ("aiperf", [(600, 5)], 512)
    assert lengths(read_trace(write(rows), format="vllm")) == [(33, 5)]


def test_turns_of_an_aiperf_session_add_to_it(write):
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 50, "hash_ids": [0, 1]},
        {"session_id": "b", "timestamp": 10, "input_length": 40, "output_length": 5},
        {"session_id": "a", "delay": 2000, "input_length": 30, "output_length": 7},
    ]
    trace = read_trace(write(rows))
    assert (trace.format, trace.closed) == ("aiperf", True)
    assert lengths(trace) == [(600, 50), (40, 5), (680, 7)]
    assert nan_as_none(trace.think_s) == [None, None, 2.0]
    names = trace.parts.ids()
    assert (names[:2], names[3:5]) == (["block/0", "block/1"], ["block/0", "block/1"])
    with pytest.raises(TraceError, match="column text_input: carries text; needs input_length"):
        read_trace(write([{"session_id": "a", "text_input": "hello", "output_length": 3}]))


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            ["TIMESTAMP,ContextTokens,GeneratedTokens", "9999-12-31 00:00:00,1,1"],
            "line 2: has a number that is",
        ),
        ([{"timestamp": 10**14, "input_length": 1, "output_length": 1}], "line 1: has a number that is too"),
        (["client,window_start_s,rate_rps,cv,pattern", "1,0,1e12,1,Gamma"], "column rate_rps: makes"),
        ([{"usage": usage(5, 5), "timestamp": 1, "latency": 10**400}], "column latency: "),
        (
            [{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": {"history": [1 << 70]}}],
            "hash_ids.history: ",
        ),
    ],
)
def test_numbers_beyond_any_trace_are_one_line_errors(write, lines, reason):
    ragpulse(write, [])
    path = write(lines, "rag/odd")
    with pytest.raises(TraceError, match=reason) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


def test_every_format_can_be_forced(write):
    for format in FORMATS:
        if format != "auto":
            with pytest.raises(TraceError):
                read_trace(write("x"), format=format)


def test_public_traces_have_their_published_counts():
    trace = read_trace(real("ragpulse"))
    assert (len(trace), len(trace.session.names), round(trace.times_s()[-1])) == (7106, 3990, 1_209_321)
    assert (trace.parts.totals() == trace.input_tokens).all()
    assert np.nanmedian(trace.think_s) == 40
    trace = read_trace(real("weka_claude_code_requests.csv.gz"))
    assert (len(trace), round(trace.input_tokens.mean())) == (49_334, 122_379)
    assert len(read_trace(real("arxiv_summarization_4k_llama2.csv.gz"))) == 28_257
    assert read_trace(real("burstgpt_1_head.csv")).failed == 5
    assert read_trace(real("servegen_m-large_client_windows_day9.csv.gz"), limit=1000).times_s()[-1] < 10


@pytest.mark.parametrize("first", [{"status": 500, "session_id": "s"}, {"error": "timeout"}, '{"half'])
def test_a_log_that_begins_with_a_failed_request(write, first):
    first = first if isinstance(first, str) else {"timestamp": 1740830399, **first}
    good = {"timestamp": 1740830400, "usage": {"prompt_tokens": 10, "completion_tokens": 2}}
    trace = read_trace(write([first, good, good]), on_bad_row="skip")
    assert (trace.format, lengths(trace)) == ("requestlog", [(10, 2)] * 2)

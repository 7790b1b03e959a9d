"""RAGPulse: JSONL with the parts of every prompt by id, their lengths in five files beside it; arXiv
2511.12979.

The file holds two weeks one after the other, and its clock starts again at the second: sorting by
`timestamp` alone would lay both on one week at twice the rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workloads.errors import TraceError
from workloads.readers.files import decoded, each_object, json_object, raw_lines
from workloads.readers.rows import Rows
from workloads.readers.values import NS, BadRow, hash_ids, needed, seconds_text_ns, shown, time_ns, tokens

KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
"""In the order in which they stand in a prompt."""
FILES = ("1_sys_prompt", "2_passages", "3_history", "5_web_search", "4_user_input")
TRACE = "0_trace.jsonl"
_WEEK_NS = 604_800 * NS
_RESTART_NS = 3600 * NS  # a clock that falls by more has started again


def trace_file(folder: Path) -> Path | None:
    """0_trace.jsonl or 0_trace.jsonl.gz of a folder."""
    return next((p for name in (TRACE, f"{TRACE}.gz") if (p := folder / name).is_file()), None)


def read(path: str, rows: Rows) -> None:
    """The trace file, or the folder that holds it."""
    found = trace_file(Path(path)) if Path(path).is_dir() else Path(path)
    if found is None:
        raise TraceError(path, f"is a folder without {TRACE}")
    path = str(found)
    lengths = [_lengths(path, name) for name in FILES]
    known = all(lengths)
    rest = len(PARTS)
    rows.part_names = (*PARTS, "rest")
    clock = {"last": 0, "weeks": 0}
    if not known:
        rows.notes.append(
            f"the files {', '.join(FILES)} are not all beside it: prompts are read without parts"
        )

    def record(row: dict[str, Any]) -> None:
        needed(row, *KEYS)
        stamp = row["timestamp"]
        if isinstance(stamp, str):
            at = seconds_text_ns(stamp, "timestamp")
        else:
            at = time_ns(stamp, "timestamp", "seconds", NS)
        prompt, answer = tokens(row["input_length"], KEYS[1]), tokens(row["output_length"], KEYS[2])
        parts = _parts(row["hash_ids"], lengths) if known else []
        session = None if row.get("session_id") is None else str(row["session_id"])
        left = prompt - sum(part[2] for part in parts)
        if left < 0:
            raise BadRow(f"the parts have {prompt - left} tokens, input_length is {prompt}", "hash_ids")
        if clock["last"] - at > _RESTART_NS:
            clock["weeks"] += 1
        clock["last"] = at
        if known and left:
            parts.append((rest, len(rows), left))
        rows.add(at + clock["weeks"] * _WEEK_NS, prompt, answer, session=session)
        if known:
            rows.add_parts(parts)

    each_object(path, rows, record)
    if clock["weeks"]:
        rows.notes.append(f"the clock starts again {clock['weeks']} times: each adds a week")
    rows.notes.append("answers have no duration: think times count from the request before")


def _parts(ids: Any, lengths: list[dict[int, int]]) -> list[tuple[int, int, int]]:
    if not isinstance(ids, dict):
        raise BadRow(f"{shown(ids)} is not an object of lists", "hash_ids")
    parts = []
    for code, (kind, known) in enumerate(zip(PARTS, lengths, strict=True)):
        for number in hash_ids(ids.get(kind, []), f"hash_ids.{kind}"):
            if number not in known:
                raise BadRow(f"names {number}, which {FILES[code]} does not have", f"hash_ids.{kind}")
            parts.append((code, number, known[number]))
    return parts


def _lengths(trace: str, name: str) -> dict[int, int]:
    """Tokens by id, of one of FILES beside the trace; empty where it is not there."""
    path = next(
        (p for end in (".jsonl", ".jsonl.gz") if (p := Path(trace).parent / f"{name}{end}").is_file()), None
    )
    if path is None:
        return {}
    lengths: dict[int, int] = {}
    for number, raw in raw_lines(str(path)):
        text = decoded(str(path), number, raw)
        if not text:
            continue
        try:
            row = json_object(text)
            needed(row, "token_length")
            (key,) = [key for key in row if key.endswith("_id")] or [""]
            needed(row, key or "id")
            lengths[tokens(row[key], key, 0)] = tokens(row["token_length"], "token_length", 0)
        except BadRow as bad:
            raise TraceError(str(path), bad.reason, line=number, column=bad.column) from bad
    return lengths

"""Sessions of coding agents as kv-cache-tester records them: one JSON file a session, whose requests nest
those of sub-agents; and a CSV with one request a row.

Only the times inside a session are known. Each agent is a session of its own, since its calls follow one
another while those of others go on; `user` joins the agents of a session. An answer of 0 tokens is taken as
1."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads.errors import TraceError
from workloads.readers.files import document, each_record, head
from workloads.readers.rows import OWN_ID, Rows
from workloads.readers.values import (
    BadRow,
    is_number,
    needed,
    number_text,
    shown,
    tokens,
    tokens_text,
)

CSV_COLUMNS = ("trace", "agent", "input_tokens", "output_tokens", "prefix_hit_tokens")
CSV_OPTIONAL = ("turn", "think_time_s", "input_types")
BLOCK_TOKENS = 64
NO_TIMES = "only times inside a session are recorded: workload.rate says how many sessions begin a second"
_DEEPEST = 50  # sub-agents of sub-agents


def read(path: str, rows: Rows) -> None:
    """One session, a folder of them, or the CSV."""
    if Path(path).is_dir() or head(path).lstrip().startswith(b"{"):
        _read_json(path, rows)
    else:
        _read_csv(path, rows)
    rows.notes.append(NO_TIMES)


def _read_csv(path: str, rows: Rows) -> None:
    def record(fields: list[str]) -> None:
        trace, agent, prompt, answer, hit, turn, think, kind = fields
        prompt_tokens = tokens_text(prompt, CSV_COLUMNS[2])
        reused = tokens_text(hit, CSV_COLUMNS[4], 0)
        if reused > prompt_tokens:
            raise BadRow(f"{reused} is above input_tokens={prompt_tokens}", CSV_COLUMNS[4])
        waited = number_text(think, "think_time_s") if think and turn != "0" else math.nan
        _add(
            rows,
            prompt_tokens,
            tokens_text(answer, CSV_COLUMNS[3], 0),
            reused_tokens=reused,
            session=f"{trace}/{agent}",
            user=trace,
            think_s=waited,
            request_class=kind or None,
        )

    each_record(path, rows, CSV_COLUMNS, record, *CSV_OPTIONAL)


def session_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.name.endswith((".json", ".json.gz")) and p.is_file())


def _read_json(path: str, rows: Rows) -> None:
    files = session_files(Path(path)) if Path(path).is_dir() else [Path(path)]
    first_id = 0
    for file in files:
        if rows.full:
            break
        try:
            first_id = _session(str(file), rows, first_id)
        except TraceError as exc:
            rows.bad(exc, exc)


def _session(path: str, rows: Rows, first_id: int) -> int:
    """Add a session's requests, whose block ids count from `first_id`; the next that is free."""
    about = document(path)
    if not isinstance(about, dict) or not isinstance(about.get("requests"), list):
        raise TraceError(
            path, "has no list of requests; a Weka session is an object with one", column="requests"
        )
    block = about.get("block_size", BLOCK_TOKENS)
    if type(block) is not int or block < 1:
        raise TraceError(path, f"{shown(block)} is not a number of tokens", column="block_size")
    rows.block_sizes = (block,)
    name = str(about.get("id", Path(path).name))
    known: dict[int, int] = {}
    for agent, turn, where, request in _requests(about["requests"], "main", "requests"):
        if rows.full:
            break
        try:
            if not isinstance(request, dict):
                raise BadRow(f"{shown(request)} is not an object")
            needed(request, "in", "out")
            prompt = tokens(request["in"], "in")
            answer = tokens(request["out"], "out", 0)
            ids = rows.filled_ids(request.get("hash_ids"), prompt)
            think = request.get("think_time")
            if think is not None and (not is_number(think) or not 0 <= think < 1e12):
                raise BadRow(f"{shown(think)} is not a time in seconds of 0 or more", "think_time")
        except BadRow as bad:
            column = where if bad.column is None else f"{where}.{bad.column}"
            rows.bad(TraceError(path, bad.reason, column=column), bad)
            continue
        # Ids count inside a session.
        ids = [i if i >= OWN_ID else known.setdefault(i, first_id + len(known)) for i in ids]
        kinds = request.get("input_types")
        _add(
            rows,
            prompt,
            answer,
            session=f"{name}/{agent}",
            user=name,
            think_s=math.nan if think is None or turn == 0 else float(think),
            request_class="+".join(map(str, kinds)) if isinstance(kinds, list) and kinds else None,
        )
        rows.add_ids(ids)
    return first_id + len(known)


def _requests(
    entries: list[Any], agent: str, where: str, depth: int = 0
) -> Iterator[tuple[str, int, str, Any]]:
    """(agent, turn, where it stands, request), those of sub-agents where they were started."""
    turn = helpers = 0
    for i, entry in enumerate(entries):
        at = f"{where}[{i}]"
        nested = entry.get("requests") if isinstance(entry, dict) else None
        if isinstance(nested, list) and depth < _DEEPEST:
            helpers += 1
            name = str(entry.get("agent_id") or entry.get("id") or f"agent_{helpers:03d}")
            yield from _requests(nested, f"{agent}/{name}", f"{at}.requests", depth + 1)
        else:
            yield agent, turn, at, entry
            turn += 1


def _add(rows: Rows, prompt: int, answer: int, **more: Any) -> None:
    rows.raised += answer == 0
    rows.add(None, prompt, max(answer, 1), **more)

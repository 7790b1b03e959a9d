"""Qwen-Bailian usage traces: JSONL with `chat_id`, `parent_chat_id` (-1: none), `timestamp` (s), lengths,
`type`, `turn` and ids of 16-token blocks. "KVCache Cache in the Wild", ATC 2025.

A session is a chat and all that go back to it; a parent from before the trace begins one."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from workloads.columns import Texts
from workloads.readers.files import each_object
from workloads.readers.rows import Rows
from workloads.readers.values import NS, BadRow, needed, shown, time_ns, tokens

KEYS = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length")
BLOCK_TOKENS = 16


def read(path: str, rows: Rows) -> None:
    rows.block_sizes = (BLOCK_TOKENS,)
    chats, parents = array("q"), array("q")

    def record(row: dict[str, Any]) -> None:
        needed(row, *KEYS)
        for key in KEYS[:2]:
            if type(row[key]) is not int or not -1 <= row[key] < 1 << 62:
                raise BadRow(f"{shown(row[key])} is not a whole number of -1 or more", key)
        prompt, answer = tokens(row[KEYS[3]], KEYS[3]), tokens(row[KEYS[4]], KEYS[4])
        ids = rows.filled_ids(row.get("hash_ids"), prompt)
        kind = row.get("type")
        rows.add(
            time_ns(row["timestamp"], "timestamp", "seconds", NS),
            prompt,
            answer,
            request_class=None if kind is None else str(kind),
        )
        rows.add_ids(ids)
        chats.append(row["chat_id"])
        parents.append(row["parent_chat_id"])

    each_object(path, rows, record)
    if len(rows):
        rows.given["session"] = _sessions(*(np.frombuffer(ids, dtype=np.int64) for ids in (chats, parents)))
        rows.notes.append("answers have no duration: think times count from the request before")


def _sessions(chats: np.ndarray, parents: np.ndarray) -> Texts:
    """The root of each chat, by doubling the way to it."""
    order = np.argsort(chats, kind="stable")
    at = np.minimum(np.searchsorted(chats[order], parents), len(chats) - 1)
    known = (chats[order][at] == parents) & (parents >= 0)
    root = np.where(known, order[at], np.arange(len(chats)))
    for _ in range(64):
        further = root[root]
        if (further == root).all():
            break
        root = further
    roots, codes = np.unique(root, return_inverse=True)
    return Texts(codes.astype(np.int64), tuple(str(chat) for chat in chats[roots].tolist()))

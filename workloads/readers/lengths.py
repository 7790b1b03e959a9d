"""Token counts, with or without times: vidur's CSV files (`num_prefill_tokens`, `num_decode_tokens` and, for
its copies of Azure's traces, `arrived_at` in seconds). Agrawal et al. 2024 (MLSys)."""

from __future__ import annotations

from workloads.readers.files import each_record
from workloads.readers.rows import Rows
from workloads.readers.values import BadRow, seconds_text_ns, tokens_text

COLUMNS = ("num_prefill_tokens", "num_decode_tokens")
TIME = "arrived_at"


def read(path: str, rows: Rows) -> None:
    timed: list[bool] = []

    def record(fields: list[str]) -> None:
        prompt, answer = (tokens_text(fields[i], COLUMNS[i]) for i in (0, 1))
        timed.append(bool(fields[2])) if not timed else None
        if bool(fields[2]) != timed[0]:
            raise BadRow("is empty" if timed[0] else "is there, and was empty before", TIME)
        rows.add(seconds_text_ns(fields[2], TIME) if timed[0] else None, prompt, answer)

    each_record(path, rows, COLUMNS, record, TIME)

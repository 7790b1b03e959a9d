"""Azure's LLM inference traces of 2023 and 2024, and of 2025 with its column NumImages: CSV, one request a
row, with a date. Patel et al. 2024 (Splitwise), Stojkovic et al. 2025 (DynamoLLM)."""

from __future__ import annotations

from workloads.readers.files import each_record
from workloads.readers.rows import Rows
from workloads.readers.values import stamp_ns, tokens_text

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: str, rows: Rows) -> None:
    """Dates have 7 digits of a second, 6, 3 or none, and a zone or none; lines end in CRLF or LF. Image
    requests of 2025 are of the class `image`."""
    time, context, generated = COLUMNS

    def record(fields: list[str]) -> None:
        stamp = stamp_ns(fields[0], time)
        prompt, answer = tokens_text(fields[1], context), tokens_text(fields[2], generated)
        images = fields[3]
        if images:
            kind = "image" if tokens_text(images, "NumImages", 0) else "text"
            rows.add(stamp, prompt, answer, request_class=kind)
        else:
            rows.add(stamp, prompt, answer)

    each_record(path, rows, COLUMNS, record, "NumImages")

"""Writing a trace in the other format.

Azure rows have no block ids: each started block of 512 prompt tokens gets an id of its own, so nothing is
shared. Mooncake rows lose theirs, and their times, which count from 0, become times from the start of 1970.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from workloads.errors import WorkloadError
from workloads.trace import Trace
from workloads.tracefile import AZURE_COLUMNS, BLOCK_TOKENS

TARGETS = ("azure", "mooncake")


def convert(trace: Trace, to: str) -> Iterator[str]:
    """The lines of the trace in the format `to`, with their line ends."""
    if to not in TARGETS:
        raise WorkloadError(f"--to={to}: choose from {', '.join(TARGETS)}")
    return _azure_lines(trace) if to == "azure" else _mooncake_lines(trace)


def write(lines: Iterator[str], path: str | Path) -> None:
    """Write lines to a file, gzipped when its name ends in .gz. Refuses to replace a file."""
    path = Path(path)
    try:
        if path.suffix == ".gz":
            with open(path, "xb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
                packed.writelines(line.encode() for line in lines)
        else:
            with open(path, "x", encoding="utf-8", newline="") as plain:
                plain.writelines(lines)
    except FileExistsError as exc:
        raise WorkloadError(f"--out={path}: exists; remove it or choose another name") from exc
    except OSError as exc:
        raise WorkloadError(f"--out={path}: cannot be written ({exc.strerror or exc})") from exc


def _azure_lines(trace: Trace) -> Iterator[str]:
    yield ",".join(AZURE_COLUMNS) + "\n"
    for time_ns, context, generated in _rows(trace):
        seconds, rest = divmod(time_ns, 1_000_000_000)
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
        yield f"{moment:%Y-%m-%d %H:%M:%S}.{rest // 100:07d},{context},{generated}\n"


def _mooncake_lines(trace: Trace) -> Iterator[str]:
    next_id = 0
    start_ns = None
    for i, (time_ns, input_tokens, output_tokens) in enumerate(_rows(trace)):
        start_ns = time_ns if start_ns is None else start_ns
        if trace.blocks is not None:
            ids = trace.blocks.ids[trace.blocks.start[i] : trace.blocks.start[i + 1]].tolist()
        else:
            blocks = -(-input_tokens // BLOCK_TOKENS)
            ids = list(range(next_id, next_id + blocks))
            next_id += blocks
        since = time_ns - start_ns
        record = {
            "timestamp": since // 1_000_000 if since % 1_000_000 == 0 else since / 1e6,
            "input_length": input_tokens,
            "output_length": output_tokens,
            "hash_ids": ids,
        }
        yield json.dumps(record) + "\n"


def _rows(trace: Trace) -> Iterator[tuple[int, int, int]]:
    assert trace.time_ns is not None
    columns = (trace.time_ns, trace.input_tokens, trace.output_tokens)
    return zip(*(column.tolist() for column in columns), strict=True)

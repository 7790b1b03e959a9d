"""Reading recorded traces, one file a family of formats.

A reader goes through a file line by line and puts numbers into columns: memory is about 8 bytes a number,
whatever the file's size. Whatever is wrong is one line that names the file, the line, the column and the
reason. A bad row can be skipped and counted; a file that cannot be read to its end, or whose header is
wrong, cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workloads.errors import TraceError, WorkloadError
from workloads.readers import (
    azure,
    bailian,
    burstgpt,
    lengths,
    mooncake,
    peers,
    ragpulse,
    requestlog,
    servegen,
    tracelab,
    weka,
)
from workloads.readers.formats import detect
from workloads.readers.rows import Rows
from workloads.trace import Trace

READERS: dict[str, Callable[[str, Rows], None]] = {
    "aiperf": peers.read,
    "azure": azure.read,
    "bailian": bailian.read,
    "burstgpt": burstgpt.read,
    "lengths": lengths.read,
    "mooncake": mooncake.read,
    "ragpulse": ragpulse.read,
    "requestlog": requestlog.read,
    "servegen": servegen.read,
    "tracelab": tracelab.read,
    "vllm": peers.read,
    "weka": weka.read,
}
FORMATS = ("auto", *READERS)


def read_trace(
    path: str | Path,
    *,
    format: str = "auto",
    limit: int | None = None,
    on_bad_row: str = "error",
    seed: int = 0,
) -> Trace:
    """Read at most `limit` usable rows, no further into the file than that needs. seed: of what a format
    leaves to be drawn (ServeGen). Raises TraceError."""
    if format not in FORMATS:
        raise WorkloadError(f"workload.format={format}: choose from {', '.join(FORMATS)}")
    path = str(Path(path).expanduser())
    try:
        found = detect(path) if format == "auto" else format
        rows = Rows(path, found, limit=limit, skip_bad=on_bad_row == "skip", seed=seed)
        READERS[found](path, rows)
    except OSError as exc:  # of a folder, which readers look through
        raise TraceError(path, f"cannot be read ({exc.strerror or exc})") from exc
    return rows.trace()

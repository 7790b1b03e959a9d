"""Writing a trace in a format that other tools read.

mooncake   the rows that vLLM, SGLang, GuideLLM, AIPerf and Dynamo take: times in ms from the first row, ids
           of 512-token blocks. Blocks of another size, parts and reused beginnings become such blocks: two
           rows have the first k ids in common where they have the first k blocks in common
azure      TIMESTAMP,ContextTokens,GeneratedTokens: what prompts share is lost, and times that count from 0
           become times from the start of 1970
"""

from __future__ import annotations

import gzip
import json
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np

from workloads import output
from workloads.errors import WorkloadError
from workloads.readers.azure import COLUMNS as AZURE_COLUMNS
from workloads.recorded import segments
from workloads.trace import Trace

TARGETS = ("azure", "mooncake")
BLOCK_TOKENS = 512  # of Mooncake's ids


def convert(trace: Trace, to: str) -> Iterator[str]:
    """The lines of the trace in the format `to`, with their line ends. Raises WorkloadError."""
    if to not in TARGETS:
        raise WorkloadError(f"--to={to}: choose from {', '.join(TARGETS)}")
    if to == "azure":
        if trace.time_ns is None:
            raise WorkloadError(f"--to=azure: the {trace.format} trace has no times; needs mooncake")
        return _azure_lines(trace)
    return _mooncake_lines(trace)


def lost(trace: Trace, to: str) -> list[str]:
    """What the format `to` cannot hold of a trace."""
    notes = []
    if to == "azure" and (trace.blocks or trace.parts or trace.reused_tokens is not None):
        notes.append("the azure format has no block ids; what prompts shared is lost")
    if trace.session is not None:
        notes.append(f"the {to} format has no sessions: every request has a time of its own")
    if to == "mooncake" and trace.time_ns is None:
        notes.append("the trace has no times: all rows have timestamp 0")
    return notes


def options(file: str, to: str) -> list[str]:
    """How other tools replay the file with its own times, one line each."""
    if to == "azure":
        return []
    file = shlex.quote(file)
    return [
        f"vLLM      vllm bench serve --dataset-name timed_trace --dataset-path {file} --self-timed "
        "--timed-trace-chunk-hash-size 512 --timed-trace-sec-multiplier 0.001",
        f"AIPerf    aiperf profile --input-file {file} --custom-dataset-type mooncake_trace "
        "--prompt-input-tokens-block-size 512 --fixed-schedule",
        f"SGLang    python -m sglang.bench_serving --dataset-name mooncake --dataset-path {file} "
        "--mooncake-num-rounds 1 --use-trace-timestamps",
        f"GuideLLM  data {file} of kind=mooncake, with time_scale=0.001: it takes times for seconds",
    ]


def write(lines: Iterator[str], path: str | Path) -> None:
    """Write lines to a file, gzipped when its name ends in .gz. Refuses to replace a file."""

    def fill(partial: Path) -> None:
        if str(path).endswith(".gz"):
            with open(partial, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
                packed.writelines(line.encode() for line in lines)
        else:
            with open(partial, "w", encoding="utf-8", newline="") as plain:
                plain.writelines(lines)

    output.write("--out", path, fill)


def _azure_lines(trace: Trace) -> Iterator[str]:
    yield ",".join(AZURE_COLUMNS) + "\n"
    for time_ns, context, generated in _rows(trace):
        seconds, rest = divmod(time_ns, 1_000_000_000)
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
        yield f"{moment:%Y-%m-%d %H:%M:%S}.{rest // 100:07d},{context},{generated}\n"


def _mooncake_lines(trace: Trace) -> Iterator[str]:
    times = [0] * len(trace) if trace.time_ns is None else (trace.time_ns - trace.time_ns[0]).tolist()
    lengths = zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    for since, (input_tokens, output_tokens), ids in zip(times, lengths, _ids(trace), strict=True):
        record = {
            "timestamp": since // 1_000_000 if since % 1_000_000 == 0 else since / 1e6,
            "input_length": input_tokens,
            "output_length": output_tokens,
            "hash_ids": ids,
        }
        yield json.dumps(record) + "\n"


def _ids(trace: Trace) -> Iterator[list[int]]:
    """Ids of 512-token blocks of each row, numbered by first use; those of the trace where they are such."""
    if trace.blocks is not None and trace.blocks.tokens == BLOCK_TOKENS and np.diff(trace.blocks.start).all():
        start, of_blocks = trace.blocks.start.tolist(), trace.blocks.ids
        for begin, end in pairwise(start):
            yield of_blocks[begin:end].tolist()
        return
    prompts = segments(trace, "", 1.0)
    known: dict[tuple[int, ...], int] = {}  # (the block before, then code, number, from, to of each piece)
    start = prompts.start.tolist()
    for begin, end in pairwise(start):
        ids: list[int] = []
        pieces: list[int] = []
        room = BLOCK_TOKENS
        which = slice(begin, end)
        columns = (prompts.code[which], prompts.number[which], prompts.tokens[which])
        for code, number, tokens in zip(*(column.tolist() for column in columns), strict=True):
            at = 0
            while at < tokens:
                upto = min(tokens, at + room)
                pieces += (code, number, at, upto)
                room -= upto - at
                at = upto
                if not room:
                    ids.append(known.setdefault((ids[-1] if ids else -1, *pieces), len(known)))
                    pieces, room = [], BLOCK_TOKENS
        if pieces:
            ids.append(known.setdefault((ids[-1] if ids else -1, *pieces), len(known)))
        yield ids


def _rows(trace: Trace) -> Iterator[tuple[int, int, int]]:
    assert trace.time_ns is not None
    columns = (trace.time_ns, trace.input_tokens, trace.output_tokens)
    return zip(*(column.tolist() for column in columns), strict=True)

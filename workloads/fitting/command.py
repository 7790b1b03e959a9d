"""`python -m workloads fit TRACE`."""

from __future__ import annotations

import argparse
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from workloads import output
from workloads.errors import WorkloadError
from workloads.fitting.goodness import Figure, check
from workloads.fitting.preset import TraceFit, fit_trace, preset, to_yaml
from workloads.report import print_figures, print_fit
from workloads.trace import Trace

if TYPE_CHECKING:
    from rich.console import Console

MISSED = 1
BLOCK_TOKENS = 16
MOST_REPLICAS = 10_000
MOST_GB = 1e6


def refuse(args: argparse.Namespace) -> None:
    """Raises WorkloadError for options that would end the command after its work."""
    if not 20 <= args.replicas <= MOST_REPLICAS:
        raise WorkloadError(f"--replicas={args.replicas}: a band needs 20 or more, {MOST_REPLICAS} at most")
    if not args.name.strip():
        raise WorkloadError(f"--name={args.name}: needs text")
    if args.seed < 0:
        raise WorkloadError(f"--seed={args.seed}: needs a whole number of 0 or more")
    if args.memory_gb is not None and not 0 < args.memory_gb <= MOST_GB:
        raise WorkloadError(f"--memory-gb={args.memory_gb:g}: needs a number above 0, {MOST_GB:g} at most")
    if args.kv_bytes_per_token < 1:
        raise WorkloadError(f"--kv-bytes-per-token={args.kv_bytes_per_token}: needs a whole number above 0")
    output.refuse("--out", args.out)
    output.refuse("--table", args.table)


def fit(args: argparse.Namespace, trace: Trace, console: Console) -> int:
    """Exit code 1 when --check misses a limit."""
    found = fit_trace(trace)
    node = preset(found, args.name)
    print_fit(trace, found, console)
    figures: list[Figure] = []
    if args.check:
        figures = check(trace, found, node, args.replicas, args.seed)
        print_figures(figures, console)
    said = not_captured(trace, found, figures)
    for line in said:
        console.print(f"not captured: {line}", highlight=False, soft_wrap=True, markup=False)
    for line in suggestions(trace, args.memory_gb, args.kv_bytes_per_token):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if args.table:
        lengths = {
            "source": args.source or Path(trace.path).name,
            "licence": args.licence or "unknown",
            "rows": found.rows,
            "input": {"points": found.lengths.input},
            "output": {"points": found.lengths.output},
        }
        if found.lengths.edges:
            lengths["joint"] = {"edges": found.lengths.edges, "points": found.lengths.joint}
        made_by = f"Made by: python -m workloads fit {Path(trace.path).name}"
        output.write_text("--table", args.table, to_yaml(lengths, [made_by]))
    if args.out:
        head = [
            f"Fitted to {Path(trace.path).name} ({trace.format}, {found.rows} rows in {found.span_s:.1f} s), "
            f"{datetime.now(UTC):%Y-%m-%d}.",
            "Unscaled and uncapped: for a small engine set length_scale, input.cap and output.cap.",
            *(f"Not captured: {line}" for line in said),
        ]
        output.write_text("--out", args.out, to_yaml(node, head))
        console.print(
            f"use it: python -m harness {override(args.out)} +engine=continuous",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    return MISSED if any(figure.ok is False for figure in figures) else 0


def override(path: str) -> str:
    """+workload=path as a shell and then Hydra's grammar take it."""
    if re.fullmatch(r"[\w./-]+", path, re.ASCII):
        return f"+workload={path}"
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', path)
    return shlex.quote(f'+workload="{escaped}"')


def not_captured(trace: Trace, fit: TraceFit, figures: list[Figure]) -> list[str]:
    """In plain words, what the preset leaves out."""
    said = [f"{f.name}: {f.source} in the trace, {f.drawn} drawn" for f in figures if f.ok is False]
    if fit.prefixes is None:
        said.append(
            "what prompts share: the trace has neither block ids nor reused tokens; every prompt is new"
        )
    if fit.sessions is None:
        said.append("sessions: the trace names none" if trace.session is None else "sessions: too few to fit")
    elif fit.prefixes is None:
        said.append("how prompts grow within a session")
    if fit.span_s < 2 * 86_400 and trace.time_ns is not None:
        said.append("the hours of a day: the trace is shorter than two")
    half = len(trace) // 2
    first, second = (float(np.median(trace.input_tokens[part])) for part in (slice(half), slice(half, None)))
    if max(first, second) > 1.25 * min(first, second):
        said.append(
            f"a drift of the lengths: the median prompt is {first:.0f} in the first half, then {second:.0f}"
        )
    said.append("who gave up, and what clients declared as max_tokens: traces do not record it")
    return said


def suggestions(trace: Trace, memory_gb: float | None, kv_bytes_per_token: int) -> list[str]:
    """Engine settings that the lengths call for. A sequence holds its prompt and on average half of its
    answer, for as long as its answer is."""
    if memory_gb is None:
        return []
    prompts, answers = trace.input_tokens.astype(float), trace.output_tokens.astype(float)
    held = float(((prompts + answers / 2) * answers).sum() / answers.sum())
    longest = int((trace.input_tokens + trace.output_tokens).max())
    pool = int(memory_gb * 1e9 / kv_bytes_per_token)
    lines = [
        f"KV: a sequence holds {held:.0f} tokens on average while it decodes; "
        f"{memory_gb:g} GB hold {pool} tokens",
        f"engine.num_kv_blocks={pool // BLOCK_TOKENS + 1} (of {BLOCK_TOKENS} tokens) "
        f"engine.max_num_seqs={max(1, int(pool / held))} engine.max_model_len={longest}",
    ]
    if longest > pool:
        lines.append(
            f"note: the longest request needs {longest} tokens and would be refused; give more memory or caps"
        )
    return lines

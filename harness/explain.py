"""One request's life as a timeline: `python -m engines.explain RUN ID`, or `--slowest ttft|e2e|stall [N]`.

When it was due, sent, taken in; what it waited for; every piece of its prompt and who shared the pass; its
decodes; each gap at the client over the run's stall threshold, and whose prefill lay in it; preemptions; its
end; and at last its E2E by part (harness/metrics/attribution.py). From the records of the run alone."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.cli import put
from harness.metrics.attribution import PARTS, is_sliced, lives, run_timeline
from harness.metrics.engine import NO_ENGINE
from harness.metrics.latency import gap_table, per_request
from harness.metrics.run import Run, load_run
from harness.metrics.stalls import stall_factor, stall_threshold_ms
from harness.metrics.timeline import DECODE, PREFILL, REASONS, RECOMPUTE, Timeline
from harness.table import number, percent

MOST_NAMES = 4
PART_NAMES = {
    "client_wait": "waiting in the client",
    "transport_in": "on the way in",
    "queue": "queue",
    "prefill": "own prefill",
    "decode": "decode",
    "stalled": "stalled by others' prefill",
    "skipped": "not its turn",
    "preempted": "preempted",
    "recompute": "computed again",
    "held": "held until its batch ended",
    "host": "between passes",
    "transport_out": "on the way out",
}
WAITED_FOR = {
    "seat": "a seat",
    "kv": "KV",
    "budget": "the token budget",
    "batch": "its batch",
    "order": "its turn in the strategy's order",
    "iteration": "an iteration to begin",
    "unknown": "what the records do not say",
}


@dataclass(frozen=True)
class Event:
    """at_ns from the run's start. took_ns: how long, where it is a span."""

    at_ns: float
    text: str
    took_ns: float | None = None


@dataclass(frozen=True)
class Story:
    """A run, read once for however many of its requests."""

    run: Run

    @cached_property
    def frame(self) -> pd.DataFrame:
        return per_request(self.run.requests, self.run.meta.get("slo") or {})

    @cached_property
    def line(self) -> Timeline:
        return run_timeline(self.run)

    @cached_property
    def lives(self) -> pd.DataFrame:
        return lives(self.run, self.frame, self.line).set_index("id")

    @cached_property
    def names(self) -> dict[int, str]:
        """seq_id: what to call it."""
        rows = self.run.engine.dropna(subset=["seq_id"])
        columns = (rows[name] for name in ("seq_id", "id", "request_class"))
        return {
            int(seq): f"{name or f'sequence {int(seq)}'}{f' ({kind})' if kind else ''}"
            for seq, name, kind in zip(*columns, strict=True)
        }

    @cached_property
    def by_step(self) -> tuple[Any, Any]:
        """The rows of the timeline in order of steps, and where each step's begin."""
        order = np.argsort(self.line.step, kind="stable")
        return order, np.searchsorted(self.line.step[order], np.arange(self.line.start.size + 1))

    @cached_property
    def threshold_ms(self) -> float | None:
        return stall_threshold_ms(gap_table(self.run.requests)["gap_ms"].to_numpy(), stall_factor(self.run))

    def others(self, first: int, last: int, seq: int) -> tuple[dict[int, int], int]:
        """In the steps from first to last: prompt tokens of others by seq_id, and how many others decode."""
        order, begins = self.by_step
        rows = order[begins[first] : begins[last + 1]]
        rows = rows[self.line.seq[rows] != seq]
        decoding = self.line.kind[rows] == DECODE
        prompts: dict[int, int] = {}
        for row in rows[~decoding]:
            other = int(self.line.seq[row])
            prompts[other] = prompts.get(other, 0) + int(self.line.tokens[row])
        return prompts, len(set(self.line.seq[rows[decoding]].tolist()))

    def whose(self, prompts: dict[int, int]) -> str:
        """The prompts, the longest first."""
        longest = sorted(prompts.items(), key=lambda item: -item[1])
        told = [f"{self.names.get(seq, f'sequence {seq}')} {n} tokens" for seq, n in longest[:MOST_NAMES]]
        rest = longest[MOST_NAMES:]
        if rest:
            told.append(f"{len(rest)} more with {sum(n for _, n in rest)} tokens")
        return ", ".join(told)


def explain(story: Story, request_id: str) -> list[str]:
    """The lines that tell of one request. Raises KeyError for an id that the run does not have."""
    found = np.flatnonzero((story.run.requests["id"] == request_id).to_numpy())
    if not found.size:
        raise KeyError(request_id)
    row = story.run.requests.iloc[int(found[0])]
    engine = story.run.engine
    mine = engine[(engine["id"] == request_id) & (engine["attempt"] == row["attempt"])]
    record = mine.iloc[-1] if len(mine) else None
    lines = [_headline(row, record), ""]
    events = _client_events(row)
    notes: list[str] = []
    if record is None:
        notes.append(NO_ENGINE if engine.empty else "the engine has no record of this request")
    else:
        events += _engine_events(story, row, record)
        if lanes := _lanes(story.run):
            notes.append(
                f"engine.lanes={', '.join(lanes)}: what the queue waited for is what held the lane whose "
                "turn it was; another lane may have waited for something else"
            )
    start = row["intended_ns"]
    lines.append(f"{'at, ms':>10}  {'took, ms':>9}")
    for event in sorted(events, key=lambda event: event.at_ns):
        took = "" if event.took_ns is None else _ms(event.took_ns)
        lines.append(f"{_ms(event.at_ns - start):>10}  {took:>9}  {event.text}")
    lines += ["", *(_totals(story, request_id) if request_id in story.lives.index else []), *notes]
    return lines


def _lanes(run: Run) -> list[str]:
    engine = run.config.get("engine")
    return list((engine.get("lanes") or {}) if isinstance(engine, dict) else {})


def _headline(row: pd.Series, record: pd.Series | None) -> str:
    reason = f" ({row['reason']})" if row["reason"] else ""
    text = f"{row['id']}: {row['request_class'] or 'no class'}, tenant {row['tenant'] or '-'}, "
    text += f"{str(row['outcome']).replace('_', ' ')}{reason}"
    prompt = row["prompt_tokens"] if record is None else record["prompt_tokens"]
    text += f"; prompt {_count(prompt)}"
    if record is not None and record["cached_tokens"] > 0:
        text += f" ({_count(record['cached_tokens'])} from the prefix cache)"
    output = row["output_tokens"] if record is None else record["output_tokens"]
    text += f", answer {_count(output)} of at most {_count(row['max_tokens'])} tokens"
    if record is not None:
        text += f"; sequence {_count(record['seq_id'])}"
        for name, word in (("preemptions", "preempted"), ("swaps", "of them swapped")):
            text += f", {word} {_count(record[name])} times" if record[name] > 0 else ""
    return text


def _client_events(row: pd.Series) -> list[Event]:
    due, sent, stamps = row["intended_ns"], row["send_ns"], row["chunk_ns"]
    events = [Event(due, f"due, {due * 1e-9:.3f} s after the load began")]
    if np.isfinite(sent):
        events.append(
            Event(sent, "sent" if not row["attempt"] > 1 else f"sent, attempt {_count(row['attempt'])}")
        )
    if len(stamps):
        more = f" with all its {len(stamps)} chunks" if len(stamps) == 1 else ""
        events.append(
            Event(stamps[0], "client: first token" if not more else "client: the answer, in one piece")
        )
        if len(stamps) > 1:
            events.append(Event(stamps[-1], "client: last token"))
    if row["outcome"] != "completed" and np.isfinite(row["end_ns"]):
        how = {"cancelled": "the user hangs up", "timed_out": "its timeout is over"}
        events.append(Event(row["end_ns"], f"client: {how.get(row['outcome'], 'the end')}"))
    return events


def _engine_events(story: Story, row: pd.Series, record: pd.Series) -> list[Event]:
    events = [Event(record["arrival_ns"], "in the engine")]
    if record["finish_reason"] == "refused":
        return [*events, Event(record["finish_ns"], f"refused: {record['refusal']}")]
    seq = int(record["seq_id"])
    rows = story.line.rows_of(seq)
    until = record["admitted_ns"] if np.isfinite(record["admitted_ns"]) else record["finish_ns"]
    events += _waits(story.line, record["arrival_ns"], until)
    events += _passes(story, rows, seq)
    if np.isfinite(record["first_token_ns"]):
        events.append(Event(record["first_token_ns"], "first token in the engine"))
    events += _absences(story, rows, seq, record)
    events += _stalls(story, row, seq)
    if np.isfinite(record["abort_seen_ns"]):
        text = f"the engine hears of it, state {record['abort_state']}"
        text += f"; {_count(record['wasted_tokens'])} tokens wasted"
        events.append(Event(record["abort_seen_ns"], text))
    if np.isfinite(record["finish_ns"]):
        events.append(Event(record["finish_ns"], f"finished ({record['finish_reason']}), KV free"))
        last = story.line.end[story.line.step[rows]].max(initial=-np.inf)
        if (
            np.isfinite(last)
            and record["finish_ns"] - last > 1e6
            and record["finish_reason"] in ("stop", "length")
        ):
            events.append(Event(last, "its answer is whole; its batch goes on", record["finish_ns"] - last))
    return events


def _waits(line: Timeline, start: float, end: float) -> list[Event]:
    """What it waited for in the queue, the longest first."""
    edges = np.array([start, end])
    spans = {reason: float(np.diff(line.waiting_for(i, edges))[0]) for i, reason in enumerate(REASONS)}
    passes = int(np.searchsorted(line.start, end) - np.searchsorted(line.start, start))
    told = ", ".join(
        f"{_ms(t)} ms for {WAITED_FOR[r]}" for r, t in sorted(spans.items(), key=lambda s: -s[1]) if t > 0
    )
    return [Event(start + 1, f"waits: {told} ({passes} steps began meanwhile)", end - start)] if told else []


def _passes(story: Story, rows: slice, seq: int) -> list[Event]:
    """A line for each piece of its prompt, and one for each run of decodes."""
    line, events = story.line, []
    steps, kinds, tokens = line.step[rows], line.kind[rows], line.tokens[rows].astype(int)
    run: list[int] = []

    def decodes() -> None:
        if run:
            length = line.end[run] - line.start[run]
            text = (
                f"decodes {len(run)} tokens, {_steps(line, run)}: median {_ms(float(np.median(length)))} ms, "
            )
            text += f"longest {_ms(float(length.max()))} ms"
            if line.extra[run].any():
                text += f"; {_ms(float(line.extra[run].sum()))} ms of it others' prefill"
            events.append(Event(line.start[run[0]], text, line.end[run[-1]] - line.start[run[0]]))
            run.clear()

    for step, kind, count in zip(steps.tolist(), kinds.tolist(), tokens.tolist(), strict=True):
        if kind == DECODE and (not run or step == run[-1] + 1):
            run.append(step)
            continue
        decodes()
        if kind == DECODE:
            run.append(step)
            continue
        verb = {PREFILL: "prompt", RECOMPUTE: "computed again"}.get(kind, "?")
        prompts, others = story.others(step, step, seq)
        company = [f"{others} decode{'s' if others > 1 else ''}"] if others else []
        company += [f"prompts of {story.whose(prompts)}"] if prompts else []
        text = f"{verb}: {count} tokens, step {line.number[step]}"
        text += f", with {' and '.join(company)}" if company else ", alone"
        events.append(Event(line.start[step], text, line.end[step] - line.start[step]))
    decodes()
    return events


def _absences(story: Story, rows: slice, seq: int, record: pd.Series) -> list[Event]:
    """Passes that ran without it after its first one: a seat lost, or others in front."""
    line, events = story.line, []
    steps = line.step[rows]
    lost, sliced = line.losses_of(seq), is_sliced(story.run)
    swapped = record["swaps"] > 0 and record["swaps"] == record["preemptions"]
    how = "its KV is copied to the host" if swapped else "its KV is given up"
    for left, back in pairwise(steps):
        gone = lost[(lost > left) & (lost <= back)]
        begin, end = line.end[left], line.start[back]
        if gone.size:
            begin = line.end[gone[0] - 1]
            text = f"preempted by the plan of step {line.number[gone[0]]}, {how}; "
            text += f"back in step {line.number[back]}"
            events.append(Event(begin, text, end - begin))
        elif back > left + 1:
            prompts, _ = story.others(int(left) + 1, int(back) - 1, seq)
            text = f"left out of {_steps(line, range(left + 1, back))}"
            if sliced or line.kind[rows][np.searchsorted(steps, back)] == RECOMPUTE:
                text = f"its slice is over; waits for the next, {_steps(line, range(left + 1, back))}"
            elif prompts:
                text += f": prompts of {story.whose(prompts)}"
            events.append(Event(begin, text, end - begin))
    after = lost[lost > steps[-1]] if steps.size else lost
    if after.size:
        at = line.end[max(0, int(after[0]) - 1)]
        events.append(
            Event(at, f"preempted by the plan of step {line.number[after[0]]}, {how}; it never came back")
        )
    return events


def _stalls(story: Story, row: pd.Series, seq: int) -> list[Event]:
    """Gaps at the client over the threshold, and the prompts of others that were computed in them."""
    line, events = story.line, []
    stamps, limit = row["chunk_ns"], story.threshold_ms
    own = line.step[line.rows_of(seq)]
    if limit is None or len(stamps) < 2 or not own.size:
        return []
    passed = np.searchsorted(line.end[own], stamps, side="right") - 1  # its own last pass before each stamp
    for k in np.flatnonzero(np.diff(stamps) > limit * 1e6):
        first, last = own[max(0, passed[k])] + 1, own[max(0, passed[k + 1])]
        text = f"STALL before chunk {k + 2} of {len(stamps)} (a gap over {number(limit)} ms): "
        if last < first:
            text += "the token was out in the engine before it began"
        else:
            prompts, _ = story.others(int(first), int(last), seq)
            text += f"{_steps(line, range(first, last + 1))}, "
            text += f"prompts of {story.whose(prompts)}" if prompts else "no prompts of others in them"
        events.append(Event(stamps[k], text, stamps[k + 1] - stamps[k]))
    return events


def _totals(story: Story, request_id: str) -> list[str]:
    life = story.lives.loc[request_id]
    whole = life["e2e_ms"]
    lines = [f"{'E2E':<28}{number(whole):>9} ms"]
    for part in PARTS:
        if abs(life[part]) < 5e-4:
            continue
        lines.append(f"  {PART_NAMES[part]:<26}{number(life[part]):>9} ms  {percent(life[part] / whole):>7}")
        for reason in REASONS if part == "queue" else ():
            if life[f"queue_{reason}"] >= 5e-4:
                lines.append(f"    {'for ' + WAITED_FOR[reason]:<34}{number(life[f'queue_{reason}']):>9} ms")
    return lines


def slowest(story: Story, by: str, count: int) -> list[str]:
    """Ids of the requests with the largest figure: ttft | e2e (of completed ones) | stall (longest gap)."""
    frame = story.frame
    if by == "stall":
        gaps = gap_table(story.run.requests)
        longest = gaps.groupby("row")["gap_ms"].max()
        values = pd.Series(longest.reindex(range(len(frame))).to_numpy(), index=frame["id"])
    else:
        done = frame[frame["outcome"] == "completed"]
        values = pd.Series(done[f"{by}_ms"].to_numpy(), index=done["id"])
    return [str(name) for name in values.dropna().sort_values(ascending=False, kind="stable").index[:count]]


def _steps(line: Timeline, steps: Iterable[int]) -> str:
    numbers = [int(line.number[step]) for step in steps]
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]}-{numbers[-1]}"


def _ms(ns: float) -> str:
    return f"{ns * 1e-6:.1f}"


def _count(value: Any) -> str:
    return "?" if value is None or not np.isfinite(value) else str(int(value))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engines.explain", description="One request's life, from the records of its run."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("ids", metavar="ID", nargs="*", help="ids of its requests, as in requests.jsonl")
    parser.add_argument(
        "--slowest", nargs="+", metavar=("ttft|e2e|stall", "N"), help="the N requests with the largest"
    )
    args = parser.parse_args(argv)
    try:
        if not (args.run / "requests.jsonl").is_file():
            raise ValueError(f"{args.run} is not a run directory: it has no requests.jsonl")
        story = Story(load_run(args.run))
        ids = [*args.ids, *_chosen(story, args.slowest)]
        if not ids:
            raise ValueError("no request named: give an id, or --slowest ttft|e2e|stall")
        for i, request_id in enumerate(ids):
            put("\n".join([*([""] if i else []), *explain(story, request_id)]))
    except KeyError as error:
        known = [str(name) for name in story.run.requests["id"]]
        near = difflib.get_close_matches(str(error.args[0]), known, 3, 0.0)
        hint = f"; near it: {', '.join(near)}" if near else ": it has none"
        print(f"error: {args.run} has no request {error.args[0]!r}{hint}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _chosen(story: Story, asked: Sequence[str] | None) -> list[str]:
    if not asked:
        return []
    by, count = asked[0], asked[1] if len(asked) > 1 else "1"
    if by not in ("ttft", "e2e", "stall") or len(asked) > 2 or not count.isdigit() or int(count) < 1:
        raise ValueError(f"--slowest {' '.join(asked)}: needs ttft, e2e or stall, and how many")
    return slowest(story, by, int(count))


if __name__ == "__main__":
    sys.exit(main())

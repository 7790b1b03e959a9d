"""How far is a fixed-length verdict off? One pair of engines under three kinds of traffic of one trace.

    python -m harness.experiments.traffic --traces FOLDER            in virtual time
    python -m harness.experiments.traffic --traces FOLDER --real     model=tiny on this machine

    fixed       every prompt and every answer as long as the trace's mean, Poisson arrivals
    fitted      drawn from the workload that `python -m workloads fit` finds in the same rows
    replayed    the rows themselves, with the pattern of their arrivals

All three have as many requests in the same time. The rate is a share (--utilisation) of what continuous
batching does of the replayed rows when it never waits for one: all of them at once in virtual time, a closed
loop of twice its seats for real. A window is the busiest stretch of so many rows that no earlier window
touches: a longer stretch of a quiet trace would be its nights. Its time is stretched to the rate. Lengths
are scaled to fit engine.max_model_len, and with them the token budget of chunked, unscaled 2,048. What
prompts share plays no part: neither engine has a prefix cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.cli import INVALID, PASS, USAGE
from workloads import WorkloadError
from workloads.trace import Trace

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from engines.virtual import Log

ENGINES = ("continuous", "chunked")
KINDS = ("fixed", "fitted", "replayed")
BUDGET = 2048
"""Tokens of a pass of chunked before they are scaled."""
LONGEST_PROMPT, LONGEST_ANSWER = 3584, 512
"""As the caps of harness/conf/workload/trace.yaml."""


@dataclass(frozen=True, slots=True)
class Source:
    """A trace below --traces. where: it can be fetched from."""

    path: str
    length_scale: float
    where: str


SOURCES = {
    "azure2023_conv": Source(
        "azure2023_conv.csv.gz",
        0.25,
        "AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset",
    ),
    "ragpulse": Source("ragpulse", 0.125, "the folder data of github.com/flashserve/RAGPulse"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one engine did with one schedule. stall: the longest gap in an answer that is being streamed."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p99_ms: float
    stall_ms: float
    tokens_per_s: float


TITLES = ("TTFT p50, ms", "p99", "TPOT p99, ms", "longest stall, ms", "tokens/s")
FIGURES = tuple(field.name for field in fields(Outcome))


@dataclass(frozen=True, slots=True)
class Part:
    """One window of one source. rate: requests/s, in all kinds; outcomes: [kind][engine]."""

    source: str
    rows: int
    rate: float
    prompt_mean: float
    answer_mean: float
    outcomes: dict[str, dict[str, Outcome]]

    def verdict(self, kind: str) -> np.ndarray:
        """chunked / continuous of each figure."""
        continuous, chunked = (_array(self.outcomes[kind][engine]) for engine in ENGINES)
        return chunked / continuous


Measure = Callable[["DictConfig"], tuple[Outcome, float]]
"""Runs a configuration: (outcome, requests/s)."""
AT_ONCE = ("workload.speed=1e9",)
CLOSED = ("load=closed", "load.concurrency=32")
"""Saturate an engine of 16 seats. 400 sends in one moment would be late ones for a real client."""


# -- traffic --


def windows(trace: Trace, rows: int, count: int) -> list[Trace]:
    """The busiest disjoint stretches of so many rows, the busiest first; fewer where the trace has no
    more."""
    times = trace.times_s()
    spans = times[rows - 1 :] - times[: len(times) - rows + 1]
    found: list[int] = []
    for start in np.argsort(spans, kind="stable").tolist():
        if len(found) == count:
            break
        if all(abs(start - other) >= rows for other in found) and spans[start] > 0:
            found.append(start)
    return [trace.take(np.arange(start, start + rows)) for start in found]


def scaled_lengths(trace: Trace, length_scale: float) -> Trace:
    from workloads.lengths import scaled

    return replace(
        trace,
        input_tokens=np.minimum(scaled(trace.input_tokens, length_scale), LONGEST_PROMPT),
        output_tokens=np.minimum(scaled(trace.output_tokens, length_scale), LONGEST_ANSWER),
        blocks=None,
        parts=None,
        reused_tokens=None,
    )


def three_kinds(window: Trace, length_scale: float, seed: int) -> dict[str, Trace]:
    """The same number of requests in the same time, of each kind. Lengths are scaled."""
    from workloads import draw
    from workloads.fitting.preset import fit_trace, preset

    n, span_s = len(window), float(window.times_s()[-1])
    replayed = scaled_lengths(window, length_scale)
    drawn = draw(preset(fit_trace(window), "fitted"), seed=seed, requests=n).columns
    fitted = replace(
        window, time_ns=_nanoseconds(drawn.arrival_s, span_s), input_tokens=drawn.prompt_tokens(),
        output_tokens=drawn.stop_after,
    )  # fmt: skip
    gaps = np.random.default_rng(seed).exponential(size=n)
    fixed = replace(
        replayed,
        time_ns=_nanoseconds(np.cumsum(gaps), span_s),
        input_tokens=np.full(n, round(replayed.input_tokens.mean())),
        output_tokens=np.full(n, round(replayed.output_tokens.mean())),
    )
    return {"fixed": fixed, "fitted": scaled_lengths(fitted, length_scale), "replayed": replayed}


def _nanoseconds(times_s: np.ndarray, span_s: float) -> np.ndarray:
    times = np.sort(times_s) - times_s.min()
    return np.rint(times * (span_s / times[-1]) * 1e9).astype(np.int64)


# -- runs --


def configuration(engine: str, path: Path, length_scale: float, seed: int, *more: str) -> DictConfig:
    from harness.conf import compose

    budget = [f"engine.max_num_batched_tokens={round(BUDGET * length_scale)}"] if engine == "chunked" else []
    return compose(
        [
            f"engine={engine}",
            *budget,
            "engine.num_kv_blocks=4097",
            "model=tiny",
            "workload=trace",
            f"workload.path='{path}'",
            f"seed={seed}",
            *more,
        ]
    )


def measure_part(
    source: str,
    window: Trace,
    length_scale: float,
    seed: int,
    utilisation: float,
    measure: Measure,
    saturated: Sequence[str],
    folder: Path,
    say: Callable[[str], None],
) -> Part:
    from workloads.convert import convert, write

    kinds = three_kinds(window, length_scale, seed)
    paths = {kind: folder / f"{source}-{int(window.time_ns[0])}-{kind}.jsonl" for kind in kinds}  # type: ignore[index]
    for kind, trace in kinds.items():
        write(convert(trace, "mooncake"), paths[kind])
    say(f"{source}: what continuous can do")
    full = configuration("continuous", paths["replayed"], length_scale, seed, *saturated)
    rate = utilisation * measure(full)[1]
    outcomes: dict[str, dict[str, Outcome]] = {kind: {} for kind in KINDS}
    for kind in KINDS:
        for engine in ENGINES:
            say(f"{source}: {kind}, {engine}")
            cfg = configuration(engine, paths[kind], length_scale, seed, f"workload.rate={rate:.6g}")
            outcomes[kind][engine] = measure(cfg)[0]
    return Part(
        source,
        len(window),
        rate,
        float(kinds["replayed"].input_tokens.mean()),
        float(kinds["replayed"].output_tokens.mean()),
        outcomes,
    )


def in_virtual_time(cfg: DictConfig) -> tuple[Outcome, float]:
    from engines.config import EngineConfig
    from harness.experiments.simulation import simulate
    from harness.plan import draw_schedule

    log = simulate(EngineConfig.from_mapping(dict(cfg.engine)), draw_schedule(cfg))
    end = max(r.finish_ns or 0 for r in log.requests) / 1e9
    return outcome(log), len(log.requests) / end


def outcome(log: Log) -> Outcome:
    done = log.requests
    ttft = [((r.first_token_ns or 0) - r.arrival_ns) / 1e6 for r in done]
    tpot = [
        ((r.finish_ns or 0) - (r.first_token_ns or 0)) / 1e6 / (r.output_tokens - 1)
        for r in done
        if r.output_tokens > 1
    ]
    end = max(r.finish_ns or 0 for r in done) / 1e9
    return Outcome(
        ttft_p50_ms=float(np.percentile(ttft, 50)),
        ttft_p99_ms=float(np.percentile(ttft, 99)),
        tpot_p99_ms=float(np.percentile(tpot, 99)),
        stall_ms=_longest_gap_ns(log) / 1e6,
        tokens_per_s=sum(r.output_tokens for r in done) / end,
    )


def _longest_gap_ns(log: Log) -> int:
    """Between two passes that gave one sequence a token: its decodes, and before them its prompt's last."""
    last: dict[int, int] = {}
    longest = 0
    for step in log.steps:
        end = step.start_ns + step.duration_ns
        for sequence, kind in zip(step.ids, step.kind, strict=True):
            if kind == 0:
                last[sequence] = end  # of its pieces the last one counts
            elif kind == 1:
                longest = max(longest, end - last[sequence])
                last[sequence] = end
    return longest


def for_real(cfg: DictConfig, invalid: list[str]) -> tuple[Outcome, float]:
    """A run that is not valid is tried once more; one that is not valid again is named in `invalid`. Raises
    RuntimeError for one that measured nothing."""
    from harness.run import run

    for _ in range(2):
        done = run(cfg)
        path = done.run_dir and done.run_dir / "summary.json"
        if path is None or not path.is_file() or done.interrupted:
            raise RuntimeError("the experiment ends early: its last run was not completed")
        summary = json.loads(path.read_text(encoding="utf-8"))
        if done.exit_code != INVALID:
            break
    else:
        invalid.append(f"{done.run_dir}: {'; '.join(summary['invalid_reasons'])}")
    latency = summary["latency_ms"]
    found = Outcome(
        ttft_p50_ms=latency["ttft"]["from_intended"]["p50"],
        ttft_p99_ms=latency["ttft"]["from_intended"]["p99"],
        tpot_p99_ms=latency["tpot"]["p99"],
        stall_ms=summary["stalls"]["longest_ms"],
        tokens_per_s=summary["throughput"]["output_tokens_per_s"],
    )
    return found, summary["counts"]["completed"] / summary["run"]["duration_s"]


# -- the table --


def table(parts: Sequence[Part]) -> str:
    """Medians over the windows of one source."""
    first = parts[0]
    rate, prompt, answer = (
        float(np.median([getattr(part, name) for part in parts]))
        for name in ("rate", "prompt_mean", "answer_mean")
    )
    head = (
        f"{first.source}: {len(parts)} x {first.rows} requests at {rate:.3g}/s, prompts of {prompt:.0f} and "
        f"answers of {answer:.0f} tokens on average"
    )
    lines = [head, "", " " * 32 + "".join(f"{title:>19}" for title in TITLES)]
    for kind in KINDS:
        for engine in ENGINES:
            figures = np.median([_array(part.outcomes[kind][engine]) for part in parts], axis=0)
            lines.append(f"{kind:10}{engine:22}" + "".join(f"{value:19.1f}" for value in figures))
        verdicts = np.array([part.verdict(kind) for part in parts])
        lines.append(
            f"{'':10}{'chunked / continuous':22}"
            + "".join(f"{_spread(verdicts[:, k]):>19}" for k in range(len(TITLES)))
        )
    lines.append("")
    for kind in KINDS[:2]:
        lines.append(f"{kind} / replayed, by how much it is off")
        for engine in ENGINES:
            off = np.median(
                [
                    _array(part.outcomes[kind][engine]) / _array(part.outcomes["replayed"][engine])
                    for part in parts
                ],
                axis=0,
            )
            lines.append(f"{'':10}{engine:22}" + "".join(f"{_percent(value):>19}" for value in off))
        off = np.median([part.verdict(kind) / part.verdict("replayed") for part in parts], axis=0)
        lines.append(f"{'':10}{'the verdict':22}" + "".join(f"{_percent(value):>19}" for value in off))
    return "\n".join(lines)


def _array(found: Outcome) -> np.ndarray:
    return np.array([getattr(found, name) for name in FIGURES])


def _spread(values: np.ndarray) -> str:
    middle = f"{np.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({values.min():.2f}-{values.max():.2f})"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.0f} %"


# -- the command --


def read_source(folder: Path, name: str) -> Trace:
    """Raises WorkloadError where it is not."""
    from workloads.readers import read_trace

    source = SOURCES[name]
    path = folder / source.path
    if not path.exists():
        raise WorkloadError(
            f"--traces={folder}: has no {source.path}; it needs {source.where}, or --sources without {name}"
        )
    return read_trace(path)


def experiment(
    folder: Path,
    sources: Sequence[str],
    *,
    requests: int,
    count: int,
    seed: int,
    utilisation: float,
    measure: Measure,
    saturated: Sequence[str] = AT_ONCE,
    scratch: Path,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Part]]:
    """By source, its windows."""
    traces = {name: read_source(folder, name) for name in sources}
    found: dict[str, list[Part]] = {}
    for name, trace in traces.items():
        stretches = windows(trace, requests, count) if len(trace) >= requests else []
        if not stretches:
            raise WorkloadError(f"--requests={requests}: {name} has {len(trace)} rows; needs fewer")
        scale = SOURCES[name].length_scale
        found[name] = [
            measure_part(name, stretch, scale, seed + k, utilisation, measure, saturated, scratch, say)
            for k, stretch in enumerate(stretches)
        ]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.experiments.traffic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, required=True, help="the folder of the traces")
    parser.add_argument("--sources", nargs="+", choices=tuple(SOURCES), default=list(SOURCES))
    parser.add_argument("--real", action="store_true", help="measured runs of model=tiny on this machine")
    parser.add_argument("--requests", type=int, default=400, help="of a window")
    parser.add_argument("--windows", type=int, help="of a source; default: 5, and 1 with --real")
    parser.add_argument("--utilisation", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    count = args.windows if args.windows is not None else 1 if args.real else 5
    invalid: list[str] = []
    try:
        if not 0 < args.utilisation < 1:
            raise WorkloadError(f"--utilisation={args.utilisation:g}: needs a share between 0 and 1")
        if args.requests < 20 or count < 1:
            raise WorkloadError(
                f"--requests={args.requests} --windows={count}: need 20 or more, and 1 or more"
            )
        with tempfile.TemporaryDirectory() as scratch:
            found = experiment(
                args.traces,
                args.sources,
                requests=args.requests,
                count=count,
                seed=args.seed,
                utilisation=args.utilisation,
                measure=partial(for_real, invalid=invalid) if args.real else in_virtual_time,
                saturated=CLOSED if args.real else AT_ONCE,
                scratch=Path(scratch),
                say=print if args.real else lambda line: None,
            )
    except WorkloadError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return INVALID
    for parts in found.values():
        print(table(parts) + "\n")
    print(
        json.dumps(
            {
                "experiment": "traffic",
                "real": args.real,
                "seed": args.seed,
                "utilisation": args.utilisation,
                "invalid": invalid,
                "parts": {name: [asdict(part) for part in parts] for name, parts in found.items()},
            }
        )
    )
    for line in invalid:
        print(f"not valid: {line}", file=sys.stderr)
    return INVALID if invalid else PASS


if __name__ == "__main__":
    raise SystemExit(main())

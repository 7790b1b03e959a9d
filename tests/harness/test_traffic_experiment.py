"""How far a fixed-length verdict is off (harness.experiments.traffic), in virtual time on a small trace."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

from harness.experiments import traffic
from workloads.readers import read_trace

ROWS = 160


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A trace with the format of azure2023_conv: every eighth prompt is long; the second half comes twice as
    fast as the first."""
    rng = np.random.default_rng(5)
    gaps = rng.exponential(np.where(np.arange(ROWS) < ROWS // 2, 0.4, 0.2))
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for i, at in enumerate(np.cumsum(gaps)):
        prompt = 6000 if i % 8 == 0 else int(rng.integers(100, 600))
        minute, second = divmod(float(at), 60)
        lines.append(f"2023-11-16 18:{int(minute):02d}:{second:010.7f},{prompt},{int(rng.integers(40, 300))}")
    folder = tmp_path_factory.mktemp("traces")
    (folder / "azure2023_conv.csv.gz").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def trace(folder):
    return read_trace(folder / "azure2023_conv.csv.gz")


def test_windows_are_the_busiest_and_touch_no_other(trace):
    first, second, third = traffic.windows(trace, 50, 9)
    starts = [int(np.searchsorted(trace.time_ns, w.time_ns[0])) for w in (first, second, third)]
    assert starts[0] >= ROWS // 2 - 10, "the fast half"
    assert all(abs(a - b) >= 50 for a in starts for b in starts if a is not b and a != b)
    assert first.times_s()[-1] < third.times_s()[-1]


def test_the_three_kinds_ask_as_often_and_fixed_lengths_are_the_mean(trace):
    (window,) = traffic.windows(trace, 120, 1)
    kinds = traffic.three_kinds(window, 0.25, seed=3)
    assert tuple(kinds) == traffic.KINDS
    spans = [kind.times_s()[-1] for kind in kinds.values()]
    assert spans == pytest.approx([float(window.times_s()[-1])] * 3, rel=1e-6)
    replayed, fixed, fitted = (kinds[name] for name in ("replayed", "fixed", "fitted"))
    assert replayed.input_tokens.tolist() == np.rint(window.input_tokens / 4).astype(int).tolist()
    assert set(fixed.input_tokens) == {round(replayed.input_tokens.mean())}
    assert set(fixed.output_tokens) == {round(replayed.output_tokens.mean())}
    assert fitted.input_tokens.std() == pytest.approx(replayed.input_tokens.std(), rel=0.3)
    assert not np.array_equal(fitted.input_tokens, replayed.input_tokens)


def test_fixed_lengths_hide_what_long_prompts_do(folder, tmp_path):
    found = traffic.experiment(
        folder,
        ["azure2023_conv"],
        requests=ROWS,
        count=1,
        seed=0,
        utilisation=0.7,
        measure=traffic.in_virtual_time,
        scratch=tmp_path,
    )
    (part,) = found["azure2023_conv"]
    stall = traffic.FIGURES.index("stall_ms")
    # A pass of continuous has a whole prompt of 1,500 tokens, one of chunked 512: a third of the time.
    assert part.verdict("replayed")[stall] < 0.6 < part.verdict("fixed")[stall]
    long = part.outcomes["replayed"]["continuous"].stall_ms
    assert long > 2 * part.outcomes["fixed"]["continuous"].stall_ms
    for engines in part.outcomes.values():
        assert engines["chunked"].tokens_per_s == pytest.approx(engines["continuous"].tokens_per_s, rel=0.05)
    lines = traffic.table([part]).splitlines()
    assert lines[0].startswith(f"azure2023_conv: 1 x {ROWS} requests")
    assert sum("chunked / continuous" in line for line in lines) == 3
    assert sum("the verdict" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--sources", "ragpulse"], "has no ragpulse; it needs the folder data of"),
        (["--sources", "azure2023_conv", "--requests", "9999"], f"azure2023_conv has {ROWS} rows"),
        (["--utilisation", "1.5"], "--utilisation=1.5: needs a share between 0 and 1"),
    ],
)
def test_usage_errors_are_one_line(folder, capsys, argv, words):
    assert traffic.main(["--traces", str(folder), *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


@pytest.mark.parametrize(("codes", "named"), [([0], 0), ([3, 0], 0), ([3, 3], 1)])
def test_a_run_that_is_not_valid_is_tried_once_more(
    codes: list[int], named: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, left = [], list(codes)

    def run(cfg: object) -> SimpleNamespace:
        folder = tmp_path / str(len(done))
        folder.mkdir()
        ttft = {"p50": 10.0 + len(done), "p99": 20}
        summary = {
            "invalid_reasons": ["client_bound"],
            "latency_ms": {"ttft": {"from_intended": ttft}, "tpot": {"p99": 3}},
            "stalls": {"longest_ms": 4},
            "throughput": {"output_tokens_per_s": 5},
            "counts": {"completed": 6},
            "run": {"duration_s": 2},
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        done.append(folder)
        return SimpleNamespace(run_dir=folder, interrupted=False, exit_code=left.pop(0))

    monkeypatch.setattr("harness.run.run", run)
    invalid: list[str] = []
    found, rate = traffic.for_real(OmegaConf.create({}), invalid)
    assert (len(done), len(invalid), rate) == (len(codes), named, 3)
    assert found.ttft_p50_ms == 9 + len(done)  # the last one counts

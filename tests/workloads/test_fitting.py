"""Fits: what was put into a made-up trace is found in it, and drawn again."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import yaml

from harness.conf import UsageError, compose
from tests.support.workload_configs import workload
from workloads import WorkloadError, draw
from workloads.__main__ import main
from workloads.arrivals import draw_arrivals, read_arrivals
from workloads.columns import Texts
from workloads.fitting.arrivals import fit_arrivals, index_of_dispersion
from workloads.fitting.goodness import check
from workloads.fitting.lengths import ks_distance
from workloads.fitting.prefixes import measure_reuse
from workloads.fitting.preset import fit_trace, preset
from workloads.reuse import reusable_share
from workloads.settings import Settings
from workloads.trace import Blocks, Trace

QUIET = {"factor": 1, "on_s": 5, "off_s": 15}
N = 6_000


def arrivals(n=N, rate=5.0, seed=3, **changes):
    node = {"kind": "poisson", "cv": 1, "burst": QUIET, **changes}
    return draw_arrivals(
        seed, read_arrivals(Settings(node, "workload.arrivals")), rate=rate, requests=n, duration_s=None
    )


def trace(times=None, n=N, **columns):
    rng = np.random.default_rng(1)
    prompts = np.rint(np.exp(rng.normal(6, 1, n))).astype(int) + 1
    # Two kinds of jobs, told apart by their prompts alone: no correlation shows it.
    answers = np.where((prompts > 300) & (prompts < 600), rng.integers(390, 411, n), rng.integers(5, 200, n))
    values = {"time_ns": None if times is None else np.rint(times * 1e9).astype(np.int64)}
    values |= {"input_tokens": prompts, "output_tokens": answers, **columns}
    return Trace(path="made.csv", format="made", **values)


def by_name(figures):
    return {figure.name: figure for figure in figures}


def test_a_slowly_swinging_rate_is_found_and_drawn_again():
    made = trace(arrivals(factor={"sigma": 0.3, "tau_s": 60}))
    fit = fit_trace(made)
    factor = fit.arrivals.settings["factor"]
    assert fit.arrivals.rate == pytest.approx(5, rel=0.15)
    assert factor["sigma"] == pytest.approx(0.3, abs=0.12)
    assert 15 < factor["tau_s"] < 240
    figures = check(made, fit, preset(fit, "made"), replicas=60)
    assert len(figures) == 6
    assert all(figure.ok for figure in figures), figures
    assert fit_trace(trace(arrivals())).arrivals.settings.get("factor", {}).get("sigma", 0) < 0.12


def test_bursts_and_silences_are_found_and_drawn_again():
    on, off = ({"dist": "lognormal", "mu": mu, "sigma": 0.8} for mu in (1.8, 2.5))
    windows = {"on_s": on, "off_s": off}
    made = trace(arrivals(rate=2.0, on_off=windows, cluster={"size": 2, "within_s": 0.003}))
    fit = fit_trace(made)
    assert fit.arrivals.kind == "on_off"
    assert fit.arrivals.settings["cluster"]["size"] == pytest.approx(2, rel=0.1)
    figures = by_name(check(made, fit, preset(fit, "made"), replicas=40))
    for name in ("dispersion in 1 s", "dispersion in 10 s"):
        drawn = float(figures[name].drawn.split()[0])
        assert drawn == pytest.approx(float(figures[name].source), rel=0.35)


def test_a_silent_rate_is_no_burst_and_gaps_keep_their_variation():
    slow = fit_arrivals(arrivals(n=2_000, rate=0.01))
    assert slow.kind == "renewal"
    for cv in (0.4, 1.3):
        found = fit_arrivals(arrivals(n=20_000, kind="gamma", cv=cv))
        assert found.settings["cv"] == pytest.approx(cv, rel=0.12)


def test_equal_gaps_are_fitted_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fit_arrivals(np.arange(2_000) * 0.5)
    assert found.settings["cv"] < 0.1
    assert found.settings.get("factor", {"sigma": 0})["sigma"] < 0.05


def test_answers_of_jobs_that_no_correlation_shows():
    made = trace(arrivals())
    fit = fit_trace(made)
    assert abs(fit.lengths.spearman) < 0.3
    schedule = draw(preset(fit, "made"), seed=0, requests=N)
    prompts, answers = schedule.columns.prompt_tokens(), schedule.columns.stop_after
    middle = (prompts > 320) & (prompts < 580)
    assert np.mean((answers[middle] > 385) & (answers[middle] < 415)) > 0.8
    assert ks_distance(made.input_tokens, prompts) < 0.02
    assert ks_distance(made.output_tokens, answers) < 0.02


def chained(n=N):
    """A third of the prompts go on from an earlier one; all begin with one block."""
    rng = np.random.default_rng(2)
    prompts, rows, start = [], [], [0]
    fresh = 1
    for i in range(n):
        if i > 20 and rng.random() < 0.33:
            ids = [*rows[i - 1 - int(rng.integers(0, 20))]]
        else:
            ids = [0]
        more = int(rng.integers(1, 12))
        ids += range(fresh, fresh + more)
        fresh += more
        rows.append(ids)
        prompts.append(len(ids) * 512 - int(rng.integers(0, 512)))
        start.append(start[-1] + len(ids))
    blocks = Blocks(np.array(start), np.array([i for row in rows for i in row]), 512)
    answers = rng.integers(1, 300, n)
    return trace(arrivals(n), n, input_tokens=np.array(prompts), output_tokens=answers, blocks=blocks)


def test_shared_prefixes_are_measured_and_drawn_again():
    made = chained()
    reuse = measure_reuse(made)
    seen: set[int] = set()
    hits = 0
    for i in range(len(made)):
        ids = made.blocks.ids[made.blocks.start[i] : made.blocks.start[i + 1]].tolist()
        found = sum(b in seen for b in ids)
        assert reuse.tokens[i] == min(found * 512, made.input_tokens[i])
        hits += reuse.tokens[i]
        seen.update(ids)
    fit = fit_trace(made)
    assert fit.prefixes.hit_rate == pytest.approx(hits / made.input_tokens.sum())
    figures = by_name(check(made, fit, preset(fit, "made"), replicas=20))
    assert figures["prefix hit rate (blocks)"].ok, figures["prefix hit rate (blocks)"]
    assert figures["KS of prompts"].ok


def test_sessions_are_found_with_their_lengths_and_reuse():
    rng = np.random.default_rng(4)
    starts = arrivals(n=1_500, rate=0.5)
    times, sessions, prompts, reused, thinks = [], [], [], [], []
    for s, start in enumerate(starts):
        at, length = start, int(rng.integers(100, 3_000))
        for turn in range(int(rng.integers(1, 8))):
            gap = float(rng.exponential(20)) if turn else np.nan
            at += gap if turn else 0
            reused.append(int(0.95 * length) if turn else 0)
            length += int(rng.integers(10, 400))
            times.append(at), sessions.append(f"s{s}"), prompts.append(length), thinks.append(gap)
    order = np.argsort(times)
    n = len(times)
    pick = [np.array(column)[order] for column in (times, prompts, reused, thinks)]
    made = trace(
        pick[0] - pick[0][0],
        n,
        input_tokens=pick[1],
        output_tokens=rng.integers(1, 200, n),
        reused_tokens=pick[2],
        think_s=pick[3],
        session=Texts.of([sessions[k] for k in order]),
    )
    fit = fit_trace(made)
    assert fit.sessions.sessions == 1_500
    assert fit.sessions.growing
    assert fit.sessions.alike > 0.6
    figures = by_name(check(made, fit, preset(fit, "made"), replicas=20))
    for name in ("KS of prompts", "KS of answers", "prefix hit rate (recorded)"):
        assert figures[name].ok, figures[name]
    schedule = draw(preset(fit, "made"), seed=0, requests=2_000)
    for name in {r.session for r in schedule if r.turn == 2}:
        own = [r.prompt_tokens for r in schedule if r.session == name]
        assert own == sorted(own)


def test_reuse_of_blocks_is_that_of_a_cache_that_is_filled_row_by_row():
    rng = np.random.default_rng(7)
    rows = [rng.integers(0, 12, rng.integers(0, 5)).tolist() for _ in range(300)]  # ids may repeat in a row
    start = np.cumsum([0, *map(len, rows)])
    made = trace(n=300, blocks=Blocks(start, np.array([i for r in rows for i in r]) << 60, 16))
    found = measure_reuse(made)
    cache = {}
    for k, row in enumerate(rows):
        hits = next((h for h, block in enumerate(row) if block not in cache), len(row))
        assert found.tokens[k] == min(16 * hits, made.input_tokens[k])
        assert found.lag[k] == (k - cache[row[hits - 1]] if hits else 0)
        cache |= dict.fromkeys(row, k)


def test_tenants_keep_their_shares():
    rng = np.random.default_rng(5)
    users = Texts.of(rng.choice(["a", "b", "c"], N, p=[0.6, 0.3, 0.1]).tolist())
    made = trace(arrivals(), user=users)
    fit = fit_trace(made)
    figures = by_name(check(made, fit, preset(fit, "made"), replicas=20))
    assert figures["volume shares of 3 tenants"].ok
    assert list(fit.tenants) == ["a", "b", "c"]


def test_stamps_on_a_grid_are_spread_over_it():
    exact = arrivals(n=4_000, rate=3.0)
    made = trace(np.floor(exact / 3) * 3, 4_000)
    fit = fit_trace(made)
    assert "stamps on a grid of 3 s, spread over it" in fit.notes
    assert fit.arrivals.dispersion[1.0] == pytest.approx(index_of_dispersion(exact, 1.0), abs=0.15)
    assert by_name(check(made, fit, preset(fit, "made"), replicas=20))["dispersion in 1 s"].ok
    assert trace(exact, 4_000).tick_s() is None


def test_stamps_of_whole_seconds_are_spread_where_few_share_one():
    """A sparse trace: hardly a second has two requests, and those that do would be more than by chance."""
    rng = np.random.default_rng(0)
    pairs = np.sort(rng.choice(40_000, 400, replace=False)) * 10.0
    times = np.sort(np.concatenate([pairs, pairs[::8], pairs[1::8] + 1]))  # of two a second apart, and none
    made = trace(times, len(times))
    assert made.tick_s() == 1
    raw = index_of_dispersion(made.times_s(), 1.0)
    fit = fit_trace(made)
    assert raw is not None
    assert 1 < fit.arrivals.dispersion[1.0] < raw


def test_from_the_command_to_a_run(tmp_path, capsys):
    source = tmp_path / "t.csv"
    made = trace(arrivals(n=400), 400)
    rows = [
        f"2024-05-12 00:{int(t) // 60:02d}:{t % 60:09.6f},{a},{b}"
        for t, a, b in zip(made.times_s(), made.input_tokens, made.output_tokens, strict=True)
    ]
    source.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    out, table = tmp_path / "my.yaml", tmp_path / "table.yaml"
    arguments = [
        "fit",
        str(source),
        "-o",
        str(out),
        "--table",
        str(table),
        "--memory-gb",
        "2",
        "--name",
        "mine",
    ]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "not captured: what prompts share" in said
    assert "engine.max_num_seqs=" in said
    assert yaml.safe_load(table.read_text())["joint"]["edges"]
    cfg = compose(
        [f"+workload={out}", "workload.length_scale=0.1", "workload.output.cap=64", "load.requests=50"]
    )
    schedule = draw(cfg.workload, seed=0, requests=50)
    assert {r.segments[0].segment_id.split("/")[0] for r in schedule} == {"mine"}
    assert main(["show", str(out), "--requests", "20"]) == 0
    assert main(arguments) == 2, "a file is never replaced"
    for wrong, words in (("nowhere.yaml", "no such file"), (str(source)[:-4] + ".yaml", "")):
        (tmp_path / "t.yaml").write_text("[1, 2")
        with pytest.raises(UsageError, match=f"workload=.*{words}"):
            compose([f"workload={wrong}"])


def test_what_cannot_be_fitted_says_so():
    with pytest.raises(WorkloadError, match="has 5 rows, a fit needs 20 or more; replay it"):
        fit_trace(trace(arrivals(n=5), 5))
    lengths_only = fit_trace(trace(None))
    assert lengths_only.arrivals.kind == "lengths_only"
    assert len(draw(preset(lengths_only, "made"), seed=0, requests=30)) == 30


def test_continued_prompts_reuse_what_they_say():
    node = workload("chat")
    node["length_scale"], node["input"]["cap"] = 1, None
    part = {
        "kind": "continued",
        "length": {"dist": "quantiles", "points": [[0, 100], [100, 2_000]]},
        "reused": {"edges": [1_000], "points": [[[0, 0.2], [100, 0.2]], [[0, 0.8], [100, 0.8]]]},
        "lag": {"dist": "discrete", "values": [1, 5, 50], "weights": [1, 1, 1]},
    }
    node["classes"]["chat"]["input"] = {"prompt": part}
    schedule = draw(node, seed=0, requests=3_000)
    prompts = schedule.columns.prompt_tokens()
    wanted = np.where(prompts >= 1_000, 0.8, 0.2) * prompts
    assert reusable_share(schedule.columns.segments) == pytest.approx(wanted.sum() / prompts.sum(), abs=0.02)
    assert ks_distance(prompts, np.linspace(100, 2_000, 3_000)) < 0.03
    few = draw(node, seed=0, requests=200)
    assert [r.segments for r in few] == [r.segments for r in schedule][:200]


def test_few_requests_are_held_to_what_chance_allows_and_many_to_the_limit():
    limits = {}
    for n in (60, 20_000):
        made = trace(arrivals(n=n), n)
        fit = fit_trace(made)
        figures = check(made, fit, preset(fit, "made"), replicas=20)
        assert [f.name for f in figures if f.ok is False and "dispersion" not in f.name] == []
        limits[n] = {f.name: f.limit for f in figures}
    assert limits[60]["KS of prompts"] == "< 0.21"
    assert limits[60]["rank correlation"] == "within 0.33"
    assert limits[20_000]["KS of prompts"] == "< 0.02"
    assert limits[20_000]["rank correlation"] == "within 0.05"

"""The page a person opens: what is on it, that its figures are those of summary.json, and that it is safe."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.dashboard import write_dashboard
from harness.dashboard.data import unpack
from harness.dashboard.page import DashboardError
from harness.dashboard.verdict import forest
from harness.metrics import write_summary
from harness.table import lookup, number, percent
from tests.harness.test_attribution import long_prompt_stalls_two
from tests.support.run_factory import engine_request, request, steady_requests, step, write_run


def make_run(folder: Path, engine: str = "continuous", *, gap: float = 0.02, **meta: object) -> Path:
    rows = [*steady_requests(40, gap=gap), request(99, intended=4.0, outcome="cancelled", reason="after_s")]
    steps = [step(i, start=i * 0.05, duration=0.04) for i in range(80)]
    run = write_run(folder, rows, steps=steps, name=engine, **meta)  # type: ignore[arg-type]
    (run / "config.yaml").write_text(f"seed: 0\nengine: {{name: {engine}, max_num_seqs: 16}}\n")
    return run


def figures_of(page: str) -> list[dict]:
    return unpack(page, "data")["figures"]


def test_one_run_shows_every_chart_with_the_records_own_values(tmp_path: Path) -> None:
    out = write_dashboard([make_run(tmp_path / "run")], tmp_path / "page.html")
    figures = {f["title"]: f for f in figures_of(out.read_text())}
    assert set(figures) == {
        "Time to first token",
        "Time per output token",
        "Inter-token latency",
        "End to end",
        "Normalized latency: E2E over output tokens",
        "Output throughput",
        "Requests in flight",
        "Batch occupancy",
        "Batch composition, continuous",
        "KV blocks, continuous",
        "KV cache in use",
        "Iteration time",
        "Device busy",
        "Outcomes",
    }
    gaps = figures["Inter-token latency"]["data"][0]
    assert gaps["x"][0] == pytest.approx(20.0, rel=1e-3)
    assert gaps["y"][-1] == 100.0
    kv = figures["KV cache in use"]["data"][0]
    assert max(kv["y"]) == pytest.approx(10.0)  # 10 live blocks of 100
    throughput = figures["Output throughput"]["data"][0]
    width = throughput["x"][1] - throughput["x"][0]
    assert sum(throughput["y"]) * width == pytest.approx(40 * 11)  # every token, once
    assert max(figures["Requests in flight"]["data"][0]["y"]) == 4
    busy = figures["Device busy"]["data"][0]
    while_busy = [y for x, y in zip(busy["x"], busy["y"], strict=True) if x < 3.9]
    assert sum(while_busy) / len(while_busy) == pytest.approx(80, abs=1)  # 40 ms of every 50
    for title in ("Time to first token", "Output throughput", "Requests in flight"):
        drawn = [f for f in figures_of(out.read_text()) if f["title"] == title][-1]
        assert [round(drawn["layout"]["shapes"][0][at], 1) for at in ("x0", "x1")] == [0.3, 4.0]
    counted = {t["name"]: t["x"] for t in figures["Outcomes"]["data"]}
    assert counted == {"completed": [40], "cancelled": [1]}


def test_gaps_within_a_chunk_are_zeros_of_the_inter_token_latency(tmp_path: Path) -> None:
    """4 tokens a chunk, 5 chunks: of 19 gaps 15 are 0, and the curve begins above them."""
    rows = [request(i, [(i + 1.0 + 0.4 * k, 4) for k in range(5)], intended=float(i)) for i in range(3)]
    page = write_dashboard([write_run(tmp_path / "run", rows)], tmp_path / "page.html").read_text()
    figures = {f["title"]: f for f in figures_of(page)}
    curve = figures["Inter-token latency"]["data"][0]
    assert curve["y"][0] == pytest.approx(100 * (45 + 1) / 57, rel=1e-3)
    assert "78.9 % of continuous are 0" in page
    assert "Gap between chunks" in figures


def shown_figures(page: str) -> list[tuple[str, int, str, str]]:
    """(path, run, value, text) of each figure that the page shows."""
    cell = re.compile(r'data-path="([^"]+)" data-run="(\d+)" data-value="([^"]*)"[^>]*>([^<]*)<')
    return [(path, int(run), value, text.strip()) for path, run, value, text in cell.findall(page)]


def test_every_figure_on_the_page_is_that_of_summary_json(tmp_path: Path) -> None:
    """To the last digit shown, and with all digits behind it."""
    rows = [
        *steady_requests(60, gap=0.0213, ttft=0.217),
        request(99, intended=4.0, outcome="cancelled", reason="after_s"),
    ]
    engine = [engine_request(row, admitted=row["send_ns"] * 1e-9 + 0.0321) for row in rows]
    steps = [step(i, start=i * 0.05, duration=0.0413, ids=[i % 60]) for i in range(120)]
    run = write_run(tmp_path / "run", rows, engine=engine, steps=steps)
    write_summary(run)
    summary = json.loads((run / "summary.json").read_text())
    figures = shown_figures(write_dashboard([run], tmp_path / "page.html").read_text())
    assert len(figures) > 70
    for path, _, value, text in figures:
        truth = lookup(summary, path)
        if value in ("", "None"):
            assert truth is None, path
            assert text == "–"
        else:
            assert float(value) == truth, path
            assert text.lstrip("~") in (number(truth), percent(truth)), path


def test_runs_of_one_schedule_are_compared_and_only_differing_settings_are_listed(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", "static", gap=0.04), make_run(tmp_path / "b", "chunked", gap=0.02)]
    page = write_dashboard(runs, tmp_path / "page.html").read_text()
    assert "0.50x ▲" in page  # TPOT halves
    assert "Not comparable" not in page
    differing = page[page.index("<h2>Configuration") : page.index("All settings")]
    assert "engine.name" in differing
    assert "engine.max_num_seqs" not in differing


def test_runs_of_unlike_schedules_carry_a_warning_and_no_factors(tmp_path: Path) -> None:
    other = {"schedule": "x" * 64, "config": "c" * 64, "host": "h" * 64, "device": "d" * 64}
    runs = [make_run(tmp_path / "a", "static"), make_run(tmp_path / "b", "chunked", fingerprint=other)]
    page = write_dashboard(runs, tmp_path / "page.html").read_text()
    assert "Not comparable" in page
    assert "▲" not in page.split("</tbody>")[0]


def test_an_invalid_run_says_why_in_a_banner(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", complete=False, incomplete_reason="server died <b>now</b>")
    page = write_dashboard([run], tmp_path / "page.html").read_text()
    assert "this run is not valid" in page
    assert '<span class="invalid">not valid</span></h1>' in page
    both = write_dashboard([make_run(tmp_path / "sound", "static"), run], tmp_path / "two.html").read_text()
    figures = both[both.index('<div id="figures"') :]
    head = figures[figures.index("<thead>") : figures.index("</thead>")]
    assert head.count('class="invalid"') == 1
    assert head.index("static") < head.index("continuous") < head.index('class="invalid"')
    assert "server died &lt;b&gt;now&lt;/b&gt;" in page


def test_warnings_and_the_client_are_on_the_page(tmp_path: Path) -> None:
    rows = [request(i, [(i + 1.0 + 0.4 * k, 20) for k in range(5)], intended=float(i)) for i in range(30)]
    page = write_dashboard([write_run(tmp_path / "run", rows)], tmp_path / "page.html").read_text()
    assert "Read with care" in page
    assert "ITL is chunked: 20 tokens a chunk" in page
    assert "not valid" not in page
    found = page[page.index("Did the client keep up") :]
    row = found[found.index("tokens a chunk") :]
    assert ">20.0<" in row[: row.index("</tr>")]


def test_names_from_outside_cannot_end_the_script(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    page = write_dashboard([make_run(tmp_path / "run", evil)], tmp_path / "page.html").read_text()
    assert "<script>alert(1)" not in page
    assert unpack(page, "data")["runs"][0]["name"] == evil


def test_a_run_without_a_single_answer_is_a_page_all_the_same(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [request(0, outcome="failed", error="HTTP 500", status=500)])
    page = write_dashboard([run], tmp_path / "page.html").read_text()
    assert [f["title"] for f in figures_of(page)] == ["Requests in flight", "Outcomes"]
    for told in ("No request was completed.", "No step records", "All requests are of one tenant."):
        assert told in page  # a part without data says why
    assert "this run is not valid" in page


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DashboardError, match=r"not a run directory"):
        write_dashboard([tmp_path], tmp_path / "page.html")
    command = [
        sys.executable,
        "-m",
        "harness.dashboard",
        str(tmp_path / "nothing"),
        "-o",
        str(tmp_path / "x.html"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x.html").exists()


def test_where_the_time_went_by_class(tmp_path: Path) -> None:
    """Bars of all requests and of each class, in ms of the mean request; a legend beside the chart."""
    page = write_dashboard([long_prompt_stalls_two(tmp_path / "run")], tmp_path / "page.html").read_text()
    figure = next(f for f in figures_of(page) if f["title"] == "Where the time went")
    bars = {trace["name"]: dict(zip(trace["y"], trace["x"], strict=True)) for trace in figure["data"]}
    assert set(bars["decode"]) == {"all", "chat", "rag"}
    assert bars["stalled by others' prefill"]["chat"] == pytest.approx(325, rel=1e-3)
    assert bars["stalled by others' prefill"]["rag"] == 0
    assert sum(bar["chat"] for bar in bars.values()) == pytest.approx(411, rel=1e-3)
    assert all(f"</span>{name.replace(chr(39), '&#39;')}</span>" in page for name in bars)


def test_whiskers_of_what_is_the_same_are_short() -> None:
    same, half = forest([("#000", 1.001, (0.999, 1.002))], 1.0), forest([("#000", 0.5, (0.45, 0.56))], 1.0)
    assert 0 < same["marks"][0]["high"] - same["marks"][0]["low"] < 2
    assert same["line"] == pytest.approx(50)
    assert half["marks"][0]["low"] < half["marks"][0]["x"] < half["marks"][0]["high"] < half["line"] < 97


def test_a_comparison_shows_its_verdict_over_rounds_and_its_middle_round(tmp_path: Path) -> None:
    path = "latency_ms.tpot.p50"
    rounds = []
    for turn in range(3):
        runs = {}
        for name, gap in (("static", 0.04), ("chunked", 0.02)):
            make_run(tmp_path / f"rounds/{turn}-{name}", name, gap=gap + 0.001 * turn)
            runs[name] = f"rounds/{turn}-{name}"
        rounds.append({"number": turn, "order": list(runs), "runs": runs, "valid": turn > 0})
    effect = {"ratio": 0.51, "low": 0.48, "high": 0.55, "rounds": 2, "verdict": "better", "needed": None}
    unsure = {"ratio": 1.02, "low": 0.7, "high": 1.4, "rounds": 2, "verdict": "inconclusive", "needed": 9}
    found = {
        "schema_version": 1,
        "arms": [{"name": "chunked", "overrides": []}, {"name": "static", "overrides": []}],
        "reference": "static",
        "rounds": rounds,
        "metrics": {
            path: {"better": "lower", "limit": 0.05, "arms": {"chunked": effect}},
            "throughput.goodput_rps": {"better": "higher", "limit": 0.05, "arms": {"chunked": unsure}},
        },
        "drift": {path: {"kind": "again", "low": 0.98, "high": 1.03}},
        "verdict": {"outcome": "decided", "text": "chunked halves TPOT <p50>"},
        "refused": [],
    }
    (tmp_path / "compare.json").write_text(json.dumps(found))
    page = write_dashboard([tmp_path], tmp_path / "report.html").read_text()
    verdict = page[page.index('class="verdict good"') : page.index('id="slots"')]
    told = "chunked better on 1 of 2 (TPOT p50 0.51x, 0.48 to 0.55), undecided on 1 · 2 of 3 rounds valid"

    assert f"<h2>Against static: {told}</h2>" in verdict
    assert "latency_ms" not in re.sub(r"<[^>]*>", "", verdict)
    assert ">0.51x</b> <i>▲</i>" in verdict
    assert "0.48 to 0.55, better" in verdict
    assert "0.70 to 1.40, inconclusive: 9 rounds would do" in verdict
    assert "The reference against itself (A/A): TPOT p50 0.98x to 1.03x." in verdict
    runs = unpack(page, "data")["runs"]
    assert [run["name"] for run in runs] == ["static", "chunked"]  # the reference first
    assert runs[0]["requests"]["columns"]["tpot_ms"][0] == pytest.approx(42)  # the last of two valid rounds
    with pytest.raises(DashboardError, match="give it alone"):
        write_dashboard([tmp_path, tmp_path / "rounds/0-static"], tmp_path / "x.html")
    (tmp_path / "compare.json").write_text("{")
    with pytest.raises(DashboardError, match="cannot read"):
        write_dashboard([tmp_path], tmp_path / "x.html")


def test_runs_at_several_rates_and_a_capacity_search_have_their_curves(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{i}", planned={"rate": rate, "requests": None, "length_scale": 1.0}, gap=gap)
        for i, (rate, gap) in enumerate(((2.0, 0.02), (4.0, 0.03)))
    ]
    points = [
        {"rate": 2.0, "attainment": 1.0, "ttft_p99": 90.0, "goodput_rps": 2.0, "run": "0"},
        {"rate": 4.0},
    ]
    found = {"schema_version": 1, "arms": {"continuous": {"capacity": {"rps": 3.0}, "points": points}}}
    (tmp_path / "capacity.json").write_text(json.dumps(found))
    page = write_dashboard(runs, tmp_path / "page.html").read_text()
    figures = {f["title"]: f for f in figures_of(page)}
    p50 = figures["TPOT against the rate"]["data"][0]
    assert p50["name"] == "continuous p50"
    assert p50["x"] == [2, 4]
    assert p50["y"] == pytest.approx([20, 30])
    page = write_dashboard([tmp_path], tmp_path / "page.html").read_text()
    figures = {f["title"]: f for f in figures_of(page)}
    assert figures["Capacity: SLO attainment"]["data"][0]["y"] == [100]
    assert "Capacity: TPOT p99" not in figures


def test_a_page_of_10_000_requests_is_under_8_mb_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    """Random figures: they pack worse than those of a machine."""
    draw = random.Random(0)
    rows, engine, steps = [], [], []
    for i in range(10_000):
        at = i * 0.01 + draw.random() * 0.01
        first = at + draw.random() * 0.3
        row = request(i, [(first + k * draw.random() * 0.02, 1) for k in range(3)], intended=at)
        rows.append(row | {"chunk_ns": sorted(row["chunk_ns"])})
        engine.append(engine_request(rows[-1], admitted=at + (first - at) / 2))
    for i in range(30_000):
        ids = sorted({min(9_999, max(0, i // 3 - draw.randrange(40))) for _ in range(8)})
        kind = [draw.choice((0, 1, 1, 1)) for _ in ids]
        live = draw.randrange(90)
        counts = {"kv_live": live, "kv_free": 100 - live, "waiting": draw.randrange(30), "running": len(ids)}
        steps.append(
            step(i, i * 0.0033, 0.003 * draw.random(), ids=ids, tokens=[1] * len(ids), kind=kind, **counts)
        )
    run = write_run(tmp_path / "run", rows, engine=engine, steps=steps)
    out = write_dashboard([run], tmp_path / "page.html")
    assert out.stat().st_size < 8_000_000
    page = out.read_text()
    data = unpack(page, "data")["runs"][0]
    assert data["requests"]["n"] == data["requests"]["whole"] == 10_000
    assert data["steps"]["n"] == 30_000
    figures = {f["title"]: f for f in figures_of(page)}
    ttft = next(f for f in figures_of(page) if f["title"] == "Time to first token" and "mode" in f["data"][0])
    drawn = [f for f in figures_of(page) if f["title"] == "Time to first token"][-1]
    assert len(drawn["data"][0]["x"]) <= 6000
    assert "6,000 of 10,000 requests shown: the slowest and the fastest of each stretch" in page
    every = [row["chunk_ns"][0] - row["intended_ns"] for row in rows]
    assert max(drawn["data"][0]["y"]) == pytest.approx(max(every) * 1e-6, rel=1e-4)  # no outlier is lost
    assert ttft["data"][0]["x"][-1] == pytest.approx(max(every) * 1e-6, rel=1e-4)
    assert len(figures["Batch occupancy"]["data"][0]["x"]) == 400

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from scipy import stats

from tests.support.workload_configs import PRESETS, full_size, workload, workload_file
from workloads import WorkloadError, draw
from workloads.assembly import class_cap
from workloads.lengths import read_answer
from workloads.settings import Settings

MAX_MODEL_LEN = 4096  # the default of the reference engines


def column(schedule, name):
    return np.array([getattr(r, name) for r in schedule])


def digest(node, **kwargs):
    return draw(node, seed=kwargs.pop("seed", 0), **kwargs).sha256()


@pytest.mark.parametrize("name", PRESETS)
def test_defaults_make_a_modest_run_that_fits_the_default_engine(name):
    schedule = draw(workload(name), seed=0)
    assert len(schedule) >= 50
    assert max(r.arrival_s for r in schedule if r.turn == 0) < 60
    assert (column(schedule, "prompt_tokens") + column(schedule, "max_tokens")).max() <= MAX_MODEL_LEN
    assert [r.id for r in schedule] == [f"r{i:06d}" for i in range(len(schedule))]
    assert np.all(np.diff(column(schedule, "arrival_s")) >= 0)
    assert schedule.length_scale == (0.0625 if name == "agent" else 0.25)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("scale", [0.05, 1.0, 3.0])
def test_a_prompt_and_its_answer_fit_the_default_engine_at_any_scale(name, scale):
    if scale > 0.5 and name in ("agent", "mixed", "toolcall"):
        scale /= 16  # their shared parts alone are longer
    schedule = draw(workload(name, length_scale=scale), seed=1)
    assert (column(schedule, "prompt_tokens") + column(schedule, "max_tokens")).max() <= MAX_MODEL_LEN
    assert all(tokens >= 1 for r in schedule for _, tokens in r.segments)
    if scale == 3.0 and name == "rag":
        assert any("workload.input.cap=3584" in note for note in schedule.notes)


@pytest.mark.parametrize("name", PRESETS)
def test_the_same_arguments_give_the_same_schedule_in_every_process(name):
    code = (
        "import yaml, sys; from workloads import draw;"
        f"print(draw(yaml.safe_load(open({workload_file(name)!r})), seed=5).sha256())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "31337", "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == digest(workload(name), seed=5)
    assert digest(OmegaConf.create(workload(name)), seed=5) == digest(workload(name), seed=5)
    assert digest(workload(name), seed=6) != digest(workload(name), seed=5)


def test_rag_has_the_lengths_that_its_source_measured():
    schedule = draw(full_size("rag"), seed=0, requests=7106)
    prompts, answers = column(schedule, "prompt_tokens"), column(schedule, "stop_after")
    assert prompts.mean() == pytest.approx(2944, rel=0.03)
    for quantile, measured in ((50, 3140), (90, 3958)):
        assert np.percentile(prompts, quantile) == pytest.approx(measured, rel=0.06)
    assert answers.mean() == pytest.approx(283, rel=0.05)
    for quantile, measured in ((25, 131), (50, 234), (75, 385), (90, 563)):
        assert np.percentile(answers, quantile) == pytest.approx(measured, rel=0.08)
    assert stats.spearmanr(prompts, answers).statistic == pytest.approx(0.42, abs=0.04)


def test_rag_prompts_share_what_the_source_shared():
    schedule = draw(full_size("rag"), seed=0, requests=2000)
    first = Counter(r.segments[0] for r in schedule)
    assert len(first) == 1, "every prompt begins with the same 512 tokens"
    second = Counter(r.segments[1].segment_id for r in schedule)
    assert second["rag/system_of_the_day"] / 2000 == pytest.approx(0.767, abs=0.03)
    lengths = {}
    uses = Counter()
    for r in schedule:
        passages = [s for s in r.segments if "/passages/" in s.segment_id]
        assert len({s.segment_id for s in passages}) == len(passages) <= 6
        for s in passages:
            assert lengths.setdefault(s.segment_id, s.tokens) == s.tokens, "a document has one length"
            uses[s.segment_id] += 1
    for top, measured in ((32, 0.18), (323, 0.59)):  # 1 and 10 % of the pool
        share = sum(n for _, n in uses.most_common(top)) / sum(uses.values())
        assert share == pytest.approx(measured, abs=0.05)


def test_chat_has_the_shape_of_its_sources():
    schedule = draw(full_size("chat"), seed=0, requests=5000)
    prompts, answers = column(schedule, "prompt_tokens"), column(schedule, "stop_after")
    assert answers.mean() == pytest.approx(294, rel=0.05)
    turns = np.array([any("/history/" in s.segment_id for s in r.segments) for r in schedule])
    assert turns.mean() == pytest.approx(1 - 1 / 1.909, abs=0.03)
    assert prompts.min() > 512
    assert prompts[turns].mean() > prompts[~turns].mean() + 300
    assert stats.spearmanr(prompts, answers).statistic == pytest.approx(0, abs=0.06)


def test_summarize_has_the_quantiles_of_its_source_and_repeats_documents():
    schedule = draw(full_size("summarize"), seed=0, requests=5000)
    documents = column(schedule, "prompt_tokens") - 150
    for quantile, measured in ((10, 1242), (25, 1986), (50, 2730), (75, 3370), (90, 3702)):
        assert np.percentile(documents, quantile) == pytest.approx(measured, rel=0.05)
    answers = column(schedule, "stop_after")
    for quantile, measured in ((10, 78), (50, 167), (75, 242)):
        assert np.percentile(answers, quantile) == pytest.approx(measured, rel=0.06)
    again = 5000 - len({r.segments[-1] for r in schedule})
    assert again / 5000 == pytest.approx(0.1, abs=0.02)


def test_batch_is_all_there_at_the_start_and_nobody_streams():
    schedule = draw(full_size("batch"), seed=0, requests=2000)
    assert set(column(schedule, "arrival_s")) == {0.0}
    assert schedule.planned_rate is None
    assert not column(schedule, "stream").any()
    assert set(column(schedule, "cancel_kind")) == {"none"}
    by_class = {c: [r for r in schedule if r.request_class == c] for c in ("score", "generate", "translate")}
    assert all(703 <= r.prompt_tokens <= 709 and r.stop_after == 5 for r in by_class["score"])
    generated = [r.prompt_tokens for r in by_class["generate"]]
    assert np.median(generated) == pytest.approx(53, rel=0.15)
    translate = by_class["translate"]
    rho = stats.spearmanr([r.prompt_tokens for r in translate], [r.stop_after for r in translate]).statistic
    assert rho == pytest.approx(0.9, abs=0.03)


def others(schedule, *but):
    names = (
        "arrival_s",
        "request_class",
        "segments",
        "stop_after",
        "max_tokens",
        "cancel_kind",
        "cancel_value",
    )
    return [[getattr(r, n) for r in schedule] for n in names if n not in but]


def test_sub_streams_are_independent():
    steady = workload("rag", arrivals__factor=None)  # swings run on the clock, whatever the rate
    base = draw(steady, seed=3)
    rate = draw({**steady, "rate": 50}, seed=3)
    assert others(base, "arrival_s") == others(rate, "arrival_s")
    assert np.allclose(column(base, "arrival_s"), column(rate, "arrival_s") * 10)
    shape = draw(workload("rag", arrivals__factor=None, arrivals__kind="poisson"), seed=3)
    assert others(base, "arrival_s") == others(shape, "arrival_s")
    cancel = draw(workload("rag", arrivals__factor=None, cancel__after_tokens__share=0.5), seed=3)
    assert others(base, "cancel_kind", "cancel_value") == others(cancel, "cancel_kind", "cancel_value")
    assert column(base, "cancel_kind").tolist() != column(cancel, "cancel_kind").tolist()
    answers = workload("rag", arrivals__factor=None)
    answers["classes"]["plain"]["output"]["mu"] = 3.0
    changed = draw(answers, seed=3)
    assert others(base, "stop_after", "max_tokens", "cancel_value") == others(
        changed, "stop_after", "max_tokens", "cancel_value"
    )
    question = workload("rag", arrivals__factor=None)
    question["classes"]["retrieval"]["input"]["question"]["length"]["mu"] = 5.0
    longer = draw(question, seed=3)
    for a, b in zip(base, longer, strict=True):
        assert a.segments[:-1] == b.segments[:-1], "a longer question moves nothing but itself"


def test_more_requests_begin_with_the_same_requests():
    short, long = draw(workload("chat"), seed=0, requests=50), draw(workload("chat"), seed=0, requests=120)
    assert others(short) == [values[:50] for values in others(long)]


def test_requests_and_duration_of_the_load():
    assert len(draw(workload("chat"), seed=0, requests=17)) == 17
    timed = draw(workload("chat", arrivals__factor=None), seed=0, duration_s=100)
    assert 95 < timed.requests[-1].arrival_s <= 100
    assert len(timed) > 400, "the workload's own count of 200 does not bind"
    both = draw(workload("chat"), seed=0, requests=10, duration_s=100)
    assert len(both) == 10
    assert len(draw(workload("batch"), seed=0, duration_s=1)) == 200


def test_class_cap_is_the_p99_of_the_class_up_to_a_multiple_of_16():
    assert [class_cap(n) for n in (1, 16, 17, 208.5)] == [16, 16, 32, 224]
    schedule = draw(full_size("rag"), seed=0, requests=4000)
    for name in ("retrieval", "plain"):
        p99 = read_answer(Settings(full_size("rag")["classes"][name]["output"], "x")).p99()
        rows = [r for r in schedule if r.request_class == name]
        cap = math.ceil(round(p99) / 16) * 16
        assert {r.max_tokens for r in rows} == {cap}
        at_cap = np.mean([r.stop_after == cap for r in rows])
        assert 0.002 < at_cap < 0.02, "about one answer in a hundred is cut to it"


def test_other_ways_to_declare_max_tokens():
    exact = draw(workload("chat", max_tokens="exact"), seed=0)
    assert all(r.max_tokens == r.stop_after for r in exact)
    double = draw(workload("chat", max_tokens="factor", max_tokens_factor=2.0), seed=0)
    assert column(double, "stop_after").tolist() == column(exact, "stop_after").tolist()
    assert all(r.max_tokens == min(512, 2 * r.stop_after) for r in double)


def test_shares_of_streams_and_cancellations():
    n = 5000
    schedule = draw(workload("chat", stream_fraction=0.5), seed=0, requests=n)
    kinds = Counter(column(schedule, "cancel_kind"))
    assert kinds["after_tokens"] / n == pytest.approx(0.04, abs=0.012)
    assert kinds["before_first_token"] / n == pytest.approx(0.01, abs=0.006)
    assert all(r.stream for r in schedule if r.cancel_kind == "after_tokens")
    assert np.mean([r.stream for r in schedule if r.cancel_kind == "none"]) == pytest.approx(0.5, abs=0.03)
    assert all(r.cancel_value <= r.stop_after for r in schedule if r.cancel_kind == "after_tokens")


@settings(max_examples=20, deadline=None)
@given(cap=st.integers(270, 1500), seed=st.integers(0, 30))
def test_the_input_cap_holds_and_leaves_shared_parts_whole(cap, seed):
    free = draw(workload("rag", input__cap=None), seed=seed, requests=20)
    capped = draw(workload("rag", input__cap=cap), seed=seed, requests=20)
    for a, b in zip(free, capped, strict=True):
        assert b.prompt_tokens == min(cap, a.prompt_tokens)
        assert [s.segment_id for s in a.segments] == [s.segment_id for s in b.segments]
        for before, after in zip(a.segments, b.segments, strict=True):
            assert 1 <= after.tokens <= before.tokens
            assert "/system" not in after.segment_id or after.tokens == before.tokens


def broken(name="rag", drop=None, **changes):
    node = workload(name, **changes)
    if drop:
        del node[drop]
    return node


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (broken(kind="file"), "workload.kind=file: choose from preset, trace"),
        (broken(rate=0), "workload.rate=0: needs a number above 0"),
        (broken(rate="fast"), "workload.rate=fast: needs a number"),
        (broken(rate=None), "workload.rate=null"),
        (broken(requests=1.5), "workload.requests=1.5: needs a whole number"),
        (broken(length_scale=-1), "workload.length_scale=-1: needs a number above 0"),
        (broken(max_tokens="p99"), "workload.max_tokens=p99: choose from class_cap, exact, factor"),
        (broken(max_tokens_factor=0.5), "workload.max_tokens_factor=0.5: needs a number of 1 or more"),
        (broken(stream_fraction=2), "workload.stream_fraction=2: needs a share"),
        (broken(input__cap=0), "workload.input.cap=0: needs a whole number of 1 or more"),
        (broken(input__cap=200), "input.cap=200: the shared parts of class retrieval need at least 259"),
        (broken(drop="cancel"), "workload.cancel is missing"),
        (broken(classes={}), "workload.classes={}: needs at least one class"),
        ({**workload("rag"), "rat": 3}, "workload.rat is not a setting; choose from: .*rate"),
        (broken("batch", rate=5), "workload.rate=5: workload.arrivals.kind=at_once has no rate"),
        (broken("batch", classes__score__weight=-1), "workload.classes.score.weight=-1"),
        (broken(classes__plain__input__system={"kind": "magic"}), "plain.input.system.kind=magic: choose"),
        (broken(classes__retrieval__input__passages__pool=5), "passages.pool=5: needs at least as many"),
        (broken(classes__plain__output={"dist": "constant", "tokens": 1, "correlation": 2}), "correlation=2"),
        ([1], r"workload=\[1\]: needs a mapping"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line_that_names_them(node, words):
    with pytest.raises(WorkloadError, match=words) as caught:
        draw(node, seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seed": 0, "requests": 0}, "load.requests=0"),
        ({"seed": 0, "duration_s": 0}, "load.duration_s=0"),
        ({"seed": 0, "duration_s": 1e-9}, "no request arrives that early at workload.rate=5"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(WorkloadError, match=words):
        draw(workload("rag"), **arguments)

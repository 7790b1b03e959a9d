"""The configuration: what composes, what is refused, and that every refusal is one line that helps."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from harness.conf import GROUPS, UsageError, choices, compose, expand
from harness.conf.checks import RULES


def test_every_choice_of_every_group_composes():
    needs = {"model=hf": ["model.id=/somewhere"], "engine=openai": ["engine.base_url=http://127.0.0.1:1"]}
    needs["workload=trace"] = ["workload.path=/somewhere.csv"]
    seen = 0
    for group in GROUPS:
        for name in choices(group):
            cfg = compose([f"{group}={name}", *needs.get(f"{group}={name}", [])])
            assert not OmegaConf.missing_keys(cfg)
            seen += 1
    assert seen >= 10


def test_plus_and_order_do_not_matter():
    plain = compose(["workload=rag", "engine=chunked", "seed=3"])
    plus = compose(["++seed=3", "+engine=static", "+workload=rag", "+engine=chunked"])
    assert plain == plus
    assert plain.engine.name == "chunked"
    assert plain.engine.max_num_batched_tokens == 512  # of chunked.yaml, over that of the shared file


def test_the_last_value_wins_and_types_are_kept():
    cfg = compose(
        ["seed=1", "seed=2", "output.dir=some where", "load.duration_s=1.5", "engine.num_kv_blocks=null"]
    )
    assert (cfg.seed, cfg.output.dir, cfg.load.duration_s) == (2, "some where", 1.5)
    assert cfg.load.requests is None


def test_the_result_is_strict_and_resolved():
    cfg = compose(["slo.ttft_ms=${slo.tpot_ms}"])
    assert cfg.slo.ttft_ms == cfg.slo.tpot_ms
    assert "${" not in OmegaConf.to_yaml(cfg, resolve=False)
    with pytest.raises(ConfigAttributeError):
        _ = cfg.engine.max_num_seq


def test_an_experiment_overrides_and_is_overridden():
    smoke = compose(["experiment=smoke"])
    assert smoke.load.requests == 12
    assert smoke.workload.length_scale < 1
    assert compose(["+experiment=smoke", "load.requests=3"]).load.requests == 3


BAD = {
    ("engine=contnuous",): [
        "engine=contnuous",
        "did you mean continuous?",
        "chunked, continuous, dynamic",
    ],
    ("workload=rga",): ["workload=rga", "did you mean rag?"],
    ("model=gpt9",): ["model=gpt9", "smollm2"],
    ("load=",): ["no such load", "closed, open"],
    ("engine.max_num_seq=8",): ["engine.max_num_seq", "did you mean engine.max_num_seqs?", "block_size"],
    ("max_num_seqs=8",): ["did you mean engine.max_num_seqs?"],
    ("frobnicate=1",): ["frobnicate is not a setting", "engine", "workload"],
    ("engine.frobnicate.x=1",): ["engine.frobnicate.x", "engine=continuous"],
    ("seed.x=1",): ["seed is one value"],
    ("server=3",): ["server.host, server.port"],
    ("server={prt:3}",): ["did you mean server.port?"],
    ("load={requests:3}",): ["load.requests="],
    ("seed",): ["key=value"],
    ("",): ["key=value"],
    ("~load",): ["key=value"],
    ("=3",): ["key=value"],
    ("load.requests=[1",): ["load.requests=[1", "cannot be read"],
    ("model@other=hf",): ["plain name"],
    ("hydra.run.dir=x",): ["hydra.run.dir"],
    ("engine=static,chunked",): ["-m"],
    ("engine=[static,chunked]",): ["-m engine=static,chunked"],
    ("model=hf",): ["model.id is needed with model=hf", "local folder"],
    ("engine=openai",): ["engine.base_url is needed"],
    ("engine=openai", "engine.base_url=ftp://x"): ["engine.base_url=ftp://x", "http://127.0.0.1:8000"],
    ("engine=openai", "engine.base_url=http://h:99999"): ["engine.base_url=http://h:99999"],
    ("engine=openai", "engine.base_url=localhost:80"): ["engine.base_url=localhost:80"],
    ("engine=openai", "engine.base_url=http://h", "engine.max_num_seqs=2"): ["engine=openai", "base_url"],
    ("seed=-1",): ["seed=-1", "whole number from 0"],
    ("seed=1.5",): ["seed=1.5"],
    ("seed=true",): ["seed=true"],
    ("seed=${nope}",): ["seed", "nope"],
    ("device=gpu",): ["device=gpu", "auto, cpu, cuda"],
    ("dtype=int8",): ["dtype=int8", "bfloat16"],
    ("dry_run=maybe",): ["dry_run=maybe", "true or false"],
    ("load.requests=0",): ["load.requests=0"],
    ("load.requests=many",): ["load.requests=many"],
    ("load.duration_s=nan",): ["load.duration_s=nan"],
    (f"load.timeout_s=1{'0' * 400}",): ["load.timeout_s=1000"],
    ("load.timeout_s=-3",): ["load.timeout_s=-3", "above 0"],
    ("load.timeout_s=1e300",): ["load.timeout_s=1e+300", "above 0 to 1e+09 or null"],
    ("load.concurrency=99999999999999999999",): ["load.concurrency=9999", "from 1 to 1000000 or null"],
    ("load.max_wait_s=1",): ["load.max_wait_s=1", "load.concurrency"],
    ("load.max_wait_s=0", "load.concurrency=4"): ["load.max_wait_s=0", "above 0"],
    ("load.ramp_s=1",): ["load.ramp_s"],
    ("load=closed", "load.ramp_s=-1"): ["load.ramp_s=-1", "above 0"],
    ("load=closed", "load.max_wait_s=1"): ["load.max_wait_s"],
    ("load.retries=-1",): ["load.retries=-1", "0 to 100"],
    ("load.retries=null",): ["load.retries=null", "whole number"],
    ("load.retry_backoff_s=-1",): ["load.retry_backoff_s=-1", "from 0"],
    ("load.processes=0",): ["load.processes=0", "auto or a whole number from 1 to 64"],
    ("load.processes=many",): ["load.processes=many", "auto"],
    ("load.processes=1.5",): ["load.processes=1.5", "auto"],
    ("load.backend=fast",): ["load.backend=fast", "auto, lean, aiohttp"],
    ("load.backend=lean", "load.trust_env=true"): ["load.trust_env=true", "load.backend=aiohttp"],
    ("load.trust_env=1",): ["load.trust_env=1", "true or false"],
    ("load=closed", "load.concurrency=null"): ["load.concurrency=null"],
    ("slo.ttft_ms=inf",): ["slo.ttft_ms=inf"],
    ("slo.tpot_ms=null",): ["slo.tpot_ms=null"],
    ("slo.attainment=1.2",): ["slo.attainment=1.2", "0 to 1"],
    ("server.port=70000",): ["server.port=70000", "65535"],
    ("engine=openai", "engine.base_url='http://a b'"): ["engine.base_url=http://a b"],
    ("engine=openai", "engine.base_url='http://[::1'"): ["engine.base_url=http://[::1"],
    (r"workload.name='\${x}'",): ["workload.name", "${...}"],
    (r"workload.classes.plain.input.question.length='{dist: \${x}}'",): ["workload.classes", "length"],
    ("engine.queue_policy=3",): ["engine.queue_policy=3", "as engine.queue_policy.name=value"],
    ("server.routes={name: a}",): ["server.routes={name: a}", "needs a list"],
    ("output.dir=null",): ["output.dir=null"],
}


@pytest.mark.parametrize("args", BAD, ids=" ".join)
def test_bad_input_is_one_line_that_names_it(args):
    with pytest.raises(UsageError) as caught:
        compose(list(args))
    message = str(caught.value)
    assert "\n" not in message
    for part in BAD[args]:
        assert part in message


@pytest.mark.parametrize(
    "args",
    [
        ["engine.api_key_env=sk-secret-123"],
        ["engine=openai", "engine.base_url=http://me:sk-secret-123@host:1"],
        ["output.dir=${oc.env:sk-secret-123}"],
    ],
)
def test_what_may_be_a_secret_is_refused_and_not_repeated(args):
    with pytest.raises(UsageError) as caught:
        compose(args)
    assert "sk-secret-123" not in str(caught.value)


def test_expand_gives_every_combination_once_in_order():
    combinations = expand(
        ["+engine=static,chunked", "seed=range(0,3)", "load.requests=choice(5)", "dtype=auto"]
    )
    assert len(combinations) == 6
    assert combinations[0] == ["engine=static", "seed=0", "load.requests=5", "dtype=auto"]
    assert [c[0] for c in combinations] == ["engine=static"] * 3 + ["engine=chunked"] * 3
    for combination in combinations:
        compose(combination)


def test_the_last_value_wins_in_a_sweep_too():
    assert expand(["+engine=static,chunked", "seed=1,2", "engine=continuous"]) == [
        ["engine=continuous", "seed=1"],
        ["engine=continuous", "seed=2"],
    ]


def test_expand_keeps_quoted_commas_and_lists_whole():
    assert expand(['output.dir="a,b"']) == [['output.dir="a,b"']]
    cfg = compose(expand(['output.dir="a,b","c d"'])[0])
    assert cfg.output.dir == "a,b"
    assert len(expand(["x=[1,2]"])) == 1


@pytest.mark.parametrize(
    "arg",
    ["seed=interval(0,1)", "seed=range(0,100000)", "engine=glob(*)", "seed=range(3,3)", "seed=range(1,2,0)"],
)
def test_a_sweep_that_cannot_be_listed_is_refused(arg):
    with pytest.raises(UsageError, match=r"^[^\n]+$"):
        expand([arg])


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=30))
def test_no_text_raises_anything_but_a_usage_error(text):
    for function in (compose, expand):
        message = ""
        try:
            function([text])
        except UsageError as error:
            message = str(error)
        assert "\n" not in message


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(RULES)), st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
)
def test_a_rule_never_passes_what_is_no_finite_number(key, value):
    wanted = RULES[key](value)
    assert wanted is None or isinstance(wanted, str)
    if isinstance(value, float) and not math.isfinite(value):
        assert wanted is not None
    if key in ("load.requests", "seed") and isinstance(value, bool | str | float):
        assert wanted is not None


def test_the_settings_of_a_policy_are_the_policys_own() -> None:
    cfg = compose(
        [
            "engine=chunked",
            "engine.queue=fair",
            "engine.queue_policy.weights.acme=3",
            "engine.queue_policy={output_cost: 1.0}",
            "engine.lanes.interactive.weight=4",
            "engine.policy.decode_seq_budget=8",
        ]
    )
    assert cfg.engine.queue_policy == {"weights": {"acme": 3}, "output_cost": 1.0}
    assert cfg.engine.lanes == {"interactive": {"weight": 4}}
    assert cfg.engine.policy.decode_seq_budget == 8
    with pytest.raises(UsageError, match=r"engine.queue_policy"):
        compose(["engine=openai", "engine.base_url=http://h", "engine.queue_policy.aging_s=1"])
    with pytest.raises(UsageError, match=r"engine.lanes"):
        compose(["engine=chunked", "engine.lanes=3"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is no workload"),
        (b"- 1", "is no workload"),
        (bytes(range(256)), "cannot be read"),
        (b"name: x\nkind: preset\nclasses: " + b"[" * 3000 + b"]" * 3000, "cannot be read"),
        (b"name: ${oc.env:HOME}\nkind: preset\n", "environment variables would end up in config.yaml"),
    ],
)
def test_a_file_that_is_no_workload_is_refused_by_its_name(tmp_path, text, words):
    file = tmp_path / "mine.yaml"
    file.write_bytes(text)
    with pytest.raises(UsageError, match=f"{words}") as error:
        compose([f"workload={file}"])
    assert str(error.value).startswith(f"workload={file}: ")
    assert "\n" not in str(error.value)


def test_a_part_of_a_workload_can_be_taken_away():
    cfg = compose(["workload=rag", "workload.arrivals.factor=null"])
    assert cfg.workload.arrivals.factor is None
    assert compose(["workload=agent", "workload.sessions=null"]).workload.sessions is None
    with pytest.raises(UsageError, match=r"engine=null|takes one name|no such"):
        compose(["engine=null"])

"""Every Triton kernel compiles for sm_80 and sm_90 without a GPU, within the limits that kernels.triton.aot
names; here the covering cases, `make aot-all` compiles the whole grid."""

from __future__ import annotations

import itertools
from dataclasses import astuple, replace

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from kernels.triton import aot


def test_the_covering_cases_compile_within_limits():
    cases = aot.ci_cases()
    assert len(cases) <= 60
    outcomes = list(aot.run(cases))
    assert [outcome.case for outcome in outcomes] == cases
    assert [(outcome.case, outcome.faults) for outcome in outcomes if outcome.faults] == []
    for outcome in outcomes:
        names = [built.name for built in outcome.built]
        assert names == {
            "prefill": ["attention_kernel"],
            "window": ["attention_kernel"],
            "decode": ["attention_kernel"],
            "split": ["attention_kernel", "reduce_kernel"],
            "add_rms_norm": ["rms_norm_kernel"],
        }.get(outcome.case.kernel, [outcome.case.kernel + "_kernel"])
        assert all(built.registers and built.cubin_bytes for built in outcome.built)


def test_the_covering_cases_cover():
    """Every value of every axis, and for attention every pair of them."""
    attention = [case for case in aot.all_cases() if case.kernel in aot.ATTENTION]
    chosen = [astuple(case) for case in aot.covering(attention)]
    assert len(chosen) < len(attention) // 50
    for a, b in itertools.combinations(range(6), 2):
        grid = {(case[a], case[b]) for case in map(astuple, attention)}
        assert {(case[a], case[b]) for case in chosen} == grid
    for axis in range(6):
        assert {astuple(case)[axis] for case in aot.ci_cases()} == {
            astuple(case)[axis] for case in aot.all_cases()
        }


def test_faults_are_found():
    case = aot.Case("prefill", 80, "bf16", 128, 4, 16)
    good = aot.Built("attention_kernel", 99328, 255, 0, 256, "bf16", 48, 9000)
    assert list(aot._faults(case, good)) == []
    for fault, changed in [
        ("shared memory 166913 of 166912 bytes", {"shared": 163 * 1024 + 1}),
        ("132 bytes of registers spilled", {"spilled": 132}),
        ("products in no matrix instruction", {"mma_kind": ""}),
        ("products in tf32", {"mma_kind": "tf32"}),
        ("no copies of 16 bytes", {"wide_copies": 0}),
        ("no cubin", {"cubin_bytes": 0}),
    ]:
        assert list(aot._faults(case, replace(good, **changed))) == [fault]
    on_hopper = replace(case, capability=90)
    assert list(aot._faults(on_hopper, replace(good, shared=200 * 1024))) == []


def test_what_does_not_compile_is_a_fault_and_not_the_end():
    (outcome,) = aot.run([aot.Case("prefill", 80, "bf16", 512, 1, 16)], workers=1)
    assert "head size 512" in outcome.faults[0]


@pytest.mark.parametrize("workers", ["0", "-1", "100000"])
def test_workers_that_cannot_be_are_one_line(workers, capsys):
    with pytest.raises(SystemExit) as ended:
        aot.main(["--workers", workers])
    assert ended.value.code == 2
    assert f"--workers {workers}: needs 1 to" in capsys.readouterr().err

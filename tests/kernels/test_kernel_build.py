"""Compilation on first use: the cache, two builders at once, and what a machine without a compiler gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cpu import build, library
from kernels.cpu.isa import ISAS, NATIVE, candidates, runnable

ROOT = Path(__file__).parents[2]
PROBE = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    import kernels
    from kernels.fused import ops
    backend = kernels.get_backend("auto", "cpu")
    kernels.get_backend("auto", "cpu")
    fused = ops("cpu", torch.float32)
    ops("cpu", torch.bfloat16)
    k_cache, v_cache = kernels.allocate_kv(3, 4, 1, 8, torch.float32, "cpu")
    q, out = torch.ones(5, 2, 8), torch.empty(5, 2, 8)
    v = torch.arange(5.0)[:, None, None].expand(5, 1, 8).contiguous()
    backend.write_kv(torch.ones(5, 1, 8), v, k_cache, v_cache, torch.tensor([4, 5, 6, 7, 8]))
    backend.paged_attention(q, k_cache, v_cache, torch.tensor([0, 5]).int(), torch.tensor([5]).int(),
                            torch.tensor([[1, 2]]).int(), 1.0, 5, out)
    try:
        kernels.get_backend("cpp", "cpu")
        named = "built"
    except RuntimeError as error:
        named = str(error)
print(json.dumps({"backend": backend.name, "ops": fused.name, "isa": getattr(backend, "isa", None),
                  "means": out[:, 0, 0].tolist(), "named": named,
                  "warnings": [str(w.message) for w in caught if "kernels" in str(w.message)]}))
"""


def probe(tmp_path: Path, **environment: str) -> dict:
    # No bytecode and no foreign cache: nothing but the environment decides.
    env = {
        "PYTHONPATH": str(ROOT),
        "BATCHMARK_CACHE": str(tmp_path),
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


def fake_compiler(folder: Path, text: str) -> str:
    path = folder / "compiler"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def quick_compiler(folder: Path, before: str = "") -> str:
    """The real one without optimisation, in a quarter of the time: what is asked here is whether the library
    is built and answers, not how fast."""
    return fake_compiler(folder, f'{before}exec "{build.find_compiler()[0]}" "$@" -O0')


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"PATH": ""}, "no C++ compiler in PATH"),
        ({"PATH": os.environ["PATH"], "CXX": "false"}, "false failed with exit 1"),
        ({"PATH": os.environ["PATH"], "CXX": "no-such-compiler"}, "CXX=no-such-compiler"),
    ],
)
def test_without_a_compiler_torch_takes_over_and_says_so_once(tmp_path, environment, reason):
    got = probe(tmp_path, **environment)
    assert (got["backend"], got["ops"]) == ("torch", "torch")
    assert got["means"] == pytest.approx([0, 0.5, 1, 1.5, 2])
    (warning,) = got["warnings"]
    assert "C++ kernels unavailable" in warning
    assert reason in warning
    assert "\n" not in warning
    assert reason in got["named"]


def test_a_compiler_error_is_quoted(tmp_path):
    compiler = fake_compiler(
        tmp_path, 'case "$1" in --version) echo 1;; *) echo "x.h: error: no omp.h" >&2; exit 4;; esac'
    )
    got = probe(tmp_path, PATH=os.environ["PATH"], CXX=compiler)
    assert got["backend"] == "torch"
    assert "exit 4: x.h: error: no omp.h" in got["warnings"][0]
    assert list(tmp_path.rglob("*.so")) == []


def test_a_library_that_does_not_load_is_reported(tmp_path):
    """A compiler that writes rubbish: the fallback holds, and the rubbish is not kept."""
    script = 'case "$1" in --version) echo 1;; *) for o; do :; done; echo rubbish > "$o";; esac'
    got = probe(tmp_path, PATH=os.environ["PATH"], CXX=fake_compiler(tmp_path, script))
    assert got["backend"] == "torch"
    assert "cannot load" in got["warnings"][0]
    assert list(tmp_path.rglob("*.so")) == []


@pytest.mark.parametrize("damaged", [b"\x7fELF of ", b"\x7fELF of this sourcf", b"", b"foreign"])
def test_a_damaged_library_is_compiled_again(tmp_path, monkeypatch, damaged):
    """Half a library, once it is mapped, ends the process with SIGBUS, and so it would at every start."""
    monkeypatch.setenv("BATCHMARK_CACHE", str(tmp_path))
    script = 'for o; do :; done; [ "$1" = --version ] || printf "\\177ELF of this source" > "$o"'
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, script))
    library = build.build(NATIVE)
    whole = library.read_bytes()
    library.write_bytes(damaged + whole[len("?ELF of this source") :] if len(damaged) == 19 else damaged)
    assert build.build(NATIVE) == library
    assert library.read_bytes() == whole
    library.unlink()
    library.mkdir()
    with pytest.raises(build.CacheError, match=r"cannot write .*; set BATCHMARK_CACHE"):
        build.build(NATIVE)


def test_a_compiler_with_arguments(tmp_path, monkeypatch):
    """CXX="ccache g++", as make understands it."""
    (tmp_path / "with space").mkdir()
    compiler = fake_compiler(tmp_path / "with space", 'echo "$@"')
    monkeypatch.setenv("CXX", f"'{compiler}' g++ -DX")
    assert build.find_compiler() == [compiler, "g++", "-DX"]
    for broken in ("'g++", " "):
        monkeypatch.setenv("CXX", broken)
        with pytest.raises(build.BuildError, match=r"^CXX="):
            build.find_compiler()


def test_what_a_killed_compilation_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHMARK_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo 1"))
    left, running = (tmp_path / "kernels" / name / f"{build.SCRATCH}x.so" for name in ("old", "new"))
    for path in (left, running):
        path.parent.mkdir(parents=True)
        path.touch()
    os.utime(left, (0, 0))
    build.build(NATIVE)
    assert (left.exists(), running.exists()) == (False, True)


def test_builders_at_once_leave_one_whole_library(tmp_path, monkeypatch):
    compiler = quick_compiler(tmp_path)
    monkeypatch.setenv("BATCHMARK_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    isa = runnable()[0]
    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(lambda _: build.build(isa), range(2)))
    (library,) = paths
    assert list(library.parent.iterdir()) == [library]
    written = library.stat().st_mtime_ns
    assert build.build(isa) == library
    assert library.stat().st_mtime_ns == written
    got = probe(tmp_path, PATH=os.environ["PATH"], CXX=compiler)
    assert (got["backend"], got["ops"], got["named"], got["warnings"]) == ("cpp", "cpp", "built", [])
    assert got["isa"] == isa
    assert got["means"] == pytest.approx([0, 0.5, 1, 1.5, 2])
    assert library.stat().st_mtime_ns == written


def test_other_flags_or_compilers_get_a_library_of_their_own(tmp_path, monkeypatch):
    compiler = build.find_compiler()
    digest = build._digest(compiler, "native")
    assert digest == build._digest(compiler, "native")
    other = fake_compiler(tmp_path, "echo 99")
    assert build._digest([other], "native") != digest
    assert build._digest([*compiler, "-DX"], "native") != digest
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DX"))
    assert build._digest(compiler, "native") != digest


def test_a_folder_that_cannot_be_written_names_the_setting(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHMARK_CACHE", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match="BATCHMARK_CACHE"):
        build.build("native")


def test_a_full_disk_ends_the_search_and_not_every_compiler_run(tmp_path, monkeypatch):
    script = tmp_path / "c++"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\necho x >> {tmp_path}/runs\nexit 1\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("BATCHMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "LEAST_FREE", 1 << 62)
    library.best.cache_clear()
    library.load.cache_clear()
    try:
        with pytest.raises(build.CacheError, match=r"no room in .*; set BATCHMARK_CACHE"):
            library.best()
    finally:
        library.best.cache_clear()
        library.load.cache_clear()
    assert (tmp_path / "runs").read_text().split() == ["x"], "one, not one for each instruction set"


def test_instruction_sets_follow_the_cpu():
    """The flags of a laptop, of a server, of one with matrix tiles; an ARM machine has none."""
    avx2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe", "sse2"}
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    amx = avx512 | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}
    assert runnable(frozenset()) == [NATIVE]
    assert runnable(frozenset(avx2)) == ["avx2", NATIVE]
    assert runnable(frozenset(avx512 - {"avx512bw"})) == ["avx2", NATIVE]
    assert runnable(frozenset(avx512)) == ["avx512", "avx2", NATIVE]
    assert runnable(frozenset(amx)) == ["amx", "avx512", "avx2", NATIVE]
    assert list(ISAS) == runnable(frozenset(amx))


def test_the_setting_names_one_instruction_set_and_the_records_say_it(tmp_path):
    slowest = [isa for isa in runnable() if isa != NATIVE][-1:] or [NATIVE]
    compiler = quick_compiler(tmp_path)
    got = probe(tmp_path, PATH=os.environ["PATH"], CXX=compiler, BATCHMARK_CPU_ISA=slowest[0])
    assert (got["backend"], got["isa"], got["warnings"]) == ("cpp", slowest[0], [])
    assert got["means"] == pytest.approx([0, 0.5, 1, 1.5, 2])


def test_a_setting_that_cannot_hold_is_an_error_not_a_fallback(monkeypatch):
    monkeypatch.setenv("BATCHMARK_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match="BATCHMARK_CPU_ISA=sse9: choose from amx, avx512, avx2, native"):
        candidates()
    monkeypatch.setattr("kernels.cpu.isa.cpu_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setenv("BATCHMARK_CPU_ISA", "avx2")
    with pytest.raises(
        ValueError, match=r"BATCHMARK_CPU_ISA=avx2: this CPU lacks abm, .*; native would work"
    ):
        candidates()


def test_a_compiler_too_old_for_the_best_gets_the_next(tmp_path):
    refuses = (
        'for o; do case "$o" in -mamx*|-mavx512*) echo "error: unrecognized $o" >&2; exit 1;; esac; done; '
    )
    compiler = quick_compiler(tmp_path, refuses)
    got = probe(tmp_path, PATH=os.environ["PATH"], CXX=compiler)
    assert (got["backend"], got["warnings"]) == ("cpp", [])
    assert got["isa"] == next(isa for isa in runnable() if isa in ("avx2", NATIVE))

"""Compilation on first use: the cache, two builders at once, and what a machine without a compiler gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cpu import build

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
print(json.dumps({"backend": backend.name, "ops": fused.name, "means": out[:, 0, 0].tolist(), "named": named,
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


def test_builders_at_once_leave_one_whole_library(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHMARK_CACHE", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(lambda _: build.build(), range(2)))
    (library,) = paths
    assert list(library.parent.iterdir()) == [library]
    written = library.stat().st_mtime_ns
    assert build.build() == library
    assert library.stat().st_mtime_ns == written
    got = probe(tmp_path, PATH=os.environ["PATH"])
    assert (got["backend"], got["ops"], got["named"], got["warnings"]) == ("cpp", "cpp", "built", [])
    assert got["means"] == pytest.approx([0, 0.5, 1, 1.5, 2])
    assert library.stat().st_mtime_ns == written


def test_other_flags_or_compilers_get_a_library_of_their_own(tmp_path, monkeypatch):
    compiler = build.find_compiler()
    digest = build._digest(compiler)
    assert digest == build._digest(compiler)
    other = fake_compiler(tmp_path, "echo 99")
    assert build._digest(other) != digest
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DX"))
    assert build._digest(compiler) != digest


def test_a_folder_that_cannot_be_written_names_the_setting(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHMARK_CACHE", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match="BATCHMARK_CACHE"):
        build.build()

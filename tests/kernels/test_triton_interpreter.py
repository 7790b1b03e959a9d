"""The Triton kernels without a GPU, run by Triton's interpreter; and a process that needs none of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from kernels import fused

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
ROOT = Path(__file__).parents[2]


def run(*command: str, **environment: str) -> str:
    # One thread: matrices of the interpreter are small, and its own threads would only wait for each other.
    env = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | environment
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["interpreted_attention", "interpreted_ops"])
def test_interpreted(name):
    out = run("-m", "pytest", "--color=no", "-W", "error", f"tests/kernels/{name}.py", TRITON_INTERPRET="1")
    assert " passed" in out
    assert "skipped" not in out


def test_without_cuda_triton_is_refused_in_one_line_and_never_imported():
    out = run(
        "-c",
        "import sys, torch, kernels; from kernels import fused\n"
        "kernels.get_backend('auto', 'cpu'); fused.ops('cpu', torch.float32)\n"
        "try: kernels.get_backend('triton', 'cpu')\n"
        "except ValueError as error: print(error)\n"
        "print('triton' in sys.modules)",
        TRITON_INTERPRET="0",
    )
    assert out == "attention=triton: runs on cuda, not cpu\nFalse\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU")
def test_what_triton_cannot_run_goes_to_torch():
    assert kernels.get_backend("auto", "cuda", torch.bfloat16).name == "torch"
    assert fused.ops("cuda", torch.bfloat16).name == "torch"
    with pytest.raises(ValueError, match="attention=triton: no CUDA device was found"):
        kernels.get_backend("triton", "cuda", torch.bfloat16)
    with pytest.raises(ValueError, match="attention=triton: runs float32, bfloat16 and float16"):
        kernels.get_backend("triton", "cuda", torch.float64)

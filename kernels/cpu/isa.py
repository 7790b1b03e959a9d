"""The instruction sets that the C++ kernels are compiled for, and the choice among them at run time.

Each is a set of compiler flags that depends on no machine, so that a compiled library serves every CPU
that has the instructions, and a test can run all that this one has. $BATCHMARK_CPU_ISA names one; else
the best that the CPU reports is taken. Elsewhere than on x86-64 Linux there is one, `native`: what the
compiler finds.
"""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path

SETTING = "BATCHMARK_CPU_ISA"
NATIVE = "native"


@dataclass(frozen=True)
class Isa:
    name: str
    flags: tuple[str, ...]  # for the compiler; spelled out, since -march=x86-64-v3 is unknown before GCC 11
    needs: frozenset[str]  # as /proc/cpuinfo calls them


def _extend(base: Isa, name: str, *features: str) -> Isa:
    flags = tuple("-m" + feature.replace("_", "-" if "amx" in feature else "") for feature in features)
    return Isa(name, base.flags + flags, base.needs | set(features))


_AVX2 = Isa(
    "avx2",
    ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe"),
    frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}),
)
_AVX512 = _extend(_AVX2, "avx512", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AMX = _extend(_AVX512, "amx", "avx512_bf16", "amx_tile", "amx_bf16")
ISAS = {isa.name: isa for isa in (_AMX, _AVX512, _AVX2, Isa(NATIVE, ("-march=native",), frozenset()))}


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What the CPU can do, as /proc/cpuinfo says; empty where it is not x86-64 Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())


def runnable(flags: frozenset[str] | None = None) -> list[str]:
    """The names that a CPU with these flags (default: this one) can execute, the fastest first."""
    flags = cpu_flags() if flags is None else flags
    return [name for name, isa in ISAS.items() if isa.needs <= flags]


def candidates() -> list[str]:
    """The names to try in turn: the one that the environment names, else all that run here (a compiler may
    be too old for the first). Raises ValueError for a name that does not exist or that this CPU cannot
    execute."""
    named = os.environ.get(SETTING)
    able = runnable()
    if not named:
        return able
    if named not in ISAS:
        raise ValueError(f"{SETTING}={named}: choose from {', '.join(ISAS)}")
    if named not in able:
        missing = ", ".join(sorted(ISAS[named].needs - cpu_flags()))
        raise ValueError(f"{SETTING}={named}: this CPU lacks {missing}; {', '.join(able)} would work")
    return [named]


def machine() -> str:
    """What -march=native depends on: a cache on a shared home must not serve another machine's
    instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(line for line in lines if line.startswith(wanted))

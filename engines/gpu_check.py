"""`make gpu-check`: all that needs a CUDA device, in one command and under 8 minutes.

    kernels   every attention backend against a float64 reference, over shapes and dtypes
    loops     greedy tokens with CUDA graphs and with the overlapped loop are those without
    goals     attention of an 8B model's layer, as shares of copying and of the matrix rate
    bench     python -m kernels.bench
    step      whole decode steps of an 8B-shaped model with random weights, over the weight-streaming bound
    static, continuous, chunked
              python -m harness with that model

Each stage is a process with a time of its own; one that overruns is cut, and said to be. A table for people,
then one JSON file with the device, the versions and every figure. Exit code 0: all hold, 1: something does
not, 2: no CUDA device here. --dry runs the same script on the CPU at a tiny size, to show that it works."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernels.command import guard

STEP_SHARE = 0.75
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""The shape of Llama 3 8B (its model card and config)."""
DRY_SHAPE = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


@dataclass(frozen=True)
class Stage:
    name: str
    budget_s: float
    command: list[str]
    kind: str  # checks | bench | step | harness: how its output is read


@dataclass
class Result:
    """status: pass, fail, cut (its time was over) or error (it did not come to an end of its own)."""

    stage: str
    status: str = "pass"
    seconds: float = 0.0
    checks: list[dict[str, Any]] = field(default_factory=list)
    detail: Any = None
    why: str | None = None


def stages(device: str, dry: bool, model: Path, runs: Path) -> list[Stage]:
    python = sys.executable
    own = [python, "-m", "engines.gpu_check", "--device", device, *(["--dry"] if dry else [])]
    budgets = {"kernels": 70, "loops": 50, "goals": 40}
    found = [Stage(name, s, [*own, "--stage", name], "checks") for name, s in budgets.items()]
    bench = [python, "-m", "kernels.bench", "--device", device, "--rounds", "2" if dry else "7"]
    step = [python, "-m", "engines.step_bench", "--model", "hf", "--id", str(model), "--weights", "dummy"]
    step += ["--device", device, "--batches", *(["1", "2"] if dry else ["1", "8", "32", "64"])]
    step += ["--context", "16", "--rounds", "1", "--dtype", "float32"] if dry else ["--context", "1024"]
    if not dry:  # on a CPU it is known to work from tests of its own, and takes its time
        found.append(Stage("bench", 65, bench, "bench"))
    found.append(Stage("step", 75, step, "step"))
    for engine in ("static", "continuous", "chunked"):
        load = ["load.requests=8", "workload.rate=20", "engine.max_model_len=512"]
        load += ["workload.length_scale=0.05", "engine.kv_memory_gb=0.1"]
        if not dry:
            load = ["load.requests=120", "workload.rate=8", "engine.max_num_seqs=64"]
            load += ["engine.max_num_batched_tokens=8192", "engine.kv_memory_gb=8"]
        command = [python, "-m", "harness", "+workload=short", f"+engine={engine}", "model=hf"]
        command += [f"model.id={model}", "model.weights=dummy", f"device={device}", f"output.dir={runs}"]
        found.append(Stage(engine, 50, [*command, *load], "harness"))
    return found


def run_stage(stage: Stage) -> Result:
    """In a session of its own, so that everything that it has started ends with it."""
    result, start = Result(stage.name), time.monotonic()
    process = subprocess.Popen(
        stage.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=stage.budget_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        result.status, result.why = "cut", f"it was not over after {stage.budget_s:g} s"
    except BaseException:  # interrupted
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    else:
        read(stage, process.returncode, output, result)
    result.seconds = round(time.monotonic() - start, 1)
    return result


def read(stage: Stage, code: int, output: str, result: Result) -> None:
    """What a stage has printed: one JSON line of its own, or the folder of a run."""
    lines = output.strip().splitlines()
    try:
        if stage.kind == "harness":
            folder = Path(next(line.partition(": ")[2] for line in lines if line.startswith("results: ")))
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            result.detail = {key: summary.get(key) for key in ("counts", "throughput", "latency_ms", "steps")}
            server = json.loads((folder / "meta.json").read_text(encoding="utf-8")).get("server", {})
            result.detail["server"] = server
            valid = bool(summary["valid"])
            result.checks = [_check("the run is valid", valid, "true", valid)]
        else:
            result.detail = json.loads(next(line for line in reversed(lines) if line.startswith(("{", "["))))
            if stage.kind == "checks":
                result.checks, result.detail = result.detail, None
            elif stage.kind == "step":
                result.checks = step_checks(result.detail)
            else:
                wrong = result.detail.get("wrong", [])
                result.checks = [_check("results that differ from the reference", len(wrong), "0", not wrong)]
    except (StopIteration, OSError, ValueError, KeyError):
        result.status, result.why = "error", f"exit code {code}: {lines[-1] if lines else 'no output'}"
        return
    if code or not all(check["ok"] for check in result.checks):
        result.status = "fail"
        result.why = f"exit code {code}" if code else None


def step_checks(detail: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a decode step over its weight-streaming bound. Held to the goal on CUDA alone."""
    on_cuda = str(detail.get("device", "")).startswith("cuda")
    checks = []
    for row in detail.get("rows", []):
        share = row.get("share_of_bound")
        goal = f">= {STEP_SHARE:g}" if on_cuda else "measured"
        ok = not on_cuda or (share is not None and share >= STEP_SHARE)
        checks.append(
            _check(f"step of batch {row['batch']}, share of the weight-streaming bound", share, goal, ok)
        )
    if on_cuda:
        graphs = detail.get("graphs") or {}
        checks.append(_check("CUDA graphs", graphs.get("why") or "on", "on", bool(graphs.get("on"))))
    return checks


def _check(what: str, value: Any, goal: str, ok: bool) -> dict[str, Any]:
    return {"what": what, "value": value, "goal": goal, "ok": ok}


def machine(device: str) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    try:
        from importlib.metadata import version

        found["triton"] = version("triton")
    except ImportError:
        found["triton"] = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "memory_gb": round(properties.total_memory / 1e9, 1)}
        found["capability"] = f"sm_{properties.major}{properties.minor}"
        found["driver"] = _driver()
    return found


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # whatever its libraries fail with: it is a line of a record
        return None


def print_result(result: Result) -> None:
    print(f"{result.stage:<12}{result.status:<6}{result.seconds:>6.1f} s  {result.why or ''}", flush=True)
    for check in result.checks:
        value = check["value"]
        shown = f"{value:.3g}" if isinstance(value, float) else value
        print(
            f"  {'ok  ' if check['ok'] else 'FAIL'}  {check['what']}: {shown} ({check['goal']})", flush=True
        )


def check_all(device: str, dry: bool, output: Path, only: Sequence[str] | None) -> int:
    report: dict[str, Any] = {"check": "gpu", "dry": dry, "machine": machine(device), "stages": []}
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        model = Path(folder) / ("dummy" if dry else "dummy-8b")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(DRY_SHAPE if dry else LLAMA_8B), encoding="utf-8")
        for stage in stages(device, dry, model, Path(folder) / "runs"):
            if only is None or stage.name in only:
                result = run_stage(stage)
                print_result(result)
                report["stages"].append(asdict(result))
    bad = [r["stage"] for r in report["stages"] if r["status"] != "pass"]
    report["passed"] = bool(report["stages"]) and not bad
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{'not passed: ' + ', '.join(bad) if bad else 'passed'}; {output}")
    return 0 if report["passed"] else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engines.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [stage.name for stage in stages("cuda", False, Path(), Path())]
    parser.add_argument("-o", "--output", type=Path, default=Path("results/gallery/gpu_check.json"))
    parser.add_argument("--dry", action="store_true", help="the same script on the CPU, at a tiny size")
    parser.add_argument("--only", nargs="+", choices=names, help="these stages")
    parser.add_argument("--device", choices=["cuda", "cpu"], help=argparse.SUPPRESS)
    parser.add_argument("--stage", choices=["kernels", "loops", "goals"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    device = args.device or ("cpu" if args.dry else "cuda")
    if device == "cpu" and not args.dry:
        parser.error("--device cpu: needs --dry beside it")
    if args.stage is not None:
        return _run_checks(args.stage, device, args.dry)
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device here; --dry runs the script on the CPU", file=sys.stderr)
        return 2
    return check_all(device, args.dry, args.output, args.only)


def _run_checks(name: str, device: str, dry: bool) -> int:
    import torch

    from engines.gpu_stages import STAGES

    checks = STAGES[name](torch.device(device), dry)
    print(json.dumps([asdict(check) for check in checks]))
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))

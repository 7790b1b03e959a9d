"""What forbids a comparison: arms that differ in more than they were asked to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.compare.arms import Arm
from harness.compare.rounds import Pass, Round
from harness.comparison import flatten, unlike_outputs

DEVICE_SETTINGS = (
    *("device", "dtype", "model", "engine.kind", "engine.threads", "engine.determinism"),
    *("engine.cpu_affinity", "engine.base_url"),
)
KV_SETTINGS = ("engine.num_kv_blocks", "engine.kv_memory_gb", "engine.block_size", "engine.kind", "model")
UNLIKE_ANSWERS = 0.01
"""Share of answers that may have another token count: a real model in bfloat16 may end a few elsewhere, since
sums in another order round otherwise. Answers of our engines end where the schedule says."""


def refusals(round_: Round, arms: Sequence[Arm]) -> list[str]:
    """One line for each difference between an arm and the reference that nobody asked for."""
    reference = arms[0]
    first = round_.passes[reference.name]
    return [
        f"{arm.name}: {reason}"
        for arm in arms[1:]
        for reason in _between(arm, round_.passes[arm.name], reference, first)
    ]


def _between(arm: Arm, one: Pass, reference: Arm, first: Pass) -> list[str]:
    found = []
    prints, expected = (p.summary["run"]["fingerprint"] for p in (one, first))
    settings = [flatten(_plain(a.cfg)) for a in (arm, reference)]
    if prints["schedule"] is None or prints["schedule"] != expected["schedule"]:
        found.append(f"fingerprint.schedule differs: it was not sent what {reference.name} was sent")
    if prints["host"] != expected["host"]:
        found.append("fingerprint.host differs: another machine is part of the difference")
    if prints["device"] != expected["device"] and not _asked(DEVICE_SETTINGS, settings):
        found.append(
            f"fingerprint.device differs, though no setting of it does: {_device(one)}, not {_device(first)}"
        )
    stray = uncovered(arm, reference)
    if stray:
        found.append(
            f"fingerprint.config differs in {', '.join(stray[:3])}, which is not among the arms' settings"
        )
    blocks = [_server(p.run_dir).get("num_kv_blocks") for p in (one, first)]
    if blocks[0] != blocks[1] and not _asked(KV_SETTINGS, settings):
        found.append(
            f"its server found room for {blocks[0]} KV blocks, that of {reference.name} for {blocks[1]}: set "
            "engine.num_kv_blocks for both"
        )
    unlike, both = unlike_outputs(first.requests, one.requests)
    if unlike > UNLIKE_ANSWERS * both:
        found.append(
            f"output lengths differ: {unlike} of {both} answers have another token count than with "
            f"{reference.name}"
        )
    return found


def uncovered(arm: Arm, reference: Arm) -> list[str]:
    """Settings in which two arms differ though neither of them was asked to."""
    asked = {text.lstrip("+").partition("=")[0] for a in (arm, reference) for text in a.overrides}
    mine, theirs = (flatten(_plain(a.cfg)) for a in (arm, reference))
    differing = [key for key in sorted({**mine, **theirs}) if mine.get(key) != theirs.get(key)]
    return [key for key in differing if not any(key == name or key.startswith(f"{name}.") for name in asked)]


def _asked(keys: Sequence[str], settings: Sequence[dict[str, str]]) -> bool:
    """Whether the two differ in one of these settings."""
    one, other = settings
    inside = [k for k in {**one, **other} if any(k == key or k.startswith(f"{key}.") for key in keys)]
    return any(one.get(key) != other.get(key) for key in inside)


def _device(one: Pass) -> str:
    server = _server(one.run_dir)
    shown = {key: server.get(key) for key in ("device", "dtype", "threads", "attention", "determinism")}
    return ", ".join(f"{key} {value}" for key, value in shown.items() if value is not None) or "unknown"


def _server(run_dir: Path) -> dict[str, Any]:
    meta = json.loads((run_dir / "meta.json").read_text(encoding="utf-8"))
    return dict(meta.get("server") or {})


def _plain(cfg: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(cfg, resolve=True)

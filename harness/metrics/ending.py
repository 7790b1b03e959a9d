"""How the engine was left when the run was over: nothing may be live then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NO_ENDING = "no engine_end.json: the engine did not come to its end, or is not one of the reference engines"


def read_ending(run_dir: str | Path) -> dict[str, Any]:
    """engine_end.json as it is; empty where there is none, or none that can be read."""
    try:
        ending = json.loads((Path(run_dir) / "engine_end.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return ending if isinstance(ending, dict) else {}


def kv_live_end(ending: dict[str, Any]) -> tuple[int | None, str | None]:
    """summary.steps.kv_live_end: blocks that were still live at the engine's end, after it had let go of
    everything; or null with its reason."""
    live = ending.get("kv_live")
    return (live, None) if isinstance(live, int) and not isinstance(live, bool) else (None, NO_ENDING)


def leak(ending: dict[str, Any]) -> str | None:
    """Why a run with this ending is invalid; None when nothing leaked, or nothing is known."""
    if not ending:
        return None
    left = {name: ending.get(name) for name in ("kv_live", "running", "waiting")}
    integrity = ending.get("integrity")
    if not any(left.values()) and integrity in ("ok", None):
        return None
    shown = ", ".join(f"{name} {value}" for name, value in left.items())
    return f"kv leak: at the engine's end {shown}; integrity: {integrity}"

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
    except (OSError, ValueError, RecursionError):
        return {}
    return ending if isinstance(ending, dict) else {}


def kv_live_end(ending: dict[str, Any]) -> tuple[int | None, str | None]:
    """summary.steps.kv_live_end: blocks that were still live at the engine's end, after it had let go of
    everything; or null with its reason."""
    live = ending.get("kv_live")
    return (live, None) if isinstance(live, int) and not isinstance(live, bool) else (None, NO_ENDING)

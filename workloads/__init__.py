"""Who asks what, when, how long, and when they give up.

`draw(cfg, seed=...)` turns the `workload` node of a configuration into a Schedule;
`workloads.prompts.PromptBook` turns the segments of its rows into token ids. Nothing here knows an engine,
a clock or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workloads.errors import TraceError, WorkloadError

if TYPE_CHECKING:
    from workloads.schedule import Schedule

__all__ = ["TraceError", "WorkloadError", "draw"]


def draw(
    workload: Mapping[str, Any],
    *,
    seed: int,
    requests: int | None = None,
    duration_s: float | None = None,
) -> Schedule:
    """See `workloads.presets.draw`, which is imported only when it is needed."""
    from workloads.presets import draw as draw_now

    return draw_now(workload, seed=seed, requests=requests, duration_s=duration_s)

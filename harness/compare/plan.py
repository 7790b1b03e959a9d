"""What a comparison is about to do, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.arms import Arm, repeat_of
from harness.compare.order import orders
from harness.compare.rounds import warm_up_requests
from harness.compare.settings import Settings
from harness.eta import duration, eta
from harness.plan import describe, draw_schedule

SHOWN_ROUNDS = 4
PASS_S = 3.0
"""Around each pass: load processes start and warm up, records are closed and summarised (two cores)."""


def describe_comparison(arms: Sequence[Arm], settings: Settings) -> str:
    """The plan for people, several lines."""
    reference = arms[0]
    schedule = draw_schedule(reference.cfg)
    expected = [eta(arm.cfg, schedule) for arm in arms]
    passes = [one.load_s + one.drain_s + PASS_S for one in expected]
    a_round = sum(passes) + (passes[0] if settings.aa else 0)
    warm_up = warm_up_requests(len(schedule), settings.warmup) / max(1, len(schedule))
    start = sum(one.start_s for one in expected) + warm_up * sum(passes)
    least = start + settings.rounds * a_round
    most = start + max(settings.rounds, settings.max_rounds) * a_round
    names = [arm.name for arm in arms] + ([repeat_of(reference.name)] if settings.aa else [])
    chosen = orders(names, reference.cfg.seed)
    traffic = "a new schedule" if settings.vary_seed else "the same schedule"
    until = f"{settings.rounds}"
    if settings.until == "decided":
        until = f"{settings.rounds} to {settings.max_rounds}, until decided"
    return "\n".join(
        [
            f"reference  {reference.name}, whose runs are",
            *(f"  {line}" for line in describe(reference.cfg, schedule).split("\n")),
            *(f"arm        {arm.name}: {' '.join(arm.overrides)}" for arm in arms),
            f"rounds     {until}; {len(names)} passes each, {traffic} in every round",
            *(
                f"  round {number}  {', '.join(next(chosen))}"
                for number in range(1, min(SHOWN_ROUNDS, settings.rounds) + 1)
            ),
            f"figures    {', '.join(metric.path for metric in settings.metrics)}",
            f"words      better or worse: the interval (at {settings.confidence_after(settings.rounds):.4g}) "
            f"lies beyond {settings.limit:.0%}; same: within it",
            f"time       about {duration(least)}{f' to {duration(most)}' if most > least else ''}",
        ]
    )

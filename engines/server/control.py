"""Questions of the server to the engine, answered between two iterations: limits to show or to change, and
the last step plans."""

from __future__ import annotations

from engines.config import ConfigError
from engines.server.step_trace import StepTrace
from engines.server.wire import Ask, Told
from engines.turns import Engines


def answer(ask: Ask, engines: Engines, trace: StepTrace) -> Told:
    """limits: {route, changes} -> {changed, limits}. steps: {last, first} -> {steps, next}."""
    wanted = ask.arguments
    try:
        if ask.what == "limits":
            changed = engines.set_limits(wanted["route"], wanted["changes"]) if wanted["changes"] else {}
            return Told(ask.key, None, {"changed": changed, "limits": engines.limits()})
        return Told(ask.key, None, trace.piece(wanted["first"], wanted["last"]))
    except ConfigError as error:
        return Told(ask.key, str(error), {})
    except (KeyError, TypeError, ValueError) as error:  # no question is worth an engine
        return Told(ask.key, f"{ask.what}: {type(error).__name__}: {error}", {})

"""The arms of a comparison: one base, and for each arm the settings in which it differs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.comparison import flatten
from harness.conf import UsageError, compose
from harness.plan import check_engine

if TYPE_CHECKING:
    from omegaconf import DictConfig

MOST_ARMS = 12
SAME_FOR_ALL = ("workload", "load", "slo", "seed")
"""Traffic and what it is held to: unlike, arms could not be compared."""
AS = "[{name: small, engine: chunked, engine.max_num_seqs: 8}, engine=static]"


@dataclass(frozen=True)
class Arm:
    """overrides: over the base. cfg: composed with the base."""

    name: str
    overrides: tuple[str, ...]
    cfg: DictConfig


def make_arms(base: Sequence[str], engines: Any, arms: Any) -> list[Arm]:
    """The first one is the reference. engines: a list of presets. arms: a list of objects or of texts of
    overrides. Raises UsageError."""
    if (engines is None) == (arms is None):
        raise UsageError(
            f"compare: needs 'engines=[static,chunked]' or 'arms={AS}'{', not both' if arms else ''}"
        )
    entries = _listed("engines", engines) if arms is None else _listed("arms", arms)
    key = "engines" if arms is None else "arms"
    if not 2 <= len(entries) <= MOST_ARMS:
        raise UsageError(f"{key}: has {len(entries)} entries; needs 2 to {MOST_ARMS}")
    named = [_engine(entry) if arms is None else _arm(entry) for entry in entries]
    made = [Arm(name, tuple(texts), compose([*base, *texts])) for name, texts in _unique(key, named)]
    for arm in made:
        check_engine(arm.cfg)
        _check_traffic(arm, made[0])
    return made


def repeat_of(reference: str) -> str:
    """The name of the reference's second pass in a round (A/A)."""
    return f"{reference} again"


def _listed(key: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, list):
        raise UsageError(
            f"{key}={value}: needs a list, as {AS if key == 'arms' else '[static,continuous,chunked]'}"
        )
    return value


def _engine(entry: Any) -> tuple[str, list[str]]:
    if not isinstance(entry, str) or "=" in entry:
        raise UsageError(f"engines: {entry}: needs names of engines; other differences go into arms={AS}")
    return entry, [f"engine={entry}"]


def _arm(entry: Any) -> tuple[str, list[str]]:
    if isinstance(entry, str):
        try:
            texts = shlex.split(entry)
        except ValueError as error:  # a quote without its other half
            raise UsageError(f"arms: {entry}: cannot be read ({error})") from None
        return " ".join(text.lstrip("+") for text in texts), texts
    if not isinstance(entry, Mapping) or not all(isinstance(key, str) for key in entry):
        raise UsageError(f"arms: {entry}: needs an object or overrides, as in arms={AS}")
    texts = [f"{key}={_written(value)}" for key, value in entry.items() if key != "name"]
    return str(entry.get("name") or " ".join(texts) or "base"), texts


def _unique(key: str, named: Sequence[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Two arms alike are an A/A comparison: allowed, and told apart by a number."""
    names = [name for name, _ in named]
    for name in names:
        if not 0 < len(name) <= 80 or "\n" in name:
            raise UsageError(f"{key}: the name {name[:80]!r} needs 1 to 80 characters on one line")
    told = [
        f"{name} #{names[: i + 1].count(name)}" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]
    taken = {repeat_of(told[0])}
    for name in told:
        if name in taken:
            raise UsageError(f"{key}: two arms would be called {name!r}; give one another name")
        taken.add(name)
    return [(name, texts) for name, (_, texts) in zip(told, named, strict=True)]


def _written(value: Any) -> str:
    """A value as an override has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, str) and not re.fullmatch(r"[\w./:-]+", value):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)


def _check_traffic(arm: Arm, reference: Arm) -> None:
    for group in SAME_FOR_ALL:
        mine, theirs = (flatten({group: _plain(a.cfg[group])}) for a in (arm, reference))
        for key in {**mine, **theirs}:
            if mine.get(key) != theirs.get(key):
                raise UsageError(
                    f"{arm.name}: {key}={mine.get(key)}, {reference.name} has {theirs.get(key)}: arms "
                    f"are sent the same requests; set {group} for all, outside of arms"
                )


def _plain(node: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node

"""Several schedulers over one model: `server.routes` sends some requests to another scheduler, with limits of
its own.

    server.routes:
      - name: slow                  # label of its figures
        match: {tenant: acme}       # tenant, model, path: a value or a list; all that are given must fit
        preset: static              # a file of harness/conf/engine; null: the settings of engine.*
        engine: {max_num_seqs: 4}   # changes to these
        kv_share: 0.25              # of the KV pool, for good

The first route that fits takes the request, `default` (engine.*) the others. Weights and runner are shared;
the routes' engines take turns, a pass each, while both have work. What that costs: everybody waits for the
passes of the other routes, no batch is as large as one for all would be, and a route's share of the KV pool
is its own, used or not.
A model that is named in `match` is another name for the one model that is served."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from engines.config import ConfigError, EngineConfig

DEFAULT = "default"
MOST_ROUTES = 16
KEYS = ("name", "match", "preset", "engine", "kv_share")
MATCHES = ("tenant", "model", "path")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = (COMPLETIONS, CHAT)
"""Where generations are asked for."""
_AN_OBJECT = f"an object of {', '.join(KEYS)}"
SHARED = (
    *("kind", "block_size", "max_model_len", "num_kv_blocks", "kv_memory_gb", "threads"),
    *("api_key_env", "admin_token_env", "cuda_graphs", "cuda_graph_sizes", "compile"),
    *("cpu_affinity", "determinism", "swap_memory_gb"),
)
"""One runner and one server: these are engine.* for every route."""


@dataclass(frozen=True, slots=True)
class Route:
    name: str
    engine: EngineConfig
    kv_share: float = 0.0  # of the default route: what the others leave
    match: Mapping[str, tuple[str, ...]] | None = None  # None: fits everything

    def fits(self, tenant: str, model: str, path: str) -> bool:
        asked = {"tenant": tenant, "model": model, "path": path}
        return all(asked[key] in values for key, values in (self.match or {}).items())


def routes_of(config: Mapping[str, Any]) -> list[Route]:
    """The routes of a resolved configuration, `default` last. Raises ConfigError."""
    entries = config["server"].get("routes")
    entries = [] if entries is None else entries
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
        raise ConfigError(f"server.routes={_shown(entries)}: needs a list of routes, each {_AN_OBJECT}")
    if len(entries) > MOST_ROUTES:
        raise ConfigError(f"server.routes: has {len(entries)} routes, needs at most {MOST_ROUTES}")
    found = [_route(f"server.routes[{i}]", entry, config["engine"]) for i, entry in enumerate(entries)]
    taken = {DEFAULT: "engine.* itself"}
    for i, route in enumerate(found):
        if route.name in taken:
            raise ConfigError(
                f"server.routes[{i}].name={route.name}: is the name of {taken[route.name]}; needs one of its "
                "own"
            )
        taken[route.name] = f"server.routes[{i}]"
    if found and (config["engine"].get("overlap") or any(route.engine.overlap for route in found)):
        raise ConfigError("engine.overlap=true: routes take turns, a pass each; use false with server.routes")
    rest = 1.0 - sum(route.kv_share for route in found)
    if rest <= 0:
        raise ConfigError(f"server.routes: the kv_share of all routes is {1 - rest:g}: needs less than 1")
    return [*found, Route(DEFAULT, EngineConfig.from_mapping(config["engine"]), rest)]


def resolved(config: Mapping[str, Any], routes: Sequence[Route]) -> dict[str, Any]:
    """The configuration with every route written out, for a process that has no presets at hand."""
    entries = [
        {
            "name": route.name,
            "match": {key: list(values) for key, values in (route.match or {}).items()},
            "engine": {**asdict(route.engine), "policy": dict(route.engine.policy)},
            "kv_share": route.kv_share,
        }
        for route in routes[:-1]
    ]
    return {**config, "server": {**config["server"], "routes": entries}}


def _route(where: str, entry: Any, engine: Mapping[str, Any]) -> Route:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}={_shown(entry)}: needs {_AN_OBJECT}")
    for key in entry:
        if key not in KEYS:
            raise ConfigError(f"{where}.{_shown(key)} is not a setting; choose from: {', '.join(KEYS)}")
    name, share = entry.get("name"), entry.get("kv_share")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", name):
        raise ConfigError(
            f"{where}.name={_shown(name)}: needs 1 to 40 letters, digits, dots, dashes or underscores"
        )
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise ConfigError(
            f"{where}.kv_share={_shown(share)}: needs a share of the KV pool, above 0 and below 1"
        )
    changes = entry.get("engine")
    changes = {} if changes is None else changes
    if not isinstance(changes, Mapping):
        raise ConfigError(
            f"{where}.engine={_shown(changes)}: needs an object of engine settings, as {{max_num_seqs: 4}}"
        )
    for key, value in changes.items():
        if key in SHARED and _listed(value) != _listed(engine.get(key)):
            raise ConfigError(f"{where}.engine.{key}: is one for all routes, set engine.{key}")
    if changes.get("preemption") == "swap":
        raise ConfigError(
            f"{where}.engine.preemption=swap: host memory is the default route's alone; needs recompute"
        )
    base = {**engine, "preemption": "recompute"}
    if entry.get("preset") is not None:
        base = _preset(where, entry["preset"]) | {key: engine[key] for key in SHARED if key in engine}
    try:
        made = EngineConfig.from_mapping(base | dict(changes))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return Route(name, made, float(share), _match(where, entry.get("match")))


def _listed(value: Any) -> Any:
    """Lists of settings are tuples in an EngineConfig, and so in what `resolved` writes out."""
    return list(value) if isinstance(value, tuple) else value


def _match(where: str, match: Any) -> Mapping[str, tuple[str, ...]]:
    if not isinstance(match, Mapping) or not match or not set(match) <= set(MATCHES):
        raise ConfigError(
            f"{where}.match={_shown(match)}: needs an object of {', '.join(MATCHES)}, at least one of them"
        )
    found = {}
    for key, value in match.items():
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, Sequence) or not values or not all(isinstance(v, str) for v in values):
            raise ConfigError(f"{where}.match.{key}={_shown(value)}: needs text, or a list of texts")
        for path in values if key == "path" else ():
            if path not in PATHS:
                raise ConfigError(
                    f"{where}.match.path={_shown(path)}: no request comes there; choose from "
                    f"{', '.join(PATHS)}"
                )
        found[key] = tuple(values)
    return found


def _shown(value: Any, limit: int = 60) -> str:
    """A value of any type for a message: on one line, cut when it is long."""
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _preset(where: str, name: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    from harness.conf import UsageError, compose

    try:
        engine = OmegaConf.to_container(compose([f"engine={name}"]).engine, resolve=True)
    except UsageError as error:
        raise ConfigError(f"{where}.preset={_shown(name)}: {error}") from None
    if not isinstance(engine, dict) or engine.get("kind") != "reference":
        raise ConfigError(f"{where}.preset={name}: runs elsewhere, choose one of our own engines")
    return {str(key): value for key, value in engine.items()}


def sized_for_all(routes: Sequence[Route]) -> EngineConfig:
    """What the one runner must be ready for."""
    return replace(
        routes[-1].engine,
        max_num_seqs=max(route.engine.max_num_seqs for route in routes),
        max_num_batched_tokens=max(route.engine.max_num_batched_tokens for route in routes),
    )


def shares(routes: Sequence[Route], num_kv_blocks: int) -> list[tuple[int, int]]:
    """(offset, num_kv_blocks) of each route's pool: its block b > 0 is block b + offset of the runner. Raises
    ConfigError."""
    usable, offset, found = num_kv_blocks - 1, 0, []
    for route in routes:
        last = route is routes[-1]
        blocks = usable - offset if last else int(usable * route.kv_share)
        if blocks < 1:
            raise ConfigError(
                f"server.routes: kv_share={route.kv_share:g} of {usable} KV blocks is none: too small"
            )
        found.append((offset, blocks + 1))
        offset += blocks
    return found

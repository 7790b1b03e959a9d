"""Looking in and turning knobs while the server runs: /admin/limits and /debug/steps, always with a token.

engine.admin_token_env names the environment variable that holds the token; without it these paths do not
exist. Clients' keys do not open them."""

from __future__ import annotations

import hmac
import logging
import re
from typing import Any

import orjson
from aiohttp import web

from engines.routes import DEFAULT, Route
from engines.server import protocol
from engines.server.engine_client import EngineClient, NotDone
from engines.server.errors import ApiError, shown
from engines.server.log import event
from engines.server.step_trace import MOST

PREFIXES = ("/admin/", "/debug/")
DEFAULT_STEPS = 100


def is_admin(path: str) -> bool:
    return path.startswith(PREFIXES)


def check_token(request: web.Request, token: str | None) -> None:
    """Raises ApiError(404) where there is no token, and ApiError(401)."""
    if token is None:
        raise ApiError(
            f"{request.method} {shown(request.path)}: no such path; it takes engine.admin_token_env", 404
        )
    sent = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(sent, f"Bearer {token}".encode()):
        raise ApiError('Authorization: needs "Bearer " and the admin token', 401, code="invalid_admin_token")


class Admin:
    """`limits`: those in force, by route; the server reads its own timeouts there. `enabled`: whether a route
    takes new requests; those of one that does not go to the next route that fits."""

    def __init__(self, engine: EngineClient, routes: list[Route]) -> None:
        self.routes = routes
        self.enabled = [True] * len(routes)
        self.queue_timeout_ms = [route.engine.queue_timeout_ms for route in routes]
        self.stream_idle_timeout_ms = [route.engine.stream_idle_timeout_ms for route in routes]
        self._engine = engine
        self._names = [route.name for route in routes]

    def handlers(self) -> list[web.RouteDef]:
        return [
            web.get("/admin/limits", self.show),
            web.patch("/admin/limits", self.change),
            web.get("/debug/steps", self.steps),
        ]

    def route_of(self, tenant: str, model: str, path: str) -> int:
        """The number of the first route that fits and is enabled; the last one takes what is left."""
        for number, route in enumerate(self.routes):
            if self.enabled[number] and route.fits(tenant, model, path):
                return number
        return len(self.routes) - 1

    # -- handlers

    async def show(self, request: web.Request) -> web.Response:
        told = await self._ask("limits", {"route": DEFAULT, "changes": {}})
        return _json({"routes": self._described(told["limits"])})

    async def change(self, request: web.Request) -> web.Response:
        """?route=NAME (the default one if left out); a body of {limit: value}, and `enabled` for a route."""
        number = self._named(_only(request, "route", DEFAULT))
        name = self._names[number]
        changes = protocol.parse_json(await request.read())
        if not changes:
            raise ApiError("the body is {}: needs at least one limit, such as max_num_seqs")
        asked_to = "enabled" in changes
        enabled = changes.pop("enabled", self.enabled[number])
        if not isinstance(enabled, bool):
            raise ApiError(f"enabled={shown(enabled)}: needs true or false", param="enabled")
        if name == DEFAULT and not enabled:
            raise ApiError("enabled=false: the default route takes what is left; needs ?route= with another")
        told = await self._ask("limits", {"route": name, "changes": changes})
        changed = told["changed"]
        if asked_to:
            changed = {**changed, "enabled": {"old": self.enabled[number], "new": enabled}}
            self.enabled[number] = enabled
        self.queue_timeout_ms[number] = told["limits"][name]["queue_timeout_ms"]
        self.stream_idle_timeout_ms[number] = told["limits"][name]["stream_idle_timeout_ms"]
        event("limits_changed", logging.WARNING, route=name, changed=changed, peer=request.remote)
        return _json({"route": name, "changed": changed, "routes": self._described(told["limits"])})

    async def steps(self, request: web.Request) -> web.Response:
        """?last=N: the last N step plans, the oldest first."""
        asked = _only(request, "last", str(DEFAULT_STEPS))
        if not (re.fullmatch(r"[0-9]{1,9}", asked) and 1 <= int(asked) <= MOST):
            raise ApiError(f"last={shown(asked)}: needs a whole number from 1 to {MOST}", param="last")
        steps: list[Any] = []
        first: int | None = None
        while len(steps) < int(asked):
            told = await self._ask("steps", {"first": first, "last": int(asked)})
            steps += told["steps"]
            first = told["next"]
            if first is None:
                break
        return _json({"steps": steps[: int(asked)]})

    # -- helpers

    async def _ask(self, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._engine.ask(what, arguments)
        except NotDone as error:
            raise ApiError(str(error), 503 if error.gone else 400) from None

    def _named(self, name: str) -> int:
        if name not in self._names:
            raise ApiError(f"route={shown(name)}: choose from {', '.join(self._names)}", param="route")
        return self._names.index(name)

    def _described(self, limits: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {
                "name": route.name,
                "match": route.match,
                "scheduler": route.engine.scheduler,
                "kv_share": round(route.kv_share, 6),
                "enabled": self.enabled[number],
                "limits": limits[route.name],
            }
            for number, route in enumerate(self.routes)
        ]


def _only(request: web.Request, name: str, default: str) -> str:
    """The one parameter that a path takes: what is misspelt would change, or show, something else."""
    query = request.query
    for key in query:
        if key != name or len(query.getall(key)) > 1:
            raise ApiError(f"?{shown(key)}: needs ?{name}=, once", param=key)
    return query.get(name, default)


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")

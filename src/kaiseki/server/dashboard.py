"""The dashboard: one page with its assets, and the stream of events that it shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from importlib.resources import files
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from kaiseki.server.admin import encode, state_for, whole
from kaiseki.server.errors import ApiError
from kaiseki.server.identity import Caller
from kaiseki.server.service import Service
from kaiseki.server.sse import EventStream

ASSETS = {
    "dashboard.html": "text/html; charset=utf-8",
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "lanes.js": "text/javascript; charset=utf-8",
}
MOST_VIEWS = 16
"""Streams at a time: each looks at the scheduler under its lock."""
INTERVAL_MS = (100, 10_000)
_LOOK_S = 0.25
"""How often a stream looks whether anybody is still there, and whether the server ends."""
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:",
    "cache-control": "no-cache",
}


async def page(http: HttpRequest, service: Service) -> Response:
    """GET /dashboard."""
    return _asset(http, service, "dashboard.html")


async def asset(http: HttpRequest, service: Service) -> Response:
    """GET /dashboard/{name}."""
    return _asset(http, service, str(http.path_params["name"]))


async def live(http: HttpRequest, service: Service) -> Response:
    """GET /kaiseki/v1/live?interval_ms=500: how things stand and what ran since, as server-sent events."""
    caller = service.directory.admin(http.headers)
    interval_ms = whole(http, "interval_ms", 500, *INTERVAL_MS)
    if service.views >= MOST_VIEWS:
        message = f"{MOST_VIEWS} live views are open already."
        raise ApiError(429, message, code="too_many_views", retry_after_s=5.0)
    service.views += 1
    events = _events(http, caller, service, interval_ms / 1e3)
    return EventStream(events, lambda: _closed(service), {})


def document(caller: Caller, service: Service, since: int) -> dict[str, Any]:
    """One event: the state, what ran after slot `since`, and who attained so far."""
    tenant = None if caller.operator else caller.charged
    counted = [
        {"tenant": who, "class": cls, "attained": attained, "missed": missed}
        for (who, cls), (attained, missed) in service.driver.metrics.attainment().items()
        if tenant in (None, who)
    ]
    health = service.driver.health()
    return {
        **state_for(caller, service),
        **service.driver.live(since, tenant),
        "attainment": counted,
        "health": {"ok": health.ok, "reason": health.reason},
    }


async def _events(
    http: HttpRequest, caller: Caller, service: Service, interval_s: float
) -> AsyncGenerator[bytes, None]:
    since, due = -1, 0.0
    while not service.draining and not await http.is_disconnected():
        now = time.monotonic()
        if now >= due:
            found = await asyncio.to_thread(document, caller, service, since)
            since, due = found["slot"], now + interval_s
            yield b"data: " + encode(found) + b"\n\n"
        await asyncio.sleep(min(interval_s, _LOOK_S))


def _closed(service: Service) -> None:
    service.views -= 1


def _asset(http: HttpRequest, service: Service, name: str) -> Response:
    try:
        service.directory.admin(http.headers)
    except ApiError as error:
        # What makes a browser ask for it; the key is the password.
        return Response(
            str(error),
            401,
            {**error.headers, "www-authenticate": 'Basic realm="Kaiseki: any user, an API key as password"'},
            "text/plain",
        )
    if name not in ASSETS:
        raise ApiError(404, f"The dashboard has no {name!r:.80}.", code="not_found")
    data = files("kaiseki.server").joinpath("static", name).read_bytes()
    return Response(data, headers=_HEADERS, media_type=ASSETS[name])

"""The ASGI application: routes, error handlers, and what surrounds them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from kaiseki import __version__
from kaiseki.config import Settings
from kaiseki.server import admin, dashboard, openapi
from kaiseki.server.bodies import ChatRequest, CompletionRequest
from kaiseki.server.chat import chat_completions
from kaiseki.server.completions import completions
from kaiseki.server.envelope import RequestIds
from kaiseki.server.errors import ApiError, internal_error
from kaiseki.server.seams import Backlog, DriverLike, TextModel
from kaiseki.server.service import Service

_log = logging.getLogger(__name__)

Route = Callable[[HttpRequest, Service], Awaitable[Response]]


def create_app(driver: DriverLike, model: TextModel, settings: Settings, backlog: Backlog) -> FastAPI:
    """The application around a driver that runs already.

    Args:
        driver: runs the requests; starting and stopping it is the caller's business.
        model: text to token ids.
        settings: who may do what, and limits.
        backlog: how much waits in the scheduler.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = service = Service(driver, model, settings, backlog)
        yield
        service.close()

    # No pages that load scripts from elsewhere; /openapi.json is there for tools.
    app = FastAPI(title="Kaiseki", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(RequestIds)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    _add_post(app, "/v1/chat/completions", chat_completions, ChatRequest)
    _add_post(app, "/v1/completions", completions, CompletionRequest)
    json = ["application/json"]
    model_id, request_id = openapi.path_parameter("model_id"), openapi.path_parameter("request_id")
    limit = openapi.number_parameter("limit", 1, admin.MAX_RECENT, default=100)
    _add_get(app, "/v1/models", admin.models, openapi.answers([400, 401], json))
    _add_get(app, "/v1/models/{model_id:path}", admin.model, openapi.answers([400, 401, 404], json), model_id)
    _add_get(app, "/health", admin.health, openapi.health_answers())
    _add_get(app, "/metrics", admin.metrics, openapi.answers([], ["text/plain"]))
    _add_get(app, "/kaiseki/v1/requests", admin.recent, openapi.answers([400, 401], json), limit)
    one = openapi.answers([400, 401, 404], json)
    _add_get(app, "/kaiseki/v1/requests/{request_id}", admin.explain, one, request_id)
    slot, tenant = openapi.path_parameter("slot"), openapi.path_parameter("tenant")
    _add_get(app, "/kaiseki/v1/slots/{slot}", admin.slot, one, slot)
    _add_get(app, "/kaiseki/v1/tenants/{tenant}", admin.share, one, tenant, *openapi.span_parameters())
    _add_get(app, "/kaiseki/v1/state", admin.state, openapi.answers([400, 401], json))
    interval = openapi.number_parameter("interval_ms", *dashboard.INTERVAL_MS, default=500)
    stream = openapi.answers([400, 401, 429], ["text/event-stream"])
    app.add_api_route(
        "/kaiseki/v1/live",
        _endpoint(dashboard.live),
        response_class=Response,
        responses=stream,
        openapi_extra={"parameters": [interval]},
    )
    page = openapi.answers([401, 404], list(dashboard.ASSETS.values()))
    _add_get(app, "/dashboard", dashboard.page, page)
    _add_get(app, "/dashboard/{name}", dashboard.asset, page, openapi.path_parameter("name"))
    return app


def _add_post(app: FastAPI, path: str, route: Route, body: type[BaseModel]) -> None:
    app.add_api_route(
        path,
        _endpoint(route),
        methods=["POST"],
        name=route.__name__,
        description=route.__doc__ or "",
        response_class=Response,
        responses=openapi.answers(list(openapi.ERRORS), ["application/json", "text/event-stream"]),
        openapi_extra={
            "requestBody": openapi.request_body(path, body),
            "parameters": openapi.header_parameters(),
        },
    )


def _add_get(
    app: FastAPI, path: str, route: Route, responses: dict[int | str, Any], *parameters: dict[str, Any]
) -> None:
    for method in ("GET", "HEAD"):  # load balancers like to ask with HEAD
        app.add_api_route(
            path,
            _endpoint(route),
            methods=[method],
            name=route.__name__,
            description=route.__doc__ or "",
            response_class=Response,
            responses=responses,
            openapi_extra={"parameters": list(parameters)},
            include_in_schema=method == "GET",
        )


def _endpoint(route: Route) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def endpoint(request: HttpRequest) -> Response:
        try:
            return await route(request, request.app.state.service)
        except (ApiError, HTTPException):
            raise
        except Exception:
            _log.exception("%s %s failed", request.method, request.url.path)
            raise internal_error() from None

    return endpoint


async def _api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    shaped = ApiError(error.status_code, message, code="not_found" if error.status_code == 404 else None)
    return JSONResponse(shaped.body, error.status_code, {**(error.headers or {}), **shaped.headers})

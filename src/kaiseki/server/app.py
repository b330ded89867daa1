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
from kaiseki.server import admin
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
    _add(app, "POST", "/v1/chat/completions", chat_completions, ChatRequest)
    _add(app, "POST", "/v1/completions", completions, CompletionRequest)
    _add(app, "GET", "/v1/models", admin.models)
    _add(app, "GET", "/v1/models/{model_id:path}", admin.model)
    _add(app, "GET", "/health", admin.health)
    _add(app, "GET", "/metrics", admin.metrics)
    _add(app, "GET", "/kaiseki/v1/requests", admin.recent)
    _add(app, "GET", "/kaiseki/v1/requests/{request_id}", admin.explain)
    _add(app, "GET", "/kaiseki/v1/state", admin.state)
    return app


def _add(app: FastAPI, method: str, path: str, route: Route, body: type[BaseModel] | None = None) -> None:
    async def endpoint(request: HttpRequest) -> Response:
        try:
            return await route(request, request.app.state.service)
        except (ApiError, HTTPException):
            raise
        except Exception:
            _log.exception("%s %s failed", request.method, path)
            raise internal_error() from None

    # Bodies are read by the routes, after the key was checked; the schema is for the API's own pages.
    extra: dict[str, Any] = {}
    if body is not None:
        where = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
        schema = body.model_json_schema(ref_template=f"{where}/$defs/{{model}}")
        content = {"application/json": {"schema": schema}}
        extra = {"requestBody": {"required": True, "content": content}}
    app.add_api_route(
        path,
        endpoint,
        methods=[method],
        name=route.__name__,
        description=route.__doc__ or "",
        response_model=None,
        openapi_extra=extra,
    )


async def _api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    shaped = ApiError(error.status_code, message, code="not_found" if error.status_code == 404 else None)
    return JSONResponse(shaped.body, error.status_code, {**(error.headers or {}), **shaped.headers})

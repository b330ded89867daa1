"""What operators and monitoring read: models, health, metrics, and why requests fared as they did."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from kaiseki.observe.explain import BODY_ID_PREFIXES
from kaiseki.observe.exposition import expose
from kaiseki.observe.recorder.batch import explain_slot
from kaiseki.observe.recorder.reading import Recording
from kaiseki.observe.recorder.share import explain_tenant
from kaiseki.observe.recorder.when import ALLOWED as MOMENTS
from kaiseki.observe.recorder.when import moment_ns
from kaiseki.server.errors import REASON_HEADER, ApiError, invalid, retry_after
from kaiseki.server.identity import Caller
from kaiseki.server.service import Service

MAX_RECENT = 1000
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TOLD = {"scheduling", "memory", "classes"}
"""Sections of the settings in the state document; the others name keys and machines."""
MOST_DIGITS = 15


async def models(http: HttpRequest, service: Service) -> Response:
    """GET /v1/models."""
    service.directory.caller(http.headers)
    return JSONResponse({"object": "list", "data": [_model(service)]})


async def model(http: HttpRequest, service: Service) -> Response:
    """GET /v1/models/{id}."""
    service.directory.caller(http.headers)
    service.check_model(http.path_params["model_id"])
    return JSONResponse(_model(service))


async def health(http: HttpRequest, service: Service) -> Response:
    """GET /health: 503 with a reason when no progress is made or no work is taken."""
    state = service.driver.health()
    reason = "draining: no new requests are taken" if service.draining else state.reason
    if state.ok and not service.draining:
        return JSONResponse({"status": "ok"})
    code = "draining" if service.draining else state.code
    headers = {REASON_HEADER: code}
    if state.retry_after_s is not None and not service.draining:
        headers |= retry_after(state.retry_after_s)
    return JSONResponse({"status": code, "reason": reason}, 503, headers)


async def metrics(http: HttpRequest, service: Service) -> Response:
    """GET /metrics."""
    return Response(expose(service.driver.metrics), headers={"content-type": METRICS_TYPE})


async def explain(http: HttpRequest, service: Service) -> Response:
    """GET /kaiseki/v1/requests/{id}: the id in a header or in a body, with `-1`, `-2` for further choices."""
    caller = service.directory.admin(http.headers)
    request_id = str(http.path_params["request_id"])
    for prefix in BODY_ID_PREFIXES:
        request_id = request_id.removeprefix(prefix)
    document = await asyncio.to_thread(service.driver.explain, request_id)
    # The same answer for what is not there and for what belongs to others.
    if document is None or not (caller.operator or document.get("tenant") == caller.charged):
        message = f"No request {request_id!r:.80} is known; ended ones are forgotten after a while."
        raise ApiError(404, message, param="request_id", code="request_not_found")
    return _json(document)


async def slot(http: HttpRequest, service: Service) -> Response:
    """GET /kaiseki/v1/slots/{slot}: why its batch was what it was. For operators: it names all requests."""
    caller = service.directory.admin(http.headers)
    text = str(http.path_params["slot"])
    if not caller.operator:
        raise ApiError(404, "Only operators see slots.", param="slot", code="slot_not_found")
    if not (text.isdecimal() and len(text) <= MOST_DIGITS):
        raise invalid("slot", "must be a whole number from 0", text)
    document = await asyncio.to_thread(_explain_slot, service, int(text))
    if document is None:
        message = f"Slot {text} is not recorded; the oldest make room for the newest."
        raise ApiError(404, message, param="slot", code="slot_not_found")
    return _json(document)


async def share(http: HttpRequest, service: Service) -> Response:
    """GET /kaiseki/v1/tenants/{tenant}?from=TIME&to=TIME: who used its share; operators see others' names."""
    caller = service.directory.admin(http.headers)
    tenant = str(http.path_params["tenant"])
    document = None
    if caller.operator or tenant == caller.charged:
        span = http.query_params.get("from"), http.query_params.get("to")
        document = await asyncio.to_thread(_explain_tenant, service, tenant, *span, caller.operator)
    if document is None:
        raise ApiError(
            404, f"Nothing is recorded of {tenant!r:.80}.", param="tenant", code="tenant_not_found"
        )
    return _json(document)


def _explain_slot(service: Service, slot: int) -> dict[str, Any] | None:
    recording = service.driver.recording()
    return None if recording is None else explain_slot(recording, slot)


def _explain_tenant(
    service: Service, tenant: str, begin: str | None, end: str | None, name_others: bool
) -> dict[str, Any] | None:
    recording = service.driver.recording()
    if recording is None:
        return None
    from_ns, to_ns = _moment(recording, "from", begin), _moment(recording, "to", end)
    return explain_tenant(recording, tenant, from_ns, to_ns, name_others)


def _moment(recording: Recording, param: str, text: str | None) -> int | None:
    try:
        return None if text is None else moment_ns(text, recording)
    except ValueError:
        raise invalid(param, f"must be {MOMENTS}", text) from None


async def recent(http: HttpRequest, service: Service) -> Response:
    """GET /kaiseki/v1/requests?limit=N: newest first."""
    caller = service.directory.admin(http.headers)
    limit = whole(http, "limit", 100, 1, MAX_RECENT)
    tenant = None if caller.operator else caller.charged
    requests = await asyncio.to_thread(service.driver.recent, limit, tenant)
    return _json({"requests": requests})


def whole(http: HttpRequest, name: str, default: int, least: int, most: int) -> int:
    """A whole number from the query string.

    Raises:
        ApiError: 400 when it is none, or outside of what is allowed.
    """
    text = http.query_params.get(name, str(default))
    short = len(text) <= len(str(most))  # what is longer may be longer than `int` takes
    if not (short and text.isdecimal() and least <= int(text) <= most):
        raise invalid(name, f"must be a whole number from {least} to {most}", text)
    return int(text)


async def state(http: HttpRequest, service: Service) -> Response:
    """GET /kaiseki/v1/state: everything for an operator, a tenant's own part for a tenant."""
    caller = service.directory.admin(http.headers)
    return _json(await asyncio.to_thread(state_for, caller, service))


def state_for(caller: Caller, service: Service) -> dict[str, Any]:
    """The part of the state document that a caller may see."""
    document = service.driver.snapshot()
    if caller.operator:
        document["settings"] = service.settings.model_dump(mode="json", include=_TOLD)
    else:
        own = document.get("tenants", {}).get(caller.charged)
        kept = ("slot", "policy", "draining")
        document = {key: document[key] for key in kept if key in document}
        document["tenants"] = {} if own is None else {caller.charged: own}
    return document


def encode(document: Any) -> bytes:
    """JSON of what the core reports: NumPy numbers as numbers, infinities as null."""
    return to_json(document, inf_nan_mode="null", fallback=lambda value: value.tolist())


def _json(document: Any) -> Response:
    return Response(encode(document), media_type="application/json")


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "kaiseki",
        "max_model_len": service.model.max_context,
    }

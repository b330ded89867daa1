"""What `/openapi.json` says of each route beside its path: parameters, bodies, and the answers it may give.

The routes read headers and bodies themselves, after the key was checked, so FastAPI can't know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from kaiseki.server.identity import FAIRNESS_HEADERS
from kaiseki.server.slo import CLASS_HEADERS, TBT_HEADERS, TTFT_HEADERS

ERRORS = {
    400: "The request is malformed, asks for what is not supported, or can never fit.",
    401: "The API key is missing or wrong.",
    403: "The class is not allowed.",
    404: "No such model or request, or nothing is recorded of it.",
    413: "The body is too large.",
    429: "Capacity is contended right now; `retry-after` says when to come back.",
    500: "The engine failed on this request.",
    503: "It expired, can't meet its target, or the server takes no requests.",
}
_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL},
        }
    },
}
HEALTH_SCHEMA = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"enum": ["ok", "draining", "no_progress", "engine_failing"]}, "reason": _TEXT},
}
WHO_AND_HOW_SOON = (*FAIRNESS_HEADERS, *CLASS_HEADERS, *TTFT_HEADERS, *TBT_HEADERS)


def answers(errors: Sequence[int], content_types: Sequence[str], schema: Any = None) -> dict[int | str, Any]:
    """`responses` of a route: what success looks like, and which errors there may be."""
    success = {kind: {"schema": schema or {}} for kind in content_types}
    found: dict[int | str, Any] = {200: {"description": "Success.", "content": success}}
    for status in errors:
        content = {"application/json": {"schema": ERROR_SCHEMA}}
        found[status] = {"description": ERRORS[status], "content": content}
    return found


def health_answers() -> dict[int | str, Any]:
    """`responses` of the health route, whose 503 is no error of the request's."""
    content = {"application/json": {"schema": HEALTH_SCHEMA}}
    return {
        200: {"description": "Requests make progress.", "content": content},
        503: {"description": "They don't, or none are taken.", "content": content},
    }


def path_parameter(name: str) -> dict[str, Any]:
    """A part of the path."""
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def number_parameter(name: str, least: int, most: int, default: int) -> dict[str, Any]:
    """`?name=N`, a whole number."""
    schema = {"type": "integer", "minimum": least, "maximum": most, "default": default}
    return {"name": name, "in": "query", "required": False, "schema": schema}


def span_parameters() -> list[dict[str, Any]]:
    """`?from=TIME&to=TIME`."""
    return [{"name": name, "in": "query", "required": False, "schema": _TEXT} for name in ("from", "to")]


def header_parameters() -> list[dict[str, Any]]:
    """Who pays and how soon; see `identity` and `slo`."""
    return [{"name": name, "in": "header", "required": False, "schema": _TEXT} for name in WHO_AND_HOW_SOON]


def request_body(path: str, body: type[BaseModel]) -> dict[str, Any]:
    """The body of a POST; its definitions are kept beside it."""
    where = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema"
    schema = body.model_json_schema(ref_template=f"{where}/$defs/{{model}}")
    return {"required": True, "content": {"application/json": {"schema": schema}}}

"""What surrounds every request: its id, and a limit on the size of its body."""

from __future__ import annotations

import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kaiseki.server.errors import ApiError

ID_HEADER = "x-kaiseki-request-id"


class RequestIds:
    """Gives every HTTP request an id, which its answer carries whatever comes of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id(request: Request) -> str:
    """The id of an HTTP request."""
    return str(request.state.request_id)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, if it is not larger than `limit` bytes.

    Raises:
        ApiError: 413, noticed as soon as the limit is passed; 400, which nobody will read, when the
            client has left.
    """
    too_large = ApiError(413, f"The body is larger than {limit} bytes.", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
    except ClientDisconnect:
        raise ApiError(400, "The client left before its body was complete.", code="client_gone") from None
    return bytes(body)

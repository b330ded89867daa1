"""Server-sent events in OpenAI's way: one JSON document per event, `[DONE]` at the end."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kaiseki.server.errors import ApiError

DONE = b"data: [DONE]\n\n"


def event(document: Any) -> bytes:
    """One event."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """A stream of events that always calls `close` when it ends, whoever ended it.

    Args:
        events: encoded events. An ApiError they raise becomes the last event.
        close: called once, after the last byte or when the client is gone.
        headers: beside those of every stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._close = close
        # Proxies that buffer would turn a stream into one late answer.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            try:
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except ApiError as error:
                await send({"type": "http.response.body", "body": event(error.body), "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
        finally:
            self._close()
            await self._events.aclose()

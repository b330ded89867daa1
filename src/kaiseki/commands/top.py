"""`kaiseki top`: the live view in a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Annotated, Any

import typer

from kaiseki.commands.asking import DEFAULT_URL, ApiKey, with_key
from kaiseki.commands.common import fail
from kaiseki.commands.explain import fetch_request
from kaiseki.commands.told import lines_of, page_of_request


def top(
    url: Annotated[str, typer.Option(help="Where the server is.")] = DEFAULT_URL,
    key: ApiKey = None,
    interval_ms: Annotated[int, typer.Option(min=100, max=10_000, help="Time between two pictures.")] = 1000,
) -> None:
    """Watch a server: who runs, who waits and why, attainment and shares.

    Arrows choose a request, Enter explains it, p holds the picture, q ends.

    Example: kaiseki top --url http://127.0.0.1:8000
    """
    if not sys.stdout.isatty():
        fail("top draws on a terminal; for scripts there is GET /kaiseki/v1/state")
    from kaiseki.observe.top import Top

    def explain(request: str) -> str:
        try:
            return "\n".join(lines_of(page_of_request(fetch_request(request, url, key))))
        except typer.Exit:
            return f"Nothing is known of {request}."

    app = Top(lambda: _documents(url, key, interval_ms), explain)
    message = app.run()
    if message:
        fail(message)


async def _documents(url: str, key: str | None, interval_ms: int) -> AsyncIterator[dict[str, Any]]:
    """Live documents of a server.

    Raises:
        OSError: it can't be reached.
        ValueError: it refuses.
    """
    import httpx

    target = f"{url.rstrip('/')}/kaiseki/v1/live"
    every = {"interval_ms": interval_ms}
    try:
        async with (
            httpx.AsyncClient(timeout=httpx.Timeout(30.0)) as client,
            client.stream("GET", target, params=every, headers=with_key(key)) as answer,
        ):
            if answer.status_code != 200:
                await answer.aread()
                raise ValueError(f"{url}: {answer.text:.200}")
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if data and data != "[DONE]":
                    yield json.loads(data)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OSError(f"cannot reach {url}: {error}") from None

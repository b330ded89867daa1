"""What commands that ask a running server share: where it is, the key, one request and its JSON answer."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kaiseki.commands.common import fail

DEFAULT_URL = "http://127.0.0.1:8000"

ApiKey = Annotated[str | None, typer.Option(help="API key.", envvar="KAISEKI_API_KEY", show_default=False)]


def with_key(key: str | None) -> dict[str, str]:
    """Headers of a request by whoever has this key."""
    return {"authorization": f"Bearer {key}"} if key else {}


def ask(
    url: str, key: str | None, route: str, query: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Status and document of a route under `/kaiseki/v1`; ends the command where no Kaiseki answers."""
    import httpx

    target = f"{url.rstrip('/')}/kaiseki/v1/{route}"
    try:
        answer = httpx.get(target, params=query, headers=with_key(key), timeout=30.0)
        document = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"cannot reach {url}: {error}")
    except ValueError:
        fail(f"{url} does not answer like a Kaiseki server")
    if not isinstance(document, dict):
        fail(f"{url} does not answer like a Kaiseki server")
    return answer.status_code, document

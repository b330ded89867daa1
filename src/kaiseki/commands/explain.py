"""`kaiseki explain`: why a request waited, was skipped, preempted or refused."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from kaiseki.commands.common import FINDING, USAGE, JsonFile, fail, write_json

DEFAULT_URL = "http://127.0.0.1:8000"


def explain(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID", show_default=False)],
    url: Annotated[str, typer.Option(help="Where the server is.")] = DEFAULT_URL,
    key: Annotated[
        str | None, typer.Option(help="API key.", envvar="KAISEKI_API_KEY", show_default=False)
    ] = None,
    json: JsonFile = None,
) -> None:
    """Tell a request's life: what it waited for, who went before it, what would have helped.

    The id is the one in the answer's x-kaiseki-request-id header or in its body.

    Example: kaiseki explain chatcmpl-5f0c1d --url http://127.0.0.1:8000
    """
    document = fetch(request_id, url, key)
    if json is not None:
        write_json(document, json)
    elif sys.stdout.isatty():
        _draw(document)
    else:
        typer.echo("\n".join(lines_of(document)))


def fetch(request_id: str, url: str, key: str | None) -> dict[str, Any]:
    """The explain document of a request; ends the command with a message where there is none."""
    from urllib.parse import quote

    import httpx

    headers = {"authorization": f"Bearer {key}"} if key else {}
    target = f"{url.rstrip('/')}/kaiseki/v1/requests/{quote(request_id, safe='')}"
    try:
        answer = httpx.get(target, headers=headers, timeout=30.0)
        document = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"cannot reach {url}: {error}")
    except ValueError:
        fail(f"{url} does not answer like a Kaiseki server")
    if not isinstance(document, dict):
        fail(f"{url} does not answer like a Kaiseki server")
    if answer.status_code != 200:
        told = document.get("error")
        message = told.get("message") if isinstance(told, dict) else answer.text
        if answer.status_code == 401:
            message = f"{message} Give it with --key or in KAISEKI_API_KEY."
        fail(f"{url}: {message}", FINDING if answer.status_code == 404 else USAGE)
    return document


def _facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    names = ("request", "tenant", "class", "outcome")
    facts = [(name, str(document[name])) for name in names if name in document]
    if document.get("total_wait_ms") is not None:
        facts.append(("waited", f"{document['total_wait_ms']:.1f} ms"))
    return facts


def _wait(wait: dict[str, Any]) -> tuple[str, str, str]:
    yielded = wait.get("yielded_to") or ()
    yielded = yielded if isinstance(yielded, list | tuple) else [yielded]
    return f"{wait.get('ms') or 0:.1f}", str(wait.get("reason", "")), ", ".join(map(str, yielded))


def _event(entry: dict[str, Any]) -> tuple[str, str, str, str, str]:
    cells = (entry.get(name) for name in ("slot", "event", "reason", "detail"))
    slot, event, reason, detail = ("" if cell is None else str(cell) for cell in cells)
    return slot, f"{entry.get('t_ms') or 0:.1f}", event, reason, detail


def lines_of(document: dict[str, Any]) -> list[str]:
    """An explain document as lines, for files and pipes."""
    lines = [str(document.get("summary", "")), ""]
    lines += [f"{name}: {value}" for name, value in _facts(document)]
    lines += ["", "slot\tms\tevent\treason\tdetail"]
    lines += ["\t".join(_event(entry)) for entry in document.get("timeline", ())]
    if document.get("waits"):
        lines += ["", "waited ms\treason\tyielded to"]
        lines += ["\t".join(_wait(wait)) for wait in document["waits"]]
    if document.get("counterfactuals"):
        lines += ["", "what would have changed it:"]
        lines += [f"- {_sentence(item)}" for item in document["counterfactuals"]]
    return lines


def _draw(document: dict[str, Any]) -> None:
    """For people at a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(str(document.get("summary", "")), style="bold"))
    console.print(Text("  ".join(f"{name}: {value}" for name, value in _facts(document)), style="dim"))
    timeline = Table("slot", "ms", "event", "reason", "detail", title="timeline", title_justify="left")
    for entry in document.get("timeline", ()):
        timeline.add_row(*map(Text, _event(entry)))
    console.print(timeline)
    if document.get("waits"):
        waits = Table("ms", "reason", "yielded to", title="waits", title_justify="left")
        for wait in document["waits"]:
            waits.add_row(*map(Text, _wait(wait)))
        console.print(waits)
    for item in document.get("counterfactuals", ()):
        console.print(Text(f"• {_sentence(item)}"))


def _sentence(item: Any) -> str:
    if isinstance(item, dict):
        return str(item.get("text") or ", ".join(f"{name}: {value}" for name, value in item.items()))
    return str(item)

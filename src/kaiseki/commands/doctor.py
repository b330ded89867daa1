"""`kaiseki doctor`: from symptoms to causes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaiseki.commands.asking import DEFAULT_URL, ApiKey, ask
from kaiseki.commands.common import FINDING, JsonFile, fail, write_json

if TYPE_CHECKING:
    from kaiseki.observe.doctor.case import Case, Finding
    from kaiseki.observe.doctor.readings import Scrape

RECENT = 500


def doctor(
    url: Annotated[
        list[str] | None,
        typer.Option(help=f"Where a server is, {DEFAULT_URL} if not given; may be repeated."),
    ] = None,
    key: ApiKey = None,
    seconds: Annotated[
        float, typer.Option(min=0, max=3600, help="Time between two looks; 0 judges all since it started.")
    ] = 10.0,
    json: JsonFile = None,
) -> None:
    """Say what is wrong with a server, why, on what evidence, and what to do.

    Reads /metrics of Kaiseki or vLLM, and with an operator's key Kaiseki's state too. Exits 1 when it
    finds something.

    Example: kaiseki doctor --url http://127.0.0.1:8000 --seconds 30
    """
    from kaiseki.observe.doctor.diagnose import diagnose

    urls = [u.rstrip("/") for u in url or [DEFAULT_URL]]
    before = {u: _scrape(u) for u in urls} if seconds else {}
    _wait(seconds)
    found = diagnose({u: _case(u, key, before.get(u)) for u in urls})
    if json is not None:
        write_json({"findings": [_document(*f, len(urls)) for f in found]}, json)
    else:
        _tell(found, urls)
    if found:
        raise typer.Exit(FINDING)


def _case(url: str, key: str | None, before: Scrape | None) -> Case:
    from kaiseki.observe.doctor.case import Case
    from kaiseki.observe.doctor.readings import Readings

    case = Case(Readings(_scrape(url), before))
    if not case.kaiseki:
        return case
    state, requests = _ask(url, "state", key), _ask(url, "requests", key, {"limit": str(RECENT)})
    return Case(case.readings, state, requests.get("requests", ()))


def _scrape(url: str) -> Scrape:
    import httpx

    from kaiseki.observe.doctor.readings import parse

    try:
        answer = httpx.get(f"{url}/metrics", timeout=30.0).raise_for_status()
        return parse(answer.text, time.monotonic())
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"cannot read {url}/metrics: {error}")
    except ValueError as error:
        fail(f"{url}/metrics is no page for Prometheus: {error}")


def _ask(url: str, what: str, key: str | None, query: dict[str, str] | None = None) -> dict[str, Any]:
    """A document under /kaiseki/v1; without a key that may see it, the metrics have to do."""
    status, document = ask(url, key, what, query)
    if status == 401:
        note = f"kaiseki: {url} wants an operator's key for its settings (--key); judging by metrics alone"
        print(note, file=sys.stderr)
    return document if status == 200 else {}


def _wait(seconds: float) -> None:
    if seconds and sys.stderr.isatty():
        from rich.progress import track

        for _ in track(range(100), f"watching for {seconds:g} s", transient=True):
            time.sleep(seconds / 100)
    else:
        time.sleep(seconds)


def _document(url: str, finding: Finding, servers: int) -> dict[str, Any]:
    from dataclasses import asdict

    return ({"url": url} if servers > 1 else {}) | asdict(finding)


def _tell(found: Sequence[tuple[str, Finding]], urls: Sequence[str]) -> None:
    if not found:
        print(f"Nothing is wrong that shows in the metrics of {', '.join(urls)}.")
    for i, (url, f) in enumerate(found):
        where = f" ({url})" if len(urls) > 1 else ""
        print(f"{chr(10) if i else ''}{f.symptom}{where}  [{f.id}]")
        print(f"  why       {f.cause}")
        print(f"  evidence  {f.evidence}")
        print(f"  do        {f.fix}")

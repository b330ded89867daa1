"""`kaiseki explain`: why a request waited, why a batch was what it was, who used a tenant's share."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaiseki.commands.asking import DEFAULT_URL, ApiKey, ask
from kaiseki.commands.common import FINDING, USAGE, JsonFile, fail, write_json
from kaiseki.commands.told import page_of_request, page_of_slot, page_of_tenant, show

if TYPE_CHECKING:
    from kaiseki.observe.recorder.reading import Recording


def explain(
    request_id: Annotated[str | None, typer.Argument(metavar="REQUEST_ID", show_default=False)] = None,
    url: Annotated[str | None, typer.Option(help="Where the server is.", show_default=DEFAULT_URL)] = None,
    recorder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|FILE", help="Read a recording instead; no server is needed.", show_default=False
        ),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Who used this tenant's share?", show_default=False)
    ] = None,
    begin: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Of the tenant's span.", show_default=False)
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="Of the tenant's span.", show_default=False)
    ] = None,
    slot: Annotated[
        int | None, typer.Option(min=0, help="Why was this slot's batch what it was?", show_default=False)
    ] = None,
    key: ApiKey = None,
    json: JsonFile = None,
) -> None:
    """Tell a request's life: what it waited for, who went before it, what would have helped.

    The id is the one in the answer's x-kaiseki-request-id header or in its body. Or tell who used a tenant's
    share in a span of time, or why a slot's batch was what it was.

    Example: kaiseki explain chatcmpl-5f0c1d --url http://127.0.0.1:8000

    Example: kaiseki explain --tenant acme --from 02:10 --to 02:20 --recorder /var/lib/kaiseki
    """
    if sum(asked is not None for asked in (request_id, tenant, slot)) != 1:
        fail("give one of REQUEST_ID, --tenant and --slot")
    if tenant is None and (begin is not None or end is not None):
        fail("--from and --to go with --tenant")
    if recorder is not None and url is not None:
        fail("give either --url or --recorder")
    if recorder is not None:
        document = _recorded(recorder, request_id, tenant, begin, end, slot)
    else:
        document = _fetch(
            DEFAULT_URL if url is None else url, key, *_route(request_id, tenant, begin, end, slot)
        )
    if json is not None:
        write_json(document, json)
        return
    page = page_of_request if request_id else page_of_tenant if tenant else page_of_slot
    show(page(document))


def _recorded(
    where: Path,
    request_id: str | None,
    tenant: str | None,
    begin: str | None,
    end: str | None,
    slot: int | None,
) -> dict[str, Any]:
    from kaiseki.observe.recorder.batch import explain_slot
    from kaiseki.observe.recorder.past import explain_recorded
    from kaiseki.observe.recorder.reading import UnreadableRecording, read
    from kaiseki.observe.recorder.share import explain_tenant

    try:
        recordings = read(where)
    except UnreadableRecording as error:
        fail(str(error))
    except OSError as error:
        fail(f"--recorder {where}: {error.strerror}")
    for recording in recordings:
        if request_id is not None:
            found = explain_recorded(recording, request_id)
        elif tenant is not None:
            found = explain_tenant(recording, tenant, *_span(recording, begin, end))
        else:
            assert slot is not None
            found = explain_slot(recording, slot)
        if found is not None:
            return found
    asked = request_id or (f"tenant {tenant}" if tenant else f"slot {slot}")
    return fail(f"{where}: nothing is recorded of {asked}; the oldest makes room for the newest", FINDING)


def _span(recording: Recording, begin: str | None, end: str | None) -> tuple[int | None, int | None]:
    from kaiseki.observe.recorder.when import moment_ns

    found: list[int | None] = []
    for option, text in (("--from", begin), ("--to", end)):
        try:
            found.append(None if text is None else moment_ns(text, recording))
        except ValueError as error:
            fail(f"{option} {error}")
    return found[0], found[1]


def _route(
    request_id: str | None, tenant: str | None, begin: str | None, end: str | None, slot: int | None
) -> tuple[str, dict[str, str]]:
    from urllib.parse import quote

    if request_id is not None:
        return f"requests/{quote(request_id, safe='')}", {}
    if tenant is not None:
        span = {"from": begin, "to": end}
        return f"tenants/{quote(tenant, safe='')}", {k: v for k, v in span.items() if v is not None}
    return f"slots/{slot}", {}


def fetch_request(request_id: str, url: str, key: str | None) -> dict[str, Any]:
    """The explain document of a request; ends the command with a message where there is none."""
    return _fetch(url, key, *_route(request_id, None, None, None, None))


def _fetch(url: str, key: str | None, route: str, query: dict[str, str]) -> dict[str, Any]:
    status, document = ask(url, key, route, query)
    if status != 200:
        told = document.get("error")
        message = told.get("message") if isinstance(told, dict) else dumps(document)
        if status == 401:
            message = f"{message} Give it with --key or in KAISEKI_API_KEY."
        fail(f"{url}: {message}", FINDING if status == 404 else USAGE)
    return document

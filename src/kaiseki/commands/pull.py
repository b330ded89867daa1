"""`kaiseki pull`: fetch and convert a model."""

from __future__ import annotations

from typing import Annotated

import typer

from kaiseki.commands.common import JsonFile, fail, write_json

DEFAULT_MODEL = "smollm2-135m-instruct"


def pull(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="Known name or organisation/name.")
    ] = DEFAULT_MODEL,
    json: JsonFile = None,
) -> None:
    """Fetch a model into the cache, converting it if need be, and print where it is.

    Example: kaiseki pull smollm2-135m-instruct
    """
    from kaiseki.models import ModelError, terminal_progress
    from kaiseki.models import pull as fetch

    try:
        with terminal_progress() as progress:
            pulled = fetch(model, progress=progress)
    except ModelError as error:
        fail(str(error))
    if json is not None:
        document = {"path": str(pulled.path), "sha256": pulled.sha256, "source": str(pulled.source)}
        write_json(document, json)
    else:
        typer.echo(pulled.path)

"""`kaiseki demo`: policies compared on this machine, under one real load."""

from __future__ import annotations

from typing import Annotated

import typer

from kaiseki.commands.common import FINDING, STDOUT, JsonFile, fail, write_json
from kaiseki.commands.pull import DEFAULT_MODEL


def demo(
    full: Annotated[bool, typer.Option("--full", help="Try every token budget for the baselines.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Loads; figures are medians over them.")] = 1,
    seconds: Annotated[float, typer.Option(min=1.0, help="Span of arrivals of each load.")] = 90.0,
    model: Annotated[str, typer.Option(hidden=True)] = DEFAULT_MODEL,
    json: JsonFile = None,
) -> None:
    """Serve one real load under fcfs, priority and kaiseki on this machine, compare, explain one request.

    Two tenants: short chats with a tight target, and long documents; together 1.3 times what the machine
    sustains. Targets are measured first. Takes about seven minutes. Exits with 1 when a target is missed.

    Example: kaiseki demo --json demo.json
    """
    import asyncio

    from rich.console import Console

    from kaiseki.demo.measure import MeasureError
    from kaiseki.demo.narrator import Narrator
    from kaiseki.demo.prompts import encoder
    from kaiseki.demo.report import document
    from kaiseki.demo.run import Demo, Options
    from kaiseki.demo.serving import ServerFailed, serve, until_signalled
    from kaiseki.demo.tables import PLAIN_WIDTH, show
    from kaiseki.models import ModelError, resolve_model, terminal_progress

    console = Console(stderr=json == STDOUT)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    try:
        with terminal_progress() as progress:
            folder = resolve_model(model, progress=progress)
    except ModelError as error:
        fail(str(error))
    options = Options(model, tuple(range(1, seeds + 1)), seconds, full)
    run = Demo(options, serve, encoder(folder), Narrator(console)).run()
    try:
        found = asyncio.run(until_signalled(run))
    except (ServerFailed, MeasureError) as error:
        fail(str(error), FINDING)
    except (KeyboardInterrupt, asyncio.CancelledError):
        fail("stopped", FINDING)
    result = document(found, options)
    show(result, console)
    if json is not None:
        write_json(result, json)
    if not result["ok"]:
        raise typer.Exit(FINDING)

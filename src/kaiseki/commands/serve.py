"""`kaiseki serve`: the OpenAI-compatible server on the embedded engine."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaiseki.commands.common import fail

if TYPE_CHECKING:
    from kaiseki.config import Settings


def serve(
    config: Annotated[Path | None, typer.Option(help="YAML settings file.", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option(help="Name that `kaiseki pull` knows, folder, or .gguf.", show_default=False)
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policy, by name or package.module:Class.", show_default=False)
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default=False)] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.", show_default=False)
    ] = None,
    recorder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Record every decision there, also through a crash.", show_default=False
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's routes.

    Options win over the settings file. Prints one line with the URL when ready; SIGTERM drains.

    Example: kaiseki serve --model smollm2-135m-instruct --port 8000
    """
    from kaiseki.engines.openmp import spin_briefly
    from kaiseki.sections import ConfigError

    spin_briefly()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        settings = _settings(config, model, policy, host, port, recorder)
        _run(settings)
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"{config or 'kaiseki'}: {problem}", err=True)
        raise typer.Exit(2) from None


def _settings(
    config: Path | None,
    model: str | None,
    policy: str | None,
    host: str | None,
    port: int | None,
    recorder: Path | None,
) -> Settings:
    """The file with the options over it.

    Raises:
        ConfigError: it has problems.
    """
    from kaiseki import config as settings_file

    try:
        settings = settings_file.Settings() if config is None else settings_file.load(config)
    except OSError as error:
        fail(f"cannot read {config}: {error.strerror}")
    over: dict[str, dict[str, Any]] = {
        "engine": {"model": model},
        "scheduling": {"policy": policy},
        "server": {"host": host, "port": port},
        "recorder": {"folder": recorder},
    }
    for name, values in over.items():
        given = {key: value for key, value in values.items() if value is not None}
        section = getattr(settings, name).model_copy(update=given)
        settings = settings.model_copy(update={name: section})
    settings_file.policy(settings)  # a wrong name is told before a model is loaded
    return settings


def _run(settings: Settings) -> None:
    from kaiseki.server.run import DrainingServer, bind, url_of

    server = settings.server
    try:
        listener = bind(server.host, server.port)
    except OSError as error:
        fail(f"cannot listen on {server.host}:{server.port}: {error.strerror}")

    from kaiseki.models import ModelError
    from kaiseki.models.resolve import check_name

    try:
        check_name(settings.engine.model)
    except ModelError as error:
        fail(str(error))

    from kaiseki.engines.embedded.child_process import Child

    # Its libraries take as long to load as ours, so both do at once.
    child = Child() if settings.engine.own_process else None
    from kaiseki.models import terminal_progress
    from kaiseki.server.app import create_app
    from kaiseki.server.build import SetupError, build

    with listener:
        try:
            with terminal_progress() as progress:
                stack = build(settings, progress, child)
        except SetupError as error:
            if child is not None:
                child.end()
            fail(str(error))
        # What is loaded stays: looking through it for garbage would stop a step for a quarter second.
        gc.collect()
        gc.freeze()
        app = create_app(stack.driver, stack.text, settings, stack.backlog)
        url = url_of(listener)
        ready = DrainingServer(app, server.drain_s, lambda: print(f"Kaiseki serves at {url}", flush=True))
        stack.driver.start()
        try:
            ready.run(sockets=[listener])
        finally:
            stack.close()

"""`kaiseki check`: validate a settings file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaiseki.commands.common import FINDING, JsonFile, fail, write_json

if TYPE_CHECKING:
    from kaiseki.config import Settings
    from kaiseki.sections import Problem


def check(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.", show_default=False)],
    json: JsonFile = None,
) -> None:
    """Validate a YAML settings file and print the effective settings.

    Exits with 1 and all problems if there are any.

    Example: kaiseki check kaiseki.yaml
    """
    from kaiseki.config import load
    from kaiseki.sections import ConfigError

    settings: Settings | None = None
    problems: list[Problem] = []
    try:
        settings = load(config)
    except OSError as error:
        fail(f"cannot read {config}: {error.strerror}")
    except ConfigError as error:
        problems = error.problems
    if json is not None:
        errors = [{"path": p.path, "value": _plain(p.value), "message": p.message} for p in problems]
        document: dict[str, Any] = {"ok": not problems, "errors": errors}
        if settings is not None:
            document["settings"] = settings.model_dump(mode="json", by_alias=True)
        write_json(document, json)
    elif problems:
        for problem in problems:
            typer.echo(f"{config}: {problem}", err=True)
    elif settings is not None:
        import yaml

        dump = settings.model_dump(mode="json", by_alias=True, exclude_none=True)
        typer.echo(yaml.safe_dump(dump, sort_keys=False).rstrip())
    if problems:
        raise typer.Exit(FINDING)


def _plain(value: Any) -> Any:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and value - value != 0 else value

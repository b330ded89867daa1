"""`kaiseki calibrate`: measure how long steps take, and keep it as a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kaiseki.commands.common import FINDING, STDOUT, JsonFile, fail, write_json
from kaiseki.commands.pull import DEFAULT_MODEL

if TYPE_CHECKING:
    from kaiseki.config import Settings
    from kaiseki.cost.calibrated import Profile


def calibrate(
    out: Annotated[Path, typer.Option(help="The profile to write.")] = Path("profile.json"),
    config: Annotated[
        Path | None, typer.Option(help="YAML settings file: model, engine, memory.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help=f"Model to measure (default {DEFAULT_MODEL}).", show_default=False),
    ] = None,
    server: Annotated[
        bool, typer.Option("--server/--engine-only", help="Measure beside a server with clients, too.")
    ] = True,
    vllm: Annotated[
        list[Path] | None,
        typer.Option(help="Result of `vllm bench` to read instead; may be repeated.", show_default=False),
    ] = None,
    vllm_shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BATCHxINPUT+OUTPUT",
            help="Of each result of `vllm bench latency`, which does not say it.",
            show_default=False,
        ),
    ] = None,
    tables: Annotated[
        str | None,
        typer.Option(
            metavar="CARD", help="Published tables of this card instead, of --model.", show_default=False
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="With --tables: cards that share each layer.")] = 1,
    engine: Annotated[str, typer.Option(help="With --tables: vllm, sglang or trtllm.")] = "vllm",
    json: JsonFile = None,
) -> None:
    """Measure how long the steps of this machine's engine take, and write a profile.

    `kaiseki sim` takes it as `profile: FILE` of a pool, `kaiseki serve` as `engine.profile`. Takes about two
    minutes; nothing else should run. Or make the profile from results of `vllm bench`, or from tables.

    Example: kaiseki calibrate --out profile.json
    """
    if vllm and tables:
        fail("--vllm and --tables: only one of them")
    if vllm:
        profile = _from_vllm(vllm, vllm_shape or [])
    elif tables:
        profile = _from_tables(tables, model, tp, engine)
    else:
        profile = _measured(_settings(config, model), server)
    try:
        profile.save(out)
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror}")
    typer.echo(_told(profile, out), err=json == STDOUT)
    if json is not None:
        document = {"profile": str(out), **profile.model_dump(mode="json")}
        write_json(document, json)


def _settings(config: Path | None, model: str | None) -> Settings:
    from kaiseki import config as settings_file
    from kaiseki.sections import ConfigError

    try:
        settings = settings_file.Settings() if config is None else settings_file.load(config)
    except OSError as error:
        fail(f"cannot read {config}: {error.strerror}")
    except ConfigError as error:
        fail(f"{config}:\n{error}")
    if model is not None:
        engine = settings.engine.model_copy(update={"model": model})
        settings = settings.model_copy(update={"engine": engine})
    return settings


def _measured(settings: Settings, server: bool) -> Profile:
    from kaiseki.engines.openmp import spin_briefly

    spin_briefly()
    from kaiseki.calibrate.here import calibrate_here
    from kaiseki.calibrate.served import NoAnswers
    from kaiseki.models import ModelError, terminal_progress
    from kaiseki.server.build import SetupError

    try:
        with terminal_progress() as progress:
            return calibrate_here(settings, server, progress)
    except (ModelError, SetupError) as error:
        fail(str(error))
    except NoAnswers as error:
        fail(str(error), FINDING)


def _from_vllm(paths: list[Path], shapes: list[str]) -> Profile:
    from kaiseki.calibrate.vllm_bench import BadResult, read

    try:
        return read(paths, shapes)
    except BadResult as error:
        fail(str(error))


def _from_tables(card: str, model: str | None, tp: int, engine: str) -> Profile:
    from kaiseki.calibrate.tables import NoTables, from_tables

    if model is None:
        fail("--tables: needs --model, such as Qwen/Qwen3-8B")
    try:
        return from_tables(model, card, tp, engine)
    except NoTables as error:
        fail(str(error))


def _told(profile: Profile, out: Path) -> str:
    error, host = profile.fit_error, profile.host
    lines = [
        f"{out}: {profile.source}, {profile.samples} steps",
        f"error on steps left out of the fit: median {error.median:.1%}, 90 % {error.p90:.1%}, "
        f"largest {error.max:.0%}",
    ]
    if host.request_us:
        lines.append(
            f"beside a server: {host.step_us / 1e3:.2f} ms per step and {host.token_us / 1e3:.2f} ms per "
            f"decode more; {host.request_us / 1e3:.1f} ms until a request is known to the scheduler"
        )
    return "\n".join(lines)

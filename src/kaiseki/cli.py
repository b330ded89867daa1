"""The `kaiseki` command.

To add a command, put its function into a module of `kaiseki.commands` (light imports at the top, heavy
ones inside) and register it here.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kaiseki import __version__
from kaiseki.commands.advise import advise
from kaiseki.commands.bench import bench
from kaiseki.commands.bench_memory import bench_memory
from kaiseki.commands.calibrate import calibrate
from kaiseki.commands.check import check
from kaiseki.commands.common import Command
from kaiseki.commands.demo import demo
from kaiseki.commands.doctor import doctor
from kaiseki.commands.experiment import experiment
from kaiseki.commands.explain import explain
from kaiseki.commands.pull import pull
from kaiseki.commands.record import record
from kaiseki.commands.replay import replay
from kaiseki.commands.serve import serve
from kaiseki.commands.sim import sim
from kaiseki.commands.top import top

app = typer.Typer(
    name="kaiseki",
    help="A token-level scheduler for LLM inference that can explain every decision.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    serve, pull, check, explain, replay, doctor, top, demo, calibrate, sim, experiment, advise,
):  # fmt: skip
    app.command(cls=Command)(command)
bench.command("memory", cls=Command)(bench_memory)
app.add_typer(bench, name="bench")
app.add_typer(record, name="record")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kaiseki {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Kaiseki."""

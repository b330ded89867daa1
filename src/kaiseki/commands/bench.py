"""`kaiseki bench`: measurements of Kaiseki's own parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaiseki.commands.common import FINDING, STDOUT, Command, JsonFile, fail, write_json
from kaiseki.commands.pull import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.table import Table

bench = typer.Typer(no_args_is_help=True, help="Measure Kaiseki's own parts.")


@bench.command("engine", cls=Command)
def bench_engine(
    peer: Annotated[
        str | None, typer.Option(metavar="vllm:PYTHON", help="Engine to compare with.", show_default=False)
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each engine.")] = None,
    rounds: Annotated[int, typer.Option(min=5, help="Rounds, of which the median counts.")] = 7,
    model: Annotated[str, typer.Option(hidden=True)] = DEFAULT_MODEL,
    json: JsonFile = None,
) -> None:
    """Tokens/s of the embedded engine in float32: decodes in batches of 1, 8, 32, and a prefill of 1,024.

    With a peer both run in turn, round by round, one stopped while the other computes. Exits with 1 when
    a target ratio is missed.

    Example: kaiseki bench engine --peer vllm:/opt/vllm/bin/python --json engine.json
    """
    from rich.console import Console

    from kaiseki.bench.engine import run
    from kaiseki.bench.peer import PeerFailed
    from kaiseki.engines.openmp import spin_briefly
    from kaiseki.models import ModelError, resolve_model, terminal_progress

    spin_briefly()
    try:
        with terminal_progress() as progress:
            document = run(resolve_model(model, progress=progress), peer, threads, rounds, progress)
    except ValueError as error:
        fail(f"--peer {error}")
    except (ModelError, PeerFailed) as error:
        fail(str(error), FINDING)
    console = Console(stderr=json == STDOUT)
    console.print(_table(document))
    for case in document["cases"]:
        console.print(f"{_name(case)}: {case['limit']['words']}", markup=False, soft_wrap=True)
    if json is not None:
        write_json(document, json)
    if any(case["ok"] is False for case in document["cases"]):
        raise typer.Exit(FINDING)


def _name(case: dict[str, Any]) -> str:
    return f"{case['kind']}, batch {case['batch']}" if case["kind"] == "decode" else case["kind"]


def _table(document: dict[str, Any]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("case", "tokens/s", "peer", "ratio", "target"):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    for case in document["cases"]:
        ratio, target = case["ratio"], case["target_ratio"]
        table.add_row(
            _name(case),
            f"{case['tokens_per_s']:.1f}",
            "-" if ratio is None else f"{case['peer_tokens_per_s']:.1f}",
            "-" if ratio is None else f"{ratio:.2f}",
            "-" if target is None else f"{target:.2f}{'' if case['ok'] in (None, True) else ' missed'}",
        )
    return table

"""`kaiseki bench memory`: the KV pool's eviction on a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaiseki.commands.common import FINDING, STDOUT, JsonFile, fail, write_json
from kaiseki.commands.sim import case_of

if TYPE_CHECKING:
    from rich.table import Table

GENERATED = 12_000
"""Requests of a generated workload, which has no end: about as many as the Mooncake trace has."""


def bench_memory(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="Trace file with prefix blocks, or a generated workload.")
    ] = "mooncake-conversation",
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first so many.", show_default="all, or 12000 generated ones"),
    ] = None,
    json: JsonFile = None,
) -> None:
    """How much of the prompts of a trace is found again in pools of five sizes, by what is evicted first.

    Ours beside LRU, plain ARC, and what hindsight would keep (Belady). Exits with 1 when a target is missed.

    Example: kaiseki bench memory mooncake_conversation.jsonl --json memory.json
    """
    from pathlib import Path

    from rich.console import Console

    from kaiseki.bench.memory import run
    from kaiseki.models import terminal_progress
    from kaiseki.work.traces.errors import TraceError

    stream = case_of(trace, "auto", "70b-8xa100", "mixed", 1.0, None, "least-work").stream
    most = GENERATED if not Path(trace).is_file() and requests is None else requests
    try:
        with terminal_progress() as progress:
            document = run(stream, most, progress)
    except (TraceError, ValueError) as error:
        fail(f"{trace}: {error}")
    except OSError as error:
        fail(f"{trace}: {error.strerror}")
    console = Console(stderr=json == STDOUT)
    console.print(_hit_rates(document))
    for target in document["targets"]:
        sign = "ok" if target["ok"] else "missed"
        line = f"{target['name']}: {target['found']:+.2%}, target {target['target']:+.1%}, {sign}"
        console.print(line, markup=False)
    if json is not None:
        write_json(document, json)
    if not all(target["ok"] for target in document["targets"]):
        raise typer.Exit(FINDING)


def _hit_rates(document: dict[str, Any]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rates = document["hit_rate"]
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        title=f"found again, pool in blocks of {document['page_tokens']} tokens",
    )
    table.add_column("eviction", no_wrap=True)
    for pool in rates["kaiseki"]:
        table.add_column(f"{int(pool):,}", justify="right", no_wrap=True)
    for name, found in rates.items():
        table.add_row(name, *(f"{rate:.2%}" for rate in found.values()))
    return table

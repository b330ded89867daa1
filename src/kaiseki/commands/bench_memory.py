"""`kaiseki bench memory`: the KV pool on traces."""

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
        list[str] | None,
        typer.Argument(
            metavar="[TRACE]...",
            help="Trace files or generated workloads.",
            show_default="mooncake-conversation azure-conversation",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first so many.", show_default="all, or 12000 generated ones"),
    ] = None,
    json: JsonFile = None,
) -> None:
    """The KV pool on traces: what is found again by what is evicted first, and how full the pool can be.

    Hit rates of ours, LRU, plain ARC and hindsight (Belady) at five sizes; fragmentation, and the time to
    take a page, of runs and of single pages. Exits with 1 when a target is missed.

    Example: kaiseki bench memory mooncake_conversation.jsonl azure_conv_2023.csv --json memory.json
    """
    from pathlib import Path

    from rich.console import Console

    from kaiseki.bench.memory import run
    from kaiseki.models import terminal_progress
    from kaiseki.work.traces.errors import TraceError

    names = trace or ["mooncake-conversation", "azure-conversation"]
    cases = {name: case_of(name, "auto", "70b-8xa100", "mixed", 1.0, None, "least-work") for name in names}
    streams = {name: case.stream for name, case in cases.items()}
    most = {name: requests or (None if Path(name).is_file() else GENERATED) for name in names}
    try:
        with terminal_progress() as progress:
            document = run(streams, most, progress)
    except (TraceError, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    console = Console(stderr=json == STDOUT)
    console.print(_hit_rates(document))
    console.print(_placements(document))
    for target in document["targets"]:
        sign = "ok" if target["ok"] else "missed"
        found = "the pool was never full" if target["found"] is None else f"{target['found']:.3g}"
        console.print(f"{target['name']}: {found}, target {target['target']:g}, {sign}", markup=False)
    if json is not None:
        write_json(document, json)
    if not all(target["ok"] for target in document["targets"]):
        raise typer.Exit(FINDING)


def _hit_rates(document: dict[str, Any]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rates = document["hit_rate"]
    title = f"found again, pool in blocks of {document['page_tokens']} tokens"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title)
    table.add_column("eviction", no_wrap=True)
    for pool in rates["kaiseki"]:
        table.add_column(f"{int(pool):,}", justify="right", no_wrap=True)
    for name, found in rates.items():
        table.add_row(name, *(f"{rate:.2%}" for rate in found.values()))
    return table


def _placements(document: dict[str, Any]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="pages in a pool that is nearly full")
    for name in ("trace", "placement", "in use", "internal", "external", "pages per span", "us per page"):
        table.add_column(name, justify="left" if name in ("trace", "placement") else "right", no_wrap=True)
    for trace, placements in document["placement"].items():
        for how, found in placements.items():
            shares = (found["pool_use"], found["internal"], found["external"])
            table.add_row(
                trace.rsplit("/", 1)[-1],
                how,
                *("-" if share is None else f"{share:.2%}" for share in shares),
                "-" if found["span_pages"] is None else f"{found['span_pages']:.1f}",
                f"{found['alloc_us']['p50']:.3f}",
            )
    return table

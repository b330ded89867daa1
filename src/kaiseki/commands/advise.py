"""`kaiseki advise`: does token-level scheduling pay for this load on this fleet?"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaiseki.commands.common import FINDING, STDOUT, JsonFile, fail, write_json
from kaiseki.commands.sim import PLAIN_WIDTH, case_of

if TYPE_CHECKING:
    from rich.table import Table

REQUESTS = 2_000


def advise(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="Trace file, or a generated workload.", show_default=False)
    ],
    classes: Annotated[str, typer.Option(metavar="NAME|FILE", help="Classes and tenants.")] = "mixed",
    cluster: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="A fleet; may be repeated.", show_default="70b-8xa100"),
    ] = None,
    scale: Annotated[float, typer.Option(min=1e-6, help="Arrivals come so many times as fast.")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="Only the first so many.")] = REQUESTS,
    router: Annotated[str, typer.Option(help="How requests are spread over replicas.")] = "least-work",
    json: JsonFile = None,
) -> None:
    """Say whether token-level scheduling pays here, with which quantum and on which of the fleets.

    Request-level batching, fcfs and priority at their best budgets, and kaiseki at several quanta are
    simulated on the same requests. Exits with 1 when it does not pay.

    Example: kaiseki advise azure_conv_2023.csv --classes mixed --cluster 70b-8xa100 --scale 0.5
    """
    from rich.console import Console

    from kaiseki.sim.advise import advise as find
    from kaiseki.sim.loop import Stuck
    from kaiseki.work.traces.errors import TraceError

    names = cluster or ["70b-8xa100"]
    fleets = {name: case_of(trace, "auto", name, classes, scale, requests, router) for name in names}
    try:
        document = find(fleets)
    except (TraceError, Stuck) as error:
        fail(str(error))
    console = Console(stderr=json == STDOUT)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(document["verdict"], markup=False, soft_wrap=True)
    for option in document["options"]:
        option["command"] = _command(option, trace, classes, scale, requests, router)
    for reason in document["reasons"]:
        mark = "yes" if reason["holds"] else "no "
        console.print(f"  {mark}  {reason['name']}: {reason['detail']}", markup=False, soft_wrap=True)
    console.print(_table(document["options"]))
    console.print("Each line can be simulated again by itself, the recommended one by")
    console.print(f"  {_recommended(document)['command']}", markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        write_json(document, json)
    if not document["pays"]:
        raise typer.Exit(FINDING)


def _command(
    option: dict[str, Any], trace: str, classes: str, scale: float, requests: int, router: str
) -> str:
    """How an option's figures can be made again."""
    words = ["kaiseki", "sim", trace, "--cluster", option["cluster"], "--classes", classes]
    words += ["--scale", f"{scale:g}", "--requests", str(requests), "--router", router]
    words += ["--policy", option["policy"], "--quantum", str(option["quantum_tokens"])]
    if option["budget_tokens"] is not None:
        words += ["--budget", str(option["budget_tokens"])]
    return shlex.join(words)


def _recommended(document: dict[str, Any]) -> dict[str, Any]:
    """The option that the advice is about."""
    wanted: dict[str, Any] = document["recommended"]
    return next(o for o in document["options"] if all(o[key] == value for key, value in wanted.items()))


def _table(options: list[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    headings = ("cluster", "policy", "budget", "quantum", "attained", "TTFT p99 ms", "tokens/s", "USD per M")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < 2 else "right", no_wrap=True)
    for option in options:
        price, ttft = option["usd_per_million_output_tokens"], option["ttft_p99_ms"]
        table.add_row(
            option["cluster"],
            option["policy"],
            "" if option["budget_tokens"] is None else str(option["budget_tokens"]),
            str(option["quantum_tokens"]) if option["policy"] == "kaiseki" else "",
            f"{option['attainment']:.1%}",
            "" if ttft is None else f"{ttft:.0f}",
            f"{option['output_tokens_per_s']:.0f}",
            "" if price is None else f"{price:.2f}",
        )
    return table

"""`kaiseki experiment`: reported figures beside ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaiseki.commands.common import STDOUT, JsonFile, fail, write_json
from kaiseki.commands.sim import PLAIN_WIDTH

if TYPE_CHECKING:
    from rich.table import Table


def experiment(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Which one; without it they are listed.")
    ] = "",
    requests: Annotated[
        int | None, typer.Option(min=1, help="How many to simulate.", show_default="the experiment's")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Run a named experiment in the simulator and print our figures beside the reported ones.

    Example: kaiseki experiment chunk-size
    """
    from rich.console import Console

    from kaiseki.sim.experiments import EXPERIMENTS

    console = Console(stderr=json == STDOUT)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    if not name:
        for known, one in EXPERIMENTS.items():
            console.print(f"{known}: {one.title}", markup=False, highlight=False)
        if json is not None:
            write_json({"experiments": {known: one.title for known, one in EXPERIMENTS.items()}}, json)
        return
    if name not in EXPERIMENTS:
        fail(f"no experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    chosen = EXPERIMENTS[name]
    rows = [row.as_dict() for row in chosen.rows(requests or chosen.requests)]
    console.print(chosen.title, markup=False, highlight=False, style="bold")
    console.print(chosen.setting, markup=False, highlight=False)
    console.print(_table(rows))
    console.print(chosen.differs, markup=False, highlight=False)
    if json is not None:
        told = {"name": name, "title": chosen.title, "setting": chosen.setting, "differs": chosen.differs}
        write_json({**told, "requests": requests or chosen.requests, "rows": rows}, json)


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("", "reported", "ours", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(row["metric"], *(_number(row[key]) for key in ("reported", "measured", "ratio")))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"

"""`kaiseki sim`: replay a trace on a fleet that need not exist."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kaiseki.commands.common import STDOUT, JsonFile, fail, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from kaiseki.core.policy import Policy
    from kaiseki.sim.comparing import Comparison
    from kaiseki.sim.run import Case

PLAIN_WIDTH = 110
"""Where there is no terminal to ask."""
DEFAULT_POLICIES = ("fcfs", "kaiseki")
SWEPT = ("lambda", "mu")


def sim(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="Trace file, or a generated workload.", show_default=False)
    ],
    trace_format: Annotated[
        str, typer.Option("--format", help="auto, mooncake, azure or burstgpt.")
    ] = "auto",
    cluster: Annotated[str, typer.Option(metavar="NAME|FILE", help="The fleet.")] = "70b-8xa100",
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy; may be repeated.", show_default="fcfs, kaiseki")
    ] = None,
    classes: Annotated[str, typer.Option(metavar="NAME|FILE", help="Classes and tenants.")] = "mixed",
    scale: Annotated[float, typer.Option(min=1e-6, help="Arrivals come so many times as fast.")] = 1.0,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first so many.", show_default="all, or 2000 generated ones"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Assignments to classes; the median counts.")] = 1,
    budget: Annotated[
        str,
        typer.Option(metavar="N|best", help="Token budget of policies that have one.", show_default="theirs"),
    ] = "",
    expiry: Annotated[
        bool, typer.Option("--expiry", help="All policies give up requests that can't make it any more.")
    ] = False,
    quantum: Annotated[int, typer.Option(min=1, help="Tokens that prompt chunks are multiples of.")] = 16,
    router: Annotated[str, typer.Option(help="How requests are spread over replicas.")] = "least-work",
    goodput: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Find the highest rate with this attainment; may be repeated.",
            show_default=False,
        ),
    ] = None,
    sweep: Annotated[
        str,
        typer.Option(
            metavar="lambda,mu", help="Vary what purchases weigh, and print the front.", show_default=False
        ),
    ] = "",
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write an HTML report with figures.", show_default=False),
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write what happened to each request.", show_default=False),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.", show_default=False),
    ] = None,
    recorder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Record every decision there; with one policy and seed.", show_default=False
        ),
    ] = None,
    recorder_mb: Annotated[
        float, typer.Option(min=1.0, max=float(1 << 20), help="Size of the recording of each replica.")
    ] = 256.0,
    json: JsonFile = None,
) -> None:
    """Replay a trace on a simulated fleet under one or more policies, and compare what users would see.

    Generated workloads: azure-conversation, mooncake-conversation, chat-sessions, agent-programs.
    Clusters that come along: 70b-8xa100, 70b-8xh100, 70b-4xa100, 70b-32xh100, 70b-4p-4d-h100. Classes: chat,
    mixed. `clairvoyant` is a policy that only the simulator has: it knows how long answers will be.

    Example: kaiseki sim azure_conv_2023.csv --requests 2000 --scale 0.5 --policy fcfs --policy kaiseki
    """
    from rich.console import Console

    from kaiseki.sim.comparing import Wanted, compare
    from kaiseki.sim.loop import Stuck
    from kaiseki.sim.run import RecordTo
    from kaiseki.work.traces.errors import TraceError

    if sweep and sorted(sweep.split(",")) != sorted(SWEPT):
        fail(f"--sweep {sweep!r}: must be {','.join(SWEPT)}")
    case = case_of(trace, trace_format, cluster, classes, scale, requests, router)
    case = case.with_settings(quantum_tokens=quantum)
    policies = {name: _policy(name, budget, expiry) for name in policy or DEFAULT_POLICIES}
    buying = any(made.buys for made in policies.values())
    if sweep and not buying:
        fail(f"--sweep {sweep}: none of {', '.join(policies)} weighs them; kaiseki does")
    for path in (report, parquet, perfetto):
        if path is not None and not path.parent.is_dir():
            fail(f"cannot write {path}: {path.parent} is no folder")
    if recorder is not None and (len(policies) != 1 or seeds != 1 or goodput or sweep or budget == "best"):
        fail("--recorder records one run: give one --policy, one seed, and nothing to search for")
    case = replace(case, record=None if recorder is None else RecordTo(recorder, recorder_mb))
    console = Console(stderr=json == STDOUT)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    try:
        found = compare(case, Wanted(policies, budget == "best", seeds, goodput or (), bool(sweep)))
        _print(console, found.document)
        _write(found, case, trace, report, parquet, perfetto)
    except (TraceError, Stuck) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or trace}: {error.strerror}")
    if json is not None:
        write_json(found.document, json)


def case_of(
    trace: str,
    trace_format: str,
    cluster: str,
    classes: str,
    scale: float,
    requests: int | None,
    router: str,
) -> Case:
    """What the options of `sim` and `advise` describe; ends the command when one of them is wrong."""
    from kaiseki.sim.opening import WrongArgument, open_case

    try:
        return open_case(trace, cluster, classes, trace_format, scale, requests, router)
    except WrongArgument as error:
        fail(f"{'' if error.argument == 'trace' else '--'}{error}")


def _policy(name: str, budget: str, expiry: bool) -> Policy:
    from kaiseki.policies.registry import UnknownPolicy
    from kaiseki.sim.opening import open_policy

    if budget not in ("", "best") and (not budget.isdecimal() or int(budget) < 1):
        fail(f"--budget {budget!r}: must be a number of tokens from 1, or best")
    try:
        return open_policy(name, int(budget) if budget.isdecimal() else None, True if expiry else None)
    except UnknownPolicy as error:
        fail(str(error))


def _write(
    found: Comparison,
    case: Case,
    trace: str,
    report: Path | None,
    parquet: Path | None,
    perfetto: Path | None,
) -> None:
    """The files that were asked for."""
    logs = {name: run.log for name, run in found.runs.items()}
    try:
        if parquet is not None:
            from kaiseki.sim.outcomes import write_parquet

            write_parquet(logs, parquet)
        if perfetto is not None:
            from kaiseki.sim.perfetto import write as write_trace

            write_trace(logs, perfetto)
        if report is not None:
            from kaiseki.sim.report import write as write_report

            command = shlex.join(["kaiseki", *sys.argv[1:]])
            write_report(found, case, f"{Path(trace).name} under {', '.join(logs)}", command, report)
    except ImportError as error:
        fail(f"{error.name} is not installed, which this needs: pip install 'kaiseki[report]'")


def _print(console: Console, document: dict[str, Any]) -> None:
    console.print(_table(document))
    from kaiseki.sim.sweep import BETTER

    for name, limits in document["goodput"].items():
        for key, found in limits.items():
            shown = "none" if found["rps"] is None else f"{found['rps']:.3g} requests/s"
            tokens = "" if found["budget_tokens"] is None else f", budget {found['budget_tokens']}"
            text = f"{name}: highest rate with {key.removeprefix('at_')} % attained{tokens}: {shown}"
            console.print(text, markup=False, highlight=False)
    for name, rows in document.get("sweep", {}).items():
        console.print(_front(name, rows))
        if len({tuple(row[axis] for axis in BETTER) for row in rows}) == 1:
            console.print("They change nothing here: room was never so short that a purchase was weighed.")


def _front(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=name, title_justify="left"
    )
    for heading in ("lambda", "mu", "cards busy", "attained", "wasted KV", "preemptions", "on the front"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['lambda']:g}",
            f"{row['mu']:g}",
            f"{row['gpu_utilisation']:.1%}",
            "" if row["attainment"] is None else f"{row['attainment']:.1%}",
            "" if row["fragmentation"] is None else f"{row['fragmentation']:.2%}",
            str(row["preemptions"]),
            "yes" if row["front"] else "",
        )
    return table


def _table(document: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in ("policy", "class", "attained", "TTFT ms p50 / 90 / 99", "gap ms p50 / 99", "tokens/s"):
        table.add_column(heading, justify="left" if heading in ("policy", "class") else "right", no_wrap=True)
    for name, run in document["policies"].items():
        tokens = "" if run["budget_tokens"] is None else f", {run['budget_tokens']}"
        label = f"{name}{tokens}"
        for cls, found in (*run["classes"].items(), ("all", run)):
            rate = found["attainment"]
            table.add_row(
                label,
                cls,
                "" if rate is None else f"{rate:.1%} of {found['requests']}",
                _spread(found["ttft_ms"], "p50", "p90", "p99"),
                _spread(found["tbt_ms"], "p50", "p99"),
                f"{found['output_tokens_per_s']:.0f}",
            )
            label = ""
        table.add_section()
    return table


def _spread(found: dict[str, float] | None, *which: str) -> str:
    return "" if found is None else " / ".join(f"{found[key]:.0f}" for key in which)

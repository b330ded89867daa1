"""`kaiseki sim`: replay a trace on a fleet that need not exist."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kaiseki.commands.common import STDOUT, JsonFile, fail, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table

    from kaiseki.core.policy import Policy
    from kaiseki.sections import ConfigError
    from kaiseki.sim.run import Case
    from kaiseki.work.batches import Batch

T = TypeVar("T")
PLAIN_WIDTH = 110
"""Where there is no terminal to ask."""
GENERATED = 2_000
"""Requests of a generated workload, which has no end."""


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
    router: Annotated[str, typer.Option(help="How requests are spread over replicas.")] = "least-work",
    goodput: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1.0, help="Find the highest rate with this attainment.", show_default=False
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Replay a trace on a simulated fleet under one or more policies, and compare what users would see.

    Generated workloads: azure-conversation, mooncake-conversation, chat-sessions, agent-programs.
    Clusters that come along: 70b-8xa100, 70b-4xa100, 70b-32xh100, 70b-4p-4d-h100. Classes: chat, mixed.

    Example: kaiseki sim azure_conv_2023.csv --requests 2000 --scale 0.5 --policy fcfs --policy kaiseki
    """
    from rich.console import Console

    from kaiseki.sim.loop import Stuck
    from kaiseki.work.traces.errors import TraceError

    case = case_of(trace, trace_format, cluster, classes, scale, requests, router)
    policies = [_policy(name, budget, expiry) for name in policy or ["fcfs", "kaiseki"]]
    console = Console(stderr=json == STDOUT)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    document: dict[str, Any] = {"policies": {}, "goodput": {}}
    try:
        for name, made in zip(policy or ["fcfs", "kaiseki"], policies, strict=True):
            _run(name, made, budget == "best", case, seeds, goodput, document)
    except TraceError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{trace}: {error.strerror}")
    except Stuck as error:
        fail(str(error))
    console.print(_table(document))
    if goodput is not None:
        for name, found in document["goodput"].items():
            rate = found[f"at_{goodput * 100:g}"]["rps"]
            shown = "none" if rate is None else f"{rate:.3g} requests/s"
            console.print(f"{name}: highest rate with {goodput:.0%} attained: {shown}", markup=False)
    if json is not None:
        write_json(document, json)


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
    from kaiseki.sections import ConfigError
    from kaiseki.sim import cluster as clusters
    from kaiseki.sim.routers import ROUTERS
    from kaiseki.sim.run import Case
    from kaiseki.work import classes as plans
    from kaiseki.work.catalogue import CATALOGUE
    from kaiseki.work.shaping import Shape
    from kaiseki.work.traces.opening import READERS, load

    if router not in ROUTERS:
        fail(f"--router {router!r}: must be one of {', '.join(ROUTERS)}")
    if trace_format not in ("auto", *READERS):
        fail(f"--format {trace_format!r}: must be one of auto, {', '.join(READERS)}")
    if not Path(trace).is_file() and trace not in CATALOGUE:
        fail(f"{trace}: no such file, and none of the generated workloads {', '.join(CATALOGUE)}")
    plan = _read("--classes", classes, plans.load, plans.shipped())
    described = _read("--cluster", cluster, clusters.load, clusters.shipped())
    try:
        fleet = clusters.fleet(described)
    except ConfigError as error:
        fail(_told("--cluster", cluster, error))
    generated = None if Path(trace).is_file() else CATALOGUE[trace]()

    def stream(shape: Shape) -> Iterator[Batch]:
        if generated is not None:
            return shape.apply(generated.stream(seed=1))
        return load(Path(trace), trace_format, shape)  # type: ignore[arg-type]

    least = GENERATED if generated is not None and requests is None else requests
    shape = Shape(rate_scale=scale, requests=least)
    return Case(
        stream,
        plan,
        fleet,
        shape,
        router,
        links=described.links,
        routers=described.routers,
        events=described.events,
        training=described.training,
        wan=described.wan,
        shares=described.shares(),
    )


def _read(option: str, name: str, load: Callable[[str], T], shipped: list[str]) -> T:
    """A file, or what comes along under this name."""
    from kaiseki.sections import ConfigError

    try:
        return load(name)
    except ConfigError as error:
        fail(_told(option, name, error))
    except OSError as error:
        fail(f"{option} {name}: {error.strerror}; there are {', '.join(shipped)}")


def _told(option: str, name: str, error: ConfigError) -> str:
    """What is wrong with a file, with its lines; one that comes along by a name has nothing wrong."""
    from kaiseki.sections import line_of

    text = Path(name).read_bytes() if Path(name).is_file() else b""
    lines = (
        f"{name}, line {line_of(text, p.path)}: {p}" if p.path else f"{name}: {p}" for p in error.problems
    )
    return "\n".join((f"{option}:", *lines))


def _policy(name: str, budget: str, expiry: bool) -> Policy:
    from kaiseki.policies.registry import UnknownPolicy, load

    try:
        policy = load(name)
    except UnknownPolicy as error:
        fail(str(error))
    if budget not in ("", "best"):
        if not budget.isdecimal() or int(budget) < 1:
            fail(f"--budget {budget!r}: must be a number of tokens from 1, or best")
        if policy.budget_tokens is not None:
            policy = replace(policy, budget_tokens=int(budget))
    return replace(policy, gives_up=True) if expiry else policy


def _run(
    name: str,
    policy: Policy,
    best: bool,
    case: Case,
    seeds: int,
    goodput: float | None,
    document: dict[str, Any],
) -> None:
    from kaiseki.sim.run import simulate
    from kaiseki.sim.search import best_budget, highest_rate

    if best:
        policy = best_budget(case, policy)
    runs = [simulate(replace(case, seed=seed), policy) for seed in range(1, seeds + 1)]
    ranked = sorted(runs, key=lambda run: run["attainment"] or 0.0)
    document["policies"][name] = ranked[len(ranked) // 2] | {
        "seeds": [{"seed": i + 1, "attainment": run["attainment"]} for i, run in enumerate(runs)]
    }
    if goodput is not None:
        rate = highest_rate(case, policy, goodput)
        document["goodput"][name] = {
            f"at_{goodput * 100:g}": {
                "rps": rate.rps,
                "low": rate.low,
                "high": rate.high,
                "budget_tokens": policy.budget_tokens,
                "demotion": policy.gives_up,
            }
        }


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

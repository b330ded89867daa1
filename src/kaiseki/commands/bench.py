"""`kaiseki bench`: measurements of Kaiseki's own parts."""

from __future__ import annotations

from pathlib import Path
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


@bench.command("decide", cls=Command)
def bench_decide(
    policy: Annotated[str, typer.Option(help="Policy whose slots are measured.")] = "kaiseki",
    peer: Annotated[
        str | None,
        typer.Option(metavar="vllm:PYTHON", help="Scheduler to compare with.", show_default=False),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time goes.")] = False,
    slots: Annotated[int, typer.Option(min=20, help="Slots that are measured of each case.")] = 400,
    json: JsonFile = None,
) -> None:
    """What a slot costs without a model, in microseconds of the thread's CPU time.

    Counted are arrivals (with the digests of their prompts), decide and apply, with block allocation,
    records and metrics. A peer's scheduler takes turns with ours under the main load. Exits with 1 when a
    target is missed.

    Example: kaiseki bench decide --profile --json decide.json
    """
    from rich.console import Console

    from kaiseki.bench.decide import Sizes, run
    from kaiseki.bench.peer import PeerFailed
    from kaiseki.models import terminal_progress

    try:
        with terminal_progress() as progress:
            document = run(policy, peer, profile, Sizes(slots=slots), progress)
    except ValueError as error:
        fail(str(error))
    except PeerFailed as error:
        fail(str(error), FINDING)
    console = Console(stderr=json == STDOUT)
    console.print(_decide_table(document))
    for target in document["targets"]:
        sign = "ok" if target["ok"] else "missed"
        console.print(f"{target['name']}: {target['found']:.4g}, target {target['target']:g}, {sign}")
    console.print(f"{document['us_per_running_request']:.3f} us per running request")
    if document["peer"] is not None:
        console.print(_against(document["peer"]), markup=False, soft_wrap=True)
    if document["profile"]:
        console.print(_profile_table(document))
    if json is not None:
        write_json(document, json)
    if not all(target["ok"] for target in document["targets"]):
        raise typer.Exit(FINDING)


@bench.command("matching", cls=Command)
def bench_matching(
    repeats: Annotated[
        int, typer.Option(min=1, help="Matchings of each instance, of which the median counts.")
    ] = 7,
    instances: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the instances; that of the checkout by default."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """How far the matching of chunks to cards is from the best possible, and what it costs.

    The instances are tight in card time and in KV, about half of the chunks fit. Small ones are compared
    with the exact optimum, large ones with the bound of the linear program, which no matching reaches.
    Exits with 1 when the median gap of a family is over the target.

    Example: kaiseki bench matching --json matching.json
    """
    from rich.console import Console

    from kaiseki.bench.matching import INSTANCES, NoInstances, run
    from kaiseki.models import terminal_progress

    try:
        with terminal_progress() as progress:
            document = run(instances or INSTANCES, repeats, progress)
    except NoInstances as error:
        fail(str(error))
    console = Console(stderr=json == STDOUT)
    console.print(_matching_table(document))
    unused = [
        f"{max(f['slack'][what] for f in document['families']):.1%} of {what}" for what in ("time", "kv")
    ]
    console.print(f"unused by the LP, at most, median of a family: {', '.join(unused)}", markup=False)
    if json is not None:
        write_json(document, json)
    if not all(family["ok"] for family in document["families"]):
        raise typer.Exit(FINDING)


@bench.command("sim", cls=Command)
def bench_sim(
    requests: Annotated[int, typer.Option(min=20, help="Requests that are simulated.")] = 1_000,
    json: JsonFile = None,
) -> None:
    """How fast the simulator is: Azure conversation lengths, 70B on A100 TP2 x PP2, Poisson 1/s, sarathi.

    CPU time of one process; compiling is not counted. Exits with 1 when a target is missed.

    Example: kaiseki bench sim --json sim.json
    """
    from rich.console import Console

    from kaiseki.bench.sim import run
    from kaiseki.models import terminal_progress

    with terminal_progress() as progress:
        document = run(requests, progress)
    console = Console(stderr=json == STDOUT)
    found, vidur = document, document["vidur"]
    console.print(f"{found['iterations']} iterations in {found['cpu_s']:.1f} s of CPU time", markup=False)
    for key, unit in (
        ("iterations_per_cpu_s", "iterations per CPU-second"),
        ("requests_per_cpu_s", "requests per CPU-second"),
        ("peak_rss_mb", "MB at most"),
    ):
        console.print(f"{found[key]:.0f} {unit} (Vidur: {vidur[key]:.0f})", markup=False)
    for target in document["targets"]:
        word = "ok" if target["ok"] else "missed"
        line = f"{word:7} {target['name']}: {target['found']:.0f}, wanted {target['target']:.0f}"
        console.print(line, markup=False)
    if json is not None:
        write_json(document, json)
    if not all(target["ok"] for target in document["targets"]):
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


def _matching_table(document: dict[str, Any]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("case", "against", "median", "max", "target", "us", "solver ms"):
        table.add_column(name, justify="left" if name in ("case", "against") else "right", no_wrap=True)
    for family in document["families"]:
        gap = family["gap"]
        table.add_row(
            f"{family['chunks']} x {family['cards']}, {family['family'].split('-')[1]}",
            {"exact": "optimum", "lp": "LP"}[family["reference"]],
            f"{gap['p50']:.2%}",
            f"{gap['max']:.2%}",
            f"{document['target_gap']:.0%}{'' if family['ok'] else ' missed'}",
            f"{family['greedy_us']['p50']:.0f}",
            f"{family['exact_us']['p50'] / 1e3:.0f}",
        )
    return table


def _decide_table(document: dict[str, Any]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("running", "waiting", "churn", "submit", "decide", "apply", "slot", "p99", "1/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for case in document["cases"]:
        times = [case[key] and case[key]["p50"] for key in ("submit_us", "decide_us", "apply_us", "total_us")]
        many = f"{case['replicas']} x " if case["replicas"] > 1 else ""
        table.add_row(
            f"{many}{case['running']:,}",
            *(f"{case[key]:,}" for key in ("waiting", "churn")),
            *("-" if us is None else f"{us:,.0f}" for us in times),
            f"{case['total_us']['p99']:,.0f}",
            f"{case['decisions_per_s']:,.0f}",
        )
    return table


def _against(peer: dict[str, Any]) -> str:
    us = {key: f"{peer[key]['p50']:,.0f}" for key in ("schedule_us", "update_us", "submit_us")}
    return (
        f"{peer['name']}: schedule {us['schedule_us']}, update {us['update_us']}, {us['submit_us']} us per "
        f"arrival: {peer['ratio']:.1f} times ours without arrivals, {peer['ratio_total']:.1f} times with them"
    )


def _profile_table(document: dict[str, Any]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="main case under the profiler, per slot")
    for name in ("function", "calls", "own us", "us"):
        table.add_column(name, justify="left" if name == "function" else "right", no_wrap=True)
    for row in document["profile"]:
        table.add_row(row["function"], f"{row['calls']:.1f}", f"{row['own_us']:.1f}", f"{row['us']:.1f}")
    return table

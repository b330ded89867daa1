"""Opening a case by names and files: what the command line and notebooks start from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kaiseki.core.policy import Policy
from kaiseki.policies import registry
from kaiseki.sections import ConfigError, line_of
from kaiseki.sim import cluster as clusters
from kaiseki.sim.clairvoyant import Clairvoyant
from kaiseki.sim.routers import ROUTERS
from kaiseki.sim.run import Case
from kaiseki.work import classes as plans
from kaiseki.work.batches import Batch
from kaiseki.work.catalogue import CATALOGUE
from kaiseki.work.shaping import Shape
from kaiseki.work.traces.opening import READERS, load

T = TypeVar("T")
GENERATED = 2_000
"""Requests of a generated workload, which has no end."""


class WrongArgument(ValueError):
    """An argument of `open_case` that can't be; `argument` is its name, the message says what is allowed."""

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(message)
        self.argument = argument


def open_case(
    trace: str | Path,
    cluster: str | Path = "70b-8xa100",
    classes: str | Path = "mixed",
    trace_format: str = "auto",
    scale: float = 1.0,
    requests: int | None = None,
    router: str = "least-work",
) -> Case:
    """A load on a fleet.

    Args:
        trace: a trace file, or the name of a generated workload.
        cluster: a cluster file, or the name of one that comes along.
        classes: a classes file, or the name of one that comes along.
        trace_format: auto, mooncake, azure or burstgpt.
        scale: arrivals come so many times as fast.
        requests: only the first so many; all of a file, `GENERATED` of a generated workload.
        router: how requests are spread over replicas.

    Raises:
        WrongArgument: a name is unknown, or a file has problems; what is wrong with the trace itself shows
            when it is read.
    """
    name, is_file = str(trace), Path(trace).is_file()
    if router not in ROUTERS:
        raise WrongArgument("router", f"router {router!r}: must be one of {', '.join(ROUTERS)}")
    if trace_format not in ("auto", *READERS):
        there = ", ".join(READERS)
        raise WrongArgument("format", f"format {trace_format!r}: must be one of auto, {there}")
    if not is_file and name not in CATALOGUE:
        there = ", ".join(CATALOGUE)
        raise WrongArgument("trace", f"{name}: no such file, and none of the generated workloads {there}")
    plan = _read("classes", str(classes), plans.load, plans.shipped())
    described = _read("cluster", str(cluster), clusters.load, clusters.shipped())
    try:
        fleet = clusters.fleet(described)
    except ConfigError as error:
        raise WrongArgument("cluster", _told("cluster", str(cluster), error)) from None
    generated = None if is_file else CATALOGUE[name]()

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


def _read(argument: str, name: str, read: Callable[[str], T], shipped: list[str]) -> T:
    """A file, or what comes along under this name."""
    try:
        return read(name)
    except ConfigError as error:
        raise WrongArgument(argument, _told(argument, name, error)) from None
    except OSError as error:
        there = ", ".join(shipped)
        raise WrongArgument(argument, f"{argument} {name}: {error.strerror}; there are {there}") from None


def _told(argument: str, name: str, error: ConfigError) -> str:
    """What is wrong with a file, with its lines; one that comes along by a name has nothing wrong."""
    text = Path(name).read_bytes() if Path(name).is_file() else b""
    lines = (
        f"{name}, line {line_of(text, p.path)}: {p}" if p.path else f"{name}: {p}" for p in error.problems
    )
    return "\n".join((f"{argument}:", *lines))


def open_policy(name: str, budget_tokens: int | None = None, gives_up: bool | None = None) -> Policy:
    """A policy by name; `clairvoyant`, which only the simulator has, among them.

    Args:
        name: as in the registry.
        budget_tokens: in place of its own budget, if it has one.
        gives_up: whether it gives up requests that can't meet their targets; None leaves it to the policy.

    Raises:
        UnknownPolicy: there is none of that name.
    """
    policy: Policy = Clairvoyant() if name == Clairvoyant.name else registry.load(name)
    if budget_tokens is not None and policy.budget_tokens is not None:
        policy = replace(policy, budget_tokens=budget_tokens)
    return policy if gives_up is None else replace(policy, gives_up=gives_up)

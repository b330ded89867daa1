"""Runs of whole fleets, with what is left of them afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple

from kaiseki.policies.registry import load as policy
from kaiseki.sim.links import Link
from kaiseki.sim.loop import Log
from kaiseki.sim.replica import SimReplica
from kaiseki.sim.run import Case, build


class Ran(NamedTuple):
    """A run's log, and the fleet as it is in the end."""

    log: Log
    replicas: list[SimReplica]
    links: dict[tuple[str, str], Link]


def run_all(case: Case, name: str = "kaiseki") -> Ran:
    """As `simulate`, with the log and the fleet."""
    simulation = build(case, policy(name))
    return Ran(simulation.run(), list(simulation.replicas), simulation.links)


def run(case: Case, name: str = "kaiseki") -> tuple[Log, list[SimReplica]]:
    """As `run_all`, for fleets without links."""
    ran = run_all(case, name)
    return ran.log, ran.replicas


def without_wall(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures that are the same whenever the same is simulated."""
    return {key: value for key, value in figures.items() if key != "wall_s"}

"""Runs of whole fleets, with what is left of them afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple

from kaiseki.core.settings import SchedulerSettings
from kaiseki.engines.clock import VirtualClock
from kaiseki.policies.registry import load as policy
from kaiseki.sim.arrivals import Arrivals
from kaiseki.sim.handover import Handover
from kaiseki.sim.links import Link
from kaiseki.sim.loop import Log, Simulation
from kaiseki.sim.replica import SimReplica
from kaiseki.sim.routers import ROUTERS
from kaiseki.sim.run import Case, lone_prefill_s
from kaiseki.work.assigning import Assigner


class Ran(NamedTuple):
    """A run's log, and the fleet as it is in the end."""

    log: Log
    replicas: list[SimReplica]
    links: dict[tuple[str, str], Link]


def run_all(case: Case, name: str = "kaiseki") -> Ran:
    """As `simulate`, with the log and the fleet."""
    clock, classes = VirtualClock(), case.plan.service_classes()
    weights = case.plan.tenant_weights()
    replicas = [
        SimReplica(d, policy(name), SchedulerSettings(max_batch_size=32), classes, weights, clock)
        for d in case.fleet
    ]
    batches = Assigner(case.plan, lone_prefill_s(case.fleet), case.seed).stream(case.stream(case.shape))
    arrivals = Arrivals(batches, classes, list(weights), 16)
    handover = Handover(replicas, case.links) if case.links is not None else None
    log = Simulation(arrivals, replicas, ROUTERS[case.router](1), clock, handover).run()
    return Ran(log, replicas, handover.links if handover is not None else {})


def run(case: Case, name: str = "kaiseki") -> tuple[Log, list[SimReplica]]:
    """As `run_all`, for fleets without links."""
    ran = run_all(case, name)
    return ran.log, ran.replicas


def without_wall(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures that are the same whenever the same is simulated."""
    return {key: value for key, value in figures.items() if key != "wall_s"}

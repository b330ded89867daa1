"""One policy on one load and fleet: from a stream of requests to figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kaiseki.core.decision import F64, I32
from kaiseki.core.policy import Policy
from kaiseki.core.protocols import F_CHUNKS, F_PAIRS, F_SLOT, F_TOKENS, N_FEATURES
from kaiseki.core.settings import SchedulerSettings
from kaiseki.engines.clock import VirtualClock
from kaiseki.observe.recorder.flight import FlightRecorder
from kaiseki.sim.arrivals import Arrivals
from kaiseki.sim.cluster import Happens, Links, Replica, Routers, Training, Wan
from kaiseki.sim.figures import policy_figures, training_figures
from kaiseki.sim.front import Front
from kaiseki.sim.handover import Handover
from kaiseki.sim.loop import Log, Simulation
from kaiseki.sim.operations import Operations
from kaiseki.sim.replica import SimReplica
from kaiseki.sim.sampling import Fragmentation
from kaiseki.sim.training import WithTraining, training_class
from kaiseki.sim.wan import Distance
from kaiseki.work.assigning import Assigner
from kaiseki.work.batches import Batch
from kaiseki.work.classes import Plan
from kaiseki.work.shaping import Shape

Stream = Callable[[Shape], Iterator[Batch]]
"""Gives the requests anew each time, so changed."""


@dataclass(frozen=True, slots=True)
class RecordTo:
    """Where a run is recorded: one file per replica, each of this size."""

    folder: Path
    size_mb: float


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated, apart from the policy.

    Attributes:
        stream: the load.
        shape: changes to it.
        plan: classes, tenants, and who gets which.
        fleet: the replicas.
        links: what joins prefill and decode replicas, where there are any.
        router: a name in `ROUTERS`.
        routers: how many of them there are, and how stale their knowledge is.
        events: failures, recoveries and the like.
        training: what shares the cards.
        wan, shares: what lies between clusters, and which part of the requests comes in each.
        seed: of shares in the plan, and of the router.
        settings: of every scheduler, but for what the pools say: batch size and tokens per step.
        exact_outputs: requests say how long their outputs are, as with `ignore_eos`.
        record: where each run is recorded, if anywhere.
    """

    stream: Stream
    plan: Plan
    fleet: Sequence[Replica]
    shape: Shape = field(default_factory=Shape)
    router: str = "least-work"
    seed: int = 1
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    links: Links | None = None
    routers: Routers = field(default_factory=Routers)
    exact_outputs: bool = False
    events: Sequence[Happens] = ()
    training: Training | None = None
    wan: Wan | None = None
    shares: Sequence[float] = (1.0,)
    record: RecordTo | None = None

    def scaled(self, factor: float) -> Case:
        """The same load, arriving so many times as fast."""
        return replace(self, shape=replace(self.shape, rate_scale=self.shape.rate_scale * factor))

    def with_settings(self, **changes: Any) -> Case:
        """The same under other settings; see `SchedulerSettings`."""
        return replace(self, settings=replace(self.settings, **changes))

    def first(self, requests: int) -> Case:
        """Only the first so many requests."""
        least = min(requests, self.shape.requests or requests)
        return replace(self, shape=replace(self.shape, requests=least))


def lone_prefill_s(fleet: Sequence[Replica]) -> Callable[[I32], F64]:
    """Seconds that prompts take alone on an idle replica of the first kind, in one step."""
    timing = fleet[0].timing

    def seconds(prompt_tokens: I32) -> F64:
        n = prompt_tokens.astype(np.float64)
        features = np.zeros((n.size, N_FEATURES))
        features[:, F_SLOT] = features[:, F_CHUNKS] = 1.0
        features[:, F_TOKENS], features[:, F_PAIRS] = n, n * (n + 1.0) / 2.0
        return timing.iterations_ns(features) / 1e9

    return seconds


def build(case: Case, policy: Policy, samples: Fragmentation | None = None) -> Simulation:
    """A case under a policy, ready to run; with `samples` taken meanwhile."""
    clock = VirtualClock()
    plan = case.plan
    classes, weights = plan.service_classes(), plan.tenant_weights()
    training = case.training
    if training is not None:
        weights = weights | {training.tenant: training.weight}
        classes = [*classes, training_class(training)]
    replicas = [
        SimReplica(
            description,
            policy,
            replace(
                case.settings,
                max_batch_size=description.pool.max_batch_size,
                max_slot_tokens=description.pool.max_step_tokens,
                max_waiting=description.pool.max_waiting,
                max_waiting_tokens=description.pool.max_waiting_tokens,
            ),
            classes,
            weights,
            clock,
            case.seed + i,
        )
        for i, description in enumerate(case.fleet)
    ]
    batches = Assigner(plan, lone_prefill_s(case.fleet), case.seed).stream(case.stream(case.shape))
    look = None
    if samples is not None:
        samples.replicas, look = replicas, samples.look
    entry = case.fleet[0]
    intake_ns = round(entry.profile.host.request_us * 1e3) if entry.profile is not None else 0
    requests = Arrivals(
        batches, classes, list(weights), entry.pool.block_tokens, intake_ns, case.exact_outputs, look
    )
    arrivals = requests if training is None else WithTraining(requests, training, replicas)
    handover = Handover(replicas, case.links) if case.links is not None else None
    wan, routers = case.wan, case.routers
    if wan is not None and not routers.refresh_ms:
        routers = routers.model_copy(update={"refresh_ms": wan.slot_ms})
    delay_ms = 0.0 if wan is None else wan.latency_ms
    front = Front(case.router, case.seed, routers, replicas, handover, delay_ms)
    distance = None if wan is None else Distance(wan, case.shares, replicas, case.seed)
    scales = any(replica.description.pool.scale is not None for replica in replicas)
    operations = Operations(replicas, case.events) if case.events or scales else None
    return Simulation(arrivals, replicas, front, clock, handover, operations, distance)


def _record(replicas: Sequence[SimReplica], to: RecordTo) -> None:
    for i, replica in enumerate(replicas):
        about, name = {"engine": "simulated"}, f"replica-{i}"
        replica.recorder = FlightRecorder.open(to.folder, 0, to.size_mb, about, replica.scheduler, name)


class Run(NamedTuple):
    """What came of a case under a policy.

    Attributes:
        figures: those of `kaiseki sim`; see `docs/cli.md`.
        log: what happened to each request.
    """

    figures: dict[str, Any]
    log: Log


def simulate(case: Case, policy: Policy) -> dict[str, Any]:
    """The figures of a case under a policy; raises what `run` does."""
    return run(case, policy).figures


def run(case: Case, policy: Policy) -> Run:
    """Run a case under a policy.

    Raises:
        TraceError: the load can't be read.
        Stuck: the policy leaves requests open for ever.
    """
    began = time.perf_counter()
    wasted = Fragmentation()
    simulation = build(case, policy, wasted)
    if case.record is not None:
        _record(simulation.replicas, case.record)
    log = simulation.run()
    for replica in simulation.replicas:
        replica.recorder.close()
    classes, tenants = case.plan.class_names(), list(case.plan.tenant_weights())
    figures = policy_figures(log, simulation.replicas, simulation.links, classes, tenants, wasted.share)
    figures["training"] = training_figures(case.training, simulation.steps, log)
    own = {"budget_tokens": policy.budget_tokens, "wall_s": time.perf_counter() - began}
    return Run(figures | own, log)

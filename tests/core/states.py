"""Digests of what random states of a scheduler decide: run as a script, once compiled and once not."""

from __future__ import annotations

import hashlib
import json
import sys
from random import Random

from tests.conformance.workloads import CLASSES
from tests.core.world import Shape, World
from tests.harness import BUILT_IN

from kaiseki.core.settings import SchedulerSettings
from kaiseki.policies.registry import load

SLOTS = 5
COLUMNS = (
    "state",
    "computed",
    "confirmed",
    "outputs",
    "late_gaps",
    "passes",
    "service_ns",
    "group",
    "cached",
)


def shape_of(r: Random, seed: int) -> Shape:
    """Every policy in turn, every depth, tight and roomy."""
    limits = SchedulerSettings(
        max_batch_size=r.choice((2, 4, 12)),
        fairness_window=r.choice((1, 3, 100)),
        watermark_ratio=r.choice((0.5, 0.8, 1.0)),
        quantum_tokens=r.choice((1, 4, 16)),
        max_slot_tokens=r.choice((16, 64, 200)),
        window=r.choice((1, 4, 64)),
        max_passes=r.choice((1, 64)),
        slo_lambda=r.choice((0.1, 10.0)),
    )
    # Half of all states are those of the default policy, which has most to decide.
    name = "kaiseki" if seed % 2 else BUILT_IN[seed // 2 % len(BUILT_IN)]
    policy = load(name, starving_slots=r.choice((2, 64)))
    return Shape(
        policy,
        r.choice((0, 1, 3)),
        r.randint(12, 60),
        r.choice((2, 4, 16)),
        False,
        True,
        r.choice((0, 1, 2)),
        limits,
        seed,
    )


def state_of(seed: int) -> World:
    """A scheduler in the middle of its work: queues filled, requests at all stages."""
    r = Random(seed)
    world = World(shape_of(r, seed))
    adapters = (None, "x", "y", "z") if world.shape.adapter_slots else (None,)
    for name in "abc":
        world.set_tenant(name, r.choice((0.5, 1.0, 3.0)))
    for _ in range(r.randint(1, 3)):
        for _ in range(r.randint(1, 4)):
            outputs = r.randint(1, 8)
            forks = [c for c in world.open() if r.random() < 0.1]
            world.submit(
                r.randint(1, 40),
                outputs,
                r.choice((None, r.randint(1, outputs))),
                r.choice((0, 16)),
                breaks_at=r.choice((-1, -1, -1, r.randint(0, 40))),
                retryable=r.random() < 0.7,
                hashed=r.random() < 0.7,
                fork_of=forks[0] if forks else None,
                tenant=r.choice("abc"),
                cls=r.choice(CLASSES),
                priority=r.randint(-1, 1),
                adapter=r.choice(adapters),
            )
        step(world)
        world.wait(r.choice((0, 1, 20)))
        if r.random() < 0.2 and world.open():
            world.cancel(r.choice(world.open()))
    return world


def step(world: World) -> None:
    """Fill the pipeline and end its oldest step."""
    while world.scheduler.in_flight <= world.depth:
        decision = world.decide()
        if decision is None or decision.empty:
            break
    world.collect()


def run(seed: int) -> tuple[str, int]:
    """Digest of the next few slots of a random state, and how many chunks they had."""
    world = state_of(seed)
    digest, chunks = hashlib.sha256(), 0
    s = world.scheduler
    for _ in range(SLOTS):
        decision = world.decide()
        if decision is not None:
            chunks += decision.rows.size
            d = decision
            for part in (
                d.rows,
                d.tokens,
                d.starts,
                d.samples,
                d.epochs,
                d.preempted,
                d.how,
                d.copies,
                d.loads,
            ):
                digest.update(part.tobytes())
            digest.update(f"{d.slot} {d.predicted_ns} {d.bound_ns}".encode())
        if s.in_flight > world.depth or decision is None or decision.empty:
            world.collect()
        for column in COLUMNS:
            digest.update(getattr(s.table, column).tobytes())
        for array in (s.fairness.counter, s.fairness.lane_counter, s.fairness.lane_floor, s.cost.planes()):
            digest.update(array.tobytes())
        digest.update(repr(sorted(world.cutoffs.items())).encode())
    return digest.hexdigest(), chunks


if __name__ == "__main__":
    json.dump([run(seed) for seed in range(int(sys.argv[1]))], sys.stdout)

"""Who holds what a tenant far behind lacks is stopped, and stays stopped for that slot."""

from __future__ import annotations

import numpy as np
from tests.core.audits import audit, check_decision, check_endings, check_result
from tests.core.world import Shape, World

from kaiseki.core.settings import SchedulerSettings
from kaiseki.policies.registry import load


def test_a_row_that_gave_way_is_not_admitted_again_in_the_same_slot() -> None:
    """The room it left does not suffice for the newcomer; it would be first in a lane that is behind."""
    limits = SchedulerSettings(watermark_ratio=1.0, fairness_window=3)
    shape = Shape(load("kaiseki"), blocks=14, page=4, settings=limits)
    world = World(shape, audit, check_decision, check_result)
    champion = world.submit(20, 8, tenant="ahead", hashed=False)
    victim = world.submit(12, 8, tenant="middle", hashed=False)
    for _ in range(2):
        world.decide()
        world.collect()
    assert champion is not None and champion.running and victim is not None and victim.running
    world.submit(3, 2, tenant="ahead", hashed=False)
    world.submit(40, 2, tenant="behind", hashed=False)
    fair = world.scheduler.fairness
    fair.counter[:] = np.array([10.0, 3.0, 0.0]) * fair.lag_ns + fair.floor[0]
    decision = world.decide()
    assert decision is not None and decision.preempted.tolist() == [victim.row]
    assert victim.row not in decision.rows
    world.collect()
    world.drain()
    check_endings(world)

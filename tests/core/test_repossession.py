"""Who holds what a tenant far behind lacks is stopped, and stays stopped for that slot."""

from __future__ import annotations

import numpy as np
from tests.core.audits import audit, check_decision, check_endings, check_result
from tests.core.world import Shape, World

from kaiseki.core.decision import Decision
from kaiseki.core.settings import SchedulerSettings
from kaiseki.policies.registry import load


def behind_asks(prompt_tokens: int) -> tuple[World, Decision, int]:
    """A tenant far behind wants what one further ahead holds; also returns the row that may be stopped."""
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
    world.submit(prompt_tokens, 2, tenant="behind", hashed=False)
    fair = world.scheduler.fairness
    fair.counter[:] = np.array([10.0, 3.0, 0.0]) * fair.lag_ns + fair.floor[0]
    decision = world.decide()
    assert decision is not None
    return world, decision, victim.row


def finish(world: World) -> None:
    world.collect()
    world.drain()
    check_endings(world)


def test_a_row_that_gave_way_is_not_admitted_again_in_the_same_slot() -> None:
    world, decision, victim = behind_asks(28)
    assert decision.preempted.tolist() == [victim]
    assert victim not in decision.rows
    finish(world)


def test_nobody_is_stopped_for_room_that_would_not_suffice() -> None:
    world, decision, victim = behind_asks(40)
    assert decision.preempted.size == 0 and victim in decision.rows
    finish(world)

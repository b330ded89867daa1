"""s22: a tenant idles for an hour and returns with a backlog.

Guards the floor of docs/fairness.md: who comes to want more starts level with those who do, whatever it
or they had before.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.harness import START_NS, Bench, Job, S, job

from kaiseki.core.settings import SchedulerSettings
from kaiseki.policies.registry import load

# 1 s a slot and 8 ms a prefill token: an hour is about 1,200 slots of 256 tokens.
SLOW = np.array([1e9, 10e6, 0.0, 8e6, 0.0, 0.0, 0.0])
SLOT_NS, TOKENS, WINDOW = 3_100_000_000, 250, 5
HOUR = 3_600 * S
BACK_NS = START_NS + HOUR + 400 * S
WATCHED = 100
"""Slots after its return, all of which both have work for."""


def backlog(tenant: str, jobs: int, at_ns: int) -> list[Job]:
    return [job(f"{tenant}{at_ns}-{n}", TOKENS, 1, at_ns, tenant=tenant) for n in range(jobs)]


def run(before: list[Job]) -> tuple[float, float]:
    """Seconds of card time that the one that stayed and the one that returned get after the return."""
    settings = SchedulerSettings(fairness_window=WINDOW, max_slot_tokens=256)
    bench = Bench(load("kaiseki"), weights=SLOW, settings=settings)
    for tenant in ("stays", "returns"):
        bench.scheduler.set_tenant(tenant, 1.0)
    bench.run(before, until_ns=BACK_NS)
    bench.clock.advance_to(BACK_NS)
    until = BACK_NS + WATCHED * SLOT_NS
    bench.run([*backlog("stays", 2 * WATCHED, BACK_NS), *backlog("returns", 2 * WATCHED, BACK_NS)], until)
    had = {"stays": 0.0, "returns": 0.0}
    for name, served in bench.served.items():
        story = bench.driver.history.story(name)
        if story is not None and story.ending is not None and story.ending.admitted_ns >= BACK_NS:
            had[served.job.request.tenant] += story.ending.service_ns / S
    return had["stays"], had["returns"]


AN_HOUR_OF_WORK = int((HOUR + 600 * S) / SLOT_NS)
PASTS = {
    "the other worked all along": [
        *backlog("returns", 20, START_NS),
        *backlog("stays", AN_HOUR_OF_WORK, START_NS),
    ],
    "nobody worked": [*backlog("returns", 20, START_NS), *backlog("stays", 20, START_NS)],
    "it had much more before": [*backlog("returns", 100, START_NS), *backlog("stays", 1, START_NS)],
    "it was never there": backlog("stays", AN_HOUR_OF_WORK, START_NS),
}


@pytest.mark.parametrize("past", PASTS)
def test_it_neither_collects_nor_pays(past: str) -> None:
    stays, returns = run(PASTS[past])
    total = WATCHED * SLOT_NS / S
    bound = 2 * (2 * WINDOW + 3) * SLOT_NS / S
    assert bound < total / 3, "the bound must say something"
    assert abs(stays - returns) <= bound
    assert stays + returns > 0.95 * total

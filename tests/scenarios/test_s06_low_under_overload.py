"""s06: endless high-priority load at 110 % of capacity, and a trickle of low.

Guards the bound of docs/fairness.md, "a class behind others": of those that arrive later only such go first
whose key is smaller, which ends, and who is then overtaken `max_passes` times is taken next.
"""

from __future__ import annotations

import math

import pytest
from tests.harness import MS, SMALL, START_NS, Bench, Job, S, job

from kaiseki.core.requests import OnLate, ServiceClass
from kaiseki.core.settings import SchedulerSettings
from kaiseki.policies.registry import load

HIGH = ServiceClass("high", ttft_ns=2 * S, weight=8.0, tier=0)
LOW = ServiceClass("low", deadline_ns=6 * S, on_late=OnLate.KEEP, tier=1)
PROMPT, OUTPUT, ROWS = 400, 8, 16
SETTINGS = SchedulerSettings(max_batch_size=ROWS, fairness_window=10, max_passes=16)
LOAD_NS, LOWS = 30 * S, 10


def bench_of(policy: str, depth: int) -> Bench:
    return Bench(load(policy), depth, weights=SMALL, settings=SETTINGS)


def capacity_per_s(policy: str, depth: int) -> float:
    """Requests of the high class per second that the card can serve at most."""
    bench, count = bench_of(policy, depth), 300
    bench.run([job(f"h{i}", PROMPT, OUTPUT) for i in range(count)])
    return count / ((bench.clock.now_ns() - START_NS) / S)


def run(policy: str, depth: int, tenant: str) -> tuple[Bench, list[Job]]:
    every_ns = int(S / (1.1 * capacity_per_s(policy, depth)))
    high = [
        job(f"h{i}", PROMPT, OUTPUT, START_NS + i * every_ns, cls=HIGH) for i in range(LOAD_NS // every_ns)
    ]
    low = [job(f"l{i}", PROMPT, OUTPUT, START_NS + (i + 1) * S, cls=LOW, tenant=tenant) for i in range(LOWS)]
    bench = bench_of(policy, depth)
    bench.run([*high, *low], until_ns=START_NS + LOAD_NS)
    return bench, low


def wait_bound_ns(bench: Bench) -> float:
    """Until no later arrival goes first, and those ahead are taken or too late; then passes and service."""
    tau_ns, fair = bench.policy.tau_ms * MS, bench.scheduler.fairness
    assert LOW.deadline_ns is not None and HIGH.ttft_ns is not None
    later_ones_behind = LOW.deadline_ns + tau_ns * math.log(HIGH.weight / LOW.weight) - HIGH.ttft_ns
    slot_ns = max(r.ended_ns - r.started_ns for r in bench.engine.results)
    lanes = 2  # of one size, and that of the demoted
    return (
        later_ones_behind
        + HIGH.ttft_ns
        + lanes * 2 * (fair.lag_ns + slot_ns)
        + (SETTINGS.max_passes + OUTPUT + 2) * slot_ns
    )


@pytest.mark.parametrize("tenant", ["default", "other"], ids=["same-tenant", "other-tenant"])
@pytest.mark.parametrize("depth", [0, 1])
def test_low_finishes_within_the_bound(depth: int, tenant: str) -> None:
    bench, low = run("kaiseki", depth, tenant)
    bound = wait_bound_ns(bench)
    assert low[-1].request.arrival_ns + bound < START_NS + LOAD_NS, "the load must outlast the bound"
    for one in low:
        served = bench.served[one.request.id]
        assert served.endings, f"{one.request.id} starved"
        assert served.end.time_ns - one.request.arrival_ns <= bound


def test_a_bare_priority_starves_them_as_long_as_the_load_lasts() -> None:
    bench, low = run("priority", 0, "default")
    assert not any(bench.served[one.request.id].tokens for one in low[1:])

"""s05: the batch holds 32; 30 requests run at normal, one is urgent. Alone it would take 8 s.

Guards the rule that decodes are an output as well: when all of them together would take longer than the
tightest TBT, the less urgent ones pause.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.harness import MS, START_NS, Bench, S, Served, job

from kaiseki.core.reasons import Outcome
from kaiseki.core.requests import ServiceClass
from kaiseki.core.settings import SchedulerSettings
from kaiseki.policies.registry import load

# 24 ms a slot and 0.8 ms a decode: 31 decodes take twice as long as one.
CARD = np.array([24e6, 0.8e6, 0.0, 0.05e6, 0.0, 0.0, 0.0])
BATCH, NORMALS, OUTPUT = 32, 30, 322
URGENT = ServiceClass("urgent", ttft_ns=300 * MS, tbt_ns=30 * MS, weight=8.0)
NORMAL = ServiceClass("normal", ttft_ns=20 * S)
STREAMS = replace(NORMAL, ttft_ns=2 * S, tbt_ns=200 * MS)
"""So that those who arrived first were due long before the urgent one."""


def run(policy: str, normal: ServiceClass, normals: int = NORMALS, depth: int = 0) -> tuple[Bench, Served]:
    bench = Bench(load(policy), depth, weights=CARD, settings=SchedulerSettings(max_batch_size=BATCH))
    jobs = [job(f"n{i}", 100, 400, cls=normal) for i in range(normals)]
    bench.run([*jobs, job("urgent", 100, OUTPUT, START_NS + 4 * S, priority=-1, cls=URGENT)])
    bench.check_end()
    return bench, bench.served["urgent"]


def took_ns(served: Served) -> int:
    return served.times_ns[-1] - served.job.request.arrival_ns


@pytest.mark.parametrize("normal", [NORMAL, STREAMS], ids=["no-tbt", "loose-tbt"])
@pytest.mark.parametrize("depth", [0, 1])
def test_it_takes_little_longer_than_alone(depth: int, normal: ServiceClass) -> None:
    lone = took_ns(run("kaiseki", normal, 0, depth)[1])
    assert abs(lone - 8 * S) < 200 * MS
    bench, urgent = run("kaiseki", normal, depth=depth)
    assert took_ns(urgent) <= 1.25 * lone
    assert urgent.ttft_ns <= URGENT.ttft_ns  # type: ignore[operator]
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())
    if normal.tbt_ns is not None:
        # Seven of them fit beside it, and all of them into what their own TBT allows, in turn.
        late = [gap for s in bench.served.values() for gap in s.gaps_ns if gap > s.job.request.cls.tbt_ns]
        assert len(late) <= 1


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_bare_policy_makes_it_take_twice_as_long(policy: str) -> None:
    lone, crowded = took_ns(run(policy, NORMAL, 0)[1]), took_ns(run(policy, NORMAL)[1])
    assert crowded > 1.9 * lone

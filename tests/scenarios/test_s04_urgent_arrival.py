"""s04: all running slots are taken by equal-priority requests; a more urgent one arrives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.harness import MS, SMALL, START_NS, Bench, S, job

from kaiseki.core.reasons import Event, Outcome, Reason
from kaiseki.core.requests import ServiceClass
from kaiseki.core.settings import SchedulerSettings

EQUAL = ServiceClass("normal", ttft_ns=20 * S, tbt_ns=100 * MS)
URGENT = ServiceClass("urgent", ttft_ns=60 * MS, tbt_ns=50 * MS, weight=8.0)
ROWS = 8


def preemptions(bench: Bench) -> list[tuple[str | None, str | None]]:
    """(victim, who it yielded to) of every purchase so far."""
    history = bench.driver.history
    records = history.records.read()
    bought = records[(records["event"] == Event.PREEMPTED) & (records["reason"] == Reason.PURCHASED)]
    return [(history.name_of(int(r["seq"])), history.name_of(int(r["other"]))) for r in bought]


@pytest.mark.parametrize("depth", [0, 1])
def test_it_is_admitted_at_once_by_a_recorded_purchase(depth: int) -> None:
    bench = Bench(
        "kaiseki", depth, weights=SMALL, settings=SchedulerSettings(max_batch_size=ROWS), audit=True
    )
    jobs = [job(f"n{i}", 100, 200, cls=EQUAL) for i in range(2 * ROWS)]
    arrives = START_NS + 100 * MS
    bench.run([*jobs, job("urgent", 100, 20, arrives, cls=URGENT)], until_ns=arrives)
    assert bench.scheduler.table.running_count == ROWS and len(bench.scheduler.waiting) == ROWS
    bench.run([job("urgent", 100, 20, arrives, cls=URGENT)])
    bench.check_end()

    urgent = bench.served["urgent"]
    assert urgent.outcome == Outcome.COMPLETED
    assert urgent.ttft_ns <= URGENT.ttft_ns and max(urgent.gaps_ns) <= URGENT.tbt_ns
    story = bench.driver.history.story("urgent")
    assert story is not None and story.ending is not None
    one_slot_ns = 20 * MS
    assert story.ending.admitted_ns - arrives <= one_slot_ns
    ((victim, buyer),) = preemptions(bench)
    assert buyer == "urgent" and victim is not None and victim.startswith("n")
    told = bench.driver.explain(victim)
    assert told is not None
    assert any(e["event"] == "preempted" and "in favour of urgent" in e["detail"] for e in told["timeline"])
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())


def test_equals_never_displace_each_other() -> None:
    bench = Bench("kaiseki", settings=SchedulerSettings(max_batch_size=4, slo_lambda=1000.0), audit=True)
    # Each later one is nearer to its target than those that run, which is no reason to stop them.
    bench.run([job(f"n{i}", 50, 60, START_NS + 10 * MS * i, cls=EQUAL) for i in range(24)])
    bench.check_end()
    assert preemptions(bench) == []
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())


def test_a_stream_of_urgent_ones_stops_each_victim_once_per_window() -> None:
    window = 200
    settings = SchedulerSettings(max_batch_size=4, fairness_window=window, slo_lambda=10.0)
    bench = Bench("kaiseki", settings=settings, audit=True)
    jobs = [job(f"n{i}", 50, 400, cls=EQUAL) for i in range(4)]
    jobs += [job(f"u{i}", 20, 5, START_NS + 50 * MS * (i + 1), cls=URGENT) for i in range(20)]
    bench.run(jobs)
    bench.check_end()
    records = bench.driver.history.records.read()
    stopped = records[(records["event"] == Event.PREEMPTED) & (records["reason"] == Reason.PURCHASED)]
    assert stopped.size >= 3
    for seq in set(stopped["seq"].tolist()):
        slots = sorted(stopped["slot"][stopped["seq"] == seq].tolist())
        assert all(b - a > window for a, b in pairwise(slots))
    assert not any(victim is not None and victim.startswith("u") for victim, _ in preemptions(bench))

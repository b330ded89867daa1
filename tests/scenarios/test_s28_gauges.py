"""s28: cold start and bursts; exported gauges are at most one slot behind the true state.

Guards `reporting.report_load`, on the scripted engine; over HTTP: `test_s28_http.py`, which also shows that
no pass over the queue is made for them.
"""

from __future__ import annotations

import pytest
from tests.harness import MS, START_NS, Bench, job

from kaiseki.core.settings import SchedulerSettings

ROWS, BURST = 8, 60


def gauges(bench: Bench) -> tuple[int, int, int, int, int]:
    load = bench.driver.metrics.load
    return load.running, load.waiting, load.kv_free, load.kv_live, load.kv_total


def truth(bench: Bench) -> tuple[int, int, int, int, int]:
    s = bench.scheduler
    waiting, kv = len(s.waiting), s.kv
    return s.table.running_count, waiting, kv.free_blocks(), kv.live_blocks(), kv.total_blocks


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("policy", ["fcfs", "kaiseki"])
def test_gauges_say_how_things_stand_after_each_slot(policy: str, depth: int) -> None:
    bench = Bench(policy, depth=depth, settings=SchedulerSettings(max_batch_size=ROWS))
    total = bench.pool.total_blocks
    assert gauges(bench) == (0, 0, total, 0, total), "before the first slot"
    seen: list[tuple[int, int, int, int, int]] = []

    def look(bench: Bench) -> None:
        assert gauges(bench) == truth(bench)
        seen.append(gauges(bench))

    bench.each_slot = look
    burst = [job(f"b{i}", 40, 5, START_NS + 20 * MS) for i in range(BURST)]
    bench.run([job("first", 40, 30), *burst])
    assert max(waiting for _, waiting, *_ in seen) >= BURST - ROWS
    assert max(running for running, *_ in seen) == ROWS
    assert gauges(bench) == (0, 0, total, 0, total), "after the last slot"

"""The driver: every request's news goes to its own owner, whatever happens around it."""

from __future__ import annotations

import pytest
from tests.harness import Bench, job

from kaiseki.core.reasons import Outcome, Reason
from kaiseki.core.settings import SchedulerSettings


def test_a_row_freed_by_a_cancel_is_not_mixed_up_with_its_next_owner() -> None:
    bench = Bench(audit=True)
    first = bench.submit(job("gone", 20, 50))
    bench.driver.step()
    bench.driver.cancel("gone")
    second = bench.submit(job("next", 30, 4))
    bench.run()
    assert first.outcome == Outcome.CANCELLED and first.end.reason == Reason.CLIENT_GONE
    assert second.outcome == Outcome.COMPLETED and len(second.tokens) == 4
    bench.check_end()


def test_a_closed_driver_refuses_and_says_when_to_come_back() -> None:
    bench = Bench()
    running = bench.submit(job("running", 20, 5))
    bench.driver.step()
    assert bench.driver.drain(timeout_s=0.0) is False and bench.driver.draining
    late = bench.submit(job("late", 20, 5))
    bench.run()
    assert late.outcome == Outcome.REFUSED and late.end.reason == Reason.DRAINING
    assert late.end.retry_after_s is not None
    assert running.outcome == Outcome.COMPLETED
    assert bench.driver.drain(timeout_s=0.0) is True
    bench.check_end()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_cancel_frees_blocks_by_the_next_slot_and_nothing_more_is_told(depth: int) -> None:
    bench = Bench("fcfs", depth, audit=True)
    gone, stays = bench.submit(job("gone", 160, 50)), bench.submit(job("stays", 16, 50))
    for _ in range(4):
        bench.driver.step()
    bench.driver.cancel("gone")
    bench.driver.step()
    bench.driver.step()
    assert bench.pool.live_blocks() <= 3
    bench.run()
    assert gone.outcome == Outcome.CANCELLED and stays.outcome == Outcome.COMPLETED
    bench.check_end()


def test_an_idle_driver_has_collected_every_step() -> None:
    bench = Bench("fcfs", 1)
    bench.submit(job("stops", 16, 50, stops_at=3))
    bench.run()
    assert bench.scheduler.in_flight == 0 and not bench.driver.busy
    assert bench.pool.free_blocks() == bench.pool.total_blocks
    assert bench.driver.health().ok and bench.driver.snapshot()["running"] == 0


def test_failures_end_or_retry_only_the_rows_they_hit() -> None:
    bench = Bench("fcfs", audit=True)
    jobs = [
        job("fails", 40, 5, breaks_at=42),
        job("again", 40, 5, breaks_at=42, retryable=True),
        job("fine", 40, 5),
    ]
    bench.run(jobs)
    outcomes = [bench.served[j.request.id].outcome for j in jobs]
    assert outcomes == [Outcome.FAILED, Outcome.COMPLETED, Outcome.COMPLETED]
    assert bench.served["fails"].end.reason == Reason.ENGINE_ERROR
    assert len(bench.served["fails"].tokens) == 3
    bench.check_end()


def test_the_snapshot_counts_what_is_there() -> None:
    bench = Bench("fcfs", settings=SchedulerSettings(max_batch_size=2))
    bench.scheduler.set_tenant("b", 3.0)
    for i in range(5):
        bench.submit(job(f"r{i}", 32, 9, tenant="ab"[i % 2]))
    bench.driver.step()
    state = bench.driver.snapshot()
    assert (state["running"], state["waiting"], state["open"], state["policy"]) == (2, 3, 5, "fcfs")
    assert state["tenants"]["b"]["weight"] == 3.0
    assert sum(t["running"] for t in state["tenants"].values()) == 2
    assert sum(t["waiting"] for t in state["tenants"].values()) == 3
    kv = state["kv"]
    assert kv["free_blocks"] + kv["live_blocks"] == kv["total_blocks"]
    recent = bench.driver.recent(3)
    assert [r["request"] for r in recent] == ["r4", "r3", "r2"]
    assert [r["request"] for r in bench.driver.recent(9, "b")] == ["r3", "r1"]


def test_a_fork_that_is_held_back_in_a_row_that_no_queue_has_seen() -> None:
    """The table grows with every request, the queues only with those that wait in them."""
    bench = Bench("fcfs", blocks=8192)
    rows = bench.scheduler.table.capacity
    for i in range(rows):
        bench.submit(job(f"r{i}", 8, 2))
    bench.submit(job("fork", 8, 2, fork_of="r0"))
    bench.driver.step()
    assert bench.scheduler.table.capacity > rows
    bench.run()
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())
    bench.check_end()

"""The driver: every request's news goes to its own owner, whatever happens around it."""

from __future__ import annotations

from tests.harness import Bench, job

from kaiseki.core.reasons import Outcome, Reason


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

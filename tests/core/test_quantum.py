"""The quantum grows while deciding takes too much of the slot, and shrinks when it no longer does (A6)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.harness import SMALL, Bench, job

from kaiseki.core.quantum import COARSEST, SETTLE_SLOTS, Quantum
from kaiseki.core.settings import SchedulerSettings
from kaiseki.policies.registry import load

SHARE, FINEST = 0.2, 16
BUDGET = 190
"""Tokens of a slot: five times 32, as coarse a grid as there is for so few, or eleven times 16."""


def after(quantum: Quantum, slots: int, share: float) -> int:
    for _ in range(slots):
        quantum.observe(share * 1e6, 1e6)
    return quantum.tokens


def test_it_grows_step_by_step_to_a_limit_and_comes_back() -> None:
    quantum = Quantum(FINEST, SHARE)
    assert after(quantum, 10 * SETTLE_SLOTS, 0.19) == FINEST
    assert after(quantum, 3 * SETTLE_SLOTS, 0.4) in (2 * FINEST, 4 * FINEST, 8 * FINEST)
    assert after(quantum, 10 * SETTLE_SLOTS, 0.4) == COARSEST * FINEST
    assert after(quantum, 10 * SETTLE_SLOTS, 0.1) == COARSEST * FINEST, "it would be back at once"
    assert after(quantum, 10 * SETTLE_SLOTS, 0.02) == FINEST


def test_one_slow_decision_changes_nothing() -> None:
    quantum = Quantum(FINEST, SHARE)
    after(quantum, 2 * SETTLE_SLOTS, 0.05)
    assert after(quantum, 1, 2.0) == FINEST
    assert after(quantum, 2 * SETTLE_SLOTS, 0.05) == FINEST


def test_it_does_not_swing_where_time_goes_with_the_number_of_chunks() -> None:
    quantum, seen = Quantum(FINEST, SHARE), []
    for _ in range(40 * SETTLE_SLOTS):
        quantum.observe(1e6 * 0.6 * FINEST / quantum.tokens, 1e6)
        seen.append(quantum.tokens)
    assert set(seen[10 * SETTLE_SLOTS :]) == {4 * FINEST}


@pytest.mark.parametrize("depth", [0, 1])
def test_the_driver_measures_and_chunks_follow(depth: int) -> None:
    """On a virtual clock that goes on while the scheduler decides, for the first half dearly."""
    settings = SchedulerSettings(quantum_tokens=FINEST, decide_share=SHARE)
    policy = load("kaiseki", budget_tokens=BUDGET)
    bench = Bench(policy, depth, weights=SMALL, blocks=20_000, settings=settings)
    scheduler: Any = bench.scheduler
    decide, dear_ns = scheduler.decide, [6_000_000]

    def slowly(now: int, limit: int | None = None) -> Any:
        decision = decide(now, limit)
        bench.clock.advance_to(now + dear_ns[0])
        return decision

    scheduler.decide = slowly
    bench.submit(job("long", 200_000, 2))
    for _ in range(200):
        bench.driver.step()
    assert scheduler.quantum.tokens == COARSEST * FINEST
    dear = chunks(bench)
    dear_ns[0] = 0
    for _ in range(400):
        bench.driver.step()
    assert scheduler.quantum.tokens == FINEST
    cheap = chunks(bench)
    assert set(dear) == {160}
    assert set(cheap) == {176}, "the finer grid makes more of the slot"


def chunks(bench: Bench) -> list[int]:
    """Sizes of the last prompt chunks."""
    found = [n for d in bench.engine.decisions[-50:] for n in d.tokens.tolist() if n > 1]
    assert len(found) > 5
    return found

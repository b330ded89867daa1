"""Searches find what they look for in as few simulations as they may take."""

from __future__ import annotations

from typing import Any

import pytest

from kaiseki.core.policy import Policy
from kaiseki.policies.registry import load as policy
from kaiseki.sim.run import Case
from kaiseki.sim.search import BUDGETS, STEPS, best_at_limit, best_budget, highest_rate


class Fake:
    """A fleet that attains all up to a rate, and nothing above it."""

    def __init__(self, limit_rps: float, best: int = 0) -> None:
        self.limit_rps, self.best, self.calls = limit_rps, best, 0

    def __call__(self, case: Case, made: Policy) -> dict[str, Any]:
        self.calls += 1
        rps = 2.0 * case.shape.rate_scale
        attained = float(rps <= self.limit_rps)
        if self.best:
            attained = 1.0 / (1 + abs((made.budget_tokens or 0) - self.best))
        return {"attainment": attained, "offered_rps": rps}


CASE = Case(stream=lambda shape: iter(()), plan=None, fleet=())  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0.011, 0.7, 2.0, 3.0, 150.0])
def test_the_highest_rate_is_bracketed(limit: float) -> None:
    fleet = Fake(limit)
    rate = highest_rate(CASE, policy("fcfs"), 0.9, fleet)
    assert rate.rps is not None and 2.0 * rate.low == rate.rps <= limit < 2.0 * rate.high
    assert rate.high / rate.low <= 1 + 2**-STEPS
    assert fleet.calls < 25


def test_no_rate_is_no_number() -> None:
    assert highest_rate(CASE, policy("fcfs"), 0.9, Fake(0.0)).rps is None


def test_the_best_budget_is_taken_and_others_are_left_alone() -> None:
    assert best_budget(CASE, policy("fcfs"), Fake(1.0, best=288)).budget_tokens == 288
    fleet = Fake(1.0)
    assert best_budget(CASE, policy("kaiseki"), fleet) == policy("kaiseki") and fleet.calls == 0
    tied = best_budget(CASE, policy("fcfs"), Fake(10.0))
    assert tied.budget_tokens == max(BUDGETS)


def test_a_given_start_and_step_take_fewer_simulations() -> None:
    fleet = Fake(1.0)
    rate = highest_rate(CASE, policy("fcfs"), 0.9, fleet, start=0.45, step=1.25, steps=3)
    assert rate.low <= 0.5 < rate.high and rate.high / rate.low < 1.04 and fleet.calls < 7


class Limits(Fake):
    """A fleet whose limit depends on the budget."""

    def __call__(self, case: Case, made: Policy) -> dict[str, Any]:
        self.limit_rps = {288: 1.0, 384: 1.2, 512: 1.5, 768: 1.1}.get(made.budget_tokens or 0, 0.5)
        return super().__call__(case, made)


def test_budgets_are_compared_at_the_rate_that_they_can_just_keep() -> None:
    fleet = Limits(0.0)
    best, rate = best_at_limit(CASE, policy("fcfs"), 0.9, fleet)
    assert best.budget_tokens == 512 and rate.rps is not None and 1.4 < rate.rps <= 1.5
    assert fleet.calls < 25

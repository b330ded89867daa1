"""Searches over simulations: the budget that suits a policy best, the highest rate that keeps a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kaiseki.core.policy import Policy
from kaiseki.sim.run import Case, simulate

BUDGETS = (64, 128, 192, 256, 288, 384, 512, 1024, 2048)
SEARCH_REQUESTS = 2_000
"""Requests on which budgets are compared."""
STEPS = 6
"""Bisections of a factor of two: the rate is found within 1.1 %."""

Simulate = Callable[[Case, Policy], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Rate:
    """The highest rate that keeps a target.

    Attributes:
        rps: requests per second at the highest scale found to keep it; None where none did.
        low, high: the scales between which the limit lies.
        attainment: at `low`.
    """

    rps: float | None
    low: float
    high: float
    attainment: float | None


def has_budget(policy: Policy) -> bool:
    """Whether a token budget bounds the policy's slots."""
    return policy.budget_tokens is not None


def best_budget(case: Case, policy: Policy, run: Simulate = simulate) -> Policy:
    """The policy with the budget that attains most on the first `SEARCH_REQUESTS` requests.

    Ties go to the larger budget, which costs fewer steps. Policies without a budget stay as they are.
    """
    if not has_budget(policy):
        return policy
    short = case.first(SEARCH_REQUESTS)
    tried = [replace(policy, budget_tokens=budget) for budget in BUDGETS]
    reached = [run(short, one)["attainment"] or 0.0 for one in tried]
    return max(zip(reached, BUDGETS, tried, strict=True), key=lambda found: found[:2])[2]


def highest_rate(case: Case, policy: Policy, target: float, run: Simulate = simulate) -> Rate:
    """Bisect the scale of arrivals for the highest at which attainment is at least `target`."""

    def at(scale: float) -> tuple[float, float]:
        found = run(case.scaled(scale), policy)
        return found["attainment"] or 0.0, found["offered_rps"]

    low, high = 1.0, 1.0
    attained, rps = at(1.0)
    best: tuple[float, float] | None = (attained, rps) if attained >= target else None
    if best is not None:
        while attained >= target and high < 1024:
            low, best = high, (attained, rps)
            high *= 2
            attained, rps = at(high)
    else:
        while best is None and low > 1 / 1024:
            high, low = low, low / 2
            attained, rps = at(low)
            best = (attained, rps) if attained >= target else None
    if best is None:
        return Rate(None, 0.0, high, None)
    for _ in range(STEPS):
        middle = (low + high) / 2
        attained, rps = at(middle)
        if attained >= target:
            low, best = middle, (attained, rps)
        else:
            high = middle
    return Rate(best[1], low, high, best[0])

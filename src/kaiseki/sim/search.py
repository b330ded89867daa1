"""Searches over simulations: the budget that suits a policy best, the highest rate that keeps a target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kaiseki.core.policy import Policy
from kaiseki.sim.run import Case, simulate

BUDGETS = (64, 128, 192, 256, 288, 384, 512, 768, 1024, 2048)
MIDDLE = 288
"""Where the search for a budget begins."""
NOTABLY = 1.03
"""A budget is better when it keeps the target at a rate so many times as high."""
WIDEST = 1024.0
"""Rates are looked for up to so many times the first, and down to its inverse."""
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


def highest_rate(
    case: Case,
    policy: Policy,
    target: float,
    run: Simulate = simulate,
    start: float = 1.0,
    step: float = 2.0,
    steps: int = STEPS,
) -> Rate:
    """The highest scale of arrivals at which attainment is at least `target`.

    From `start` on, each scale is `step` times the last until the target is lost (or kept); `steps`
    bisections follow, so that the rate is found within `(step - 1) / 2**steps`.
    """

    def at(scale: float) -> tuple[float, float]:
        found = run(case.scaled(scale), policy)
        return found["attainment"] or 0.0, found["offered_rps"]

    low = high = start
    attained, rps = at(start)
    best: tuple[float, float] | None = (attained, rps) if attained >= target else None
    if best is not None:
        while attained >= target and high < start * WIDEST:
            low, best = high, (attained, rps)
            high *= step
            attained, rps = at(high)
    else:
        while best is None and low > start / WIDEST:
            high, low = low, low / step
            attained, rps = at(low)
            best = (attained, rps) if attained >= target else None
    if best is None:
        return Rate(None, 0.0, high, None)
    for _ in range(steps):
        middle = (low + high) / 2
        attained, rps = at(middle)
        if attained >= target:
            low, best = middle, (attained, rps)
        else:
            high = middle
    return Rate(best[1], low, high, best[0])


def best_at_limit(
    case: Case,
    policy: Policy,
    target: float,
    run: Simulate = simulate,
    start: float = 1.0,
    requests: int = SEARCH_REQUESTS,
) -> tuple[Policy, Rate]:
    """The policy with the budget that keeps `target` up to the highest rate, and that rate.

    Budgets are compared where it matters, on the first `requests`: from the middle of `BUDGETS` outwards,
    each is asked whether it keeps the target at `NOTABLY` more than the best so far, and a side ends with the
    first that does not.
    """
    short = case.first(requests)
    middle = BUDGETS.index(MIDDLE)
    best = replace(policy, budget_tokens=MIDDLE) if has_budget(policy) else policy
    rate = highest_rate(short, best, target, run, start, 1.5, 3)
    if not has_budget(policy):
        return best, rate
    for side in (BUDGETS[middle + 1 :], BUDGETS[middle - 1 :: -1]):
        for budget in side:
            tried = replace(policy, budget_tokens=budget)
            more = (rate.low or rate.high) * NOTABLY
            if (run(short.scaled(more), tried)["attainment"] or 0.0) < target:
                break
            best, rate = tried, highest_rate(short, tried, target, run, more, 1.1, 2)
    return best, rate

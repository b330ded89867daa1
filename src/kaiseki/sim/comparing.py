"""Several policies on one case, with all that `kaiseki sim` can be asked for beside their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kaiseki.core.policy import Policy
from kaiseki.sim.run import Case, Run, run
from kaiseki.sim.search import best_at_limit, best_budget, highest_rate
from kaiseki.sim.sweep import sweep


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to find out.

    Attributes:
        policies: by the names under which they are reported.
        best: give each its best token budget.
        seeds: assignments to classes; the run with the median attainment counts.
        goodput: attainments for which the highest rate is searched.
        sweep: whether to vary lambda and mu of those that weigh them.
    """

    policies: Mapping[str, Policy]
    best: bool = False
    seeds: int = 1
    goodput: Sequence[float] = ()
    sweep: bool = False


@dataclass(slots=True)
class Comparison:
    """What was found.

    Attributes:
        document: the JSON of `kaiseki sim`.
        runs: the run behind each policy's figures, with what happened to each request.
        policies: as they ran, with the budgets found.
    """

    document: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    policies: dict[str, Policy] = field(default_factory=dict)


def compare(case: Case, wanted: Wanted) -> Comparison:
    """Simulate what is wanted.

    Raises:
        TraceError: the load can't be read.
        Stuck: a policy leaves requests open for ever.
    """
    found = Comparison({"policies": {}, "goodput": {}})
    for name, policy in wanted.policies.items():
        if wanted.best:
            policy = best_budget(case, policy)
        runs = [run(replace(case, seed=seed), policy) for seed in range(1, wanted.seeds + 1)]
        ranked = sorted(runs, key=lambda one: one.figures["attainment"] or 0.0)
        found.runs[name] = median = ranked[len(ranked) // 2]
        found.policies[name] = policy
        found.document["policies"][name] = median.figures | {
            "seeds": [{"seed": i + 1, "attainment": one.figures["attainment"]} for i, one in enumerate(runs)]
        }
        if wanted.goodput:
            found.document["goodput"][name] = {
                f"at_{target * 100:g}": _limit(case, policy, target, wanted.best) for target in wanted.goodput
            }
    if wanted.sweep:
        buying = {name: policy for name, policy in found.policies.items() if policy.buys}
        found.document["sweep"] = {name: sweep(case, policy) for name, policy in buying.items()}
    return found


def _limit(case: Case, policy: Policy, target: float, best: bool) -> dict[str, Any]:
    """The highest rate with a target; with `best` at the budget that goes furthest there."""
    start = 1.0
    if best:
        policy, near = best_at_limit(case, policy, target)
        start = near.low or near.high
    rate = highest_rate(case, policy, target, start=start)
    return {
        "rps": rate.rps,
        "low": rate.low,
        "high": rate.high,
        "attainment": rate.attainment,
        "budget_tokens": policy.budget_tokens,
        "demotion": policy.gives_up,
    }

"""Lambda and mu of the objective varied: what they trade against each other (A2).

Useful work minus lambda times missed targets minus mu times fragmented KV is what a purchase weighs, in
seconds of card time; see `kaiseki.core.preemption`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kaiseki.core.policy import Policy
from kaiseki.sim.run import Case, simulate
from kaiseki.sim.search import Simulate

LAMBDAS = (0.0, 0.1, 1.0, 10.0)
MUS = (0.0, 0.1, 1.0)
BETTER = {"gpu_utilisation": 1.0, "attainment": 1.0, "fragmentation": -1.0}
"""The axes of the front, and which way is better."""


def sweep(case: Case, policy: Policy, run: Simulate = simulate) -> list[dict[str, Any]]:
    """A row per pair of lambda and mu, with the axes and whether it is on the Pareto front."""
    rows = []
    for slo_lambda in LAMBDAS:
        for kv_mu in MUS:
            figures = run(case.with_settings(slo_lambda=slo_lambda, kv_mu=kv_mu), policy)
            row = {"lambda": slo_lambda, "mu": kv_mu, "preemptions": figures["preemptions"]}
            rows.append(row | {axis: figures[axis] for axis in BETTER})
    return [row | {"front": not any(_dominates(other, row) for other in rows)} for row in rows]


def _dominates(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """No worse on every axis and better on one; an axis that was not measured decides nothing."""
    signs: Sequence[float] = [
        sign * ((one[axis] or 0.0) - (other[axis] or 0.0)) for axis, sign in BETTER.items()
    ]
    return min(signs) >= 0.0 and max(signs) > 0.0

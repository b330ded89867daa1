"""Fleets that are simulated: the scheduler itself, on a clock that jumps from event to event.

From Python::

    from kaiseki.sim import open_case, open_policy, simulate

See `docs/python.md`.
"""

from kaiseki.sim.comparing import Comparison, Wanted, compare
from kaiseki.sim.opening import WrongArgument, open_case, open_policy
from kaiseki.sim.outcomes import columns
from kaiseki.sim.run import Case, Run, run, simulate
from kaiseki.sim.search import Rate, best_at_limit, best_budget, highest_rate

__all__ = [
    "Case",
    "Comparison",
    "Rate",
    "Run",
    "Wanted",
    "WrongArgument",
    "best_at_limit",
    "best_budget",
    "columns",
    "compare",
    "highest_rate",
    "open_case",
    "open_policy",
    "run",
    "simulate",
]

"""Earliest deadline first: the next target that a request has to meet orders everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.core.policy import Order, Policy
from kaiseki.core.requests import NEVER_NS
from kaiseki.core.table import View

PATIENCE_NS = 600 * 10**9
"""Requests without targets are ordered as if they were due so long after their arrival."""


def first_due_ns(view: View) -> F64:
    """float64[n]: when the first target of each request falls due, ns.

    Without any it is PATIENCE_NS after arrival, so that it waits for a bounded number of others only.
    """
    first = np.minimum(view.ttft_ns, view.deadline_ns)
    due: F64 = view.arrival_ns + np.where(first < NEVER_NS, first, PATIENCE_NS).astype(np.float64)
    return due


@dataclass(frozen=True)
class Edf(Policy):
    """Deadlines order the queue and running prefills alike; decodes go first, within a token budget."""

    name: ClassVar[str] = "edf"
    budget_tokens: int | None = 512
    order: Order = Order.DECODES_FIRST
    running_first: bool = False

    def key(self, view: View) -> F64:
        """The first due time, ns."""
        return first_due_ns(view)

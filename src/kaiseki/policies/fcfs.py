"""First come, first served, in vLLM's default order: running requests by admission, then the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.core.policy import Order, Policy
from kaiseki.core.table import View


@dataclass(frozen=True)
class Fcfs(Policy):
    """A token budget, filled in order of admission and then of arrival; the youngest loses its KV first."""

    name: ClassVar[str] = "fcfs"
    budget_tokens: int | None = 2048
    order: Order = Order.ADMISSION

    def key(self, view: View) -> F64:
        """Arrival time, ns."""
        return view.arrival_ns.astype(np.float64)

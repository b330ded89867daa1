"""Bare priority, as vLLM has it: lower tier first, arrival within a tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kaiseki.core.decision import F64, I64
from kaiseki.core.policy import Order, Policy
from kaiseki.core.table import View


@dataclass(frozen=True)
class Priority(Policy):
    """Tiers are strict: while anything of a lower tier waits, nothing of a higher one is admitted."""

    name: ClassVar[str] = "priority"
    budget_tokens: int | None = 2048
    order: Order = Order.ADMISSION

    def key(self, view: View) -> F64:
        """The tier; ties go to the earlier arrival."""
        return view.tier.astype(np.float64)

    def victim_cost(self, view: View, blocks: I64, now_ns: int) -> F64:
        """The highest tier loses first; within it the last admitted."""
        return -view.tier.astype(np.float64)

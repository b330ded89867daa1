"""Shortest job first, with ageing: a policy in thirty lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kaiseki.core.decision import F64, I64
from kaiseki.core.policy import Order, Policy
from kaiseki.core.table import View


@dataclass(frozen=True)
class ShortestFirst(Policy):
    """Short uncached prompts go first; a second of waiting outweighs `tokens_per_s` tokens."""

    name: ClassVar[str] = "shortest-first"
    order: Order = Order.DECODES_FIRST
    budget_tokens: int | None = 256
    running_first: bool = False
    strict: bool = False
    tokens_per_s: float = 200.0

    def key(self, view: View) -> F64:
        """Time at which a request of no length would have to arrive to be as urgent, in seconds."""
        return np.asarray(view.arrival_ns / 1e9 + view.uncached / self.tokens_per_s, np.float64)

    def victim_cost(self, view: View, blocks: I64, now_ns: int) -> F64:
        """Least work lost per block freed."""
        return np.asarray(view.lone_ns / np.maximum(blocks, 1), np.float64)

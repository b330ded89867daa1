"""Swap or recompute: what stopping a request costs either way.

The linear rule: moving blocks out and back takes a time per block, learned from what moves took; computing
them again takes what the cost model says. The cheaper way is taken.
"""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I64, Bool

FORGETTING = 0.98
"""Weight of what is known when another measurement comes: that of some fifty moves."""


class LinearSwitch:
    """Ns per block moved, as a running mean weighted by blocks.

    Args:
        block_ns: what is believed before the first move; `WEIGHT` blocks' worth.
    """

    WEIGHT = 64.0

    def __init__(self, block_ns: float) -> None:
        self._blocks = self.WEIGHT
        self._ns = self.WEIGHT * block_ns

    @property
    def block_ns(self) -> float:
        """Time to move one block one way, ns."""
        return self._ns / self._blocks

    def swap_ns(self, blocks: I64) -> F64:
        """float64[n]: time to move so many blocks out and in again."""
        return 2.0 * self.block_ns * blocks.astype(np.float64)

    def prefers_swap(self, blocks: I64, recompute_ns: F64) -> Bool:
        """bool[n]: whether moving is cheaper than computing again."""
        return self.swap_ns(blocks) < recompute_ns

    def observe(self, blocks: int, measured_ns: int) -> None:
        """Learn from a step that moved so many blocks in so much time."""
        self._blocks = FORGETTING * self._blocks + blocks
        self._ns = FORGETTING * self._ns + measured_ns

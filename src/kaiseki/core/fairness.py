"""Who has had how much: charged card time per unit of weight, per tenant."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I32
from kaiseki.core.jit import inlined
from kaiseki.core.lanes import LANE_WEIGHT, LANES, move

HARD_LAG = 2.0
"""H over L."""


@inlined
def charge(group: int, ns: float, counter: F64, weight: F64, lane_counter: F64) -> None:
    """Add card time to a tenant's counter and to its lane's."""
    tenant = group // LANES
    share = ns / weight[tenant]
    counter[tenant] += share
    lane_counter[group] += share / LANE_WEIGHT[group % LANES]


class Fairness:
    """Service counters of tenants, in nanoseconds of card time divided by weight.

    A counter holds what was measured, and what was predicted for decisions in flight: chunks are charged
    when they are granted and corrected when their step is measured. Each lane of a tenant has a counter of
    its own, divided by the lane's weight as well.

    A tenant that comes back from idleness is lifted to the least counter among tenants with work, so
    that it neither collects credit for the time it was away nor pays for it.

    Args:
        window: how many mean slots of service a tenant may be ahead (B13 `fairness_window`).
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.names: list[str] = []
        self.counter: F64 = np.zeros(0)
        self.weight: F64 = np.zeros(0)
        self.open_requests: I32 = np.zeros(0, np.int32)
        self.lane_counter: F64 = np.zeros(0)  # by tenant * LANES + lane
        self.lane_requests: I32 = np.zeros(0, np.int32)
        self._index: dict[str, int] = {}
        self._mean_slot_ns = 0.0

    @property
    def lag_ns(self) -> float:
        """L: how far ahead of the least a tenant may be and still be granted, ns per unit of weight."""
        return self.window * self._mean_slot_ns

    @property
    def hard_lag_ns(self) -> float:
        """H: from where on even decodes pause, and whoever holds what others lack is stopped; 2 L."""
        return HARD_LAG * self.lag_ns

    def tenant(self, name: str) -> int:
        """Index of a tenant, made with weight 1 when it is new."""
        known = self._index.get(name)
        if known is not None:
            return known
        index = len(self.names)
        self._index[name] = index
        self.names.append(name)
        self.counter = np.append(self.counter, 0.0)
        self.lane_counter = np.append(self.lane_counter, np.zeros(LANES))
        self.lane_requests = np.append(self.lane_requests, np.zeros(LANES, np.int32))
        self.weight = np.append(self.weight, 1.0)
        self.open_requests = np.append(self.open_requests, np.int32(0))
        return index

    def set_weight(self, name: str, weight: float) -> None:
        """Change a tenant's share from now on; what it was charged before is not revalued.

        Raises:
            ValueError: the weight is not a positive number.
        """
        if not weight > 0:
            raise ValueError(f"tenant {name!r}: weight is {weight}, must be > 0")
        index = self.tenant(name)  # may grow the arrays
        self.weight[index] = weight

    def opened(self, tenant: int) -> None:
        """The tenant has one more open request; the first one lifts it."""
        if self.open_requests[tenant] == 0:
            busy = self.open_requests > 0
            if busy.any():
                self.counter[tenant] = max(self.counter[tenant], self.counter[busy].min())
        self.open_requests[tenant] += 1

    def closed(self, tenants: I32) -> None:
        """Requests of these tenants (int32[n], with repetition) ended."""
        np.subtract.at(self.open_requests, tenants, 1)

    def moved(self, old: I32, new: I32) -> None:
        """Requests change lanes: int32[n] each, tenant * LANES + lane, -1 for none."""
        move(self.lane_counter, self.lane_requests, old, new)

    def observe_slot(self, measured_ns: float) -> None:
        """Learn how long a slot takes: the lags are multiples of the mean.

        The first slot sets the scale, later ones move it slowly.
        """
        rate = 1.0 if self._mean_slot_ns == 0.0 else 0.01
        self._mean_slot_ns += rate * (measured_ns - self._mean_slot_ns)

    def gap_ns(self) -> float:
        """Largest difference between counters of tenants that have work, ns per unit of weight."""
        busy = self.open_requests > 0
        return float(np.ptp(self.counter[busy])) if busy.sum() > 1 else 0.0

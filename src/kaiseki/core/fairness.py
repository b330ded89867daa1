"""Who has had how much: charged card time per unit of weight, per tenant."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I32, I64, Bool
from kaiseki.core.jit import inlined, kernel
from kaiseki.core.lanes import LANE_WEIGHT, LANES
from kaiseki.core.limits import L_BLOCKS, L_ROWS, is_blocked
from kaiseki.core.table import Records

HARD_LAG = 2.0
"""H over L."""


# What a tenant or lane saw in a slot.
UNMET, BLOCKED, SERVED = range(3)


@kernel
def note_wants(entries: Records, waiting: I64, reachable: I64, limits: F64, out: Bool, tenants: Bool) -> None:
    """Mark who could have used more time, lacked room, was served.

    `waiting`, `reachable`: int64[tenants * LANES], see `Fairness.settle`.
    `out`: bool[3, tenants * LANES]; `tenants`: bool[3, tenants], whether any of their lanes did.
    """
    for g in range(waiting.size):
        if waiting[g] > 0:
            room = limits[L_ROWS] >= 1.0 and limits[L_BLOCKS] >= 1.0
            out[UNMET if room and reachable[g] > 0 else BLOCKED, g] = True
    for i in range(entries.size):
        entry = entries[i]
        group = entry["group"]
        if entry["chunk"] > 0:
            out[SERVED, group] = True
        if entry["chunk"] < entry["need"]:
            out[BLOCKED if is_blocked(entry, limits) else UNMET, group] = True
    for what in range(3):
        for g in range(out.shape[1]):
            if out[what, g]:
                tenants[what, g // LANES] = True


@kernel
def settle_books(counter: F64, claims: Bool, slot: Bool, floor: F64, width: int) -> None:
    """See `Fairness.settle`; for each `width` counters that belong together, with one entry of `floor`."""
    for first in range(0, counter.size, width):
        k = first // width
        least, most, anybody = np.inf, -np.inf, False
        for g in range(first, first + width):
            wants = slot[UNMET, g] or slot[BLOCKED, g]
            if wants and not claims[g]:
                counter[g] = max(counter[g], floor[k])
            claims[g] = wants
            anybody = anybody or claims[g]
            if slot[UNMET, g]:
                least = min(least, counter[g])
            elif slot[SERVED, g]:
                most = max(most, counter[g])
        if least < np.inf:
            floor[k] = max(floor[k], least)
        elif not anybody:
            floor[k] = max(floor[k], most)


@kernel
def close_books(
    entries: Records, waiting: I64, reachable: I64, limits: F64, lanes: Bool, tenants: Bool,
    counter: F64, claims: Bool, floor: F64, lane_counter: F64, lane_claims: Bool, lane_floor: F64,
) -> None:  # fmt: skip
    """See `Fairness.settle`; `lanes`, `tenants`: all false, for `note_wants`."""
    note_wants(entries, waiting, reachable, limits, lanes, tenants)
    settle_books(counter, claims, tenants, floor, counter.size)
    settle_books(lane_counter, lane_claims, lanes, lane_floor, LANES)


@inlined
def charge(group: int, ns: float, counter: F64, weight: F64, lane_counter: F64) -> None:
    """Add card time to a tenant's counter and to its lane's."""
    tenant = group // LANES
    share = ns / weight[tenant]
    counter[tenant] += share
    lane_counter[group] += share / LANE_WEIGHT[group % LANES]


@inlined
def lifted(counter: F64, claims: Bool, floor: F64, width: int, g: int) -> float:
    """Counter g, without a claim at least at its floor; `width` of them share one."""
    return float(counter[g] if claims[g] else max(counter[g], floor[g // width]))


@kernel
def lift(counter: F64, claims: Bool, floor: F64, width: int, out: F64) -> None:
    """The counters as they compare; see `lifted`."""
    for g in range(counter.size):
        out[g] = lifted(counter, claims, floor, width, g)


@kernel
def mark_ahead(counter: F64, claims: Bool, floor: F64, waiting: I64, lag: float, out: Bool) -> None:
    """See `Fairness.lanes_ahead`."""
    for first in range(0, waiting.size, LANES):
        least = np.inf
        for g in range(first, first + LANES):
            if waiting[g] > 0:
                least = min(least, lifted(counter, claims, floor, LANES, g))
        for g in range(first, first + LANES):
            out[g] = lifted(counter, claims, floor, LANES, g) - least > lag


@kernel
def widest_gap(counter: F64, open_requests: I32, claims: Bool) -> float:
    """How far the one furthest ahead of those with requests is before the least that has a claim."""
    most, least = -np.inf, np.inf
    for t in range(counter.size):
        if open_requests[t] > 0:
            most = max(most, counter[t])
        if claims[t]:
            least = min(least, counter[t])
    return max(0.0, most - least) if least < np.inf and most > -np.inf else 0.0


@kernel
def leave(open_requests: I32, tenants: I32) -> int:
    """Count the endings of requests of these tenants; the last of them that has none left, or -1."""
    for i in range(tenants.size):
        open_requests[tenants[i]] -= 1
    gone = -1
    for i in range(tenants.size):
        if open_requests[tenants[i]] == 0:
            gone = tenants[i]
    return gone


class Fairness:
    """Service counters of tenants, in nanoseconds of card time divided by weight.

    A counter holds what was measured, and what was predicted for decisions in flight: chunks are charged
    when they are granted and corrected when their step is measured. Each lane of a tenant has a counter of
    its own, divided by the lane's weight as well.

    A tenant that comes to want more than it gets is lifted, so that it neither collects credit for the time
    before nor pays for it; see `settle`.

    Args:
        window: how many mean slots of service a tenant may be ahead (B13 `fairness_window`).
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.names: list[str] = []
        self.counter: F64 = np.zeros(0)
        self.weight: F64 = np.zeros(0)
        self.open_requests: I32 = np.zeros(0, np.int32)
        self.claims: Bool = np.zeros(0, np.bool_)  # wanted more in the last slot, or lacked room for it
        self.floor: F64 = np.zeros(1)
        self.lane_counter: F64 = np.zeros(0)  # by tenant * LANES + lane
        self.lane_claims: Bool = np.zeros(0, np.bool_)
        self.lane_floor: F64 = np.zeros(0)  # by tenant
        self._index: dict[str, int] = {}
        self.tokens: F64 = np.zeros(0)  # weighted tokens / weight, for policies that count them
        self._last_to_leave = -1
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
        self.claims = np.append(self.claims, np.False_)
        self.tokens = np.append(self.tokens, 0.0)
        self.lane_counter = np.append(self.lane_counter, np.zeros(LANES))
        self.lane_claims = np.append(self.lane_claims, np.zeros(LANES, np.bool_))
        self.lane_floor = np.append(self.lane_floor, 0.0)
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
        """The tenant has one more open request; the first one lifts its count of tokens."""
        if self.open_requests[tenant] == 0:
            busy = self.open_requests > 0
            if busy.any():
                self.tokens[tenant] = max(self.tokens[tenant], self.tokens[busy].min())
            elif self._last_to_leave >= 0:  # as in VTC: who finds nobody else has no credit over the last one
                self.tokens[tenant] = max(self.tokens[tenant], self.tokens[self._last_to_leave])
        self.open_requests[tenant] += 1

    def closed(self, tenants: I32) -> None:
        """Requests of these tenants (int32[n], with repetition) ended."""
        gone = leave(self.open_requests, np.ascontiguousarray(tenants))
        if gone >= 0:
            self._last_to_leave = gone

    def count_tokens(self, tenants: I32, tokens: I32, each: float) -> None:
        """Charge tokens (int32[n]), so much for each, to tenants (int32[n], with repetition)."""
        np.add.at(self.tokens, tenants, each * tokens / self.weight[tenants])

    def comparable(self) -> tuple[F64, F64]:
        """Copies of the counters of tenants and of lanes as they compare now.

        Who has no claim from before compares as if it had been lifted already; see `settle`.
        """
        tenants, lanes = np.empty(self.counter.size), np.empty(self.lane_counter.size)
        lift(self.counter, self.claims, self.floor, self.counter.size, tenants)
        lift(self.lane_counter, self.lane_claims, self.lane_floor, LANES, lanes)
        return tenants, lanes

    def lanes_ahead(self, waiting: I64) -> Bool | None:
        """bool[tenants * LANES]: lanes further ahead than L of the least of their tenant's that wait.

        `waiting`: int64[tenants * LANES], requests that wait. None while there is no L.
        """
        if self.lag_ns <= 0:
            return None
        ahead = np.empty(waiting.size, np.bool_)
        mark_ahead(self.lane_counter, self.lane_claims, self.lane_floor, waiting, self.lag_ns, ahead)
        return ahead

    def settle(self, entries: Records, waiting: I64, reachable: I64, limits: F64) -> None:
        """Close the books of a slot: who wanted more than it got can claim it later, nobody else can.

        A tenant that comes to want more is lifted to the largest there has been of the least counters
        among tenants that wanted more, or, where nobody did, of the counters of those that were served.
        So nobody collects credit while it has no use for it, and nobody owes for time that nobody else
        wanted. Lanes of a tenant likewise. See `docs/fairness.md` for what follows.

        Args:
            entries: ENTRY[n] with their answers.
            waiting: int64[tenants * LANES], requests that wait.
            reachable: the same without those whose adapter can't be had.
            limits: float64[N_LIMITS], what the slot left.
        """
        if not self.names:
            return
        lanes: Bool = np.zeros((3, self.lane_counter.size), np.bool_)
        tenants: Bool = np.zeros((3, self.counter.size), np.bool_)
        close_books(
            entries, waiting, reachable, limits, lanes, tenants, self.counter, self.claims, self.floor,
            self.lane_counter, self.lane_claims, self.lane_floor,
        )  # fmt: skip

    def observe_slot(self, measured_ns: float) -> None:
        """Learn how long a slot takes: the lags are multiples of the mean.

        The first slot sets the scale, later ones move it slowly.
        """
        rate = 1.0 if self._mean_slot_ns == 0.0 else 0.01
        self._mean_slot_ns += rate * (measured_ns - self._mean_slot_ns)

    def gap_ns(self) -> float:
        """How far the tenant furthest ahead is before the least of those that want more, ns per weight."""
        return widest_gap(self.counter, self.open_requests, self.claims)

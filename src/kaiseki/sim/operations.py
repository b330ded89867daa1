"""What happens to a fleet while it serves: failures, recoveries, and pools that grow and shrink."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal, NamedTuple

from kaiseki.sim.cluster import Happens, Scale
from kaiseki.sim.replica import SimReplica

What = Literal["fail", "drain", "recover", "look"]


class Change(NamedTuple):
    """Something that is done to a replica, or the time to look at the load of its pool."""

    at_ns: int
    order: int
    what: What
    replica: int


def wanted(demands: Sequence[float], starting: int, scale: Scale) -> int:
    """How many replicas a pool should have more (1), fewer (-1), or neither (0).

    One is taken out only if those that are left could do with the whole load, so that a pool never shrinks to
    a size at which it would grow again: as `in_below <= out_above`, a steady load moves it one way only.

    Args:
        demands: of each replica that takes requests.
        starting: replicas that will do so soon.
        scale: limits.
    """
    total, count = sum(demands), len(demands) + starting
    if count < scale.most and (count < scale.least or total > scale.out_above * count):
        return 1
    if starting == 0 and count > scale.least and total < scale.in_below * (count - 1):
        return -1
    return 0


class Operations:
    """Changes to come, in order of time.

    Args:
        replicas: the fleet; those that take no requests now are spare.
        events: what will happen in any case.
    """

    def __init__(self, replicas: Sequence[SimReplica], events: Sequence[Happens]) -> None:
        self._replicas = replicas
        self._order = 0
        self._heap: list[Change] = []
        self._starting: set[int] = set()
        places = {(r.description.pool.name, r.description.number): i for i, r in enumerate(replicas)}
        for event in events:
            self._add(round(event.at_s * 1e9), event.what, places[event.pool, event.replica])
        for i, replica in enumerate(replicas):
            scale = replica.description.pool.scale
            if replica.description.number == 0 and scale is not None:
                self._add(round(scale.every_s * 1e9), "look", i)  # at 0 every pool looks idle

    def _add(self, at_ns: int, what: What, replica: int) -> None:
        self._order += 1
        heapq.heappush(self._heap, Change(at_ns, self._order, what, replica))

    def next_ns(self) -> int | None:
        """When the next one is due."""
        return self._heap[0].at_ns if self._heap else None

    @property
    def will_help(self) -> bool:
        """Whether a replica may yet come (back)."""
        spare = any(r.description.pool.scale and not r.up and not r.failed for r in self._replicas)
        return spare or any(change.what == "recover" for change in self._heap)

    def pop(self) -> Change | None:
        """The next change, which is due; None where it was only time to look."""
        change = heapq.heappop(self._heap)
        if change.what == "look":
            self._look(change)
            return None
        self._starting.discard(change.replica)
        return change

    def _look(self, change: Change) -> None:
        """See whether a pool should have another size."""
        pool = self._replicas[change.replica].description.pool
        assert pool.scale is not None
        mine = [i for i, r in enumerate(self._replicas) if r.description.pool.name == pool.name]
        up = [i for i in mine if self._replicas[i].up]
        starting = [i for i in mine if i in self._starting]
        more = wanted([self._replicas[i].load().demand for i in up], len(starting), pool.scale)
        idle = [i for i in mine if i not in up and i not in starting and not self._replicas[i].failed]
        if more > 0 and idle:
            self._starting.add(idle[0])
            self._replicas[idle[0]].power_on(change.at_ns)
            self._add(change.at_ns + round(pool.scale.start_s * 1e9), "recover", idle[0])
        elif more < 0 and len(up) > 1:
            fewest = min(up, key=lambda i: self._replicas[i].open_requests)
            self._add(change.at_ns, "drain", fewest)
        self._add(change.at_ns + round(pool.scale.every_s * 1e9), "look", change.replica)

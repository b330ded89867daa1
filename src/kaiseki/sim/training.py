"""Training that shares the cards: a tenant which always has its next step to do."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from kaiseki.core.requests import OnLate, Request, ServiceClass
from kaiseki.sim.arrivals import Arrival, Arrivals
from kaiseki.sim.cluster import Training
from kaiseki.sim.engine import Work
from kaiseki.sim.replica import SimReplica

CLASS = "training"


class Step(NamedTuple):
    """One step on one replica, ns."""

    replica: int
    began_ns: int
    ended_ns: int


def training_class(section: Training) -> ServiceClass:
    """What its steps are promised: each ends in time for so many per second; late ones are done as well."""
    return ServiceClass(CLASS, deadline_ns=round(1e9 / section.steps_per_s), on_late=OnLate.KEEP)


class WithTraining:
    """A stream of requests, and training steps beside them for as long as any of them is to come or open.

    A step is a prompt of so many tokens of which nothing is kept, so it is split over slots, bounded by the
    targets of those it shares them with, and charged to its tenant. A replica's next one comes when the last
    has ended.

    Args:
        arrivals: the requests.
        section: what is trained.
        replicas: the fleet.
    """

    def __init__(self, arrivals: Arrivals, section: Training, replicas: Sequence[SimReplica]) -> None:
        self._arrivals = arrivals
        self._section = section
        self._class = training_class(section)
        mine = [i for i, r in enumerate(replicas) if r.description.pool.name == section.pool]
        self._due = [(0, i) for i in mine]
        self._under_way: dict[int, tuple[int, int]] = {}  # by position: when it came, and where
        self._open = 0
        self.steps: list[Step] = []

    def next_ns(self) -> int | None:
        """When the next request or step comes."""
        arrives = self._arrivals.next_ns()
        steps = self._due[0][0] if self._due and (arrives is not None or self._open) else None
        return min((when for when in (arrives, steps) if when is not None), default=None)

    def pop(self) -> Arrival:
        """The next one; steps have positions below 0 and a replica of their own."""
        arrives = self._arrivals.next_ns()
        if not self._due or (arrives is not None and arrives <= self._due[0][0]):
            self._open += 1
            return self._arrivals.pop()
        when, replica = heapq.heappop(self._due)
        position = -1 - len(self.steps) - len(self._under_way)
        self._under_way[position] = when, replica
        request = Request(
            f"step{-position}", self._section.tokens, 1, self._section.tenant, self._class, when, min_tokens=1
        )
        return Arrival(position, request, Work(self._section.tokens, 1), 0, replica)

    def ended(self, position: int, now: int, followers: int) -> None:
        """A request or step is over."""
        if position >= 0:
            self._open -= 1
            self._arrivals.ended(position, now, followers)
            return
        began, replica = self._under_way.pop(position)
        self.steps.append(Step(replica, began, now))
        heapq.heappush(self._due, (now, replica))

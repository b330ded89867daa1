"""The event loop: arrivals are routed, steps begin and end, until nothing is open."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from kaiseki.core.admission import Refusal
from kaiseki.core.decision import F64, I32
from kaiseki.core.lifecycle import Ending
from kaiseki.core.requests import Request
from kaiseki.engines.clock import VirtualClock
from kaiseki.sim.arrivals import Arrival, Arrivals
from kaiseki.sim.replica import Happened, SimReplica
from kaiseki.sim.routers import Router

STUCK_NS = 600_000_000_000
"""A replica with open requests that grants nothing for so long will not do so later."""


class Stuck(RuntimeError):
    """A replica has requests and grants none of them anything."""


@dataclass(slots=True)
class Log:
    """What happened, for the figures.

    Attributes:
        endings: how each request ended, with its request.
        refusals: what was refused at once.
        gaps: float64 ns between tokens; gap_cls, gap_tenant: int32, whose, parallel to them.
        fairness_gap_ns, fairness_bound_ns: the largest there were, ns of card time per unit of weight.
        first_ns, last_ns: of arrivals.
        ended_ns: when the last request ended.
    """

    endings: list[tuple[Request, Ending]] = field(default_factory=list)
    refusals: list[tuple[Request, Refusal]] = field(default_factory=list)
    gaps: list[F64] = field(default_factory=list)
    gap_cls: list[I32] = field(default_factory=list)
    gap_tenant: list[I32] = field(default_factory=list)
    fairness_gap_ns: float = 0.0
    fairness_bound_ns: float = 0.0
    first_ns: int = -1
    last_ns: int = 0
    ended_ns: int = 0


class Simulation:
    """One run of a stream on a fleet.

    Args:
        arrivals: the load.
        replicas: the fleet, all on `clock`.
        router: where requests go.
        clock: moved by this loop.
    """

    def __init__(
        self, arrivals: Arrivals, replicas: Sequence[SimReplica], router: Router, clock: VirtualClock
    ) -> None:
        self._arrivals = arrivals
        self._replicas = replicas
        self._router = router
        self._clock = clock
        self._events: list[tuple[int, int]] = []  # (time, replica); stale ones do no harm
        self._due: list[int | None] = [None] * len(replicas)
        self._progress_ns = [0] * len(replicas)
        self._open: dict[str, Arrival] = {}
        self.log = Log()

    def run(self) -> Log:
        """Until everything has arrived and ended.

        Raises:
            Stuck: requests are left that no replica will ever run.
        """
        while True:
            arrives = self._arrivals.next_ns()
            happens = self._events[0][0] if self._events else None
            if arrives is None and happens is None:
                return self.log
            if happens is None or (arrives is not None and arrives < happens):
                assert arrives is not None
                self._clock.advance_to(arrives)
                self._arrive(self._arrivals.pop())
            else:
                when, i = heapq.heappop(self._events)
                self._clock.advance_to(when)
                if self._due[i] == when:
                    self._due[i] = None
                    self._turn(i)

    def _arrive(self, arrival: Arrival) -> None:
        log, now = self.log, self._clock.now_ns()
        log.first_ns = now if log.first_ns < 0 else log.first_ns
        log.last_ns = now
        i = self._router(arrival.request, self._replicas) if len(self._replicas) > 1 else 0
        replica = self._replicas[i]
        if not replica.open_requests:
            self._progress_ns[i] = now
        refusal = replica.submit(arrival.request, arrival.work)
        if refusal is not None:
            log.refusals.append((arrival.request, refusal))
            self._arrivals.ended(arrival.position, now, arrival.expects_followers)
            return
        self._open[arrival.request.id] = arrival
        if self._due[i] is None or replica.engine.next_end_ns() is None:
            self._turn(i)

    def _turn(self, i: int) -> None:
        """Collect what has ended on a replica, decide what can begin, and note when to come back."""
        replica, now = self._replicas[i], self._clock.now_ns()
        while True:
            ends = replica.engine.next_end_ns()
            if ends is None or ends > now:
                break
            self._take(replica.end())
            self._progress_ns[i] = now
        self._close(replica.begin())
        self._watch_fairness(replica)
        due = self._due[i] = replica.next_ns()
        if due is not None:
            if now - self._progress_ns[i] > STUCK_NS:
                raise Stuck(f"replica {i}: {replica.open_requests} requests are open and get nothing")
            heapq.heappush(self._events, (due, i))

    def _take(self, happened: Happened) -> None:
        tokens = happened.tokens
        later = tokens[~tokens["first"]]
        if later.size:
            self.log.gaps.append(later["ns"].copy())
            self.log.gap_cls.append(later["cls"].copy())
            self.log.gap_tenant.append(later["tenant"].copy())
        self._close(happened.endings)

    def _close(self, endings: list[Ending]) -> None:
        for ending in endings:
            arrival = self._open.pop(ending.request_id)
            self.log.endings.append((arrival.request, ending))
            self.log.ended_ns = ending.ended_ns
            self._arrivals.ended(arrival.position, ending.ended_ns, arrival.expects_followers)

    def _watch_fairness(self, replica: SimReplica) -> None:
        fair, log = replica.scheduler.fairness, self.log
        log.fairness_gap_ns = max(log.fairness_gap_ns, fair.gap_ns())
        log.fairness_bound_ns = max(log.fairness_bound_ns, fair.hard_lag_ns)

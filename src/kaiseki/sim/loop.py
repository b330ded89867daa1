"""The event loop: arrivals are routed, steps begin and end, until nothing is open."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from kaiseki.core.admission import Refusal
from kaiseki.core.decision import F64, I32
from kaiseki.core.endings import Ending
from kaiseki.core.requests import Request
from kaiseki.engines.clock import VirtualClock
from kaiseki.sim.arrivals import Arrival, Arrivals
from kaiseki.sim.engine import Work
from kaiseki.sim.front import Front
from kaiseki.sim.handover import Handover
from kaiseki.sim.links import Link
from kaiseki.sim.lives import Past, never_served
from kaiseki.sim.operations import Operations
from kaiseki.sim.replica import Happened, SimReplica
from kaiseki.sim.training import Step, WithTraining
from kaiseki.sim.wan import Distance

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
        changes: of the fleet: when, what, and to which replica.
        retried: how often a request lost its replica and went to another one.
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
    changes: list[tuple[int, str, int]] = field(default_factory=list)
    retried: int = 0


class Simulation:
    """One run of a stream on a fleet.

    Args:
        arrivals: the load.
        replicas: the fleet, all on `clock`.
        front: says where requests go, among replicas that compute prompts.
        clock: moved by this loop.
        handover: takes requests from prefill replicas on, if there are any.
        operations: what happens to the fleet meanwhile.
        distance: between clusters, if there are several.

    Attributes:
        replicas: the fleet.
        log: what has happened so far.
    """

    def __init__(
        self,
        arrivals: Arrivals | WithTraining,
        replicas: Sequence[SimReplica],
        front: Front,
        clock: VirtualClock,
        handover: Handover | None = None,
        operations: Operations | None = None,
        distance: Distance | None = None,
    ) -> None:
        self._arrivals = arrivals
        self.replicas = replicas
        self._entries = [i for i, r in enumerate(replicas) if r.description.pool.role != "decode"]
        self._front = front
        self._handover = handover
        self._operations = operations
        self._distance = distance
        self._clock = clock
        self._events: list[tuple[int, int]] = []  # (time, replica); stale ones do no harm
        self._due: list[int | None] = [None] * len(replicas)
        self._progress_ns = [0] * len(replicas)
        self._open: dict[str, Arrival] = {}
        self._homeless: list[Arrival] = []  # no replica takes requests
        self._pasts: dict[str, Past] = {}
        self.log = Log()

    @property
    def links(self) -> dict[tuple[str, str], Link]:
        """Between pools, by their names; none where all replicas are whole."""
        return {} if self._handover is None else self._handover.links

    @property
    def steps(self) -> list[Step]:
        """Of training, that ended."""
        return self._arrivals.steps if isinstance(self._arrivals, WithTraining) else []

    def run(self) -> Log:
        """Until everything has arrived and ended.

        Raises:
            Stuck: requests are left that no replica will ever run.
        """
        while True:
            arrives = self._arrivals.next_ns()
            happens = self._events[0][0] if self._events else None
            lands = self._handover.next_ns() if self._handover is not None else None
            travels = self._distance.next_ns() if self._distance is not None else None
            due = min((when for when in (arrives, happens, lands, travels) if when is not None), default=None)
            changes = self._operations.next_ns() if self._operations is not None else None
            helps = self._homeless and self._operations is not None and self._operations.will_help
            if due is None and not helps:
                self._give_up()
                return self.log
            if changes is not None and (due is None or changes <= due):
                self._clock.advance_to(changes)
                self._operate()
                continue
            assert due is not None
            self._clock.advance_to(due)
            if due == happens:
                _, i = heapq.heappop(self._events)
                if self._due[i] == due:
                    self._due[i] = None
                    self._turn(i)
            elif due == arrives:
                self._arrive(self._arrivals.pop())
            elif self._distance is not None and due == travels:
                self._travel(self._distance)
            if self._handover is not None:
                self._hand_over(self._handover)

    def _hand_over(self, handover: Handover) -> None:
        """Move KV on, and let replicas go on that got some or have room since."""
        now = self._clock.now_ns()
        for i in dict.fromkeys(handover.advance(now)):
            self._progress_ns[i] = now
            self._wake(i)
        handover.start(now)

    def _arrive(self, arrival: Arrival) -> None:
        log, now = self.log, self._clock.now_ns()
        if arrival.position >= 0:
            log.first_ns = now if log.first_ns < 0 else log.first_ns
            log.last_ns = now
        self._place(arrival)

    def _place(self, arrival: Arrival) -> None:
        """Give a request to a replica, at once or when the slot ends."""
        if self._distance is not None and arrival.replica is None:
            self._distance.hold(arrival, self._clock.now_ns())
            return
        i = self._choose(arrival)
        if i is not None:
            self._give(arrival, i)

    def _travel(self, distance: Distance) -> None:
        """Place what came in a slot that ends, and let run what has come to where it runs."""
        now = self._clock.now_ns()
        for arrival in distance.to_place(now):
            i = self._choose(arrival, distance.away_ns(arrival))
            if i is not None:
                distance.send(arrival, i, now)
        for arrival, i in distance.landed(now):
            if self.replicas[i].up:
                self._give(arrival, i)
            else:
                distance.hold(arrival, now)

    def _choose(self, arrival: Arrival, away_ns: Sequence[int] | None = None) -> int | None:
        """A replica for a request; where none takes any the request waits for one."""
        entries = self._entries if arrival.replica is None else [arrival.replica]
        may = [i for i in entries if self.replicas[i].up]
        if not may:
            self._homeless.append(arrival)
            return None
        return self._front.choose(arrival.request, may, self._clock.now_ns(), away_ns)

    def _give(self, arrival: Arrival, i: int) -> None:
        """Queue a request on a replica, or note why it is refused."""
        log, now = self.log, self._clock.now_ns()
        if not self.replicas[i].open_requests:
            self._progress_ns[i] = now
        refusal = self._submit(arrival, i)
        if refusal is not None:
            log.refusals.append((arrival.request, refusal))
            self._arrivals.ended(arrival.position, now, arrival.expects_followers)
            return
        self._open[arrival.request.id] = arrival
        self._wake(i)

    def _submit(self, arrival: Arrival, i: int) -> Refusal | None:
        """Queue a request on a replica, or only its first part, or say why not."""
        replica, request, work = self.replicas[i], arrival.request, arrival.work
        if self._handover is not None and replica.description.pool.role == "prefill":
            refusal = self._handover.refuses(request)
            if refusal is not None:
                return refusal
            request, work = self._handover.first_part(request), Work(work.prompt_tokens, 1)
        return replica.submit(request, work)

    def _wake(self, i: int) -> None:
        """Look at a replica that may have more to do, unless it will be looked at when its step ends."""
        if self._due[i] is None or self.replicas[i].engine.next_end_ns() is None:
            self._turn(i)

    def _turn(self, i: int) -> None:
        """Collect what has ended on a replica, decide what can begin, and note when to come back."""
        replica, now = self.replicas[i], self._clock.now_ns()
        while True:
            ends = replica.engine.next_end_ns()
            if ends is None or ends > now:
                break
            self._take(replica.end(), i)
            self._progress_ns[i] = now
        self._close(replica.begin(), i)
        self._watch_fairness(replica)
        if not replica.up:
            replica.rest()
        due = self._due[i] = replica.next_ns()
        if due is not None:
            if now - self._progress_ns[i] > STUCK_NS:
                raise Stuck(f"replica {i}: {replica.open_requests} requests are open and get nothing")
            heapq.heappush(self._events, (due, i))

    def _take(self, happened: Happened, i: int) -> None:
        tokens = happened.tokens
        later = tokens[~tokens["first"]]
        if later.size:
            self.log.gaps.append(later["ns"].copy())
            self.log.gap_cls.append(later["cls"].copy())
            self.log.gap_tenant.append(later["tenant"].copy())
        self._close(happened.endings, i)

    def _close(self, endings: list[Ending], i: int) -> None:
        for part in endings:
            arrival, ending = self._open[part.request_id], part
            if self._handover is not None:
                if self._handover.takes(arrival.request, part, i):
                    continue
                ending = self._handover.whole(part)
            del self._open[ending.request_id]
            past = self._pasts.pop(ending.request_id, None)
            if past is not None:
                ending = past.whole(ending)
            if arrival.position >= 0:
                self.log.endings.append((arrival.request, ending))
                self.log.ended_ns = ending.ended_ns
            self._arrivals.ended(arrival.position, ending.ended_ns, arrival.expects_followers)

    def _operate(self) -> None:
        """Carry out the next change of the fleet, which is due."""
        assert self._operations is not None
        change = self._operations.pop()
        if self._handover is not None:
            self._hand_over(self._handover)
        if change is None:
            return
        i, replica = change.replica, self.replicas[change.replica]
        self.log.changes.append((change.at_ns, change.what, i))
        if change.what == "fail":
            self._fail(i)
        elif change.what == "drain":
            replica.drain()
        else:
            replica.recover()
            homeless, self._homeless = self._homeless, []
            for arrival in homeless:
                self._place(arrival)

    def _fail(self, i: int) -> None:
        """A replica is gone with all its KV: what it had to do is done anew elsewhere, oldest first."""
        parts = {} if self._handover is None else {left.request_id: left for left in self._handover.lose(i)}
        whole = {left.request_id: left for left in self.replicas[i].fail()}
        self._due[i] = None
        for name in sorted({**parts, **whole}, key=lambda name: self._open[name].position):
            arrival = self._open.pop(name)
            past = self._pasts.setdefault(name, Past())
            for left in (parts.get(name), whole.get(name)):
                if left is not None:
                    past.add(left)
            left = whole.get(name) or parts[name]
            request = left.going_on(arrival.request)
            work = Work(request.prompt_tokens, request.max_tokens - left.outputs)
            self.log.retried += 1
            self._place(arrival._replace(request=request, work=work))

    def _give_up(self) -> None:
        """Nothing will happen any more: what is left has no replica to run on."""
        for arrival in (*self._homeless, *self._open.values()):
            if arrival.position < 0:
                continue
            self.log.endings.append((arrival.request, never_served(arrival.request, self._clock.now_ns())))
        self._homeless, self._open = [], {}

    def _watch_fairness(self, replica: SimReplica) -> None:
        fair, log = replica.scheduler.fairness, self.log
        log.fairness_gap_ns = max(log.fairness_gap_ns, fair.gap_ns())
        log.fairness_bound_ns = max(log.fairness_bound_ns, fair.hard_lag_ns)

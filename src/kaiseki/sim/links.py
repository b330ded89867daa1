"""A link between two pools: transfers share its bandwidth, within what the scheduler may plan."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from kaiseki.sim.cluster import Links


@dataclass(slots=True)
class Transfer:
    """The KV of one request on its way.

    Attributes:
        request_id: whose.
        size_bytes: how much.
        asked_ns, started_ns, landed_ns: when it could have begun, began, and was complete.
    """

    request_id: str
    size_bytes: float
    asked_ns: int
    started_ns: int = -1
    landed_ns: int = -1


class Link:
    """Transfers under way and what is known of them.

    The scheduler plans with (1 - headroom) of the bandwidth, in equal shares for all transfers that it
    believes to be under way. It starts them itself, so that it knows of every start at once; of an end it
    hears `feedback_us` later. Until then the share stays planned, and counts in `max_active`: what is planned
    is never less than what is sent.

    Args:
        section: bandwidth and limits.

    Attributes:
        budget: what may be planned, bytes per ns.
        moved: every transfer that has landed, in order.
        peak_gb_s: the highest sum of rates there was.
        most_active: most transfers under way at once.
    """

    def __init__(self, section: Links) -> None:
        self.budget = section.gb_s * (1.0 - section.headroom)  # GB/s are bytes per ns
        self._max_active = section.max_active
        self._latency_ns = round(section.latency_us * 1e3)
        self._feedback_ns = round(section.feedback_us * 1e3)
        self._active: list[tuple[float, int, Transfer]] = []  # by the service at which all is sent
        self._started = 0
        self._service = 0.0  # bytes sent by a transfer that is under way since the link was idle last
        self._at_ns = 0
        self._unknown: deque[int] = deque()  # when the scheduler hears of transfers that have been sent
        self._flying: deque[tuple[int, Transfer]] = deque()  # sent, and landing then
        self.moved: list[Transfer] = []
        self.peak_gb_s = 0.0
        self.most_active = 0

    @property
    def planned(self) -> int:
        """Transfers that the scheduler believes to be under way."""
        return len(self._active) + len(self._unknown)

    @property
    def backlog_ns(self) -> float:
        """Until what is under way is sent, as of the last event."""
        return sum(upto - self._service for upto, _, _ in self._active) / self.budget

    def can_start(self) -> bool:
        """Whether one more transfer may be under way."""
        return self.planned < self._max_active

    def start(self, transfer: Transfer, now: int) -> None:
        """Begin to send; `advance` has been called up to `now`, and `can_start` said so."""
        if not self._active:
            self._service, self._at_ns = 0.0, now
        transfer.started_ns = now
        heapq.heappush(self._active, (self._service + transfer.size_bytes, self._started, transfer))
        self._started += 1
        self.most_active = max(self.most_active, len(self._active))

    def next_ns(self) -> int | None:
        """When something happens here next: all is sent, known or landed of one transfer."""
        times = [self._sent_ns()] if self._active else []
        times += [self._unknown[0]] if self._unknown else []
        times += [self._flying[0][0]] if self._flying else []
        return min(times, default=None)

    def _sent_ns(self) -> int:
        """When all of the transfer is sent that has least to send."""
        return self._at_ns + math.ceil(max(self._active[0][0] - self._service, 0.0) / self._rate())

    def _rate(self) -> float:
        """Bytes per ns of each transfer under way."""
        return self.budget / self.planned

    def cancel(self, transfer: Transfer) -> None:
        """Send no more of a transfer that has begun; `advance` has been called up to now."""
        self._active = [one for one in self._active if one[2] is not transfer]
        heapq.heapify(self._active)
        self._flying = deque(one for one in self._flying if one[1] is not transfer)

    def advance(self, now: int) -> list[Transfer]:
        """Let time pass up to `now`. Returns transfers that landed."""
        before = len(self.moved)
        while (due := self.next_ns()) is not None and due <= now:
            self._pass(due)
            while self._active and self._sent_ns() == due:
                _, _, transfer = heapq.heappop(self._active)
                self._flying.append((due + self._latency_ns, transfer))
                self._unknown.append(due + self._feedback_ns)
            while self._unknown and self._unknown[0] <= due:
                self._unknown.popleft()
            while self._flying and self._flying[0][0] <= due:
                transfer = self._flying.popleft()[1]
                transfer.landed_ns = due
                self.moved.append(transfer)
        self._pass(now)
        return self.moved[before:]

    def _pass(self, until_ns: int) -> None:
        """Send at the present rate until then."""
        if self._active and until_ns > self._at_ns:
            self.peak_gb_s = max(self.peak_gb_s, len(self._active) * self._rate())
            self._service += (until_ns - self._at_ns) * self._rate()
        self._at_ns = until_ns

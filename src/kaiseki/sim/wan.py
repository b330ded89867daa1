"""Clusters far apart: requests are placed once per slot, and travel to where they run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kaiseki.sim.arrivals import Arrival
from kaiseki.sim.cluster import Wan
from kaiseki.sim.replica import SimReplica


class Distance:
    """Requests between the cluster in which they come and the one in which they run.

    All that came in a slot are placed at its end. Who runs elsewhere is there a latency later, and each of
    its tokens takes that again on the way back: for the scheduler such a request came so much earlier, so
    that targets hold where its client is.

    Args:
        section: how far, and how long slots are.
        shares: part of the requests that come in each cluster.
        replicas: the fleet.
        seed: of where requests come.
    """

    def __init__(
        self, section: Wan, shares: Sequence[float], replicas: Sequence[SimReplica], seed: int
    ) -> None:
        self._latency_ns = round(section.latency_ms * 1e6)
        self._slot_ns = round(section.slot_ms * 1e6)
        self._shares = np.array(shares) / sum(shares)
        self._sites = [replica.description.site for replica in replicas]
        self._rng = np.random.default_rng(seed)
        self._homes: dict[str, int] = {}
        self._back_ns: dict[str, int] = {}  # what was taken off a request's arrival
        self._held: list[Arrival] = []
        self._slot_end_ns = 0
        self._travelling: list[tuple[int, int, Arrival, int]] = []
        self._sent = 0
        self.moved = 0

    def hold(self, arrival: Arrival, now: int) -> None:
        """Keep a request, new or back from a replica that failed, until the slot ends."""
        if not self._held:
            self._slot_end_ns = (now // self._slot_ns + 1) * self._slot_ns
        self._held.append(arrival)

    def next_ns(self) -> int | None:
        """When a slot ends or a request is where it runs."""
        times = [self._slot_end_ns] if self._held else []
        times += [self._travelling[0][0]] if self._travelling else []
        return min(times, default=None)

    def to_place(self, now: int) -> list[Arrival]:
        """Requests of the slot that ends now."""
        if not self._held or now < self._slot_end_ns:
            return []
        held, self._held = self._held, []
        return held

    def away_ns(self, arrival: Arrival) -> list[int]:
        """What each replica adds for a request, there and back."""
        home = self._home(arrival)
        return [0 if site == home else 2 * self._latency_ns for site in self._sites]

    def send(self, arrival: Arrival, replica: int, now: int) -> None:
        """Let a request go to a replica."""
        name, request = arrival.request.id, arrival.request
        far = self._sites[replica] != self._home(arrival)
        back = self._latency_ns if far else 0
        came = request.arrival_ns + self._back_ns.pop(name, 0) - back
        self._back_ns[name] = back
        self.moved += far
        self._sent += 1
        arrival = arrival._replace(request=replace(request, arrival_ns=came))
        heapq.heappush(self._travelling, (now + back, self._sent, arrival, replica))

    def landed(self, now: int) -> list[tuple[Arrival, int]]:
        """Requests that are where they run."""
        there = []
        while self._travelling and self._travelling[0][0] <= now:
            _, _, arrival, replica = heapq.heappop(self._travelling)
            there.append((arrival, replica))
        return there

    def _home(self, arrival: Arrival) -> int:
        home = self._homes.get(arrival.request.id)
        if home is None:
            home = self._homes[arrival.request.id] = int(self._rng.choice(self._shares.size, p=self._shares))
        return home

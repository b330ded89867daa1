"""Which replica a request goes to: the ways that are in use, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kaiseki.core.requests import Request
from kaiseki.sim.replica import SimReplica

Router = Callable[[Request, Sequence[SimReplica]], int]


def round_robin(seed: int) -> Router:
    """One after the other."""
    turn = seed - 1

    def route(request: Request, replicas: Sequence[SimReplica]) -> int:
        nonlocal turn
        turn += 1
        return turn % len(replicas)

    return route


def at_random(seed: int) -> Router:
    """Any."""
    rng = np.random.default_rng(seed)

    def route(request: Request, replicas: Sequence[SimReplica]) -> int:
        return int(rng.integers(len(replicas)))

    return route


def least_outstanding(seed: int) -> Router:
    """The one with the fewest open requests."""

    def route(request: Request, replicas: Sequence[SimReplica]) -> int:
        return min(range(len(replicas)), key=lambda i: replicas[i].open_requests)

    return route


def least_work(seed: int) -> Router:
    """The one whose uncomputed prompts take least time."""

    def route(request: Request, replicas: Sequence[SimReplica]) -> int:
        return min(range(len(replicas)), key=lambda i: (replicas[i].load_ns(), replicas[i].open_requests))

    return route


def prefix_aware(seed: int) -> Router:
    """The one that last got a request with the longest common prefix; without any, the fewest open requests.

    It remembers where it sent what, and does not ask what is still cached.
    """
    sent: dict[bytes, int] = {}
    fallback = least_outstanding(seed)

    def route(request: Request, replicas: Sequence[SimReplica]) -> int:
        to = next((sent[d] for d in reversed(request.block_hashes) if d in sent), None)
        if to is None:
            to = fallback(request, replicas)
        sent.update(dict.fromkeys(request.block_hashes, to))
        return to

    return route


ROUTERS: dict[str, Callable[[int], Router]] = {
    "random": at_random,
    "round-robin": round_robin,
    "least-outstanding": least_outstanding,
    "least-work": least_work,
    "prefix-aware": prefix_aware,
}

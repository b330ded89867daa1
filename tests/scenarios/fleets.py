"""Fleets of small replicas for scenarios about routers: how requests spread over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kaiseki.policies.registry import load as policy
from kaiseki.sim import cluster
from kaiseki.sim.loop import Simulation
from kaiseki.sim.run import Case, build
from kaiseki.work import classes
from kaiseki.work.batches import Batch, Blocks
from kaiseki.work.shaping import Shape

PLAN = "classes: {chat: {ttft_ms: 2000, tbt_ms: 200}}\ntenants: {all: {class: chat}}\nassign: [{tenant: all}]"
FLEET = """
model: llama-3-8b
pools: [{{name: main, card: h100, replicas: {replicas}, kv_blocks: {blocks}{scale}}}]
{more}
"""


def fleet(
    batch: Batch,
    router: str,
    replicas: int = 8,
    blocks: int = 20_000,
    more: str = "",
    scale: str = "",
    plan: str = PLAN,
) -> Case:
    """A load on equal replicas behind a router."""
    described = cluster.parse(
        FLEET.format(
            replicas=replicas, blocks=blocks, more=more, scale=f", scale: {{{scale}}}" if scale else ""
        )
    )

    def stream(shape: Shape) -> Iterator[Batch]:
        return shape.apply([batch])

    fleet = cluster.fleet(described)
    return Case(stream, classes.parse(plan), fleet, router=router, routers=described.routers)


class Watched:
    """A run, with where each request went."""

    def __init__(
        self, case: Case, name: str = "fcfs", each_request: Callable[[Watched], None] | None = None
    ) -> None:
        self.each_request = each_request
        self.simulation: Simulation = build(case, policy(name))
        self.went: list[tuple[int, int]] = []
        for i, replica in enumerate(self.simulation.replicas):
            replica.submit = self._noting(i, replica.submit)  # type: ignore[method-assign, assignment]
        self.log = self.simulation.run()

    def _noting(self, i, submit):
        def noted(request, work):
            self.went.append((request.arrival_ns, i))
            if self.each_request is not None:
                self.each_request(self)
            return submit(request, work)

        return noted

    def shares(self) -> list[int]:
        """Requests that each replica got."""
        return np.bincount([i for _, i in self.went], minlength=len(self.simulation.replicas)).tolist()

    def busiest_in_any_second(self) -> float:
        """The most over the mean of what replicas got, over all seconds."""
        at, where = np.array(self.went).T
        second = at // 10**9
        counts = np.zeros((second.max() + 1, len(self.simulation.replicas)))
        np.add.at(counts, (second, where), 1)
        counts = counts[:-1] if counts.shape[0] > 1 else counts  # the last one is no whole second
        return float((counts.max(axis=1) / counts.mean(axis=1)).max())

    def hit_rate(self) -> float:
        """Prompt tokens that needed no computing, of all."""
        endings = [e for _, e in self.log.endings]
        return sum(e.cached for e in endings) / sum(e.prompt for e in endings)


def poisson(requests: int, rate_rps: float, seed: int = 0) -> np.ndarray:
    """Arrival times, ns."""
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.exponential(1e9 / rate_rps, requests)).astype(np.int64)


def prefixed(
    arrivals: np.ndarray, shared_tokens: int, own_tokens: int, outputs: int, page: int = 16
) -> Batch:
    """Prompts that all begin alike and differ at their ends."""
    n, alike, own = len(arrivals), shared_tokens // page, own_tokens // page
    first = np.arange(alike)
    rows = [np.concatenate([first, alike + i * own + np.arange(own)]) for i in range(n)]
    return Batch.of(
        0, arrivals, np.full(n, shared_tokens + own_tokens), np.full(n, outputs), blocks=Blocks.of(rows, page)
    )

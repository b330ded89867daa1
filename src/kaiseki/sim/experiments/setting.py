"""Loads and fleets of experiments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kaiseki.sim import cluster as clusters
from kaiseki.sim.cluster import Cluster
from kaiseki.sim.run import Case, Stream
from kaiseki.work import classes
from kaiseki.work.arrivals import poisson
from kaiseki.work.batches import Batch
from kaiseki.work.catalogue import Workload
from kaiseki.work.lengths import Lengths
from kaiseki.work.oneshot import OneShot
from kaiseki.work.shaping import Shape

SEED = 1
CHATS = """
classes:
  chat: {ttft_ms: 1000, ttft_per_lone: 3, tbt_ms: 250}
assign:
  - {class: chat}
"""
"""Chats across a fleet in two parts: a TTFT that leaves time for the way, one class, one tenant."""


def of_lengths(prompt: Lengths, output: Lengths, rps: float) -> Stream:
    """Poisson arrivals of requests with such lengths."""
    return generated(OneShot(poisson(rps), prompt, output))


def generated(workload: Workload) -> Stream:
    """A generated workload as a stream."""

    def stream(shape: Shape) -> Iterator[Batch]:
        return shape.apply(workload.stream(SEED))

    return stream


def case_on(cluster: Cluster, stream: Stream, plan: str, requests: int, scale: float = 1.0) -> Case:
    """A load on a fleet.

    Args:
        cluster: the fleet.
        stream: the load.
        plan: a classes file's text, or the name of one that comes along.
        requests: how many.
        scale: arrivals come so many times as fast.
    """
    found = classes.parse(plan) if "\n" in plan else classes.load(plan)
    shape = Shape(rate_scale=scale, requests=requests)
    return Case(stream, found, clusters.fleet(cluster), shape, links=cluster.links, routers=cluster.routers)


def with_pools(cluster: Cluster, **changes: Any) -> Cluster:
    """The same fleet with something else in each of its pools."""
    pools = [pool.model_copy(update=changes) for pool in cluster.pools or ()]
    return cluster.model_copy(update={"pools": pools})


def with_links(cluster: Cluster, **changes: Any) -> Cluster:
    """The same fleet with other links."""
    assert cluster.links is not None
    return cluster.model_copy(update={"links": cluster.links.model_copy(update=changes)})

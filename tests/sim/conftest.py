"""A small fleet and small loads, so that a simulation takes a blink."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.sim.loads import PLAN, load

from kaiseki.sim import cluster
from kaiseki.sim.run import Case
from kaiseki.work import classes
from kaiseki.work.batches import Batch
from kaiseki.work.shaping import Shape

CLUSTER = """
model: llama-3-8b
pools:
  - {name: main, card: a100-80, replicas: %d, tp: 1, pp: %d, kv_blocks: %d, max_batch_size: 32}
"""


@pytest.fixture
def case() -> Callable[..., Case]:
    def make(
        batch: Batch | None = None,
        replicas: int = 1,
        pp: int = 1,
        blocks: int = 4000,
        router: str = "least-work",
    ) -> Case:
        given = load() if batch is None else batch

        def stream(shape: Shape) -> Iterator[Batch]:
            return shape.apply([given])

        fleet = cluster.fleet(cluster.parse(CLUSTER % (replicas, pp, blocks)))
        return Case(stream, classes.parse(PLAN), fleet, router=router)

    return make

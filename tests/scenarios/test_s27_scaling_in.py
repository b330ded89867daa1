"""s27: two workers at 70 % of their KV, scale-down threshold 80 %.

Guards `operations.wanted`: what counts is the load that those who are left would have.
"""

from __future__ import annotations

import numpy as np
from tests.scenarios.fleets import Watched, fleet

from kaiseki.work.batches import Batch

SCALE = "least: 1, most: 3, out_above: 0.9, in_below: 0.8, every_s: 1, start_s: 1"
BLOCKS, PROMPT, OUTPUT = 600, 900, 300
"""A request holds 57 to 75 blocks."""


def requests(per_s: float, until_s: float) -> Batch:
    at = np.arange(0, until_s, 1 / per_s)
    return Batch.of(0, at * 1e9, np.full(at.size, PROMPT), np.full(at.size, OUTPUT))


def steady(per_s: float, until_s: float, first: int) -> Batch:
    """Requests at a steady rate, after `first` of them in the first second: the pool does not begin empty."""
    at = np.concatenate([np.linspace(0, 1, first, endpoint=False), np.arange(1, until_s, 1 / per_s)])
    return Batch.of(0, at * 1e9, np.full(at.size, PROMPT), np.full(at.size, OUTPUT))


def run(batch: Batch) -> tuple[Watched, list[str], list[float]]:
    """The run, what changed, and the mean load of the workers in use over time."""
    case = fleet(batch, "least-outstanding", 2, BLOCKS, scale=SCALE)
    seen: list[float] = []

    def look(watched: Watched) -> None:
        up = [r for r in watched.simulation.replicas if r.up]
        seen.append(sum(r.load().demand for r in up) / len(up))

    watched = Watched(case, each_request=look)
    return watched, [what for _, what, _ in watched.log.changes], seen


def test_two_at_seventy_percent_stay_two() -> None:
    watched, _, load = run(steady(per_s=5.2, until_s=12, first=8))
    assert 0.6 < np.median(load[20:]) < 0.8, "the load that is meant"
    assert [change for change in watched.log.changes if change[0] < 12e9] == []
    assert min(watched.shares()[:2]) > 25


def test_the_pool_follows_the_load_once_each_way() -> None:
    low, high = requests(3.0, 8), requests(12.0, 16)
    times = np.concatenate([low.arrival_ns, high.arrival_ns + 8 * 10**9, low.arrival_ns + 24 * 10**9])
    batch = Batch.of(0, times, np.full(times.size, PROMPT), np.full(times.size, OUTPUT))
    _, changes, _ = run(batch)
    assert changes == ["drain", "recover", "recover", "drain", "drain"]

"""s24: 16 routers in front of 8 workers share metrics that are refreshed once a second; 400 requests/s.

Guards `kv_aware`: between two reports a router counts what it sent itself, times the number of routers.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.scenarios.fleets import Watched, fleet, poisson

from kaiseki.work.batches import Batch

STALE = "routers: {count: 16, refresh_ms: 1000}"


def load(requests: int = 1300) -> Batch:
    rng = np.random.default_rng(1)
    prompts, outputs = rng.integers(50, 400, requests), rng.integers(4, 30, requests)
    return Batch.of(0, poisson(requests, 400.0), prompts, outputs)


def test_no_worker_gets_more_than_twice_the_mean_in_any_second() -> None:
    watched = Watched(fleet(load(), "kv-aware", more=STALE))
    assert len(watched.log.endings) == 1300
    assert watched.busiest_in_any_second() <= 2.0
    assert max(watched.shares()) <= 1.2 * min(watched.shares())


@pytest.mark.parametrize("router", ["least-outstanding", "least-work"])
def test_a_router_that_believes_the_last_report_makes_a_herd(router: str) -> None:
    watched = Watched(fleet(load(500), router, more=STALE))
    assert watched.busiest_in_any_second() == 8.0

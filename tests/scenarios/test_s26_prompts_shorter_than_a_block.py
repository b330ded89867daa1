"""s26: prompts shorter than one hash block, so that no prefix is known of any.

Guards the load terms of `kv_aware`: they decide where nothing is cached.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.scenarios.fleets import Watched, fleet, poisson

from kaiseki.work.batches import Batch


@pytest.mark.parametrize("more", ["", "routers: {count: 4, refresh_ms: 1000}"], ids=["fresh", "stale"])
def test_they_spread_by_load(more: str) -> None:
    rng = np.random.default_rng(2)
    batch = Batch.of(0, poisson(448, 100.0), rng.integers(3, 15, 448), rng.integers(20, 60, 448))
    shares = Watched(fleet(batch, "kv-aware", replicas=2, more=more)).shares()
    assert sum(shares) == 448 and min(shares) >= 0.4 * 448

"""Small loads and plans."""

from __future__ import annotations

import numpy as np

from kaiseki.work.batches import Batch, Follow

PLAN = """
classes:
  chat: {ttft_ms: 400, tbt_ms: 40, weight: 4}
  batch: {deadline_s: 60}
tenants:
  acme: {weight: 3, class: chat}
  labs: {class: batch}
assign:
  - {share: 0.4, tenant: labs}
  - {tenant: acme}
"""


def load(requests: int = 60, rate_rps: float = 8.0, seed: int = 0) -> Batch:
    """Poisson arrivals of short chats."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1e9 / rate_rps, requests)).astype(np.int64)
    return Batch.of(0, arrivals, rng.integers(20, 1500, requests), rng.integers(1, 60, requests))


def chain(turns: int, think_ns: int) -> Batch:
    """One session whose turns each wait for the one before."""
    n = np.arange(turns)
    follow = Follow(
        np.zeros(turns, np.int64), n - 1, np.full(turns, think_ns, np.int64), (n < turns - 1).astype(np.int32)
    )
    return Batch.of(0, np.zeros(turns, np.int64), 100 + 50 * n, np.full(turns, 5), follow)

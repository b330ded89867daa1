"""s25: 8 workers; every prompt begins with the same 8,000 tokens, 500 differ.

Guards the cost of `kv_aware`: a cached prefix is worth the time it saves, and no more than that.
"""

from __future__ import annotations

from tests.scenarios.fleets import Watched, fleet, poisson, prefixed

LOAD = prefixed(poisson(240, 40.0), shared_tokens=8_000, own_tokens=496, outputs=16)


def test_load_spreads_and_the_prefix_is_found() -> None:
    watched = Watched(fleet(LOAD, "kv-aware"))
    shares = watched.shares()
    assert max(shares) <= 1.5 * sum(shares) / len(shares)
    assert watched.hit_rate() >= 0.85


def test_affinity_alone_sends_all_to_one() -> None:
    assert max(Watched(fleet(LOAD, "prefix-aware")).shares()) == 240

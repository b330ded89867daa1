"""Size lanes: inside a tenant, requests of one order of magnitude queue together and share with the others.

A lane holds requests by the tokens they have yet to compute, in powers of two, so that how long a request
waits depends on how many wait before it in its lane, not on how long other prompts are (A24).
"""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I64
from kaiseki.core.jit import inlined

SMALLEST = 64
"""Tokens up to which all requests are in the first lane."""
LONG_LANE = 10
"""Prompts of more than 32 Ki uncached tokens (A15)."""
DEMOTED_LANE = 11
LANES = 12
DEMOTED_SHARE = 0.1
"""Weight of the lane of demoted requests against 1 for any other: their floor."""

LANE_WEIGHT: F64 = np.ones(LANES)
LANE_WEIGHT[DEMOTED_LANE] = DEMOTED_SHARE


@inlined
def lane_of(uncached: int, demoted: bool) -> int:
    """The lane of a request with so many tokens to compute."""
    if demoted:
        return DEMOTED_LANE
    lane, most = 0, SMALLEST
    while uncached > most and lane < LONG_LANE:
        lane, most = lane + 1, 2 * most
    return lane


def per_tenant(by_group: I64) -> I64:
    """int64[tenants]: sums over each tenant's lanes."""
    sums: I64 = by_group.reshape(-1, LANES).sum(axis=1)
    return sums

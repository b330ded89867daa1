"""Placement: which replica each waiting request goes to, before any of them decides a slot of its own."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I32, I64
from kaiseki.core.matching import EFFORT, assign


def place(
    log_urgency: F64,
    uncached: I32,
    blocks: I32,
    ns_per_token: F64,
    load_ns: F64,
    free_blocks: I64,
    *,
    horizon_ns: int,
    tau_ns: float,
    effort: int = EFFORT,
) -> I32:
    """Replica of each waiting request, -1 for those that better wait; rows in order of sequence number.

    The prompt takes time = uncached * ns_per_token. Urgency is u = w * exp(-(d - t) / tau) (A4); a first
    token that comes later by one second is as bad as a deadline that is one second nearer, so where `load_ns`
    is ahead of it the request is worth u * exp(-(load_ns + time) / tau). A prefix cached there lowers time
    and blocks, which also raises the worth: where KV lives comes first, as far as load allows (A10).

    Requests that run are not passed in: they stay with their KV, and count in `load_ns` and `free_blocks`.

    Args:
        log_urgency: float64[n], ln w - d / tau with d in ns, larger is sooner. t/tau is common to all, and
            so is any other constant.
        uncached: int32[n, m], prompt tokens that each replica would have to compute.
        blocks: int32[n, m], KV blocks that the request will need there beyond those it would share.
        ns_per_token: float64[m], predicted prefill time of a token.
        load_ns: float64[m], predicted time of the work that each replica already has.
        free_blocks: int64[m], blocks that it may still give away.
        horizon_ns: no more work than this is put on a replica, so that what comes later can still be placed
            elsewhere. Work longer than the horizon goes to a replica that has none.
        tau_ns: time scale of urgency.
        effort: see `assign`.

    Returns:
        int32[n].
    """
    if not log_urgency.size or not load_ns.size:
        return np.full(log_urgency.size, -1, np.int32)
    work = np.ceil(uncached * ns_per_token)
    log_value = log_urgency[:, None] - (load_ns + work) / tau_ns
    # Only ratios count. Where the spread is beyond what a float can hold, the late ones still may be placed.
    value = np.exp(np.maximum(log_value - log_value.max(), -700.0))
    room_ns = np.maximum(horizon_ns - np.ceil(load_ns), 0.0)
    nowhere = np.full(log_urgency.size, -1, np.int32)
    fitting = np.minimum(work, float(horizon_ns))
    return assign(
        value, fitting, blocks.astype(np.float64), room_ns, free_blocks.astype(np.float64), nowhere, effort
    )
